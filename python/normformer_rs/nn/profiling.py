"""The profiling pass that sets Admin's initial gains (Liu et al. 2020; docs/spec.md §3.4).

At the start of each stack r is 1. Each sublayer in turn then sets ω ← r and r ← √(Var(ω⊙x) + Var(drop f)), with the
biased variance over all elements.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError
from .dropout import Where, drop


class ProfilingPass:
    """The state of a profiling pass in progress."""

    def __init__(self) -> None:
        self.deviation: Tensor | None = None
        """r, (1,), the standard deviation of x after the last sublayer; None at the start of a stack, where r is 1."""
        self.gains = 0
        """The number of gains set so far."""
        self.place = (-1, -1)
        """The (layer, sublayer) announced last."""


_pass: ProfilingPass | None = None


@contextlib.contextmanager
def profiling() -> Iterator[ProfilingPass]:
    """Makes forwards inside the block set the gains on x."""
    global _pass
    _pass = ProfilingPass()
    try:
        with torch.no_grad():
            yield _pass
    finally:
        _pass = None


def is_profiling() -> bool:
    """True while a profiling pass runs."""
    return _pass is not None


def begin_stack() -> None:
    """Restarts r for a new stack."""
    if _pass is not None:
        _pass.deviation = None


def follow(layer: int, sublayer: int, is_told: bool) -> None:
    """Announces the next sublayer of a layer outside a stack. r restarts unless this sublayer comes after the one
    announced before it, in the order of (layer, sublayer). `is_told`: True if the layer knows its number, or needs
    none.

    Errors: InputError while profiling, if `is_told` is False.
    """
    if _pass is not None:
        if not is_told:
            raise InputError(
                "profiling needs the number of each layer, and nobody has told one: call "
                "normformer_rs.nn.place_layers(layers, init=True) with all layers of its stack (init=False keeps "
                "trained weights), or give layer= and the depth"
            )
        if (layer, sublayer) <= _pass.place:
            begin_stack()
        _pass.place = layer, sublayer


def profile_step(omega: Tensor, x: Tensor, f: Tensor, where: Where) -> None:
    """Sets ω ← r and computes the next r, while profiling; otherwise does nothing. `omega`: the gain on x; `f`: the
    sublayer's output before its dropout; `where`: (p, seed, site) of that dropout.

    Errors: InputError if r is not finite.
    """
    if _pass is None:
        return
    r = omega.new_ones(1) if _pass.deviation is None else _pass.deviation
    if dist.is_available() and dist.is_initialized():
        dist.broadcast(r, 0)  # every rank takes rank 0's r, because each has another batch
    if not r.isfinite().all():
        raise InputError(
            f"profiling found a gain on x of {r.item()}: expected a finite number. The branches grow from sublayer to "
            "sublayer, as with norms whose output grows with their input (repbn, prepbn): choose another norm, or "
            "fewer layers"
        )
    omega.copy_(r.expand_as(omega))
    dropped = drop(f, where).to(x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    variance = [t.to(wide).var(correction=0) for t in (x * omega, dropped)]
    _pass.deviation = (variance[0] + variance[1]).sqrt().to(omega.dtype).reshape(1)
    _pass.gains += 1
