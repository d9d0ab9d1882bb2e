"""Norms exchanged in a model that somebody else wrote."""

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import nn as nfnn
from ..config import tables, unknown
from ..errors import InputError
from ..nn.norms import FixedScaleNorm
from ..nn.running import RunningNorm
from .edits import Edits, Repoint, Row, Swaps, refuse_wrapped

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_RMS_NAMES = ("T5LayerNorm", "RMSNorm")
"""Classes of other libraries that are RMSNorm under another name end so."""


class Known(NamedTuple):
    """A norm over the last dimension: its width, and the name in `normformer_rs.tables()` of what it computes."""

    width: int
    computes: str


Reader = Callable[[Any], Known | None]
_READERS: dict[type[nn.Module], Reader] = {}


def register_norm(kind: type[nn.Module], reader: Reader) -> None:
    """Makes `swap_norms` know a class of norms.

    `reader(module)` returns (width, computes), `computes` the name of the nearest norm in `normformer_rs.tables()`;
    None: not a norm over the last dimension. Its parameters, if any, must be named weight and bias.
    """
    _READERS[kind] = reader


def _torchs(computes: str) -> Reader:
    def read(module: Any) -> Known | None:
        shape = module.normalized_shape
        return Known(shape[0], computes) if len(shape) == 1 else None

    return read


register_norm(nn.LayerNorm, _torchs("layernorm"))
register_norm(nn.RMSNorm, _torchs("rmsnorm"))


def read_norm(module: nn.Module) -> Known | None:
    """What kind of norm this is; None: not one that is known."""
    if type(module) in _READERS:
        return _READERS[type(module)](module)
    computes = own_name(module)
    if computes is not None:
        return Known(_width(module), computes)
    known, weight = None, getattr(module, "weight", None)
    for kind in type(module).__mro__:
        if kind in _READERS:
            known = _READERS[kind](module)
            break
    else:
        if type(module).__name__.endswith(_RMS_NAMES) and isinstance(weight, Tensor) and weight.dim() == 1:
            known = Known(weight.numel(), "rmsnorm")
    return known if known is not None and _computes(module, known) else None


@torch.no_grad()
def _computes(module: Any, known: Known) -> bool:
    """A class that only looks like a norm is asked with two rows of numbers: Gemma's RMSNorm counts its gain from zero,
    and a subclass of LayerNorm may normalise channels that come first. 0.05 is six roundings of bfloat16; what these do
    differs by the size of the numbers themselves."""
    like = next(module.parameters(), torch.empty(0))
    if like.is_meta:
        return True
    x = torch.linspace(-40, 50, 2 * known.width, device=like.device).view(1, 2, known.width).to(like.dtype)
    formulas: dict[str, Any] = {"layernorm": F.layer_norm, "rmsnorm": F.rms_norm}
    formula = formulas.get(known.computes)
    if formula is None:
        return True
    wide = [t if t is None else t.double() for t in (module.weight, getattr(module, "bias", None))]
    expected = formula(x.double(), (known.width,), *wide[: 2 if known.computes == "layernorm" else 1])
    try:
        found = type(module).forward(module, x)
    except Exception:  # whatever it may say of a shape that it does not take
        return False
    return found.shape == x.shape and torch.allclose(found.double(), expected, rtol=0.05, atol=0.05)


def own_name(module: nn.Module) -> str | None:
    """The package's name for one of its own norms."""
    if isinstance(module, nfnn.ScaleNorm) and module.weight is None:
        return "scalenorm-fixed"
    kinds = {nfnn.norm_class(entry["name"]): entry["name"] for entry in tables()["norms"]}
    return {**kinds, FixedScaleNorm: "scalenorm"}.get(type(module))


def _width(module: Any) -> int:
    return module.normalized_shape[0] if hasattr(module, "normalized_shape") else module.num_features


def new_norm(name: str, width: int, bias: bool = True, **settings: Any) -> Any:
    """A norm by its name; `bias` counts for those that have one."""
    kind = nfnn.norm_class(name)
    has_bias = kind is nfnn.LayerNorm or issubclass(kind, RunningNorm)
    for option in settings:
        if option not in _options(kind):
            raise InputError(unknown(f"option of {name}", option, _options(kind)))
    return kind(width, **({"bias": bias} if has_bias else {}), **settings)


