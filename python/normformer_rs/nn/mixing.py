"""Sublayers that read x from several tensors and write F(x) to several (Rust's `Mixing`): declarations, and their run.

The tensors travel as a tuple from sublayer to sublayer. A hyper-connection has one, (…, n, d), with all streams in it;
attention over depth has one (…, d) for each output that it may attend to.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import formulas
from .specs import Learned

Tensors = tuple[Tensor, ...]


def without_autocast(device: str) -> Any:
    """A context without autocast, which some devices, such as meta, do not have."""
    if not _has_autocast(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


# As torch.compiler.assume_constant_result does, which would import the compiler: 1.5 s.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Joint(NamedTuple):
    """Gates of all streams at once: `formulas.hyper_connection`; at a stack's end `formulas.hyper_read`."""

    weight: Learned
    scale: Learned
    bias: Learned
    magnitude: float
    iterations: int

    def parameters(self) -> tuple[Learned, ...]:
        """Its parameters' declarations."""
        return self.weight, self.scale, self.bias

    def read(self, streams: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        """x; then, around a sublayer, the mixed streams and the gates of F(x)."""
        if self.scale.shape == (1,):
            return (formulas.hyper_read(streams, weight, scale, bias),)
        return formulas.hyper_connection(streams, weight, scale, bias, self.iterations, self.magnitude)


class Each(NamedTuple):
    """Gates of each stream by itself: `formulas.free_hyper_connection`. `dynamic`: γ, β, W and s."""

    bias: Learned
    dynamic: tuple[Learned, ...]

    def parameters(self) -> tuple[Learned, ...]:
        """Its parameters' declarations."""
        return self.bias, *self.dynamic

    def read(self, streams: Tensor, bias: Tensor, *dynamic: Tensor) -> tuple[Tensor, ...]:
        """x, the mixed streams and the gates of F(x)."""
        return formulas.free_hyper_connection(streams, bias, *dynamic)


class Channel(NamedTuple):
    """Gates by channel: `formulas.channel_read`."""

    gain: Learned
    down: Learned
    up: Learned
    write: Learned | None
    magnitude: float

    def parameters(self) -> tuple[Learned, ...]:
        """Its parameters' declarations."""
        return (self.gain, self.down, self.up, *(() if self.write is None else (self.write,)))

    def read(
        self, streams: Tensor, gain: Tensor, down: Tensor, up: Tensor, write: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """x; then, around a sublayer, the streams and the gates of F(x)."""
        if write is None:
            return (formulas.channel_read(streams, gain, down, up),)
        return formulas.channel_connection(streams, gain, down, up, write, self.magnitude)


class Sum(NamedTuple):
    """x = c·Σ_i H_i, at a stack's end."""

    c: float

    def parameters(self) -> tuple[Learned, ...]:
        """None."""
        return ()

    def read(self, streams: Tensor) -> tuple[Tensor, ...]:
        """x."""
        return (formulas.sum_of_streams(streams, self.c),)


class HyperConnection(NamedTuple):
    """n streams, all x at the start, read and written by gates."""

    streams: int
    gates: Joint | Each | Channel | Sum
    reads_apart: bool = False

    def parameters(self) -> tuple[Learned, ...]:
        """Its parameters' declarations."""
        return self.gates.parameters()

    def begin(self, x: Tensor) -> Tensor:
        """The first tensor, of what the stack reads."""
        return formulas.spread(x, self.streams)

    def read(self, owner: nn.Module, tensors: Tensors) -> tuple[Tensor, Tensors]:
        """x, and what is left for `write`: the mixed streams and the gates of F(x)."""
        made = [getattr(owner, what.name) for what in self.parameters()]
        with without_autocast(tensors[0].device.type):  # the residual stream keeps its type
            x, *unwritten = self.gates.read(tensors[0], *made)
            return x, tuple(unwritten)

    def write(self, tensors: Tensors, unwritten: Tensors, f: Tensor) -> Tensors:
        """The tensors after F(x) = f, dropped."""
        mixed, gates = unwritten
        return (mixed + gates * f.unsqueeze(-2),)

    def seen(self, tensors: Tensors) -> Tensor:
        """One tensor like x: the streams' mean."""
        return tensors[0].mean(-2)


class DepthAttention(NamedTuple):
    """`formulas.depth_attention` over earlier sublayers' outputs. `weights`: (query, gain); (query,): over normed
    outputs, `formulas.normed_depth_attention`; (): only v_0 is there."""

    weights: tuple[Learned, ...]
    begins_block: bool

    @property
    def reads_apart(self) -> bool:
        """q, k and v each have an input of their own: what is read is three tensors, stacked."""
        return any(len(what.shape) == 2 for what in self.weights)

    def parameters(self) -> tuple[Learned, ...]:
        """Its parameters' declarations."""
        return self.weights

    def begin(self, x: Tensor) -> Tensor:
        """The first tensor, of what the stack reads."""
        return x

    def read(self, owner: nn.Module, tensors: Tensors) -> tuple[Tensor, Tensors]:
        """x; nothing is left for `write`."""
        if not self.weights:
            return tensors[0], ()
        query, *gain = (getattr(owner, what.name) for what in self.weights)
        with without_autocast(tensors[0].device.type):
            if not gain:
                return formulas.normed_depth_attention(tensors, query), ()
            return formulas.depth_attention(tensors, query, *gain), ()

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
        return HyperConnection(what["streams"], _gates(what["gates"]))
    weights = what["weights"] or []
    weights = weights if isinstance(weights, list) else [weights]
    return DepthAttention(tuple(map(Learned.of, weights)), what["begins_block"])


def _gates(found: dict[str, Any]) -> Joint | Each | Channel | Sum:
    ((kind, what),) = found.items()
    if kind == "sum":
        return Sum(what)
    if kind == "each":
        dynamic = what["dynamic"] or {}
        names = ("gain", "shift", "weight", "scale")
        return Each(Learned.of(what["bias"]), tuple(Learned.of(dynamic[name]) for name in names if dynamic))
    read: dict[str, Any] = {key: Learned.of(part) if isinstance(part, dict) else part for key, part in what.items()}
    return Joint(**read) if kind == "joint" else Channel(**read)
