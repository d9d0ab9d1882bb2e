"""`load_swapped` loads a swapped Hugging Face model that `save_pretrained` has written."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..config import TransformerConfig
from ..declarations.file_class import names_code, refuse_code
from ..errors import InputError
from ..nn.norm_table import FAMILIES
from ..nn.registry import norm_class
from .configuration import KEY, LOAD, model_class, read_config, register
from .folding import fold_named
from .marker import MARKS
from .norms import swap_norms
from .probe import KINDS
from .residuals import swap_residuals

_MOST, _DEEPEST = 1000, 10_000
"""Upper limits for a config.json: of the number of swaps, and of the number of layers in a saved `depth`."""


def load_swapped(
    folder: Any,
    kind: Any = None,
    *,
    swap: Callable[[nn.Module], Any] | None = None,
    example: Any = None,
    trust: bool = False,
    **options: Any,
) -> Any:
    """Loads a model that was swapped and then saved by Hugging Face's `save_pretrained`. Its weights are bit-equal.

        model = LlamaForCausalLM.from_pretrained(name)
        swap_residuals(model, "deepnorm")
        model.save_pretrained("swapped")
        model = load_swapped("swapped")

    The stock model is built from config.json and swapped as config.json says. Then it gets its weights through the
    stock class's own mapping of names. To load a PEFT adapter onto such a model, use PEFT's own function.

    Args:
        folder: a folder or a repository's name, as for `from_pretrained`.
        kind: the class of models; None: the one that config.json names. Another class of the same family gets the
            swapped norms of the part that both have; a class such as AutoModel chooses by config.json.
        swap: a function that makes the swaps instead of those that config.json names. It is needed for norms of your
            own classes, which no file holds.
        example: as in `swap_residuals`.
        trust: if True, code that config.json names as file.py:Class is run.
        options: those of `from_pretrained`.

    Returns: the model, in evaluation mode as `from_pretrained` gives it.

    Errors: InputError if `transformers` is not installed; if config.json names no swaps, swaps to a class of your own,
    damaged swaps, or norms that the model's base does not have; if it names code and `trust` is False; and if
    `swap` leaves out a swap of the saved model.
    """
    try:
        import transformers
    except ImportError as reason:
        raise InputError("load_swapped loads models of Hugging Face: install transformers") from reason
    register()
    hub = {name: options[name] for name in ("revision", "token", "cache_dir", "subfolder") if name in options}
    config = copy.copy(options.pop("config", None)) or read_config(folder, kind, **hub)
    swaps = [] if swap is not None else _swaps(config, folder, trust)
    # "part": only a part of the model was swapped. Marks without swaps: it was swapped with modules around it.
    marks = getattr(config, KEY, {})
    if swap is None and isinstance(marks, Mapping) and ("part" in marks or (marks and not swaps)):
        raise InputError(
            f"{folder}: a part of the model was swapped, or the model with modules around it, and config.json does not "
            "say how: pass swap=, a function that swaps the stock model as the saved one was"
        )
    if swap is None and not swaps:
        raise InputError(
            f"{folder}'s config.json names no swaps: load it with from_pretrained; or pass swap=, a function that "
            "swaps the stock model as it was before it was saved"
        )
    kind = _model_class(kind, config, folder, transformers)
    setattr(config, KEY, {})  # the stock model is built without marks; the swaps write them anew

    def again(model: nn.Module) -> None:
        """Repeats the swaps."""
        if swap is not None:
            swap(model)
        for number, entry in enumerate(swaps, 1):
            _swap(model, dict(entry), example, f"{folder}'s config.json: swap {number}")

    wants_report = options.pop("output_loading_info", False)
    try:
        model, report = _class(kind, again).from_pretrained(folder, config=config, output_loading_info=True, **options)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise InputError(
            f"{folder}: its weights have other shapes than the swaps that its config.json names, as the report above "
            "says: pass swap=, a function that swaps as the saved model was"
        ) from error
    # A swap marks its modules by buffers (marker.py): the names of those that only the model has, or only the file. If
    # the file has a mark at no path, its weights are of a model without the swap.
    missing, unexpected = (_marks(report[f"{which}_keys"]) for which in ("missing", "unexpected"))
    if lost := sorted(missing.keys() - unexpected.keys()):
        how = "that its config.json names" if swaps else "that the function swap= makes"
        raise InputError(
            f"{folder}: its weights are of no model with {lost[0]}, a swap {how}: load it with from_pretrained, or "
            "pass swap=, a function that swaps as the saved model was"
        )
    # a part that the model does not have, such as CLIP's other encoder, may have any marks
    left = (mark for mark, paths in unexpected.items() if mark not in missing and any(_has(model, p) for p in paths))
    if swap is not None and (first := min(left, default="")):
        raise InputError(
            f"{folder}: its weights have {first}, the mark of a swap that the function swap= does not make: let it "
            "make all swaps of the saved model"
        )
    model.__class__ = kind  # instead of the subclass that repeats the swaps
    return (model, report) if wants_report else model


LOAD.append(load_swapped)  # configuration.py finds the function there, since it cannot import this module


def _marks(keys: Iterable[str]) -> dict[str, list[str]]:
    """Returns the marks of swaps among a state dict's keys: name → the paths of the modules that have it."""
    marks: dict[str, list[str]] = {}
    for path, _, leaf in (key.rpartition(".") for key in keys):
        if leaf.startswith(MARKS):
            marks.setdefault(leaf, []).append(path)
    return marks


