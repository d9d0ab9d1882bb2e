"""The norms' equations in PyTorch's own operations, for exported programs and `to_torch`'s modules.

TorchScript compiles every function here. All compute in f32 (f64 for f64 inputs) and return x's dtype.
"""

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


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float) -> Tensor:
    """y = γ⊙(x − μ)/√(σ² + ε) + β over the last dimensions, which have this shape."""
    a = wide(x)
    gamma = None if weight is None else weight.to(a.dtype)
    beta = None if bias is None else bias.to(a.dtype)
    return F.layer_norm(a, shape, gamma, beta, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, shape: list[int], eps: float) -> Tensor:
    """y = γ⊙x/√(mean x² + ε) over the last dimensions, which have this shape."""
    a = wide(x)
    dims = [-1 - i for i in range(len(shape))]
    y = a * torch.rsqrt(a.square().mean(dims, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(a.dtype)).to(x.dtype)


def lp_norm(x: Tensor, weight: Tensor | None, gain: float, p: float, dims: int, eps: float) -> Tensor:
    """y = g·x/max(‖x‖_p, ε) over the last `dims` dimensions; `gain` is g where there is no weight."""
    a = wide(x)
    over = [-1 - i for i in range(dims)]
    largest = a.detach().abs().amax(over, keepdim=True)
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))  # divided by the largest, no power overflows
    length = (torch.linalg.vector_norm(a / unit, p, over, keepdim=True) * unit).clamp_min(eps)
    y = a / length
    return (y * gain if weight is None else y * weight.to(a.dtype)).to(x.dtype)


def dyt(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y = γ⊙tanh(αx) + β."""
    a = wide(x)
    return affine(torch.tanh(a * alpha.to(a.dtype)), weight, bias).to(x.dtype)


def derf(x: Tensor, alpha: Tensor, s: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y = γ⊙erf(αx + s) + β."""
    a = wide(x)
    return affine(torch.erf(a * alpha.to(a.dtype) + s.to(a.dtype)), weight, bias).to(x.dtype)


def l2norm(x: Tensor, eps: float) -> Tensor:
    """y = x/max(‖x‖₂, ε) over the last dimension."""
    return lp_norm(x, None, 1.0, 2.0, 1, eps)


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


def group_scaling(x: Tensor, groups: int, eps: float = 1e-5) -> Tensor:
    """x/√(mean over each group of x² + ε), `groups` equal parts of the last dimension."""
    parts = x.unflatten(-1, [groups, x.shape[-1] // groups])
    return rms_norm(parts, None, [x.shape[-1] // groups], eps).flatten(-2)


def residual(x: Tensor, f: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor:
    """x⁺ = α⊙x + β⊙f in x's dtype; None: one."""
    a, b = wide(x), wide(f)
    if alpha is not None:
        a = a * alpha.to(a.dtype)
    if beta is not None:
        b = b * beta.to(b.dtype)
    return (a + b).to(x.dtype)
