"""How hyper-connections and attention residuals read and write the tensors that travel through a stack, by loops.

Hyper-connections' are the n streams, attention residuals' the embedding and the outputs so far.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    side by side, over their root mean square; then times a number of `scale` for p, g and R each, plus `bias`. No
    iterations: R = I and no rows for it, ε on g (Hunyuan V4).
    """

    n: int
    iterations: int
    weight: Parameter
    scale: Parameter
    bias: Parameter
    magnitude: float


@dataclasses.dataclass(frozen=True)
class Permuted:
    """mHC-lite: as `Hyper`, but R is a mean of all permutations, weighted by a softmax; γ (`gain`) follows the
    division by the length, which is at least 1e-12, and g is at most 2."""

    n: int
    gain: Parameter
    weight: Parameter
    scale: Parameter
    bias: Parameter


@dataclasses.dataclass(frozen=True)
class Free:
    """Hyper-connections: row i of a matrix has p_i, R_i1…R_in and g_i; a dynamic one is moved by
    tanh(W·LayerNorm(H_i)). `moved`: LayerNorm's γ and β, W, and its scales, of p and R and of g."""

    n: int
    matrix: Parameter
    moved: tuple[Parameter, Parameter, Parameter, Parameter] | None


@dataclasses.dataclass(frozen=True)
class Channels:
    """Qwen4-exp: the mean of normed streams, each channel of each times its own gate of low rank; R = I."""

    n: int
    gain: Parameter
    down: Parameter
    up: Parameter
    write: Parameter | None
    magnitude: float


@dataclasses.dataclass(frozen=True)
class Total:
    """The streams' sum times a constant, at the end."""

    n: int
    factor: float


@dataclasses.dataclass(frozen=True)
class Depth:
    """Attention residuals: what is read is the mean of all v, weighted by softmax(w·RMSNorm(v)); the embedding is the
    first v. An output begins a new v or joins the newest. No query: the embedding is read. No gain: RMSNorm(v) is
    summed up, by scores over √d; of three queries q, k and v get one sum each, stacked (Inkling 2)."""

    query: Parameter | None = None
    gain: Parameter | None = None
    begins: bool = False


Streams = Hyper | Permuted | Free | Channels | Total
Mixing = Streams | Depth | None
"""None: x is read as it is."""


def parts(mixing: Mixing) -> Iterator[Parameter]:
    """The parameters of any form."""
    if mixing is None:
        return
    for field in dataclasses.fields(mixing):
        value = getattr(mixing, field.name)
        yield from (one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, Parameter))


# Declarations. `place` is a residual.Place.


def attnres(place: Any) -> Depth:
    """a = softmax(w·RMSNorm(v_i)), w = 0 at first (Kimi Team 2026)."""
    number = _number(place)
    begins = number % place.config["attnres_block"] == 0
    if number == 0:
        return Depth(begins=begins)
    if place.config["attnres_queries"] == 3 and place.kind == "self_attn":
        return Depth(place.parameter(f"depth_query{place.index}", (3, place.config["d_model"]), 0.0), None, begins)
    gain = place.vector("depth_gain", 1.0) if place.config["attnres_form"] == "plain" else None
    return Depth(place.vector("depth_query", 0.0), gain, begins)


def end_attnres(config: Config, stack: str) -> Depth:
    """The same after the last layer, of all v."""
    shape = (config["d_model"],)
    gain = Parameter(f"{stack}.end_depth_gain", shape, 1.0) if config["attnres_form"] == "plain" else None
    return Depth(Parameter(f"{stack}.end_depth_query", shape, 0.0), gain)


