"""`swap_norms` replaces the norms of a model."""

import functools
import gc
import inspect
import math
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import nn as nfnn
from ..config import TransformerConfig, unknown
from ..declarations.file_class import names_code
from ..errors import InputError
from ..nn.norm_table import FAMILIES
from ..nn.norms import BiasedRMSNorm
from ..nn.registry import norm_class
from ..nn.result import Typed
from ..norms import Norm
from .exact import ExactSwap
from .flow import Flow
from .handover import hand_over_parameter, hand_over_plain
from .marker import mark, mark_norms, warn_of_adapters
from .optimizers import Exchange, Repoint
from .padding import read_padding
from .probe import KINDS, RecognisedNorm, result_of
from .recognise import alike, examine, looks_like_a_norm, own_name, read_norm
from .signs import hand_on
from .stream import Places, join
from .undo import Edits, Row, Swaps, refuse_wrapped


def swap_norms(
    model: nn.Module,
    to: str | Callable[..., nn.Module],
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
    init: Literal["match", "default"] = "match",
    optimizer: torch.optim.Optimizer | None = None,
    exact: bool = False,
    example: Any = None,
    **options: Any,
) -> Swaps:
    """Replaces norms of a model by others, in place.

    >>> from torch import nn
    >>> model = nn.TransformerEncoderLayer(8, 2, 16)
    >>> print(swap_norms(model, "scalenorm"))
    swap_norms to scalenorm: 3
    module   old        new        note
    norm1    LayerNorm  ScaleNorm  bias dropped
    norm2    LayerNorm  ScaleNorm  bias dropped
    (model)  fast path  off        torch.nn's fused evaluation would bypass the norms

    Norms over the last dimension are recognised by trial calls of a copy, whatever their classes and gains are called.
    The module itself, its buffers, its hooks and the random state do not change. A module is tried if it has no
    children, no buffers, at most two parameters of one row, and a forward that takes x alone. Register other classes
    with `normformer_rs.surgery.register_norm`. If a module is called a norm but is not replaced, the table has a row
    with the reason.

    Device, dtype, training mode, hooks and sharing (one norm under two names stays one) are kept, and so are attributes
    that other libraries wrote on norms and gains. Norms that are already of the wanted kind are left alone. torch.nn's
    fused evaluation of encoder layers is switched off, because it reads weights instead of calling norms.

    Args:
        model: any tree of modules that holds norms over the last dimension.
        to: a name from `normformer_rs.tables()["norms"]` or `["families"]`, or its class in `normformer_rs.nn`; or a
            class of your own, or a function, that makes a norm of the width.
        filter: (name, module) → whether to replace it; None: all.
        init: "match" keeps the learned values. A vector γ is copied to a vector. A new single gain becomes its initial
            value times the root mean square of γ, so that outputs keep their length on average. Conversely, an old
            single gain, divided by its initial value, fills a new vector. Offsets are converted: Gemma's weight + 1
            becomes RMSNorm's weight. In 16 bits that sum would lose the weight, so there the RMSNorm is zero-centred,
            too. "default": a new norm's initial values.
        optimizer: its groups get the new parameters in the places of the old ones, whose state is dropped. An optimizer
            that has old parameters and is not passed warns at its next step.
        exact: keeps the model's outputs in evaluation mode when layernorm becomes rmsnorm in pre-norm blocks.
            Everything that writes the residual stream is centred: the weights and biases of its writers, or the output
            of an embedding that shares its weight. β is folded into the biases of the linear layers after the norm, or
            stays. Hidden states of the stream lose their mean, and `inputs_embeds` must have mean 0. Training the model
            further ends this equality, since updates and dropout give the stream a mean again. Source: Jiang et al.
            2023; docs/spec.md §4.16.
        example: an input for runs of the model, as in `swap_residuals`. exact=True needs runs, and checks with them
            that the outputs stay.
        options: the new norm's own options (`eps`, …). ε is copied between norms that use it in the same way.

    Returns: the table of the changes; its `undo()` brings the old norms back.

    Errors: InputError for an unknown name; a model without known norms, or that is itself a norm; models whose
    parameters something else holds (DistributedDataParallel, FSDP, DTensors, DeepSpeed, accelerate's offloading); hooks
    and attributes of parameters that new ones cannot have; an optimizer that does not own the parameters. With
    exact=True also for another target than rmsnorm, a model that cannot be run, a model without a LayerNorm whose input
    can be centred, training mode, and the meta device. After an error the model is unchanged.
    """
    target = _target(to)
    if exact and (target.computes != "rmsnorm" or init != "match" or options):
        raise InputError(
            'exact=True turns layernorm into rmsnorm with its own ε: call swap_norms(model, "rmsnorm", exact=True) '
            f"without init and options; got {to!r}{f', init={init!r}' if init != 'match' else ''}"
            + "".join(f", {name}={value!r}" for name, value in options.items())
        )
    if init not in ("match", "default"):
        raise InputError(unknown("init", init, ("match", "default")))
    refuse_wrapped(model)
    change = functools.partial(_swap, model, to, target, filter, init, optimizer, exact, example, options)
    title = f"swap_norms to {target.title}" + (", exact" if exact else "")
    return Edits(model, title, optimizer).all_or_none(change)


