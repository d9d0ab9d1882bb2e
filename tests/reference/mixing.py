"""How mHC and attention residuals read and write the tensors that travel through a stack, by loops over them.

mHC's are the n streams, attention residuals' the embedding and the outputs so far.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .config import Config, is_one_stack
from .declared import Parameter

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Hyper:
    """mHC: n streams H_i, all x at first. Read: Σ p_i H_i; with an output f, H_j becomes g_j f + Σ_i R_ij H_i.

    φ (`weight`), one row for each of p_1…p_n, g_1…g_n, R_11, R_12…R_nn (at the end p alone), times all streams' columns
    side by side, over their root mean square; then times a number of `scale` for p, g and R each, plus `bias`.
    """

    n: int
    iterations: int
    weight: Parameter
    scale: Parameter
    bias: Parameter


@dataclasses.dataclass(frozen=True)
class Depth:
    """Attention residuals: what is read is the mean of all v, weighted by softmax(w·RMSNorm(v)); the embedding is the
    first v. An output begins a new v or joins the newest. No query: the embedding is read."""

    query: Parameter | None = None
    gain: Parameter | None = None
    begins: bool = False


Mixing = Hyper | Depth | None
"""None: x is read as it is."""


def parts(mixing: Mixing) -> Iterator[Parameter]:
    """The parameters of either form."""
    if isinstance(mixing, Hyper):
        yield from (mixing.weight, mixing.scale, mixing.bias)
    elif isinstance(mixing, Depth) and mixing.query is not None:
        yield from (mixing.query, mixing.gain)


# Declarations. `place` is a residual.Place.


def attnres(place: Any) -> Depth:
    """a = softmax(w·RMSNorm(v_i)), w = 0 at first (Kimi Team 2026)."""
    number = _number(place)
    begins = number % place.config["attnres_block"] == 0
    if number == 0:
        return Depth(begins=begins)
    return Depth(place.vector("depth_query", 0.0), place.vector("depth_gain", 1.0), begins)


def end_attnres(config: Config, stack: str) -> Depth:
    """The same after the last layer, of all v."""
    shape = (config["d_model"],)
    return Depth(Parameter(f"{stack}.end_depth_query", shape, 0.0), Parameter(f"{stack}.end_depth_gain", shape, 1.0))


def mhc(place: Any) -> Hyper:
    """n streams, read and written by gates and a doubly stochastic matrix (Xie et al. 2025). φ = 0, scales 0.01; biases
    of p and g −1, but 1 of stream l mod n in sublayer l, from 0; of R −8 off the diagonal."""
    n = place.config["mhc_streams"]
    gates = -torch.ones(n)
    gates[_number(place) % n] = 1.0
    bias = torch.cat([gates, gates, (8 * torch.eye(n) - 8).flatten()])
    names = [f"{place.prefix}.hyper_{part}{place.index}" for part in ("weight", "scale", "bias")]
    return _hyper(place.config, names, 3, bias)


def end_mhc(config: Config, stack: str) -> Hyper:
    """What is read after the last layer: biases 0."""
    names = [f"{stack}.end_hyper_{part}" for part in ("weight", "scale", "bias")]
    return _hyper(config, names, 1, torch.zeros(config["mhc_streams"]))


def _hyper(config: Config, names: Sequence[str], scales: int, bias: Tensor) -> Hyper:
    n, rows = config["mhc_streams"], len(bias)
    weight = Parameter(names[0], (rows, n * config["d_model"]), 0.0)
    return Hyper(
        n, config["mhc_iterations"], weight, Parameter(names[1], (scales,), 0.01), Parameter(names[2], (rows,), bias)
    )


def _number(place: Any) -> int:
    """The sublayer's in its stack, from 0."""
    per_layer = 3 if place.stack == "decoder" and not is_one_stack(place.config) else 2
    return place.layer * per_layer + place.index - 1


# Running them.


Gates = tuple[list[Tensor], list[list[Tensor]]]
"""g_j and R_ij, each (B, T, 1)."""


def sinkhorn(logits: Tensor, repeat: int, eps: float = EPS) -> Tensor:
    """DeepSeek's: exp over the row's sum, plus ε; columns over theirs plus ε; then rows, columns, repeat − 1 times."""
    matrix = logits.exp() / logits.exp().sum(-1, keepdim=True) + eps
    for number in range(2 * repeat - 1):
        over = -2 if number % 2 == 0 else -1
        matrix = matrix / (matrix.sum(over, keepdim=True) + eps)
    return matrix


def begin(about: Any, x: Tensor) -> list[Tensor]:
    """What travels beside x in such a residual.Stack, as it begins."""
    return [x] * (about.mixing.n - 1) if isinstance(about.mixing, Hyper) else [x for _ in about.streams]


def read(mixing: Mixing, state: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, Gates | None]:
    """What a sublayer or the end of a stack reads; mHC's weights of what it then writes."""
    if mixing is None:
        return tensors[0], None
    if isinstance(mixing, Depth):
        return _attended(mixing, state, tensors), None
    n = mixing.n
    beside = torch.cat(list(tensors), -1)
    mixes = (beside / (beside.pow(2).mean(-1, keepdim=True) + EPS).sqrt()) @ state[mixing.weight.name].T
    scale, bias = state[mixing.scale.name], state[mixing.bias.name]

    def part(number: int, row: int) -> Tensor:
        return (scale[number] * mixes[..., row] + bias[row]).unsqueeze(-1)

    x = sum((part(0, i).sigmoid() + EPS) * tensors[i] for i in range(n))
    if len(scale) == 1:
        return x, None
    gates = [2 * part(1, n + j).sigmoid() for j in range(n)]
    logits = torch.cat([part(2, 2 * n + k) for k in range(n * n)], -1).unflatten(-1, (n, n))
    matrix = sinkhorn(logits, mixing.iterations)
    return x, (gates, [[matrix[..., i, j].unsqueeze(-1) for j in range(n)] for i in range(n)])


def _attended(mixing: Depth, state: Mapping[str, Tensor], outputs: Sequence[Tensor]) -> Tensor:
    if mixing.query is None:
        return outputs[0]
    values = torch.stack(list(outputs))  # (sources, B, T, d)
    keys = state[mixing.gain.name] * values / (values.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    shares = torch.einsum("d,sbtd->sbt", state[mixing.query.name], keys).softmax(0)
    return torch.einsum("sbt,sbtd->btd", shares, values)


def write(mixing: Hyper | Depth, tensors: Sequence[Tensor], gates: Gates | None, f: Tensor) -> list[Tensor]:
    """The tensors after a sublayer whose dropped output is f."""
    if isinstance(mixing, Depth):
        return [*tensors, f] if mixing.begins else [*tensors[:-1], tensors[-1] + f]
    g, matrix = gates
    n = mixing.n
    return [g[j] * f + sum(matrix[i][j] * tensors[i] for i in range(n)) for j in range(n)]
