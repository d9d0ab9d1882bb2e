"""Marks swapped models, and warns of new modules that adapters' files leave out.

The configuration of a swapped Hugging Face model names the swap, and `save_pretrained` writes it into config.json (see
configuration.py). Each swapped block also has a buffer named after its scheme, so that the state dicts of different
swaps have different keys.
"""

import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .configuration import KEY, UPLOAD, keeps_function, register, swapped_class, upload
from .undo import Edits
from .whole import LEVEL, configs_of

MARKS = ("scheme_", "norm_is_")
"""The beginnings of the names of the buffers that mark a swap: scheme_deepnorm, norm_is_scalenorm."""


def mark(model: nn.Module, what: str, name: str, edits: Edits, how: Mapping[str, Any] | None = None) -> None:
    """Writes the mark {what: name} into the configurations of a Hugging Face model and its parts. `what`: "residual",
    "norm" or "folded". The model's own configuration also gets `how`, the arguments of the swap, in the list "swaps",
    for `load_swapped`. The undo removes the marks.

    If the model is a part of other models, their configurations get {what: name} and "part". Configurations are copied
    first, so that unrelated models with the same configuration object get no marks.

    >>> import types
    >>> from normformer_rs.surgery.undo import Edits
    >>> model = nn.Linear(2, 2)
    >>> model.config = types.SimpleNamespace(model_type="bert", to_dict=dict)
    >>> mark(model, "norm", "scalenorm", Edits(model, "swap_norms to scalenorm"), {"swap_norms": "scalenorm"})
    >>> model.config.normformer_rs
    {'norm': 'scalenorm', 'swaps': [{'swap_norms': 'scalenorm'}]}
    """
    around = _around(model)
    _copy_configs(model, around, edits)
    _publish_with_card(model, edits)
    # a swap that keeps the function that the model computes marks only the model's own configuration
    keeps = how is not None and keeps_function({"swaps": [how]})
    own_configs = {id(config) for config in configs_of(model)}
    for whole in () if keeps else around:
        config = vars(whole).get("config")
        if not hasattr(config, "to_json_file") or id(config) in own_configs:
            continue
        assert edits.state is not None
        edits.state.keep_dicts(map(vars, whole.modules()))
        _copy_configs(whole, _around(whole), edits)
        _publish_with_card(whole, edits)
        config = vars(whole)["config"]
        for key, value in ((what, name), ("part", True)):
            edits.afterwards(functools.partial(_write, config, key, getattr(config, KEY, {}).get(key)))
            _write(config, key, value)
    for config in configs_of(model):
        if keeps and config is not model.__dict__.get("config"):
            continue
        edits.afterwards(functools.partial(_write, config, what, getattr(config, KEY, {}).get(what)))
        _write(config, what, name)
        if how is not None and config is model.__dict__.get("config"):
            before = getattr(config, KEY, {}).get("swaps")
            edits.afterwards(functools.partial(_write, config, "swaps", before))
            _write(config, "swaps", [*(before or []), dict(how)])


def _publish_with_card(model: nn.Module, edits: Edits) -> None:
    """Makes `push_to_hub` of a model, and of its parts that have this method, upload a model card that names the swap.
    Puts a method of this package in the place of transformers' own, which `UPLOAD` names, into the instances."""
    for module in model.modules():
        if hasattr(type(module), UPLOAD) and UPLOAD not in vars(module):
            edits.afterwards(functools.partial(vars(module).pop, UPLOAD, None))
            vars(module)[UPLOAD] = functools.partial(upload, type(module))


