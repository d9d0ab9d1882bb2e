"""Sublayers that read x from several tensors and write F(x) to several (Rust's `Mixing`): declarations, and their run.

The tensors travel as a tuple from sublayer to sublayer. A hyper-connection has one, (…, n, d), with all streams in it;
attention over depth has one (…, d) for each output that it may attend to.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import formulas
from .parts import Learned

Tensors = tuple[Tensor, ...]


class HyperConnection(NamedTuple):
    """`formulas.hyper_connection` of n streams, all x at the start; at a stack's end `formulas.hyper_read`."""

    streams: int
    iterations: int
    weight: Learned
    scale: Learned
    bias: Learned

    def parameters(self) -> tuple[Learned, ...]:
        """Its parameters' declarations."""
        return self.weight, self.scale, self.bias

    def begin(self, x: Tensor) -> Tensor:
        """The first tensor, of what the stack reads."""
        return formulas.spread(x, self.streams)

    def read(self, owner: nn.Module, tensors: Tensors) -> tuple[Tensor, Tensors]:
        """x, and what is left for `write`: the mixed streams and the gates of F(x)."""
        weight, scale, bias = (getattr(owner, what.name) for what in self.parameters())
        with torch.autocast(tensors[0].device.type, enabled=False):  # the residual stream keeps its type
            if self.scale.shape == (1,):
                return formulas.hyper_read(tensors[0], weight, scale, bias), ()
            x, *unwritten = formulas.hyper_connection(tensors[0], weight, scale, bias, self.iterations)
            return x, tuple(unwritten)

    def write(self, tensors: Tensors, unwritten: Tensors, f: Tensor) -> Tensors:
        """The tensors after F(x) = f, dropped."""
        mixed, gates = unwritten
        return (mixed + gates * f.unsqueeze(-2),)

    def seen(self, tensors: Tensors) -> Tensor:
        """One tensor like x: the streams' mean."""
        return tensors[0].mean(-2)


class DepthAttention(NamedTuple):
    """`formulas.depth_attention` over earlier sublayers' outputs. `weights`: (query, gain); None: only v_0 is there."""

    weights: tuple[Learned, Learned] | None
    begins_block: bool

    def parameters(self) -> tuple[Learned, ...]:
        """Its parameters' declarations."""
        return self.weights or ()

    def begin(self, x: Tensor) -> Tensor:
        """The first tensor, of what the stack reads."""
        return x

    def read(self, owner: nn.Module, tensors: Tensors) -> tuple[Tensor, Tensors]:
        """x; nothing is left for `write`."""
        if self.weights is None:
            return tensors[0], ()
        query, gain = (getattr(owner, what.name) for what in self.weights)
        with torch.autocast(tensors[0].device.type, enabled=False):
            return formulas.depth_attention(tensors, query, gain), ()

    def write(self, tensors: Tensors, unwritten: Tensors, f: Tensor) -> Tensors:
        """The tensors after F(x) = f, dropped: one more, or the last with f added."""
        return (*tensors, f) if self.begins_block else (*tensors[:-1], tensors[-1] + f)

    def seen(self, tensors: Tensors) -> Tensor:
        """One tensor like x: their mean."""
        return torch.stack(tensors).mean(0)


Mixing = HyperConnection | DepthAttention


def parse(found: dict[str, Any] | None) -> Mixing | None:
    """The declaration of Rust's JSON."""
    if found is None:
        return None
    ((kind, what),) = found.items()
    if kind == "hyper":
        parameters = [Learned.of(what[key]) for key in ("weight", "scale", "bias")]
        return HyperConnection(what["streams"], what["iterations"], *parameters)
    weights = what["weights"]
    return DepthAttention(weights and tuple(map(Learned.of, weights)), what["begins_block"])
