"""Equations in PyTorch's own operations: norms with running statistics and the residual step, for exported programs,
and sublayers that read and write several tensors. Where an operator computes the same, only exported programs and
DTensors use the equation.

All compute in f32 (f64 for f64 inputs) and return x's dtype; the weights of streams stay in f32. Those that replace an
operator return a contiguous tensor, like its kernels.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .sharding import is_sharded

OPS = torch.ops.normformer_rs


def wide(x: Tensor) -> Tensor:
    """Returns x in the type in which norms compute."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def affine(hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns weight⊙x̂ + bias in x̂'s type."""
    if weight is not None:
        hat = hat * weight.to(hat.dtype)
    if bias is not None:
        hat = hat + bias.to(hat.dtype)
    return hat


def running_norm(
    x: Tensor,
    shift: Tensor | None,
    square: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    padding_mask: Tensor | None,
) -> Tensor:
    """Returns y = γ⊙(x − μ)/√(s + ε) + β for the given statistics: μ = `shift` (None: 0), s = `square`; y is 0 at
    padding."""
    a = wide(x)  # becomes x − μ
    if padding_mask is not None:
        a = a.masked_fill(padding_mask.unsqueeze(-1), 0.0)
    if shift is not None:
        a = a - shift.flatten().to(a.dtype)
    y = affine(a * torch.rsqrt(square.flatten().to(a.dtype) + eps), weight, bias)
    if padding_mask is not None:
        y = y.masked_fill(padding_mask.unsqueeze(-1), 0.0)
    return y.to(x.dtype).contiguous()


