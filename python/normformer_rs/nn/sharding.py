"""DTensor's sharding rules of the package's operators, and the initialisation of parameters, also of sharded ones.

Rows may be sharded; each rank's gradient of a parameter is then a part of the sum. The width may not be sharded.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from .norm_table import DECLARED, Numbers

OPERATORS = tuple(dict.fromkeys(entry.operator for entry in DECLARED.values() if entry.form == "rows"))
"""The operators of the norms that work row by row."""
_TENSORS = "torch.distributed.tensor"
"""The module that defines DTensor. Without it no tensor is sharded."""
_is_registered = False


def register() -> None:
    """Registers the rules with DTensor, once, and only if its module is imported already: importing it is slow."""
    global _is_registered
    if _is_registered or _TENSORS not in sys.modules:
        return
    _is_registered = True
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.normformer_rs.growth.default)(_growth)
    for name in map(str, OPERATORS):
        register_sharding(getattr(torch.ops.normformer_rs, name).default)(_forward)
        register_sharding(getattr(torch.ops.normformer_rs, name + "_backward").default)(_backward)


def is_sharded(x: Tensor) -> bool:
    """True for a DTensor."""
    return _TENSORS in sys.modules and hasattr(x, "device_mesh")


@torch.no_grad()
def write_whole(p: Tensor, write: Callable[[Tensor], object]) -> None:
    """Sets a parameter in place. `write` fills a plain tensor of the full shape. For a 16-bit parameter that tensor is
    f32, so that one seed gives the same model in every dtype.

    For a DTensor every rank fills a full tensor, and then keeps its own shard of the first rank's tensor. `write` could
    not fill the DTensor itself: its slices are copies, so writes into rows would be lost, and ranks with the same seed
    would draw the same numbers for every shard.
    """
    dtype = torch.promote_types(p.dtype, torch.float32)
    if not is_sharded(p) and dtype == p.dtype:
        write(p)
        return
    whole = torch.empty(p.shape, dtype=dtype, device=p.device)
    write(whole)
    if is_sharded(p):
        from torch.distributed.tensor import distribute_tensor

        target: Any = p
        whole = distribute_tensor(whole.to(p.dtype), target.device_mesh, target.placements)
    p.copy_(whole)


def write_first(p: Tensor, numbers: Numbers, scale: float = 1.0) -> None:
    """Sets a norm's parameter to its initial values; constants are `numbers.first(scale)`."""
    if numbers.std:
        write_whole(p, lambda whole: nn.init.normal_(whole, std=numbers.std))
    else:
        nn.init.constant_(p, numbers.first(scale))


def mark_drawn(module: nn.Module) -> None:
    """Marks the module as initialised for Hugging Face transformers, whose `init_weights()` and `post_init()` then
    leave it alone. A module with parameters on the meta device has no values yet and gets no mark."""
    if any(p is not None and p.is_meta for p in module._parameters.values()):
        vars(module).pop("_is_hf_initialized", None)
    else:
        vars(module)["_is_hf_initialized"] = True


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Replaces the module's own sharded parameters by plain tensors inside the block, so that torch.nn's
    `reset_parameters` can fill them. Afterwards `write_whole` copies their values into the sharded parameters."""
    has_any = _TENSORS in sys.modules  # True if there may be DTensors
    sharded: dict[str, Any] = {n: p for n, p in module._parameters.items() if has_any and hasattr(p, "device_mesh")}
    plain = {n: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=p.device)) for n, p in sharded.items()}
    module._parameters.update(plain)
    try:
        yield
    finally:
        module._parameters.update(sharded)
    for name, p in sharded.items():
        write_whole(p, functools.partial(_copy, plain[name]))


def _copy(values: Tensor, target: Tensor) -> None:
    """Copies the values into `target`; it comes last, because `whole` sets only the first argument beforehand."""
    target.copy_(values)


def _forward(x: Any, weight: Any, bias: Any, *own: Any) -> list[tuple[list[Any], list[Any]]]:
    """Returns (placements of y and stats, placements of the inputs), one pair per way to shard. `own`: ε, or the
    parameters that x̂ depends on."""
    whole = [_whole(p) for p in (weight, bias, *own)]
    return [([placement, placement], [placement, *whole]) for placement in _places(x)]


def _backward(dy: Any, x: Any, weight: Any, bias: Any, stats: Any, *own: Any) -> list[tuple[list[Any], list[Any]]]:
    """Returns (placements of the gradients of x and the parameters, placements of the inputs), one pair per way to
    shard."""
    from torch.distributed.tensor import Partial, Replicate

    affine, numbers = [_whole(p) for p in (weight, bias)], [_whole(p) for p in own]
    learned = [*affine, *(p for p in numbers if p is not None)]  # ε is a number and has no gradient
    ways = []
    for placement in _places(x):  # dy, x, stats and the gradient of x have the same placement
        # A rank with some of the rows has a part of each parameter's gradient, which is a sum over rows.
        sums = [Partial() if placement.is_shard() and p is not None else Replicate() for p in learned]
        ways.append(([placement, *sums], [placement, placement, *affine, placement, *numbers]))
    return ways


def _growth(t: Any, *_: Any) -> list[tuple[list[Any], list[Any]]]:
    """Returns the only placements of α_t and of the inputs t, steps and curve: the tensors are replicated."""
    from torch.distributed.tensor import Replicate

    return [([Replicate()], [Replicate(), None, None])]


def _whole(argument: Any) -> Any:
    """Returns the placement of an operator's argument: replicated for a tensor, None for None and for a number."""
    from torch.distributed.tensor import Replicate

    return None if argument is None or isinstance(argument, float) else Replicate()


def _places(x: Any) -> list[Any]:
    """Returns the placements that x may have: replicated, or sharded along a dimension other than the width."""
    from torch.distributed.tensor import Replicate, Shard

    width = len(x.shape) - 1
    if any(place.is_shard(width) for place in x.placements):
        raise InputError(
            f"a norm needs whole rows, but dimension {width}, its width, is sharded: redistribute x to Replicate(), or "
            "to Shard of another dimension, first"
        )
    return [Replicate(), *(Shard(i) for i in range(width))]
