"""Reads and writes the tensors that travel through a stack under hyper-connections and attention residuals, in loops.

Under hyper-connections these are n streams; under attention residuals they are the embedding and the outputs so far.
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
    """mHC: n streams H_i, all x at first. A sublayer reads Σ p_i H_i; its output f turns H_j into g_j f + Σ_i R_ij H_i.

    p, g and R are computed from the columns of all streams side by side, divided by their root mean square. They are
    multiplied by φ (`weight`), which has one row for each of p_1…p_n, g_1…g_n, R_11, R_12…R_nn (at the stack's end only
    for p), then by `scale`, which has one number each for p, g and R; then `bias` is added. With 0 iterations R = I, φ
    has no rows for it, and ε is added to g (Hunyuan V4).
    """

    n: int
    iterations: int
    weight: Parameter
    scale: Parameter
    bias: Parameter
    magnitude: float


@dataclasses.dataclass(frozen=True)
class Permuted:
    """mHC-lite: like `Hyper`, but R is the mean of all permutation matrices, weighted by a softmax. The streams are
    divided by their length (at least 1e-12) and multiplied by γ (`gain`). g is at most 2."""

    n: int
    gain: Parameter
    weight: Parameter
    scale: Parameter
    bias: Parameter


@dataclasses.dataclass(frozen=True)
class Free:
    """Hyper-connections: row i of `matrix` holds p_i, R_i1…R_in and g_i. If the matrix is dynamic, a scaled
    tanh(W·LayerNorm(H_i)) is added to it. `moved` holds LayerNorm's γ and β, then W, then two scales: one for p and R,
    one for g."""

    n: int
    matrix: Parameter
    moved: tuple[Parameter, Parameter, Parameter, Parameter] | None


@dataclasses.dataclass(frozen=True)
class Channels:
    """Qwen4-exp: reads the mean of the normed streams, with each channel of each stream multiplied by its own gate,
    which is computed through a matrix of low rank. R = I."""

    n: int
    gain: Parameter
    down: Parameter
    up: Parameter
    write: Parameter | None
    magnitude: float


@dataclasses.dataclass(frozen=True)
class Total:
    """The stack's output is the sum of the streams times a constant."""

    n: int
    factor: float


@dataclasses.dataclass(frozen=True)
class Depth:
    """Attention residuals: a sublayer reads the mean of all tensors v, weighted by softmax(w·RMSNorm(v)). The first v
    is the embedding; an output begins a new v or is added to the newest. Without a query the embedding is read. Without
    a gain the mean is that of RMSNorm(v), and scores are divided by √d. With three queries q, k and v each read their
    own mean; the three means are stacked (Inkling 2)."""

    query: Parameter | None = None
    gain: Parameter | None = None
    begins: bool = False


Streams = Hyper | Permuted | Free | Channels | Total
Mixing = Streams | Depth | None
"""The way in which tensors are mixed. With None a sublayer reads x itself."""


def parts(mixing: Mixing) -> Iterator[Parameter]:
    """Yields the parameters of a form of mixing."""
    if mixing is None:
        return
    for field in dataclasses.fields(mixing):
        value = getattr(mixing, field.name)
        yield from (one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, Parameter))


# These functions declare the mixing of a sublayer (`place` is a residual.Place) or of a stack's end.


def attnres(place: Any) -> Depth:
    """Returns attention over depth for a sublayer: weights softmax(w·RMSNorm(v_i)), w = 0 at first (Kimi Team 2026)."""
    number = _number(place)
    begins = number % place.config["attnres_block"] == 0
    if number == 0:
        return Depth(begins=begins)
    if place.config["attnres_queries"] == 3 and place.kind == "self_attn":
        return Depth(place.parameter(f"depth_query{place.index}", (3, place.config["d_model"]), 0.0), None, begins)
    gain = place.vector("depth_gain", 1.0) if place.config["attnres_form"] == "plain" else None
    return Depth(place.vector("depth_query", 0.0), gain, begins)