def residual(x: Tensor, f: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor:
    """Returns x⁺ = α⊙x + β⊙f in x's dtype; None means one."""
    skip, branch = wide(x), wide(f)
    if alpha is not None:
        skip = skip * alpha.to(skip.dtype)
    if beta is not None:
        branch = branch * beta.to(branch.dtype)
    return (skip + branch).to(x.dtype).contiguous()


def sinkhorn(logits: Tensor, iterations: int, eps: float = 1e-6) -> Tensor:
    """Returns matrices (…, n, n) whose rows and columns sum to nearly 1: softmax(logits) + ε over rows, each column
    divided by its sum + ε, then rows and columns in the same way, `iterations` − 1 times.

    >>> sinkhorn(torch.tensor([[1.0, 0.2], [-0.3, 0.5]]), 10)
    tensor([[0.6900, 0.3100],
            [0.3100, 0.6900]])

    Source: deepseek-ai/TileKernels, `sinkhorn_normalize_ref`.
    """
    if not torch.compiler.is_exporting() and not is_sharded(logits):
        return OPS.sinkhorn(logits, iterations, eps)
    # In the first iteration softmax normalises the rows; the columns follow.
    m = torch.softmax(logits, -1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def mix_streams(streams: Tensor, weights: Tensor, added: Tensor | None = None) -> Tensor:
    """Returns y_i = Σ_j w_ij H_j, (…, m, d), for n streams H (…, n, d), with `added` (…, d), if given, as one more. The
    weights are (…, m, n) or (…, m, n + 1), in the type in which norms compute."""
    if not torch.compiler.is_exporting() and not is_sharded(streams):
        return OPS.mix_streams(streams, weights, added)
    # Under autocast a product of matrices would round the streams to 16 bits.
    rows = [*streams.unbind(-2), *([] if added is None else [added])]
    terms = (w * wide(row).unsqueeze(-2) for w, row in zip(weights.split(1, -1), rows, strict=True))
    return functools.reduce(torch.add, terms).to(streams.dtype)


def _read(streams: Tensor, shares: Tensor) -> Tensor:
    """Returns x = Σ_i p_i H_i for the shares p (…, n)."""
    return mix_streams(streams, shares.unsqueeze(-2)).squeeze(-2)


def spread(x: Tensor, streams: int) -> Tensor:
    """Returns n copies of x (…, d) as streams, (…, n, d)."""
    return torch.stack([x] * streams, -2)


def _inverse_rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Returns 1/√(mean x² + ε) of each row, (…, 1)."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _mixes(streams: Tensor, weight: Tensor) -> Tensor:
    """Returns φ vec(H)/√(mean H² + ε), (…, m), for streams H (…, n, d), with φ = `weight` (m, n·d)."""
    flat = wide(streams.flatten(-2))
    return F.linear(flat, weight.to(flat.dtype)) * _inverse_rms(flat)


def hyper_read(streams: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Returns x = Σ_i (σ(s·φ vec(H)/√(mean H² + ε) + b) + ε)_i H_i for n streams H (…, n, d); φ is (n, n·d), s (1,), b
    (n,).

    Source: deepseek-ai/TileKernels, `mhc_head`.
    """
    mixes = _mixes(streams, weight)
    shares = torch.sigmoid(mixes * scale.to(mixes.dtype) + bias.to(mixes.dtype)) + eps
    return _read(streams, shares)


def hyper_connection(
    streams: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    iterations: int,
    magnitude: float = 2.0,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Returns (x, (Rᵀ, g)) for n streams H (…, n, d): x (…, d) = Σ_i (σ(s₀m₀ + b₀) + ε)_i H_i is F's input, and
    H⁺ = RᵀH + g⊙F(x) with R = sinkhorn(s₂m₂ + b₂), and g (…, n, 1) = c·σ(s₁m₁ + b₁).

    m = φ vec(H)/√(mean H² + ε); m₀, m₁ and m₂ are its first n numbers, the next n, and the last n², and b is split in
    the same way. φ is (n² + 2n, n·d), s (3,). Without iterations H⁺ = H + g⊙F(x), g = c·σ(s₁m₁ + b₁) + ε, φ is
    (2n, n·d) and s (2,), and g alone is returned. Source: Xie et al. 2025; deepseek-ai/TileKernels, `mhc_pre` and
    `mhc_post_ref`; transformers, `HYV4HyperConnection`.
    """
    n, mixes = streams.shape[-2], _mixes(streams, weight)
    s, b = scale.to(mixes.dtype), bias.to(mixes.dtype)
    shares = torch.sigmoid(mixes[..., :n] * s[0] + b[:n]) + eps
    gates = magnitude * torch.sigmoid(mixes[..., n : 2 * n] * s[1] + b[n : 2 * n])
    x = _read(streams, shares)
    if iterations == 0:
        return x, (gates + eps).unsqueeze(-1).to(streams.dtype)
    logits = mixes[..., 2 * n :] * s[2] + b[2 * n :]
    r_transposed = sinkhorn(logits.unflatten(-1, (n, n)), iterations, eps).transpose(-2, -1)
    return x, torch.cat([r_transposed, gates.unsqueeze(-1)], -1)  # [Rᵀ, g], (…, n, n + 1)


def permuted_connection(
    streams: Tensor, gain: Tensor, weight: Tensor, scale: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (x, (Rᵀ, g)) for n streams H (…, n, d): x (…, d) = Σ_i σ(s₀m₀ + b₀)_i H_i is F's input, and
    H⁺ = RᵀH + g⊙F(x) with R = Σ_r softmax(s₂m₂ + b₂)_r P_r over all permutations, and g (…, n, 1) = 2σ(s₁m₁ + b₁).

    m = φ(γ⊙vec(H)·√(nd)/max(‖vec(H)‖, 1e-12)); m₀, m₁ and m₂ are its first n numbers, the next n, and the last n!, and
    b is split in the same way. γ is (n·d,), φ (2n + n!, n·d), s (3,). Source: Yang & Gao 2026, release (`MHCLite`).
    """
    n, flat = streams.shape[-2], wide(streams.flatten(-2))
    normed = F.normalize(flat, dim=-1) * flat.shape[-1] ** 0.5 * gain.to(flat.dtype)
    mixes = F.linear(normed, weight.to(flat.dtype))
    s, b = scale.to(mixes.dtype), bias.to(mixes.dtype)
    shares = torch.sigmoid(mixes[..., :n] * s[0] + b[:n])
    gates = 2 * torch.sigmoid(mixes[..., n : 2 * n] * s[1] + b[n : 2 * n])
    permutation_shares = torch.softmax(mixes[..., 2 * n :] * s[2] + b[2 * n :], -1)  # (…, n!)
    r_transposed = mean_permutation(permutation_shares, n).transpose(-2, -1)
    return _read(streams, shares), torch.cat([r_transposed, gates.unsqueeze(-1)], -1)  # [Rᵀ, g], (…, n, n + 1)


def mean_permutation(shares: Tensor, n: int) -> Tensor:
    """Returns Σ_r shares_r P_r, (…, n, n), of the n! permutations of n in lexicographic order; row i of P_r has its 1
    where the permutation sends i.

    >>> mean_permutation(torch.tensor([0.25, 0.75]), 2)
    tensor([[0.2500, 0.7500],
            [0.7500, 0.2500]])
    """
    if n == 1:
        return shares.unsqueeze(-1)
    # In this order, all permutations that send 0 to j are neighbours. They form a chunk of (n − 1)! shares, which
    # permutes the other n − 1 numbers.
    chunks = shares.unflatten(-1, (n, -1))
    smaller = mean_permutation(chunks, n - 1).unbind(-3)
    zeros = torch.zeros_like(smaller[0][..., :1])
    # Rows 1 to n − 1: in chunk j, column j belongs to row 0, so zeros are put in there. Row 0 has the chunks' sums.
    rest = sum(torch.cat([mean[..., :j], zeros, mean[..., j:]], -1) for j, mean in enumerate(smaller))
    return torch.cat([chunks.sum(-1).unsqueeze(-2), rest], -2)  # type: ignore[list-item]


def free_hyper_connection(
    streams: Tensor,
    bias: Tensor,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (x, (Rᵀ, g)) for n streams H (…, n, d): x = Σ_i p_i H_i, and H⁺ = RᵀH + g⊙F(x), g (…, n, 1). Row i of
    (p, R, g) is that of `bias` (n·(n + 2),), plus (s₀, …, s₀, s₁)⊙tanh(W·LayerNorm(H_i)) if there are γ and β (d,), W
    (n + 2, d) and s (2,).

    Source: Zhu et al. 2024, Algorithm 2.
    """
    h, n = wide(streams), streams.shape[-2]
    rows = bias.to(h.dtype).view(n, n + 2)
    if weight is not None:
        assert gain is not None and shift is not None and scale is not None
        normed = F.layer_norm(h, h.shape[-1:], gain.to(h.dtype), shift.to(h.dtype), 1e-5)
        s = scale.to(h.dtype)
        rows = rows + torch.tanh(F.linear(normed, weight.to(h.dtype))) * torch.cat([s[:1].expand(n + 1), s[1:]])
    rows = rows.expand(*streams.shape[:-1], n + 2)
    shares, r, gates = rows[..., 0], rows[..., 1 : n + 1], rows[..., n + 1 :]
    return _read(streams, shares), torch.cat([r.transpose(-2, -1), gates], -1)  # [Rᵀ, g], (…, n, n + 1)


def channel_connection(
    streams: Tensor, gain: Tensor, down: Tensor, up: Tensor, write: Tensor, magnitude: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Returns (x, g) for n streams H (…, n, d): F's input x, which `channel_read` computes, and the gates g (…, n, 1) =
    c·σ(W vec(Ĥ)/n) of H⁺ = H + g⊙F(x). Ĥ are the normed streams of `channel_read`, c the `magnitude`, W (n, n·d).

    Source: transformers, `Qwen4ExpTextGatedResidual`.
    """
    normed = _normed_streams(streams, gain)
    gates = magnitude * torch.sigmoid(F.linear(normed, write.to(normed.dtype)) / streams.shape[-2])
    return _read_by_channel(streams, normed, down, up), gates.unsqueeze(-1).to(streams.dtype)


def channel_read(streams: Tensor, gain: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Returns x = 1/n·Σ_i σ(U silu(V vec(Ĥ)/n))_i⊙Ĥ_i for n streams H (…, n, d), Ĥ_i = γ_i⊙H_i/√(mean H_i² + ε),
    ε = 1e-6; γ is (n·d,), V (r, n·d), U (n·d, r).

    Source: transformers, `Qwen4ExpTextGatedResidual`.
    """
    return _read_by_channel(streams, _normed_streams(streams, gain), down, up)


def _normed_streams(streams: Tensor, gain: Tensor) -> Tensor:
    """Returns vec(Ĥ), (…, n·d), as in `channel_read`."""
    h = wide(streams)
    return (h * _inverse_rms(h)).flatten(-2) * gain.to(h.dtype)


def _read_by_channel(streams: Tensor, normed: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Returns the x of `channel_read`; `normed` is vec(Ĥ), `down` is V and `up` is U."""
    n = streams.shape[-2]
    low = F.silu(F.linear(normed, down.to(normed.dtype)) / n)
    shares = torch.sigmoid(F.linear(low, up.to(normed.dtype)))
    return (shares * normed).unflatten(-1, (n, -1)).mean(-2).to(streams.dtype)


def sum_of_streams(streams: Tensor, c: float) -> Tensor:
    """Returns c·Σ_i H_i for streams H (…, n, d)."""
    return (wide(streams).sum(-2) * c).to(streams.dtype)


def depth_attention(outputs: Sequence[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    """Returns Σ_i a_i v_i for outputs v_i (…, d), a = softmax_i⟨query, gain⊙v_i/√(mean v_i² + ε)⟩, ε = 1e-6.

    Source: Kimi Team 2026 (Attention Residuals).
    """
    logits = []
    for v in outputs:
        wide_v = wide(v)
        key = query.to(wide_v.dtype) * gain.to(wide_v.dtype)  # ⟨query, gain⊙v⟩ = ⟨query⊙gain, v⟩
        logits.append((wide_v @ key).unsqueeze(-1) * _inverse_rms(wide_v))
    return _weighted(outputs, torch.softmax(torch.cat(logits, -1), -1))


def normed_depth_attention(outputs: Sequence[Tensor], query: Tensor) -> Tensor:
    """Returns Σ_i a_i v̂_i for outputs v_i (…, d), v̂_i = v_i/√(mean v_i² + ε), a = softmax_i(⟨query, v̂_i⟩/√d),
    ε = 1e-6; for several queries (m, d) it returns as many such sums, (m, …, d).

    Source: transformers, `Inkling2BlockAttentionResidual`.
    """
    scales = [_inverse_rms(wide(v)) for v in outputs]
    queries = query.view(-1, query.shape[-1]) * query.shape[-1] ** -0.5
    logits = []
    for v, scale in zip(outputs, scales):
        wide_v = wide(v)
        logits.append(F.linear(wide_v, queries.to(wide_v.dtype)) * scale)  # (…, queries)
    # Since a_i v̂_i = (a_i·scale_i) v_i, the outputs v_i themselves are summed with these shares.
    shares = torch.softmax(torch.stack(logits, -1), -1) * torch.cat(scales, -1).unsqueeze(-2)
    read = [_weighted(outputs, shares[..., i, :]) for i in range(len(queries))]
    return read[0] if query.dim() == 1 else torch.stack(read)


def _weighted(outputs: Sequence[Tensor], shares: Tensor) -> Tensor:
    """Returns Σ_i shares_i v_i for outputs v_i (…, d) and shares (…, number of outputs)."""
    shares = shares.to(outputs[0].dtype)
    total = outputs[0] * shares[..., :1]
    for i, v in enumerate(outputs[1:], 1):
        total = torch.addcmul(total, v, shares[..., i : i + 1])
    return total
