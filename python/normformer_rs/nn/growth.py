"""α_t, the factor of branchnorm and prores (prepbn's 1 − λ) that grows with the number t of the update, and its
operator."""

import torch
from torch import Tensor

from .. import _core
from ..declarations.declared import Growth
from . import sharding
from .tracing import records_core

OPS = torch.ops.normformer_rs


def alpha(growth: Growth, t: Tensor, layer: int) -> Tensor:
    """Returns α_t, (1,), for the update number t, (1,) int64, in a layer counted from 0."""
    steps = growth.steps * (layer + 1) if growth.by_layer else growth.steps
    if records_core():
        return growth_now(t, steps, growth.curve)
    if sharding.is_sharded(t):
        sharding.register()
    return OPS.growth(t, steps, growth.curve)


def growth_now(t: Tensor, steps: int, curve: str) -> Tensor:
    """Returns α_t for t, (1,) int64, on t's device: the host never reads it."""
    return _core.growth(steps, curve, t)  # type: ignore[arg-type]


# α_t is an operator, so that compiled graphs contain it. It is defined by hand, because `torch.library.custom_op` would
# read this source file, which takes 13 ms.
_LIBRARY = torch.library.Library("normformer_rs", "FRAGMENT")
_LIBRARY.define("growth(Tensor t, SymInt steps, str curve) -> Tensor")
_LIBRARY.impl("growth", growth_now, "CompositeExplicitAutograd")
_LIBRARY.impl("growth", lambda t, steps, curve: torch.empty_like(t, dtype=torch.float64), "Meta")