def _has(model: Any, path: str) -> bool:
    """Returns whether a model has the module that a mark at `path` of a file belongs to: the block around a residual,
    or the model around its norms. The file may be of the model with a head, or of the model inside that one."""
    owner, base = path.rpartition(".")[0], model.base_model_prefix  # `owner`: without "residual" or "swapped_norms"
    paths = {name for name, _ in model.named_modules()}
    return bool({owner, owner.removeprefix(f"{base}."), f"{base}.{owner}".rstrip(".")} & paths)


def _model_class(kind: Any, config: Any, folder: Any, transformers: Any) -> Any:
    """Returns the class of models: `kind`, the class that `kind` chooses if it is an Auto class, or, if `kind` is None,
    the class that config.json names. `transformers`: the imported package."""
    architectures = getattr(config, "architectures", None)
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if kind is None:
        classes = (getattr(transformers, name, None) for name in names)
        kind = next((named_class for named_class in classes if named_class is not None), None)
    if kind is None:
        raise InputError(f"{folder}'s config.json names no class of transformers as its architecture: pass kind=")
    if getattr(kind, "_model_mapping", None) is not None:  # AutoModel and its like
        try:
            kind = model_class(kind, config)
        except KeyError:
            raise InputError(
                f"{kind.__name__} has no class for a {type(config).__name__}: pass a class of models as kind="
            ) from None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise InputError(f"kind must be a class of transformers' models; got {kind!r}")
    return kind


def _class(kind: Any, again: Callable[[nn.Module], None]) -> Any:
    """Returns a subclass of the stock class `kind`, with its name and module, whose models are swapped as they are
    built. `again`: makes the swaps in a stock model."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """The subclass's __init__: builds the stock model on the CPU and repeats the swaps."""
        with torch.device("cpu"):  # the loader builds on the meta device, where the swaps' runs are not possible
            kind.__init__(self, config, *args, **kwargs)
            with torch.no_grad():
                for p in self.parameters():
                    if p.is_floating_point():
                        p.uniform_(-0.1, 0.1)  # the loader leaves uninitialised memory, and the swaps run the model
            for name, source in dict(getattr(self, "all_tied_weights_keys", None) or {}).items():
                # the loader ties weights last, but the swaps must see which ones are tied
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, self.get_parameter(source))
            again(self.eval())
            for module in self.modules():  # so that the loader fills buffers that no file holds
                module.__dict__.pop("_is_hf_initialized", None)

    body = {"__init__": build, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), body)


