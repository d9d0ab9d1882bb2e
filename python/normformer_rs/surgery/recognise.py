"""Recognises which norm a module is: by its registered reader, its class, or trial calls."""

import math
import re
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .. import nn as nfnn
from ..config import unknown
from ..errors import InputError
from ..nn.norm_table import Numbers
from ..nn.norms import FixedScaleNorm, RowNorm
from .converted import original
from .handover import own_forward
from .probe import KINDS, RecognisedNorm, has_stateful_parts, probe

Reader = Callable[[Any], "tuple[int, str] | None"]
"""A function from a module to (width, name of the norm); None: the module is no norm."""
_READERS: dict[type[nn.Module], Reader] = {}


def register_norm(kind: type[nn.Module], reader: Reader) -> None:
    """Registers a class as a norm for `swap_norms` and `swap_residuals`, if trial calls do not recognise it.

    >>> import torch
    >>> from normformer_rs.surgery import register_norm, swap_norms
    >>> class Noisy(torch.nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.g = torch.nn.Parameter(torch.ones(width))
    ...     def forward(self, x, sigma=0.1):
    ...         return self.g * torch.nn.functional.layer_norm(x + sigma * torch.randn_like(x), x.shape[-1:])
    >>> register_norm(Noisy, lambda m: (m.g.numel(), "layernorm"))
    >>> model = torch.nn.Sequential(Noisy(4))
    >>> print(swap_norms(model, "rmsnorm"))
    swap_norms to rmsnorm: 1
    module  old    new      note
    0       Noisy  RMSNorm  weight is the old g

    Args:
        kind: the class. Its subclasses are not registered with it.
        reader: a function from a module to (width, computes), where `computes` is the name of the nearest norm in
            `normformer_rs.tables()`; it returns None if the module is no norm over the last dimension.

    Trial calls find which parameter is the gain, its offset and its factor. If they fail, the gain is the parameter
    `weight`, or else the first one, and the bias is `bias`, or else the second. Both are then used as in `computes`.

    Errors: InputError if `kind` is no class of modules; at the swap, if the reader returns anything else.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise InputError(f"kind must be a subclass of torch.nn.Module; got {kind!r}")
    _READERS[kind] = reader


def read_norm(module: nn.Module) -> RecognisedNorm | None:
    """Returns the norm that a module computes. None: it is no known norm."""
    result = examine(module)
    return result if isinstance(result, RecognisedNorm) else None


def examine(module: nn.Module) -> RecognisedNorm | str:
    """Returns the norm that a module computes, or the reason why it is no known norm."""
    if isinstance(module, torch.jit.ScriptModule):
        return "compiled by torch.jit: swap first, and script or trace afterwards"
    kind = original(type(module))
    if kind in _READERS:
        return _registered(module, _READERS[kind](module))
    computes = own_name(module) if own_forward(module) is None else None
    if computes is not None:
        return _by_convention(module, _own_width(module), computes, by_order=False)
    # a torch norm with buffers or a forward of its own may compute something else, so it gets trial calls
    if kind in _TORCHS and not module._buffers and own_forward(module) is None:
        shape = cast(Any, module).normalized_shape
        if len(shape) != 1:
            return f"normalises over the last {len(shape)} dimensions"
        return _by_convention(module, shape[0], _TORCHS[kind])
    return probe(module)


def alike(module: nn.Module) -> Hashable:
    """Returns a key that is equal for modules of one class with equal attributes and parameter shapes, so that
    examining one of them is enough. A module with attributes other than numbers, strings and sizes is its own key."""
    # the attributes beside those that every module has
    own = {name: value for name, value in vars(module).items() if name not in vars(_EMPTY)}
    is_plain = all(value is None or isinstance(value, int | float | str | torch.Size) for value in own.values())
    if original(type(module)) in _READERS or has_stateful_parts(module) or module._buffers or not is_plain:
        return module
    parts = {name: alike(part) for name, part in module.named_children()}
    # if a child is its own key, so is the module
    if any(part in parts.values() for part in module.children()):
        return module
    shapes = ((name, None if p is None else p.shape) for name, p in module._parameters.items())
    return type(module), (*own.items(),), (*shapes,), (*parts.items(),)


_EMPTY = nn.Module()
"""A module that has only the attributes that all modules have."""
_TORCHS: dict[type[nn.Module], str] = {nn.LayerNorm: "layernorm", nn.RMSNorm: "rmsnorm"}


def looks_like_a_norm(module: nn.Module) -> bool:
    """Returns whether a module without children is a norm by its class's name; it may be parametrized. torch's weight
    and spectral norms do not count, since they change another layer's weight."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    name = str(module.original_name) if is_scripted else type(module).__name__
    is_named_so = re.search("norm(?!al|ed)", name, re.IGNORECASE) is not None  # Normalize and Normed do not count
    is_leaf = {name for name, _ in module.named_children()} <= {"parametrizations"}
    changes_weights = type(module).__module__.startswith("torch.nn.utils") and not is_parametrized(module)
    return is_named_so and is_leaf and not changes_weights


