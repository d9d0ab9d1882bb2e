"""Equations in PyTorch's own operations: norms with running statistics and the residual step, for exported programs,
and sublayers that read and write several tensors.

All compute in f32 (f64 for f64 inputs) and return x's dtype.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in the type that norms compute in."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def affine(hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """weight⊙x̂ + bias in x̂'s type."""
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
    """y = γ⊙(x − μ)/√(s + ε) + β with the given statistics: μ = `shift` (None: 0), s = `square`; 0 at padding."""
    a = wide(x)
    if padding_mask is not None:
        a = a.masked_fill(padding_mask.unsqueeze(-1), 0.0)
    if shift is not None:
        a = a - shift.flatten().to(a.dtype)
    y = affine(a * torch.rsqrt(square.flatten().to(a.dtype) + eps), weight, bias)
    if padding_mask is not None:
        y = y.masked_fill(padding_mask.unsqueeze(-1), 0.0)
    return y.to(x.dtype)


def residual(x: Tensor, f: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor:
    """x⁺ = α⊙x + β⊙f in x's dtype; None: one."""
    a, b = wide(x), wide(f)
    if alpha is not None:
        a = a * alpha.to(a.dtype)
    if beta is not None:
        b = b * beta.to(b.dtype)
    return (a + b).to(x.dtype)


def sinkhorn(logits: Tensor, iterations: int, eps: float = 1e-6) -> Tensor:
    """Matrices (…, n, n) whose rows and columns sum to nearly 1: softmax(logits) + ε over rows, each column divided by
    its sum + ε, then rows and columns so, `iterations` − 1 times.

    >>> sinkhorn(torch.tensor([[1.0, 0.2], [-0.3, 0.5]]), 10)
    tensor([[0.6900, 0.3100],
            [0.3100, 0.6900]])

    Source: deepseek-ai/TileKernels, `sinkhorn_normalize_ref`.
    """
    m = torch.softmax(logits, -1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def spread(x: Tensor, streams: int) -> Tensor:
    """x (…, d) as each of n streams, (…, n, d)."""
    return torch.stack([x] * streams, -2)


def _inverse_rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _mixes(streams: Tensor, weight: Tensor) -> Tensor:
    """φ vec(H)/√(mean H² + ε)."""
    flat = wide(streams.flatten(-2))
    return F.linear(flat, weight.to(flat.dtype)) * _inverse_rms(flat)


def hyper_read(streams: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """x = Σ_i (σ(s·φ vec(H)/√(mean H² + ε) + b) + ε)_i H_i of n streams H (…, n, d); φ is (n, n·d), s (1,), b (n,).

    Source: deepseek-ai/TileKernels, `mhc_head`.
    """
    mixes = _mixes(streams, weight)
    shares = torch.sigmoid(mixes * scale.to(mixes.dtype) + bias.to(mixes.dtype)) + eps
    return (shares.to(streams.dtype).unsqueeze(-2) @ streams).squeeze(-2)


def hyper_connection(
    streams: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, iterations: int, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(x, M, g) of n streams H (…, n, d): x (…, d) = Σ_i (σ(s₀m₀ + b₀) + ε)_i H_i is what F reads, and
    H⁺ = M + g⊙F(x) with M_j = Σ_i R_ij H_i, R = sinkhorn(s₂m₂ + b₂), and g (…, n, 1) = 2σ(s₁m₁ + b₁).

    m = φ vec(H)/√(mean H² + ε); m₀, m₁ and m₂ are its first n numbers, the next n, and the last n², as b's are. φ is
    (n² + 2n, n·d), s (3,). Source: Xie et al. 2025; deepseek-ai/TileKernels, `mhc_pre` and `mhc_post_ref`.
    """
    n, mixes = streams.shape[-2], _mixes(streams, weight)
    s, b = scale.to(mixes.dtype), bias.to(mixes.dtype)
    shares = torch.sigmoid(mixes[..., :n] * s[0] + b[:n]) + eps
    gates = 2 * torch.sigmoid(mixes[..., n : 2 * n] * s[1] + b[n : 2 * n])
    logits = mixes[..., 2 * n :] * s[2] + b[2 * n :]
    into = sinkhorn(logits.unflatten(-1, (n, n)), iterations, eps).transpose(-2, -1)
    both = torch.cat([shares.unsqueeze(-2), into], -2).to(streams.dtype) @ streams  # (…, 1 + n, d)
    return both[..., 0, :], both[..., 1:, :], gates.unsqueeze(-1).to(streams.dtype)


def depth_attention(outputs: Sequence[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    """Σ_i a_i v_i of outputs v_i (…, d), a = softmax_i⟨query, gain⊙v_i/√(mean v_i² + ε)⟩, ε = 1e-6.

    Source: Kimi Team 2026 (Attention Residuals).
    """
    logits = []
    for v in outputs:
        a = wide(v)
        key = query.to(a.dtype) * gain.to(a.dtype)
        logits.append((a @ key).unsqueeze(-1) * _inverse_rms(a))
    shares = torch.softmax(torch.cat(logits, -1), -1).to(outputs[0].dtype)
    total = outputs[0] * shares[..., :1]
    for i, v in enumerate(outputs[1:], 1):
        total = torch.addcmul(total, v, shares[..., i : i + 1])
    return total