def _swap(
    model: nn.Module,
    to: Any,
    target: "_Target",
    filter: Callable[[str, nn.Module], bool] | None,
    init: str,
    optimizer: torch.optim.Optimizer | None,
    exact: bool,
    example: Any,
    options: Mapping[str, Any],
    edits: Edits,
) -> Swaps:
    """Makes the swap of `swap_norms`, whose arguments have been checked. Its steps: find the norms, make the new ones,
    exchange them and the optimizer's parameters, then run the model to check that it calls the new norms."""
    norms, staying = _find(model, filter)  # `staying`: name → row of the table, for norms that are not replaced
    flow = None if any(p.is_meta for p in model.parameters()) else Flow.of(model, example, Places(model))
    # norms that the model does not call although it reads their weights: norm → message
    only_read: dict[nn.Module, str] = {} if flow is None else flow.only_read()
    for name, module, message in () if flow is None else flow.formulas():
        if filter is None or filter(name, module):
            staying[name] = Row(name, type(module).__name__, type(module).__name__, f"stays: {message}")
    for name, module, _ in norms:
        if module in only_read and (filter is None or filter(name, module)):
            staying[name] = Row(name, type(module).__name__, type(module).__name__, f"stays: {only_read[module]}")
    norms = [(name, module, known) for name, module, known in norms if module not in only_read]
    if not norms:
        named = "".join(f"; {name or 'the model'}, a {row.old}, {row.note}" for name, row in staying.items())
        raise InputError(
            f"{type(model).__name__} holds no known norm over the last dimension{named}: register a class with "
            "normformer_rs.surgery.register_norm(kind, reader)"
        )
    _, first_norm, _ = norms[0]
    if first_norm is model:
        raise InputError(
            f"the model is itself a {type(model).__name__}, and no module holds it, so nothing can take its place: "
            "make the norm with normformer_rs.nn instead, or pass the module that holds it"
        )

    plan = ExactSwap(model, {module: known for _, module, known in norms}, example) if exact else None
    before = None if plan is None else plan.flow.outputs()  # the model's outputs, which must stay
    made: dict[nn.Module, _NewNorm] = {}  # old norm → new norm
    shared: dict[tuple[nn.Parameter, str, torch.Size], nn.Parameter] = {}  # see `_share`
    places: list[tuple[str, nn.Module]] = []  # (name, old norm) of all norms that are replaced
    for name, module, known in norms:
        if target.is_met_by(module) or (exact and known.computes == "rmsnorm"):
            continue
        # an exact swap changes a norm under all of its names, since the layers that read it take its β in
        names = [name] if plan is None else plan.places.modules[module]
        if filter is not None and not all(filter(name, module) for name in names):
            continue
        if plan is not None and (reason := plan.reason(module)):
            kind = type(module).__name__
            if not plan.writes(module):  # norms that write the stream get their row from `plan.apply`
                staying[name] = Row(name, kind, kind, f"stays: {reason}")
            continue
        places.append((name, module))
        if module not in made:
            # a β that cannot be folded stays in an RMSNorm with a bias
            keeps_bias = plan is not None and known.bias is not None and not plan.folds(module)
            into = target._replace(make=BiasedRMSNorm) if keeps_bias else target
            made[module] = _twin(name, module, known, into, init, _nearest(model, name), options)
            hand_on(module, made[module].norm, name)
            if plan is not None:
                made[module] = made[module]._replace(note=plan.note(module))
            _share(module, made[module], shared)

    # without a run, nothing else shows that the model calls a norm by another name
    held_outside = held_beside(model, made) if flow is None else {}
    if held_outside:
        old, attribute = next(iter(held_outside.items()))
        raise InputError(
            f"{attribute} holds a norm, a {type(old).__name__}, outside the children, where no swap reaches it: "
            "pass example=, so that a run shows by which name the model calls it"
        )
    edited = [] if plan is None else plan.edited(made)
    known_as = {p: name for name, p in model.named_parameters()}
    repoint = Repoint(optimizer, _exchanged(model, places, made), known_as, edited)
    title, rows = edits.title, []
    for name, old in places:
        rows.append(Row(name, type(old).__name__, type(made[old].norm).__name__, made[old].note))
    rows += staying.values()
    rows += [] if plan is None else plan.apply(edits, made)
    rows += replace(model, places, {old: new.norm for old, new in made.items()}, edits)
    for name, old in places:
        for leaf, new_leaf in made[old].counterparts.items():
            edits.succeed_parameter(f"{name}.{leaf}", getattr(old, leaf), getattr(made[old].norm, new_leaf))
    repoint(edits)
    read_padding(model, edits)
    names = [name for name, _ in places]
    # the arguments from which `load_swapped` repeats the swap
    how = {"swap_norms": to if isinstance(to, str) else None, "names": names, "exact": exact, **options}
    mark(model, "norm", target.title, edits, how)
    if places:
        mark_norms(model, target.title, edits)
    if flow is not None:
        flow.check_calls({old: new.norm for old, new in made.items()}, target.title)
    if before is not None and plan is not None:
        plan.flow.check(before, "swap_norms(..., exact=True)")
    edits.done()
    warn_of_adapters(model, title, ((name, made[old].norm) for name, old in places))
    return Swaps(title, rows, edits)