def end_attnres(config: Config, stack: str) -> Depth:
    """Returns attention over depth for the stack's output, which is read from all v after the last layer."""
    shape = (config["d_model"],)
    gain = Parameter(f"{stack}.end_depth_gain", shape, 1.0) if config["attnres_form"] == "plain" else None
    return Depth(Parameter(f"{stack}.end_depth_query", shape, 0.0), gain)


def mhc(place: Any) -> Streams:
    """Returns mHC for a sublayer: n streams that gates and a doubly stochastic matrix R read and write (Xie et al.
    2025). At first φ = 0 and the scales are 0.01. The biases of p and g are −1, but in sublayer l, counted from 0, they
    are 1 for stream l mod n; those of R are −8 off the diagonal. Without R, p starts at 1/n and g at 1."""
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
    """Returns mHC for the stack's output, which is read by gates p or is the mean of the streams. At first the biases
    of p are 0; without R they make p = 1/n."""
    n = config["mhc_streams"]

    def name(part: str) -> str:
        return f"{stack}.end_hyper_{part}"

    if config["mhc_end"] == "mean":
        return Total(n, 1 / n)
    if config["mhc_mixing"] == "channel":
        return _channels(config, name, False)
    return _hyper(config, name, 1, _even(n) if config["mhc_mixing"] == "none" else torch.zeros(n))


def _even(n: int) -> Tensor:
    """Returns n equal biases b with σ(b) = 1/n; for one stream σ(b) = 1/2."""
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
    """Returns mHC-lite for a sublayer: n streams and all n! permutations (Yang & Gao 2026). At first γ = 1, φ = 0 and
    the scales are 0.01. The biases of p and g are −1, but in sublayer l, counted from 0, they are 1 for stream l mod n;
    those of the permutations are −8, but 0 for the identity."""
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
    """Returns the stack's output: the sum of the streams."""
    return Total(config["mhc_lite_streams"], 1.0)


def hyper_connections(place: Any) -> Free:
    """Returns hyper-connections for a sublayer (Zhu et al. 2024). At first sublayer l reads stream l mod n and writes
    to all streams, R = I, γ = 1, β = 0, W = 0, and the scales are 0.01."""
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
    """Returns the stack's output: the sum of the streams."""
    return Total(config["hyper_connections_streams"], 1.0)


def _number(place: Any) -> int:
    """Returns the number of the sublayer in its stack, counted from 0."""
    per_layer = 3 if place.stack == "decoder" and not is_one_stack(place.config) else 2
    return place.layer * per_layer + place.index - 1


# These functions compute what the declarations above say.


Gates = tuple[list[Tensor], list[list[Tensor]] | None]
"""The gates g_j and the matrix R_ij, whose elements are tensors (B, T, 1); None instead of the matrix means R = I."""


def sinkhorn(logits: Tensor, repeat: int, eps: float = EPS) -> Tensor:
    """Returns a nearly doubly stochastic matrix, as DeepSeek computes it: exp(logits) divided by the row's sum, plus ε;
    then columns are divided by their sum plus ε; then rows and columns again, repeat − 1 times."""
    matrix = logits.exp() / logits.exp().sum(-1, keepdim=True) + eps
    for number in range(2 * repeat - 1):
        over = -2 if number % 2 == 0 else -1
        matrix = matrix / (matrix.sum(over, keepdim=True) + eps)
    return matrix


def begin(about: Any, x: Tensor) -> list[Tensor]:
    """Returns the tensors that travel beside x at the beginning of the residual.Stack `about`: copies of x."""
    return [x] * (about.mixing.n - 1) if isinstance(about.mixing, Streams) else [x for _ in about.streams]


def read(mixing: Mixing, state: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, Gates | None]:
    """Returns the tensor that a sublayer, or the end of a stack, reads, and the gates with which the sublayer's output
    is written later; None if there are none."""
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
    """Returns the tensors after a sublayer whose output, after dropout, is f."""
    if isinstance(mixing, Depth):
        return [*tensors, f] if mixing.begins else [*tensors[:-1], tensors[-1] + f]
    g, matrix = gates
    n = mixing.n
    if matrix is None:
        return [g[j] * f + tensors[j] for j in range(n)]
    return [g[j] * f + sum(matrix[i][j] * tensors[i] for i in range(n)) for j in range(n)]