# Checks of the swaps that a config.json names. The file may be damaged, or come from an untrusted source.


def _swaps(config: Any, folder: Any, trust: bool) -> list[Mapping[str, Any]]:
    """Returns the swaps that the configuration names, after checking all of them. Errors: InputError."""
    marks = getattr(config, KEY, {})
    swaps = marks.get("swaps", []) if isinstance(marks, Mapping) else None
    if not isinstance(swaps, list) or len(swaps) > _MOST:
        raise InputError(
            f"{folder}'s config.json: {KEY}.swaps must be a list of at most {_MOST} swaps; got {_shown(swaps or marks)}"
        )
    for number, entry in enumerate(swaps, 1):
        where = f"{folder}'s config.json: swap {number}"
        # the swaps that the entry names: swap_norms, swap_residuals or fold_norms
        kinds = [name for name in _CHECKS if name in entry] if isinstance(entry, Mapping) else []
        if len(kinds) != 1:
            raise InputError(f"{where} must be an object with one of {', '.join(_CHECKS)}; got {_shown(entry)}")
        refuse_code(entry, where, trust)
        _CHECKS[kinds[0]](entry, where)
    return swaps


def _check_norms(entry: Mapping[str, Any], where: str) -> None:
    """Raises InputError if an entry of `swap_norms` is damaged. `where`: the entry's place, for messages."""
    to, names, exact = entry["swap_norms"], entry.get("names"), entry.get("exact", False)
    if to is None:
        raise InputError(
            "the model's norms were swapped to a class of one's own, which config.json does not hold: pass swap=, "
            "a function that makes the swaps again"
        )
    if not isinstance(to, str) or not (to in KINDS or to in FAMILIES or names_code(to)):
        raise InputError(f"{where}: swap_norms must name a norm of the table; got {_shown(to)}")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{where}: names must be a list of modules' names; got {_shown(names)}")
    if not isinstance(exact, bool):
        raise InputError(f"{where}: exact must be true or false; got {_shown(exact)}")
    if names_code(to):
        return
    defaults = _defaults(norm_class(to))
    for name, value in entry.items():
        if name in ("swap_norms", "names", "exact"):
            continue
        if name not in defaults:
            raise InputError(f"{where}: {to} has no option {name!r}; it has {', '.join(defaults)}")
        # eps=None stands for the machine epsilon, whatever the default is
        if not (value is None and name == "eps") and not _is_like(value, defaults[name]):
            raise InputError(f"{where}: {name} of {to} has a wrong value, {_shown(value)}")


def _defaults(make: Any) -> dict[str, Any]:
    """Returns the options of a norm's class and its base classes that a file may set: name → default. `make`: the
    class, or a `functools.partial` of it."""
    kind = getattr(make, "func", make)  # the class of a family is a partial with the family's settings
    parents = kind.__mro__[: kind.__mro__.index(nn.Module)]
    defaults: dict[str, Any] = {}
    for function in (vars(parent)["__init__"] for parent in parents if "__init__" in vars(parent)):
        for name, p in inspect.signature(function).parameters.items():
            if p.default is not p.empty and name not in ("device", "dtype", "process_group"):
                defaults.setdefault(name, p.default)
    return defaults