def mhc(place: Any) -> Streams:
    """n streams, read and written by gates and a doubly stochastic matrix (Xie et al. 2025). φ = 0, scales 0.01; biases
    of p and g −1, but 1 of stream l mod n in sublayer l, from 0; of R −8 off the diagonal. Without R: p = 1/n, g =
    1."""
    c = place.config
    n = c["mhc_streams"]

    def name(part: str) -> str:
        return f"{place.prefix}.hyper_{part}{place.index}"

    if c["mhc_mixing"] == "channel":
        return _channels(c, name, True)
    if c["mhc_mixing"] == "none":
        return _hyper(c, name, 2, torch.cat([_even(n), torch.zeros(n)]))
    gates = -torch.ones(n)
    gates[_number(place) % n] = 1.0
    return _hyper(c, name, 3, torch.cat([gates, gates, (8 * torch.eye(n) - 8).flatten()]))


def end_mhc(config: Config, stack: str) -> Streams:
    """What is read after the last layer: biases 0, without R p = 1/n; or the mean."""
    n = config["mhc_streams"]

    def name(part: str) -> str:
        return f"{stack}.end_hyper_{part}"

    if config["mhc_end"] == "mean":
        return Total(n, 1 / n)
    if config["mhc_mixing"] == "channel":
        return _channels(config, name, False)
    return _hyper(config, name, 1, _even(n) if config["mhc_mixing"] == "none" else torch.zeros(n))


def _even(n: int) -> Tensor:
    """σ of it is 1/n; 1/2 for one stream."""
    return torch.full((n,), -math.log(max(n - 1, 1)), dtype=torch.float64)


def _hyper(config: Config, name: Callable[[str], str], scales: int, bias: Tensor) -> Hyper:
    n, rows, has_r = config["mhc_streams"], len(bias), config["mhc_mixing"] == "sinkhorn"
    drawn: dict[str, Any] = {"start": 0.0} if has_r else {"std": 0.02}
    return Hyper(
        n,
        config["mhc_iterations"] if has_r else 0,
        Parameter(name("weight"), (rows, n * config["d_model"]), **drawn),
        Parameter(name("scale"), (scales,), 0.01),
        Parameter(name("bias"), (rows,), bias),
        config["mhc_magnitude"],
    )


def _channels(config: Config, name: Callable[[str], str], writes: bool) -> Channels:
    n, rank = config["mhc_streams"], config["mhc_rank"]
    width = n * config["d_model"]
    return Channels(
        n,
        Parameter(name("gain"), (width,), 1.0),
        Parameter(name("down"), (rank, width), std=0.02),
        Parameter(name("up"), (width, rank), std=0.02),
        Parameter(name("weight"), (n, width), std=0.02) if writes else None,
        config["mhc_magnitude"],
    )


def mhc_lite(place: Any) -> Permuted:
    """n streams and all n! permutations (Yang & Gao 2026). γ = 1, φ = 0, scales 0.01; biases of p and g −1, but 1 of
    stream l mod n in sublayer l, from 0; of the permutations −8, but 0 of the identity."""
    n = place.config["mhc_lite_streams"]
    count, width = math.factorial(n), n * place.config["d_model"]
    gates = -torch.ones(n)
    gates[_number(place) % n] = 1.0
    bias = torch.cat([gates, gates, torch.zeros(1), -8 * torch.ones(count - 1)])
    return Permuted(
        n,
        place.parameter(f"hyper_gain{place.index}", (width,), 1.0),
        place.parameter(f"hyper_weight{place.index}", (2 * n + count, width), 0.0),
        place.parameter(f"hyper_scale{place.index}", (3,), 0.01),
        place.parameter(f"hyper_bias{place.index}", (2 * n + count,), bias),
    )


def end_mhc_lite(config: Config, stack: str) -> Total:
    """The sum."""
    return Total(config["mhc_lite_streams"], 1.0)


