"""Streams that sublayers mix: `nn/mixing.py`'s two forms around a sublayer and at the end of a stack."""

import torch
from torch import Tensor, nn

from ..nn import formulas
from .norms import keep


def _all(x: Tensor, others: list[Tensor]) -> list[Tensor]:
    """x and the others. TorchScript knows no starred items."""
    found = [x]
    found.extend(others)
    return found


class HyperAround(nn.Module):
    """`formulas.hyper_connection` around F(N_before(…)): x is (…, n, d), all streams. Between `enter` and the call the
    list has what the call needs."""

    weight: Tensor
    scales: Tensor
    bias: Tensor

    def __init__(
        self, before: nn.Module, dropout: nn.Module, scale: float, streams: int, iterations: int, learned: list[Tensor]
    ) -> None:
        super().__init__()
        self.before, self.dropout, self.scale = before, dropout, scale
        self.streams, self.iterations = streams, iterations
        keep(self, **dict(zip(("weight", "scales", "bias"), learned)))

    def begin(self, x: Tensor, others: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """The streams; a layer that stands alone begins them."""
        none: list[Tensor] = []
        return (formulas.spread(x, self.streams), none) if others is None else (x, others)

    def enter(self, x: Tensor, others: list[Tensor]) -> Tensor:
        """What F reads."""
        read, mixed, gates = formulas.hyper_connection(x, self.weight, self.scales, self.bias, self.iterations)
        others.append(mixed)
        others.append(gates)
        return self.before(read)

    def forward(self, x: Tensor, f: Tensor, others: list[Tensor]) -> Tensor:
        """The streams after F(…) = f."""
        gates = others.pop()
        return others.pop() + gates * (self.dropout(f) * self.scale).unsqueeze(-2)

    def join(self, x: Tensor, bottom: Tensor) -> Tensor:
        """x in the sum: the layer's input is not added."""
        return x

    def end(self, x: Tensor, others: list[Tensor]) -> Tensor:
        """The output of a layer that stands alone."""
        return x.mean(-2)


class DepthAround(nn.Module):
    """`formulas.depth_attention` before F(N_before(…)): x is v_0, and the list has v_1, v_2, …"""

    query: Tensor | None
    gain: Tensor | None

    def __init__(
        self, before: nn.Module, dropout: nn.Module, scale: float, begins_block: bool, learned: list[Tensor]
    ) -> None:
        super().__init__()
        self.before, self.dropout, self.scale, self.begins_block = before, dropout, scale, begins_block
        query, gain = learned or (None, None)
        keep(self, query=query, gain=gain)

    def begin(self, x: Tensor, others: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """x and the outputs so far; a layer that stands alone has none."""
        none: list[Tensor] = []
        return (x, none) if others is None else (x, others)

    def enter(self, x: Tensor, others: list[Tensor]) -> Tensor:
        """What F reads."""
        query, gain = self.query, self.gain
        if query is not None and gain is not None:
            return self.before(formulas.depth_attention(_all(x, others), query, gain))
        return self.before(x)

    def forward(self, x: Tensor, f: Tensor, others: list[Tensor]) -> Tensor:
        """v_0; F(…) = f joins the list, or its last."""
        f = self.dropout(f) * self.scale
        if self.begins_block:
            others.append(f)
        elif len(others) > 0:
            others.append(others.pop() + f)
        else:
            x = x + f
        return x

    def join(self, x: Tensor, bottom: Tensor) -> Tensor:
        """x in the sum: the layer's input is not added."""
        return x

    def end(self, x: Tensor, others: list[Tensor]) -> Tensor:
        """The output of a layer that stands alone."""
        return torch.stack(_all(x, others)).mean(0)


class One(nn.Module):
    """The streams of a stack where layers do not mix them: x, at the start and at the end."""

    def begin(self, x: Tensor) -> Tensor:
        """The streams of what the stack reads."""
        return x

    def forward(self, x: Tensor, others: list[Tensor]) -> Tensor:
        return x


class HyperEnd(nn.Module):
    """`formulas.hyper_read` after the last layer."""

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, streams: int, learned: list[Tensor]) -> None:
        super().__init__()
        self.streams = streams
        keep(self, **dict(zip(("weight", "scale", "bias"), learned)))

    def begin(self, x: Tensor) -> Tensor:
        """The streams of what the stack reads."""
        return formulas.spread(x, self.streams)

    def forward(self, x: Tensor, others: list[Tensor]) -> Tensor:
        return formulas.hyper_read(x, self.weight, self.scale, self.bias)


class DepthEnd(nn.Module):
    """`formulas.depth_attention` after the last layer."""

    query: Tensor
    gain: Tensor

    def __init__(self, learned: list[Tensor]) -> None:
        super().__init__()
        query, gain = learned
        keep(self, query=query, gain=gain)

    def begin(self, x: Tensor) -> Tensor:
        """The first of the outputs."""
        return x

    def forward(self, x: Tensor, others: list[Tensor]) -> Tensor:
        return formulas.depth_attention(_all(x, others), self.query, self.gain)