def _is_like(value: Any, default: Any) -> bool:
    """Returns whether a value has the type of an option's default. Whole numbers must be from 1 to 10 000."""
    if isinstance(default, (bool, str)):  # before int, since a bool is an int
        return type(value) is type(default)
    if isinstance(default, int) or default is None:
        return (type(value) is int and 1 <= value <= 10_000) or (value is None and default is None)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_residuals(entry: Mapping[str, Any], where: str) -> None:
    """Raises InputError if an entry of `swap_residuals` is damaged. `where`: the entry's place, for messages."""
    if not isinstance(entry["swap_residuals"], (str, Mapping)):
        raise InputError(f"{where}: swap_residuals must name a scheme, or declare one; got {_shown(entry)}")
    # a file names no init, because its weights are loaded
    fields = {field.name: field for field in TransformerConfig.FIELDS if field.name != "init"}
    depth = entry.get("depth")
    depths = depth if isinstance(depth, list) and len(depth) == 2 else [depth]  # two: those of encoder and decoder
    if depth is not None and not all(type(number) is int and 1 <= number <= _DEEPEST for number in depths):
        raise InputError(f"{where}: depth must be one or two numbers from 1 to {_DEEPEST}; got {_shown(depth)}")
    for name, value in entry.items():
        if name not in ("swap_residuals", "depth"):
            if name not in fields:
                raise InputError(f"{where}: a scheme has no option {name!r}")
            if not names_code(value):  # code comes from a trusted file only, and the swap checks its result
                fields[name].check(value)


def _check_fold(entry: Mapping[str, Any], where: str) -> None:
    """Raises InputError if an entry of `fold_norms` is damaged. `where`: the entry's place, for messages."""
    if entry["fold_norms"] is not True or entry.keys() - {"fold_norms", "names", "biases"}:
        raise InputError(f"{where}: fold_norms must be true, and has no options but names; got {_shown(entry)}")
    names = entry.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{where}: names must be a list of modules' names; got {_shown(names)}")


_CHECKS = {"swap_norms": _check_norms, "swap_residuals": _check_residuals, "fold_norms": _check_fold}


def _shown(value: Any) -> str:
    """Returns at most 80 characters of a value, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _swap(model: nn.Module, how: dict[str, Any], example: Any, where: str) -> None:
    """Makes one swap that config.json names. `how`: its entry; `where`: the entry's place, for messages."""
    if "swap_residuals" in how:
        to, depth = how.pop("swap_residuals"), how.pop("depth", None)
        swap_residuals(
            model, to, depth=tuple(depth) if isinstance(depth, list) else depth, init=None, example=example, **how
        )
    elif "swap_norms" in how:
        to, names = how.pop("swap_norms"), _found(model, how.pop("names"), where)
        if names:
            swap_norms(model, to, filter=lambda name, _: name in names, example=example, **how)
    else:
        fold_named(model, _found(model, how["names"], where) if "names" in how else None, example)


def _found(model: Any, names: list[str], where: str) -> set[str]:
    """Returns this model's names for the norms that a file names. A model with a head holds its base model under a
    prefix, such as "bert.", and names in the base model alone lack the prefix. Norms in a head that this class does not
    have are left out, with a warning. Errors: InputError if norms of the base are missing."""
    existing = {name for name, _ in model.named_modules(remove_duplicate=False)}
    prefix = getattr(model, "base_model_prefix", "") + "."
    has_base = prefix != "." and prefix[:-1] in existing
    with_base = [name for name in names if name.startswith(prefix)] if prefix != "." else []
    others = [name for name in names if name not in {*with_base}]
    # if this model is a base model, its norms have no prefix
    found = {*with_base} if has_base else {name.removeprefix(prefix) for name in with_base}
    # if the base model alone was saved, no name has the prefix
    found |= {prefix + name if has_base and not with_base and name not in existing else name for name in others}
    missing = sorted(found - existing)
    # if some names have the prefix, those without it belong to the head
    heads = [name for name in missing if with_base and name in others]
    if lost := [name for name in missing if name not in heads]:
        raise InputError(
            f"{where} names {len(lost)} norms that {type(model).__name__} does not have, the first {lost[0]!r}: load "
            "the class that was saved, or pass swap="
        )
    if heads:
        warnings.warn(
            f"{type(model).__name__} has no {', '.join(heads)}, swapped norms of the head that was saved", stacklevel=2
        )
    return found - {*heads}