def hyper_connections(place: Any) -> Free:
    """Sublayer l reads stream l mod n and writes to all; streams stay as they are; γ = 1, β = 0, W = 0, scales 0.01
    (Zhu et al. 2024)."""
    n = place.config["hyper_connections_streams"]
    matrix = torch.cat([torch.zeros(n, 1), torch.eye(n), torch.ones(n, 1)], -1)
    matrix[_number(place) % n, 0] = 1.0
    start = place.parameter(f"hyper_bias{place.index}", (n * (n + 2),), matrix.flatten())
    if not place.config["hyper_connections_dynamic"]:
        return Free(n, start, None)
    weight = place.parameter(f"hyper_weight{place.index}", (n + 2, place.config["d_model"]), 0.0)
    scale = place.parameter(f"hyper_scale{place.index}", (2,), 0.01)
    norm = place.vector("hyper_norm_weight", 1.0), place.vector("hyper_norm_bias", 0.0)
    return Free(n, start, (*norm, weight, scale))


def end_hyper_connections(config: Config, stack: str) -> Total:
    """The sum."""
    return Total(config["hyper_connections_streams"], 1.0)


def _number(place: Any) -> int:
    """The sublayer's in its stack, from 0."""
    per_layer = 3 if place.stack == "decoder" and not is_one_stack(place.config) else 2
    return place.layer * per_layer + place.index - 1


# Running them.


Gates = tuple[list[Tensor], list[list[Tensor]] | None]
"""g_j and R_ij, each (B, T, 1); None: R = I."""


def sinkhorn(logits: Tensor, repeat: int, eps: float = EPS) -> Tensor:
    """DeepSeek's: exp over the row's sum, plus ε; columns over theirs plus ε; then rows, columns, repeat − 1 times."""
    matrix = logits.exp() / logits.exp().sum(-1, keepdim=True) + eps
    for number in range(2 * repeat - 1):
        over = -2 if number % 2 == 0 else -1
        matrix = matrix / (matrix.sum(over, keepdim=True) + eps)
    return matrix


def begin(about: Any, x: Tensor) -> list[Tensor]:
    """What travels beside x in such a residual.Stack, as it begins."""
    return [x] * (about.mixing.n - 1) if isinstance(about.mixing, Streams) else [x for _ in about.streams]


def read(mixing: Mixing, state: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, Gates | None]:
    """What a sublayer or the end of a stack reads; mHC's weights of what it then writes."""
    if mixing is None:
        return tensors[0], None
    if isinstance(mixing, Depth):
        return _attended(mixing, state, tensors), None
    if isinstance(mixing, Total):
        return mixing.factor * sum(tensors), None
    if isinstance(mixing, Free):
        return _free(mixing, state, tensors)
    if isinstance(mixing, Permuted):
        return _permuted(mixing, state, tensors)
    if isinstance(mixing, Channels):
        return _by_channel(mixing, state, tensors)
    n = mixing.n
    beside = torch.cat(list(tensors), -1)
    mixes = (beside / (beside.pow(2).mean(-1, keepdim=True) + EPS).sqrt()) @ state[mixing.weight.name].T
    scale, bias = state[mixing.scale.name], state[mixing.bias.name]

    def part(number: int, row: int) -> Tensor:
        return (scale[number] * mixes[..., row] + bias[row]).unsqueeze(-1)

    x = sum((part(0, i).sigmoid() + EPS) * tensors[i] for i in range(n))
    if len(scale) == 1:
        return x, None
    gates = [mixing.magnitude * part(1, n + j).sigmoid() for j in range(n)]
    if len(scale) == 2:
        return x, ([gate + EPS for gate in gates], None)
    logits = torch.cat([part(2, 2 * n + k) for k in range(n * n)], -1).unflatten(-1, (n, n))
    matrix = sinkhorn(logits, mixing.iterations)
    return x, (gates, [[matrix[..., i, j].unsqueeze(-1) for j in range(n)] for i in range(n)])