def _find(
    model: nn.Module, filter: Callable[[str, nn.Module], bool] | None
) -> tuple[list[tuple[str, nn.Module, RecognisedNorm]], dict[str, Row]]:
    """Returns the norms of a model as (name, module, what it computes), each once for each of its names, and rows of
    the table for modules that are called norms but are not recognised: name → row."""
    norms: list[tuple[str, nn.Module, RecognisedNorm]] = []
    staying: dict[str, Row] = {}
    examined: dict[Hashable, RecognisedNorm | str] = {}  # results by `alike`, since trial calls take long
    for name, module in model.named_modules(remove_duplicate=False):
        if norms and name.startswith(norms[-1][0] + "."):
            continue  # the module lies inside the last norm found
        key = alike(module)
        if key not in examined:
            known = examine(module)
            if isinstance(known, RecognisedNorm):
                known = known._replace(returns=result_of(module, known.width))
            examined[key] = known
        found = examined[key]
        if isinstance(found, RecognisedNorm):
            norms.append((name, module, found))
        elif looks_like_a_norm(module) and (filter is None or filter(name, module)):
            kind = type(module).__name__
            staying[name] = Row(name, kind, kind, f"stays: {found}")
    return norms, staying


def held_beside(model: nn.Module, norms: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Returns those of `norms` that a module of the model also holds outside its children, such as in a list or a
    closure, each with the path of the attribute that holds it."""
    wanted, found = {id(norm): norm for norm in norms}, {}
    for path, module in model.named_modules():
        attributes = {} if id(module) in wanted else vars(module)  # what a norm itself holds does not count
        for name, value in attributes.items():
            todo = [] if name in _MODULES_OWN else [value]
            seen: dict[int, Any] = {}  # keeps the objects alive, so that no other one gets their identity
            while todo:  # follows references through containers and functions
                current = todo.pop()
                if id(current) in seen:
                    continue
                seen[id(current)] = current
                if id(current) in wanted:
                    found[wanted[id(current)]] = join(path, name)
                elif isinstance(current, types.FunctionType):
                    todo += [
                        *(current.__closure__ or ()),
                        *(current.__defaults__ or ()),
                        *(current.__kwdefaults__ or {}).values(),
                    ]
                elif isinstance(current, _KEEPERS):
                    todo += gc.get_referents(current)
    return found


_MODULES_OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has, such as the dictionary of its children."""
_KEEPERS = (list, tuple, set, dict, functools.partial, types.MethodType, types.CellType)
"""Types of objects whose references are followed."""


def replace(
    model: nn.Module, places: Iterable[tuple[str, nn.Module]], made: Mapping[nn.Module, nn.Module], edits: Edits
) -> list[Row]:
    """Puts new norms into the places of old ones. `places`: (path, old norm); `made`: old norm → new norm. Returns rows
    of the table for the fused evaluations (fast paths) that this switches off."""
    for old in dict.fromkeys(old for _, old in places):
        edits.succeed(old, made[old])
    for name, old in places:
        parent, _, leaf = name.rpartition(".")
        holder = model.get_submodule(parent)
        edits.remember(holder)
        holder._modules[leaf] = made[old]
    return _switch_off_fast_paths(model, {*made.values()}, edits)


def unweighted(model: nn.Module, name: str, norm: nn.Module, known: RecognisedNorm) -> nn.Module:
    """Returns a norm that computes the x̂ of a norm of the model: one of the same kind, without γ and β. `name`: the
    norm's path; `known`: what it computes."""
    target = _target(known.computes)
    return _twin(name, norm, known, target, "match", _nearest(model, name), {"elementwise_affine": False}).norm


# The code below makes the new norms.


class _Target(NamedTuple):
    """The kind of norm that a swap puts in."""

    title: str
    computes: str | None
    """The norm's name in `normformer_rs.tables()`. None: it is of the user's own class."""
    make: Callable[..., Any]
    """The class of the norms, or a function (width, options…) → norm."""

    def is_met_by(self, module: nn.Module) -> bool:
        """Returns whether a norm is of this kind already."""
        if self.computes is None:
            return type(module) is self.make
        settings = FAMILIES[self.title].settings if self.title in FAMILIES else {}
        wanted = {name: value for name, value in settings.items() if name not in ("eps", "elementwise_affine")}
        if settings and not settings["elementwise_affine"]:  # the family's norms have no γ
            wanted["weight"] = None
        is_same_norm = own_name(module) == self.computes
        return is_same_norm and all(getattr(module, name) == value for name, value in wanted.items())

    def norm(self, width: int, like: Tensor, wanted: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Returns a new norm with the caller's `options`, and with those settings in `wanted` that its constructor has.
        `like`: a tensor with the device and dtype for the norm. Errors: InputError for an unknown option."""
        accepted = _options(self.make)
        for option in options:
            if accepted is not None and option not in accepted:
                raise InputError(unknown(f"option of {self.title}", option, accepted))
        settings = {name: value for name, value in wanted.items() if accepted and name in accepted} | {**options}
        with like.device:
            made = self.make(width, **settings) if self.computes else self._make_foreign(width, settings)
        return made if "dtype" in settings else made.to(like.dtype)

    def _make_foreign(self, width: int, settings: Mapping[str, Any]) -> nn.Module:
        """Returns a new norm of the user's own class. Errors: InputError if the class does not make a module from the
        width."""
        try:
            made = self.make(width, **settings)
        except TypeError as error:
            raise InputError(
                f"{self.title} must make a norm of the width alone; {self.title}({width}): {error}"
            ) from error
        if not isinstance(made, nn.Module):
            raise InputError(f"{self.title}({width}) must be a torch.nn.Module; got {type(made).__name__}")
        return made


def _target(to: str | Callable[..., nn.Module]) -> _Target:
    """Returns the kind of norm that a caller asks for. Errors: InputError."""
    if isinstance(to, type) and issubclass(to, Norm):
        to = to()
    if isinstance(to, str) and names_code(to):
        to = TransformerConfig(norm=to).norm  # the configuration makes a Norm of "file.py:Class"
    if isinstance(to, Norm):
        return _Target(str(to), None, to)
    name = next((name for name, kind in KINDS.items() if to is kind), to)
    if isinstance(name, str):
        if name in FAMILIES:
            return _Target(name, FAMILIES[name].norm, norm_class(name))
        if name not in KINDS:
            raise InputError(unknown("norm", name, [*KINDS, *FAMILIES]))
        return _Target(name, name, KINDS[name])
    is_class = isinstance(to, type) and issubclass(to, nn.Module)
    if not is_class and (isinstance(to, type | nn.Module) or not callable(to)):
        raise InputError(
            f"to must be one of {', '.join([*KINDS, *FAMILIES])}, a class of norms, or a function that makes one of "
            f"the width; got {to!r}"
        )
    return _Target(getattr(to, "__name__", type(to).__name__), None, cast(Callable[..., Any], to))


def _options(make: Callable[..., Any]) -> list[str] | None:
    """Returns the names of the options of a class's constructor or of a function, without the width. If a constructor
    has **options, those of its base class are included. None: any option is accepted."""
    names: list[str] = []
    parents = make.__mro__[: make.__mro__.index(nn.Module)] if isinstance(make, type) else [make]
    for parent in parents:
        function = vars(parent).get("__init__", make.__init__) if isinstance(parent, type) else parent  # type: ignore[misc]
        # the parameters without the width, which comes first, and in a class without self
        own = [*inspect.signature(function).parameters.values()][2 if isinstance(parent, type) else 1 :]
        names += [p.name for p in own if p.kind != p.VAR_KEYWORD and p.name not in names]
        if all(p.kind != p.VAR_KEYWORD for p in own):  # no **options that the base class would take
            return names
    return None


class _NewNorm(NamedTuple):
    """A new norm that replaces an old one, with the table's note."""

    norm: nn.Module
    note: str
    counterparts: dict[str, str]
    """The name of an old parameter in its norm → the name of the new one that takes its place."""


def _nearest(model: nn.Module, name: str) -> Tensor:
    """Returns a tensor with a norm's device and dtype: a tensor of the norm called `name`, or of the smallest module
    around it that has a floating-point tensor."""
    while True:
        module = model.get_submodule(name)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                return tensor
        if not name:
            return torch.empty(0)
        name = name.rpartition(".")[0]


def _share(old: nn.Module, made: _NewNorm, shared: dict[tuple[nn.Parameter, str, torch.Size], nn.Parameter]) -> None:
    """Makes new norms share a parameter if the old norms shared one. `shared`: the new parameters so far, by (old
    parameter, name of the new one, its shape)."""
    for leaf, new_leaf in made.counterparts.items():
        parameter = getattr(made.norm, new_leaf)
        key = getattr(old, leaf), new_leaf, parameter.shape
        setattr(made.norm, new_leaf, shared.setdefault(key, parameter))


def _twin(
    path: str,
    old: nn.Module,
    known: RecognisedNorm,
    target: _Target,
    init: str,
    like: Tensor,
    options: Mapping[str, Any],
) -> _NewNorm:
    """Returns the new norm that replaces `old` at `path`, on the device and with the dtype of `like`. `known`: the norm
    that `old` computes; `init`: "match" to take over the learned values, or "default"; `options`: the caller's. Errors:
    InputError if the new norm has another width."""
    # A layernorm without a bias was built so on purpose, so the new norm gets none either. Other norms lack a bias by
    # their formula, so the new one gets its usual bias.
    has_bias = known.bias is not None or known.computes != "layernorm"
    wanted: dict[str, Any] = {"device": like.device, "dtype": like.dtype, "bias": has_bias}
    if known.gain is None and known.bias is None:
        wanted["elementwise_affine"] = False
    computes = target.computes
    if computes is None:  # the user's own class: a trial norm shows what it computes
        computes = getattr(read_norm(target.norm(known.width, like, wanted, options)), "computes", None)
    takes_eps = target.title not in FAMILIES or FAMILIES[target.title].settings["eps_place"] == "inside"
    # the old ε is copied if both norms use it in the same way
    if takes_eps and (computes == known.computes or {computes, known.computes} <= {"layernorm", "rmsnorm"}):
        if known.eps is None:  # torch's RMSNorm uses the machine epsilon of the dtype it computes in
            wanted["eps"] = torch.finfo(torch.promote_types(like.dtype, torch.float32)).eps
        elif not math.isnan(known.eps):
            wanted["eps"] = known.eps
    is_narrow = like.dtype in (torch.float16, torch.bfloat16)
    keeps_offset = known.gain is not None and (known.offset, known.factor) == (1.0, 1.0) and is_narrow
    if keeps_offset and target.title == "rmsnorm":
        # y = (1 + weight)⊙x̂ keeps the stored weight; weight + 1 in 16 bits would round it away
        wanted["zero_centred"] = True
    new = target.norm(known.width, like, wanted, options)
    if isinstance(new, Typed):
        new.return_like(known.returns, like)

    new_known, parameters = read_norm(new), dict(new.named_parameters(recurse=False))
    if new_known is not None and new_known.width != known.width:
        raise InputError(
            f"{target.title}({known.width}) makes a norm of width {new_known.width}, and {path} has width {known.width}"
        )
    names = (known.gain, known.bias) if new_known is None else (new_known.gain, new_known.bias)
    pairs = {  # name of an old parameter → name of the new one in its place
        old_name: new_name
        for old_name, new_name in zip((known.gain, known.bias), names)
        if old_name and new_name and new_name in parameters
    }
    learned_names = (("gain", known.gain), ("bias", known.bias))
    notes = [f"{what} dropped" for what, name in learned_names if name and name not in pairs]
    if new_known is None:
        notes.append(f"{type(new).__name__} is no known norm: its own first values")
    elif init == "match" and isinstance(old, nfnn.RepBN) and isinstance(new, nfnn.RepBN):
        pairs = {name: name for name in dict(old.named_parameters(recurse=False)) if name in parameters}
        _match_blended(old, new)
        notes = ["the same in evaluation"]  # in place of "dropped", since every parameter that both have is copied
    elif init == "match":
        # in training, a PRepBN fades from a norm of rows to a RepBN, beginning after `warm` updates
        if isinstance(old, nfnn.PRepBN) and not old.t.is_meta and int(old.t) > old.warm + 1:
            raise InputError(
                f"{path} is a PRepBN that has begun to fade, and {target.title} cannot take its values over: swap it "
                'for repbn, which computes what it computes in evaluation, or give init="default"'
            )
        if isinstance(old, nfnn.RepBN) and not isinstance(old, nfnn.PRepBN):
            notes.append("share dropped")  # the learned share of x that a RepBN adds to its output
        notes += _match(old, known, new, new_known)
    # a new parameter without a counterpart takes requires_grad and attributes from the old norm's first parameter
    first = next(old.parameters(recurse=False), None)
    learned = {new_name: getattr(old, old_name) for old_name, new_name in pairs.items()}
    for name, parameter in parameters.items():
        parameter.requires_grad_(getattr(learned.get(name, first), "requires_grad", True))
        if name not in learned and isinstance(first, nn.Parameter):
            hand_over_plain(first, parameter)
    for old_name, new_name in pairs.items():
        hand_over_parameter(f"{path}.{old_name}", getattr(old, old_name), parameters[new_name])
    new.train(old.training)
    return _NewNorm(new, ", ".join(notes), pairs)


@torch.no_grad()
def _match_blended(old: nfnn.RepBN, new: nfnn.RepBN) -> None:
    """Copies the parameters and buffers that both norms have. In evaluation both then compute the same."""
    olds = {**dict(old.named_parameters(recurse=False)), **dict(old.named_buffers(recurse=False))}
    news = {**dict(new.named_parameters(recurse=False)), **dict(new.named_buffers(recurse=False))}
    for name in olds.keys() & news.keys():
        news[name].copy_(olds[name])


@torch.no_grad()
def _match(old: Any, known: RecognisedNorm, new: Any, new_known: RecognisedNorm) -> list[str]:
    """Sets the new norm's bias and gain from the old one's. Norms multiply x̂ by factor·(offset + gain), and the new
    gain is chosen so that this product stays. Returns a note if the gain's numbers had to be converted."""
    if known.bias and new_known.bias:
        getattr(new, new_known.bias).copy_(getattr(old, known.bias))
    if not (known.gain and new_known.gain):
        return []
    old_gain, new_gain = getattr(old, known.gain).detach(), getattr(new, new_known.gain)
    if not (old_gain.is_meta or new_gain.is_meta):
        multiplier = known.factor * (known.offset + old_gain.to("cpu", torch.float64))
        # the root mean square as the only number keeps the outputs' length on average
        if new_gain.numel() == 1 and multiplier.numel() > 1:
            multiplier = multiplier.square().mean().sqrt()
        new_gain.copy_((multiplier / new_known.factor - new_known.offset).broadcast_to(new_gain.shape))
        is_same_form = known.offset == new_known.offset != 0 and known.factor == new_known.factor
        if is_same_form and old_gain.shape == new_gain.shape:  # a plain copy avoids the rounding of offset + gain
            new_gain.copy_(old_gain)
    # new gain = times·(plus + old gain)
    times, plus = known.factor / new_known.factor, known.offset - new_known.offset * new_known.factor / known.factor
    if old_gain.numel() != new_gain.numel() or (known.gain, times, plus) == (new_known.gain, 1, 0):
        return []
    conversion = f"the old {known.gain}" if plus == 0 else f"{plus:g} + the old {known.gain}"
    if times != 1:
        conversion = f"{times:.6g}·" + (conversion if plus == 0 else f"({conversion})")
    return [f"{new_known.gain} is {conversion}"]


def _exchanged(model: nn.Module, places: list[tuple[str, nn.Module]], made: Mapping[nn.Module, _NewNorm]) -> Exchange:
    """Returns for each parameter of the old norms the (path, parameter) pairs that replace it. A parameter that a
    remaining module shares is one of its own replacements. `places`: (path, old norm); `made`: old norm → new norm."""
    kept = {p for module in model.modules() if module not in made for p in module.parameters(recurse=False)}
    exchange: Exchange = {}
    for name, old in places:
        for p, new in _exchange(name, old, made[old]).items():
            replacements = exchange.setdefault(p, [(name, p)] if p in kept else [])
            # norms that share a parameter list its replacement once
            replacements += [(leaf, q) for leaf, q in new if all(q is not other for _, other in replacements)]
    return exchange


def _exchange(name: str, old: nn.Module, made: _NewNorm) -> Exchange:
    """Returns the exchange of one norm's parameters: each old one → the (path, parameter) pairs that replace it. New
    parameters without a counterpart count as replacements of the first old one. `name`: the norm's path."""
    olds, news = dict(old.named_parameters(recurse=False)), dict(made.norm.named_parameters(recurse=False))
    counterparts = made.counterparts
    exchange = {
        p: [(f"{name}.{counterparts[leaf]}", news[counterparts[leaf]])] if leaf in counterparts else []
        for leaf, p in olds.items()
    }
    if olds:
        rest = [(f"{name}.{leaf}", p) for leaf, p in news.items() if leaf not in counterparts.values()]
        exchange[next(iter(olds.values()))] += rest
    return exchange


def _switch_off_fast_paths(model: nn.Module, new: set[nn.Module], edits: Edits) -> list[Row]:
    """Switches off torch.nn's fused encoder evaluation, which would compute LayerNorm with any new norm's weights.
    `new`: the new norms. Returns rows of the table."""
    rows, changed = [], set()
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and new & {*module.children()}:
            edits.remember(module)
            module.activation_relu_or_gelu = 0  # torch's forward takes the fast path only if this is not 0
            changed.add(module)
            rows.append(
                Row(name or "(model)", "fast path", "off", "torch.nn's fused evaluation would bypass the norms")
            )
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and changed & {*module.layers}:
            edits.remember(module)
            module.use_nested_tensor = module.enable_nested_tensor = False
    return rows