def _around(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that contain this one, directly or in further modules. A module does not know them, but the
    garbage collector knows what refers to it."""
    # gc.get_referrers does not see frozen objects. What refers to the model is frozen only if the model is.
    if gc.get_freeze_count() and all(obj is not model for obj in gc.get_objects()):
        gc.unfreeze()
        try:
            return _around(model)
        finally:
            gc.freeze()
    around: dict[nn.Module, None] = {}  # an ordered set
    todo = [model]
    while todo:
        part = todo.pop()
        for children in gc.get_referrers(part):
            # a module refers to its children by the dictionary `_modules`, which holds nothing else
            if not isinstance(children, dict) or not all(isinstance(m, nn.Module | None) for m in children.values()):
                continue
            referrers = gc.get_referrers(children)
            # Python reports as referrer either an object or the dictionary of its attributes, whose referrer it then is
            attributes = [obj for obj in referrers if isinstance(obj, dict) and obj.get("_modules") is children]
            owners = [*referrers, *(obj for held in attributes for obj in gc.get_referrers(held))]
            parents = [obj for obj in owners if isinstance(obj, nn.Module) and vars(obj)["_modules"] is children]
            todo += [parent for parent in parents if parent not in around]
            around |= dict.fromkeys(parents)
    return [*around]


_OWN: "weakref.WeakKeyDictionary[nn.Module, dict[int, Any]]" = weakref.WeakKeyDictionary()
"""For each module, the copied configurations that only its model has: identity → configuration."""


def _copy_configs(model: nn.Module, around: Iterable[nn.Module], edits: Edits) -> None:
    """Replaces a model's configurations by copies, since other models may share them. The modules `around` it, which
    contain it, get the same copies where they have the same configurations. A configuration that is such a copy already
    stays."""
    modules = dict.fromkeys(model.modules())
    # identities of the copies that this model has already, and of those that any model has
    copied_before = {number for module in modules for number in _OWN.get(module, ())}
    copied_for_any = {number for numbers in _OWN.values() for number in numbers}
    configs = [config for config in configs_of(model) if id(config) not in copied_before]
    if not configs:
        return
    assert edits.state is not None
    copies = {id(config): copy.copy(config) for config in configs}  # by the identity of the original
    for copied in copies.values():
        if hasattr(copied, "to_json_file"):
            register()
            copied.__class__ = swapped_class(type(copied))
    for number in copies.keys() & copied_for_any:
        vars(copies[number]).pop(KEY, None)  # these marks belong to another model
    # the attributes of each module around the model that has one of these configurations
    outside = [vars(module) for module in around if any(id(value) in copies for value in vars(module).values())]
    edits.state.keep_dicts(outside)
    originals = {id(copies[id(config)]): config for config in configs}  # by the identity of the copy
    # the attributes of all modules and configurations that may refer to one of the configurations
    holders: list[Any] = [*map(vars, (*modules, *copies.values())), *outside]

    def back() -> None:
        """Puts the original configurations back, unless something was written into the copies since."""
        # the attributes of each copy, in which originals replace copies, and the attributes of its original
        pairs = ((_exchanged(vars(copied), originals), vars(originals[id(copied)])) for copied in copies.values())
        if all(now.keys() == then.keys() and all(now[n] is then[n] for n in then) for now, then in pairs):
            for held_by in holders:
                held_by.update(_exchanged(held_by, originals))

    for held_by in holders:
        held_by.update(_exchanged(held_by, copies))
    edits.afterwards(back)
    for module in (*modules, *(child for held in outside for child in _below(held))):
        _OWN.setdefault(module, {}).update((id(copied), copied) for copied in copies.values())


def _exchanged(held: dict[str, Any], new: Mapping[int, Any]) -> dict[str, Any]:
    """Returns a copy of a dictionary with some values replaced. `new`: identity of an old value → new value."""
    return {name: new.get(id(value), value) for name, value in held.items()}


def _below(held: dict[str, Any]) -> Iterable[nn.Module]:
    """Yields all modules below a module, which is given by its attributes."""
    return (part for child in held["_modules"].values() if child is not None for part in child.modules())


def _write(config: Any, what: str, name: Any) -> None:
    """Sets the mark `what` of a configuration to `name`; None removes the mark."""
    marks = {**getattr(config, KEY, {}), what: name}
    marks = {key: value for key, value in marks.items() if value is not None}
    if marks:
        setattr(config, KEY, marks)
    elif hasattr(config, KEY):
        delattr(config, KEY)


class Marks(nn.Module):
    """Holds the mark of swapped norms, a buffer. A norm cannot hold it, since the buffer's load hook would be handed
    over to the norm that replaces it in a later swap."""


def mark_norms(model: nn.Module, name: str, edits: Edits) -> None:
    """Gives a Hugging Face model a buffer named after its norms, as `mark_module` does for blocks, beside those of
    earlier swaps of norms."""
    if next(configs_of(model), None) is None:
        return
    marks, before = Marks().train(model.training), model._modules.get("swapped_norms")
    device = next(model.parameters()).device
    for mark in dict.fromkeys((*(before._buffers if before is not None else ()), f"norm_is_{name}")):
        mark_module(marks, mark, device)
    model.add_module("swapped_norms", marks)

    def back() -> None:
        """Removes the mark, and restores that of an earlier swap."""
        if model._modules.get("swapped_norms") is marks:
            del model._modules["swapped_norms"]
            if before is not None:
                model.add_module("swapped_norms", before)

    edits.afterwards(back)


def mark_module(module: nn.Module, name: str, device: Any) -> None:
    """Gives a module that a swap has made a buffer named after the scheme or norm, so that files of different swaps
    have different keys.

    A state dict without the buffer, from the stock class or an earlier version, still loads, because the swap made
    before loading has named the scheme.
    """
    module.register_buffer(name, torch.ones(1, dtype=torch.uint8, device=device))
    if len(module._buffers) == 1:
        module.register_load_state_dict_pre_hook(_fill)


def _fill(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Adds the marking buffer of a module to a state dict that lacks it, before the state dict is loaded."""
    for name, buffer in module.named_buffers(recurse=False):
        if name.startswith(MARKS):
            state_dict.setdefault(prefix + name, buffer)


def warn_of_adapters(model: nn.Module, title: str, made: Iterable[tuple[str, nn.Module]]) -> None:
    """Warns if a swap made trainable modules in a model with PEFT's adapters, because an adapter's file holds neither
    other modules' weights nor their buffers. `made`: the names and modules that the swap made."""
    if not any(type(module).__module__.startswith("peft.") for module in model.modules()):
        return
    changing = [
        name.rpartition(".")[2]
        for name, module in made
        # PEFT handles these two itself: the copy that it saves, and the original
        if not {"modules_to_save", "original_module"} & {*name.split(".")}
        and (
            any(p.requires_grad for p in module.parameters())
            or any(not key.rpartition(".")[2].startswith(MARKS) for key, _ in module.named_buffers())
        )
    ]
    if changing:
        warnings.warn(
            f"{title} made modules that training changes, and files of PEFT's adapters leave them out: swap first, and "
            f"then wrap the model with modules_to_save={[*dict.fromkeys(changing)]}",
            stacklevel=LEVEL + 1,
        )