def _permuted(mixing: Permuted, state: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, Gates]:
    n, beside = mixing.n, torch.cat(list(tensors), -1)
    length = torch.linalg.vector_norm(beside, dim=-1, keepdim=True).clamp_min(1e-12)
    normed = beside / length * beside.shape[-1] ** 0.5 * state[mixing.gain.name]
    mixes = normed @ state[mixing.weight.name].T
    p, g, r = mixes.split([n, n, mixes.shape[-1] - 2 * n], -1)
    scales, biases = state[mixing.scale.name], state[mixing.bias.name].split([n, n, r.shape[-1]])
    p, g, r = (scale * part + bias for scale, part, bias in zip(scales, (p, g, r), biases, strict=True))
    weights = r.exp() / r.exp().sum(-1, keepdim=True)
    matrix = [[torch.zeros_like(weights[..., :1]) for _ in range(n)] for _ in range(n)]
    for number, permutation in enumerate(itertools.permutations(range(n))):
        for i, j in enumerate(permutation):
            matrix[i][j] = matrix[i][j] + weights[..., number : number + 1]
    x = sum(p[..., i : i + 1].sigmoid() * tensors[i] for i in range(n))
    return x, ([2 * g[..., j : j + 1].sigmoid() for j in range(n)], matrix)


def _free(mixing: Free, state: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, Gates]:
    n = mixing.n
    matrix = state[mixing.matrix.name].view(n, n + 2)

    def entry(i: int, column: int) -> Tensor:
        if mixing.moved is None:
            return matrix[i, column]
        gain, shift, weight, scale = (state[parameter.name] for parameter in mixing.moved)
        centred = tensors[i] - tensors[i].mean(-1, keepdim=True)
        normed = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain + shift
        moved = (normed @ weight[column]).tanh().unsqueeze(-1)
        return matrix[i, column] + scale[1 if column == n + 1 else 0] * moved

    x = sum(entry(i, 0) * tensors[i] for i in range(n))
    gates = [entry(j, n + 1) for j in range(n)]
    return x, (gates, [[entry(i, 1 + j) for j in range(n)] for i in range(n)])


def _by_channel(
    mixing: Channels, state: Mapping[str, Tensor], tensors: Sequence[Tensor]
) -> tuple[Tensor, Gates | None]:
    n = mixing.n
    gains = state[mixing.gain.name].chunk(n)
    normed = [h / (h.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gain for h, gain in zip(tensors, gains, strict=True)]
    beside = torch.cat(normed, -1) / n
    low = beside @ state[mixing.down.name].T
    shares = (low * low.sigmoid() @ state[mixing.up.name].T).sigmoid().chunk(n, -1)
    x = sum(share * h for share, h in zip(shares, normed, strict=True)) / n
    if mixing.write is None:
        return x, None
    gates = mixing.magnitude * (beside @ state[mixing.write.name].T).sigmoid()
    return x, (list(gates.split(1, -1)), None)


def _attended(mixing: Depth, state: Mapping[str, Tensor], outputs: Sequence[Tensor]) -> Tensor:
    if mixing.query is None:
        return outputs[0]
    values, query = torch.stack(list(outputs)), state[mixing.query.name]  # (sources, B, T, d), (d,)
    keys = values / (values.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    if mixing.gain is None:
        values, query = keys, query / query.shape[-1] ** 0.5
    else:
        keys = state[mixing.gain.name] * keys
    read = [_mean(one, keys, values) for one in query.view(-1, query.shape[-1])]
    return torch.stack(read) if query.dim() == 2 else read[0]


def _mean(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    shares = torch.einsum("d,sbtd->sbt", query, keys).softmax(0)
    return torch.einsum("sbt,sbtd->btd", shares, values)


def write(mixing: Streams | Depth, tensors: Sequence[Tensor], gates: Gates | None, f: Tensor) -> list[Tensor]:
    """The tensors after a sublayer whose dropped output is f."""
    if isinstance(mixing, Depth):
        return [*tensors, f] if mixing.begins else [*tensors[:-1], tensors[-1] + f]
    g, matrix = gates
    n = mixing.n
    if matrix is None:
        return [g[j] * f + tensors[j] for j in range(n)]
    return [g[j] * f + sum(matrix[i][j] * tensors[i] for i in range(n)) for j in range(n)]