def _options(kind: type[nn.Module]) -> list[str]:
    """What its constructor takes beside the width; what it hands on is asked of the class above."""
    names: list[str] = []
    for parent in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        own = [*inspect.signature(vars(parent).get("__init__", kind.__init__)).parameters.values()][2:]
        names += [p.name for p in own if p.kind != p.VAR_KEYWORD and p.name not in names]
        if all(p.kind != p.VAR_KEYWORD for p in own):
            break
    return names


def swap_norms(
    model: nn.Module,
    to: str,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
    init: Literal["match", "default"] = "match",
    optimizer: torch.optim.Optimizer | None = None,
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
    (model)  fast path  off        torch.nn's fused evaluation would pass the norms by

    Device, dtype, training mode, hooks and sharing (one norm under two names stays one) are kept; norms that are of the
    kind already are left alone. torch.nn's fused evaluation of encoder layers, which reads weights instead of calling
    norms, is switched off.

    Args:
        model: any tree of modules that holds norms over the last dimension.
        to: a name out of `normformer_rs.tables()["norms"]`.
        filter: (name, module) → whether to replace it; None: all.
        init: "match" keeps what was learned: a vector γ is taken over, a single gain becomes its start times the root
            mean square of γ (so that outputs keep their length on average), and the other way round; "default": a new
            norm's values.
        optimizer: its groups then hold the new parameters in the old ones' places; state of the old ones is dropped.
        options: the new norm's own (`eps`, …).

    Returns: the table of what was done; its `undo()` brings the old norms back.

    Errors: InputError for an unknown name; a model without norms that are known, or that is itself one;
    DistributedDataParallel and FSDP models; an optimizer that does not own the parameters. Nothing has been changed
    then.
    """
    names = [entry["name"] for entry in tables()["norms"]]
    if to not in names:
        raise InputError(unknown("norm", to, names))
    if init not in ("match", "default"):
        raise InputError(unknown("init", init, ("match", "default")))
    refuse_wrapped(model)
    found = [(name, module, read_norm(module)) for name, module in model.named_modules(remove_duplicate=False)]
    norms = [(name, module, known) for name, module, known in found if known is not None]
    if not norms:
        kinds = [kind.__name__ for kind in _READERS] + list(_RMS_NAMES)
        raise InputError(
            f"{type(model).__name__} holds no norm that is known; known are {', '.join(kinds)} and "
            "normformer_rs.nn's own: tell of another class with normformer_rs.surgery.register_norm(kind, reader)"
        )
    if norms[0][1] is model:
        raise InputError(
            f"the model is itself a {type(model).__name__}, which no module holds, so that nothing can be put in its "
            "place: make the norm with normformer_rs.nn instead, or pass the module that holds it"
        )

    made: dict[nn.Module, tuple[nn.Module, str]] = {}
    shared: dict[tuple[nn.Parameter, str, torch.Size], nn.Parameter] = {}
    places: list[tuple[str, nn.Module]] = []
    for name, module, known in norms:
        if own_name(module) == to or (filter is not None and not filter(name, module)):
            continue
        places.append((name, module))
        if module not in made:
            made[module] = _twin(module, known, to, init, _nearest(model, name), options)
            _share(module, made[module][0], shared)

    repoint = Repoint(optimizer, _exchanged(model, places, {old: new for old, (new, _) in made.items()}))
    title = f"swap_norms to {to}"
    edits, rows = Edits(model, title), []
    for name, old in places:
        parent, _, leaf = name.rpartition(".")
        holder = model.get_submodule(parent)
        edits.remember(holder)
        holder._modules[leaf] = made[old][0]
        rows.append(Row(name, type(old).__name__, type(made[old][0]).__name__, made[old][1]))
    rows += _switch_off_fast_paths(model, {new for new, _ in made.values()}, edits)
    repoint(edits)
    edits.done()
    return Swaps(title, rows, edits)


def _nearest(model: nn.Module, name: str) -> Tensor:
    """A tensor that tells a norm's device and dtype: its own, or one of the smallest part of the model around it."""
    while True:
        module = model.get_submodule(name)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                return tensor
        if not name:
            return torch.empty(0)
        name = name.rpartition(".")[0]


def _share(old: nn.Module, new: nn.Module, shared: dict[tuple[nn.Parameter, str, torch.Size], nn.Parameter]) -> None:
    """Norms that had a parameter in common have one again. `shared`: those that were made so far."""
    for leaf, parameter in [*new.named_parameters(recurse=False)]:
        counterpart = getattr(old, leaf, None)
        if counterpart is not None:
            setattr(new, leaf, shared.setdefault((counterpart, leaf, parameter.shape), parameter))


def _twin(
    old: nn.Module, known: Known, to: str, init: str, like: Tensor, options: dict[str, Any]
) -> tuple[nn.Module, str]:
    """The norm that takes the old one's place, on the device and of the dtype of `like`, and a note."""
    first = next((p for p in old.parameters(recurse=False)), None)
    bias = getattr(old, "bias", None)
    place: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
    if first is None:
        place["elementwise_affine"] = False
    has_bias = bias is not None or known.computes != "layernorm"
    # ε means the same in these two; in others it is another number's.
    eps = getattr(old, "eps", getattr(old, "variance_epsilon", math.nan))
    if {to, known.computes} <= {"layernorm", "rmsnorm"}:
        if eps is None:  # torch's RMSNorm: that of the type computed in
            place["eps"] = torch.finfo(torch.promote_types(like.dtype, torch.float32)).eps
        elif not math.isnan(eps):
            place["eps"] = float(eps)
    new = new_norm(to, known.width, **{"bias": has_bias, **place, **options})
    if init == "match":
        _match(old, new)
    lost = [name for name in ("weight", "bias") if isinstance(getattr(old, name, None), Tensor)]
    lost = [name for name in lost if getattr(new, name, None) is None]
    note = ", ".join({"weight": "gain dropped", "bias": "bias dropped"}[name] for name in lost)
    for name, parameter in new.named_parameters():
        counterpart = getattr(old, name, None)
        parameter.requires_grad_(getattr(first if counterpart is None else counterpart, "requires_grad", True))
    new.train(old.training)
    for hooks in _HOOKS:
        if hooks in old.__dict__:
            new.__dict__[hooks] = old.__dict__[hooks]
    return new, note


@torch.no_grad()
def _match(old: Any, new: Any) -> None:
    """The new norm's gain from the old one's, each counted in units of its start."""
    if old.weight is None or new.weight is None or new.weight.is_meta:
        return
    start = old.gain() if getattr(old, "has_one_gain", False) else 1.0
    relative = old.weight.detach().to(torch.float64).cpu() / start
    if new.weight.numel() == 1 and relative.numel() > 1:
        relative = relative.square().mean().sqrt().reshape(1)
    new.weight.copy_(new.weight * relative.to(new.weight))
    bias = getattr(old, "bias", None)
    if bias is not None and getattr(new, "bias", None) is not None:
        new.bias.copy_(bias)


Exchange = dict[nn.Parameter, list[tuple[str, nn.Parameter]]]


def _exchanged(model: nn.Module, places: list[tuple[str, nn.Module]], made: dict[nn.Module, nn.Module]) -> Exchange:
    """For each parameter of the old norms what takes its place; it stays where others have it too."""
    kept = {p for module in model.modules() if module not in made for p in module.parameters(recurse=False)}
    out: Exchange = {}
    for name, old in places:
        for p, new in _exchange(name, old, made[old]).items():
            known = out.setdefault(p, [(name, p)] if p in kept else [])
            known += [(leaf, q) for leaf, q in new if all(q is not other for _, other in known)]
    return out


def _exchange(name: str, old: nn.Module, new: nn.Module) -> Exchange:
    """Of one norm; what has no counterpart goes where the weight was."""
    olds, news = dict(old.named_parameters(recurse=False)), dict(new.named_parameters(recurse=False))
    out = {p: [(f"{name}.{leaf}", news[leaf])] if leaf in news else [] for leaf, p in olds.items()}
    if olds:
        out[next(iter(olds.values()))] += [(f"{name}.{leaf}", p) for leaf, p in news.items() if leaf not in olds]
    return out


def _switch_off_fast_paths(model: nn.Module, new: set[nn.Module], edits: Edits) -> list[Row]:
    """torch.nn's encoder in evaluation reads its norms' weights and computes LayerNorm of them whatever they are."""
    rows, changed = [], set()
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and new & {*module.children()}:
            edits.remember(module)
            module.activation_relu_or_gelu = 0  # what its forward asks before it takes the fast path
            changed.add(module)
            rows.append(
                Row(name or "(model)", "fast path", "off", "torch.nn's fused evaluation would pass the norms by")
            )
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and changed & {*module.layers}:
            edits.remember(module)
            module.use_nested_tensor = module.enable_nested_tensor = False
    return rows