def own_name(module: nn.Module) -> str | None:
    """Returns the table's name of one of this package's norms. None: the module is none of them."""
    if isinstance(module, nfnn.ScaleNorm) and module.weight is None:
        return "scalenorm-fixed"
    return _NAMES.get(original(type(module)))


_NAMES = {kind: name for name, kind in KINDS.items()} | {FixedScaleNorm: "scalenorm"}


def _own_width(module: Any) -> int:
    """Returns the width of one of this package's norms."""
    return module.normalized_shape[0] if hasattr(module, "normalized_shape") else module.num_features


# The functions below recognise norms of registered and known classes.


def _registered(module: nn.Module, said: Any) -> RecognisedNorm | str:
    """Returns the norm that a module of a registered class computes, or the reason why it is none. `said`: the result
    of the class's reader."""
    if said is None:
        return "its reader says that it is no norm over the last dimension"
    kind = type(module).__name__
    if not (isinstance(said, tuple) and len(said) == 2 and isinstance(said[0], int) and isinstance(said[1], str)):
        raise InputError(
            f'the reader of {kind} must return (width, computes), such as (512, "layernorm"); got {said!r}'
        )
    width, computes = said
    if computes not in KINDS:
        raise InputError(unknown(f"norm, which the reader of {kind} returned,", computes, KINDS))
    result = probe(module, width, computes)  # trial calls
    return result if isinstance(result, RecognisedNorm) else _by_convention(module, width, computes)


def _by_convention(module: nn.Module, width: int, computes: str, by_order: bool = True) -> RecognisedNorm:
    """Returns the norm `computes` with the module's parameters `weight` and `bias` as its gain and bias. If a name is
    missing, the parameters' order decides. `by_order=False`: only names decide, since the module has other parameters
    than gain and bias. A PRepBN, which fades from a norm of rows to another norm, counts as that norm of rows."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    candidates = names if by_order else []
    usual = [f"row_{name}" if isinstance(module, nfnn.PRepBN) else name for name in ("weight", "bias")]
    gain = usual[0] if usual[0] in names else next((name for name in candidates if name != "bias"), None)
    bias = usual[1] if usual[1] in names else next((name for name in candidates if name != gain), None)
    kind = KINDS[computes]
    offset, factor = 0.0, 1.0
    if issubclass(kind, RowNorm) and gain is not None:
        like: Any = module if isinstance(module, RowNorm) else kind(width)
        numbers = like.numbers_of.get("weight", Numbers(1.0))  # the class's offset and factor of the gain
        offset, factor = numbers.offset, numbers.factor / like.gain()
    eps = next((getattr(module, name) for name in _EPS if hasattr(module, name)), math.nan)
    if isinstance(module, RowNorm) and getattr(module, "eps_place", "inside") == "outside":
        eps = math.nan  # an ε outside the root is not the ε of the table's formula
    if gain is None:  # the norm multiplies by factor·(offset + gain), and here by 1
        offset = 1.0
    return RecognisedNorm(width, computes, gain, bias, None if eps is None else float(eps), offset, factor)


_EPS = ("eps", "variance_epsilon", "epsilon")
"""The usual names of the attribute with ε."""
