"""Computes the normalisation layers (docs/spec.md §1) and the fused residual step (§2.2) by their equations.

Every function works over the last dimension, computes in f32 (f64 for f64 inputs) and returns x's dtype. The norms with
batch statistics are in batch_norms.py. TwT is Nguyen & Salazar 2019, PN Shen et al. 2020.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DEFAULT_EPS = 1e-5
L2_EPS = 1e-12
"""The ε of l2norm."""
ROW_NORMS = ("layernorm", "rmsnorm", "scalenorm", "scalenorm-fixed", "lpnorm", "dyt", "derf", "l2norm", "gated-rmsnorm")


def computed(x: Tensor) -> Tensor:
    """Returns x in the type in which statistics are computed: f64 for f64; f32 for f32, bf16 and f16."""
    return x if x.dtype == torch.float64 else x.float()


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = DEFAULT_EPS) -> Tensor:
    """Returns y = γ⊙(x−μ)/√(σ²+ε) + β, with biased σ² (Ba et al. 2016)."""
    a = computed(x)
    mean = a.mean(-1, keepdim=True)
    variance = ((a - mean) ** 2).mean(-1, keepdim=True)
    return _affine((a - mean) / torch.sqrt(variance + eps), weight, bias).to(x.dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = DEFAULT_EPS,
    zero_centred: bool = False,
    cast: str = "after",
    eps_place: str = "inside",
    part: float = 1.0,
) -> Tensor:
    """Returns y = γ⊙x/√(mean x²+ε) (Zhang & Sennrich 2019; TwT §4.2). ε=None is the compute type's machine epsilon.

    With `zero_centred` γ is weight + 1. `cast` is where values are rounded to x's type: "after" the product with γ
    only; "before" it, too (x̂); "scale": the row's scale is also rounded. `eps_place` "outside" means √(mean x²) + ε.
    `part`: the mean is that of the first ⌊part·d⌋ numbers.
    """
    a = computed(x)
    if eps is None:
        eps = torch.finfo(a.dtype).eps
    mean = (a[..., : int(part * a.shape[-1])] ** 2).mean(-1, keepdim=True)
    # 1e-200 keeps the gradient of the square root finite if a row is zero
    root = torch.sqrt(mean + 1e-200) + eps if eps_place == "outside" else torch.sqrt(mean + eps)
    hat = a * (1 / root).to(x.dtype).to(a.dtype) if cast == "scale" else a / root
    hat = hat if cast == "after" else hat.to(x.dtype).to(a.dtype)
    if weight is not None and zero_centred:
        weight = computed(weight) + 1
    return _affine(hat, weight, None).to(x.dtype)


FAMILIES: dict[str, dict[str, Any]] = {
    "rmsnorm:llama": {"cast": "before", "eps": 1e-6},
    "rmsnorm:olmo": {"eps": 1e-6},
    "rmsnorm:gemma": {"zero_centred": True, "eps": 1e-6},
    "rmsnorm:gemma4": {"eps": 1e-6},
    "rmsnorm:deepseek-v4": {"weight": False, "cast": "scale", "eps": 1e-6},
    "rmsnorm:nanochat": {"weight": False, "eps": 2.0**-23},
    "rmsnorm:original": {"eps_place": "outside", "eps": 1e-8},
    "rmsnorm:partial": {"eps_place": "outside", "part": 1 / 16, "eps": 1e-8},
}
"""The options of RMSNorm in families of models; options that are not listed have their usual values."""


def rms_conventions(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `rms_norm`, and `weight`, which is True if there is a weight. For the name "rmsnorm" they
    come from the config, for a family from FAMILIES."""
    names = ("weight", "zero_centred", "cast", "eps_place", "part")
    if name == "rmsnorm":
        return {key: config[f"rmsnorm_{key}"] for key in names}
    usual = {"weight": True, "zero_centred": False, "cast": "after", "eps_place": "inside", "part": 1.0}
    return {key: FAMILIES[name].get(key, usual[key]) for key in names}


def scale_norm(x: Tensor, g: Tensor | float, eps: float = DEFAULT_EPS) -> Tensor:
    """Returns y = g·x/max(n, ε), with n = ‖x‖₂ and g a scalar or of shape (1,) (TwT eq 5).

    With u = x/max(n, ε): dx = (g/n)(dy − u⟨u,dy⟩) if n > ε, else (g/ε)dy; dg = Σ⟨dy,u⟩.
    """
    a = computed(x)
    if isinstance(g, Tensor):
        g = g.to(a.dtype)
    return (g * a / clamped_length(a, eps)).to(x.dtype)


def scale_norm_fixed(x: Tensor, eps: float = DEFAULT_EPS) -> Tensor:
    """Returns ScaleNorm of x with g = √d, which is not learned (TwT Table 7)."""
    return scale_norm(x, math.sqrt(x.shape[-1]), eps)


def lp_norm(x: Tensor, g: Tensor | float, p: float = 2.0, eps: float = DEFAULT_EPS) -> Tensor:
    """Returns y = g·x/max(n, ε), with n = ‖x‖_p, p ≥ 1 or ∞, and g a scalar or of shape (1,) (TwT §5)."""
    return _LpNorm.apply(x, torch.as_tensor(g, dtype=computed(x).dtype) if not isinstance(g, Tensor) else g, p, eps)


class _LpNorm(torch.autograd.Function):
    """The gradient of LpNorm: with u = x/n and w = sign(x)(|x|/n)^{p−1}, dx = (g/n)(dy − w⟨u,dy⟩). For p = ∞, w is
    sign(x)·1[|x| = n]/k if k entries are equally large.

    If n ≤ ε, u = x/ε and dx = (g/ε)dy. dg = Σ⟨dy,u⟩.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, p: float, eps: float) -> Tensor:
        a = computed(x)
        n = torch.linalg.vector_norm(a, p, dim=-1, keepdim=True)
        ctx.save_for_backward(a, n, g)
        ctx.p, ctx.eps = p, eps
        return (g.to(a.dtype) * a / n.clamp(min=eps)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        a, n, g = ctx.saved_tensors
        b, clamped = computed(dy), n.clamp(min=ctx.eps)
        u = a / clamped
        if ctx.p == math.inf:
            is_largest = a.abs() == n
            w = a.sign() * is_largest / is_largest.sum(-1, keepdim=True)
        else:
            w = a.sign() * u.abs() ** (ctx.p - 1)
        along = (u * b).sum(-1, keepdim=True)
        dx = g.to(a.dtype) / clamped * (b - torch.where(n > ctx.eps, w * along, 0.0))
        return dx.to(dy.dtype), along.sum().view(g.shape).to(g.dtype), None, None


def dyt(x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Returns y = γ⊙tanh(αx) + β, with α of shape (1,) (Zhu et al. 2025, Algorithm 1)."""
    a = computed(x)
    return _affine(torch.tanh(alpha.to(a.dtype) * a), weight, bias).to(x.dtype)


def derf(x: Tensor, alpha: Tensor, s: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Returns y = γ⊙erf(αx + s) + β, with α and s of shape (1,) (Chen et al. 2025)."""
    a = computed(x)
    return _affine(torch.erf(alpha.to(a.dtype) * a + s.to(a.dtype)), weight, bias).to(x.dtype)


def l2_norm(x: Tensor, eps: float = L2_EPS) -> Tensor:
    """Returns y = x/max(‖x‖₂, ε), as torch's `normalize` (Loshchilov et al. 2024, who have no ε)."""
    a = computed(x)
    return (a / clamped_length(a, eps)).to(x.dtype)


def group_scaling(x: Tensor, groups: int = 1, eps: float = DEFAULT_EPS) -> Tensor:
    """Returns x/√(mean x² + ε), with the mean over each of `groups` equal parts of the last dimension. There are no
    parameters (PN App A)."""
    a = computed(x).unflatten(-1, (groups, -1))
    return (a / torch.sqrt((a**2).mean(-1, keepdim=True) + eps)).flatten(-2).to(x.dtype)


def fixnorm(weight: Tensor) -> Tensor:
    """Returns the word embedding with rows of length one, W/max(‖row‖₂, 1e-12) (TwT §2.3; Nguyen & Chiang 2018)."""
    w = computed(weight)
    return (w / clamped_length(w, 1e-12)).to(weight.dtype)


def clamped_length(a: Tensor, eps: float) -> Tensor:
    """Returns max(‖a‖₂, ε) over the last dimension, which stays with size 1. If ‖a‖₂ ≤ ε it is the constant ε.

    The inner `where` keeps √ away from 0, whose infinite slope would make 0·∞ = NaN of the gradient of a zero row.
    """
    squared = (a**2).sum(-1, keepdim=True)
    is_long = squared.detach().sqrt() > eps
    return torch.where(is_long, torch.where(is_long, squared, 1.0).sqrt(), eps)


def gated_rms_norm(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float = DEFAULT_EPS) -> Tensor:
    """Returns y = n⊙σ(W₂ silu(W₁ n)), with n = γ⊙x/√(mean x² + ε) (A.X-K2)."""
    n = rms_norm(computed(x), weight, eps)
    hidden = n @ down.T
    return (n * torch.sigmoid((hidden * torch.sigmoid(hidden)) @ up.T)).to(x.dtype)


def apply_norm(
    name: str,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = DEFAULT_EPS,
    p: float = 2.0,
    inside: Mapping[str, Tensor] | None = None,
    conventions: Mapping[str, Any] | None = None,
) -> Tensor:
    """Returns the row norm `name` of x. `inside` holds, by name, its parameters other than weight and bias;
    `conventions` are the options of rmsnorm.

    `scalenorm-fixed` has a weight only as the decoder's final norm, whose g is learned.
    """
    inside = inside or {}
    if name == "layernorm":
        return layer_norm(x, weight, bias, eps)
    if name.partition(":")[0] == "rmsnorm":
        return rms_norm(x, weight, eps, **(conventions or {}))
    if name == "scalenorm":
        return scale_norm(x, weight, eps)
    if name == "scalenorm-fixed":
        return scale_norm_fixed(x, eps) if weight is None else scale_norm(x, weight, eps)
    if name == "lpnorm":
        return lp_norm(x, weight, p, eps)
    if name == "dyt":
        return dyt(x, inside["alpha"], weight, bias)
    if name == "derf":
        return derf(x, inside["alpha"], inside["s"], weight, bias)
    if name == "l2norm":
        return l2_norm(x, eps)
    if name == "gated-rmsnorm":
        return gated_rms_norm(x, weight, inside["gate_down"], inside["gate_up"], eps)
    raise ValueError(f"unknown norm {name!r}; the row norms are {', '.join(ROW_NORMS)}")


def residual_step(
    x: Tensor,
    f: Tensor,
    mask: Tensor | None = None,
    p_keep_scale: float = 1.0,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    norm: str | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = DEFAULT_EPS,
) -> tuple[Tensor, Tensor]:
    """Returns x⁺ = αx + β(f⊙mask·scale) and y = N(x⁺) (docs/spec.md §2.2).

    `mask` is True where f is kept; None keeps all of f, without a scale. x⁺ has the dtype of x, y that of f. y is
    computed from x⁺ after it was rounded to x's dtype. With `norm=None` y is x⁺ in f's dtype.
    """
    compute = torch.float64 if torch.float64 in (x.dtype, f.dtype) else torch.float32
    branch = f.to(compute)
    if mask is not None:
        branch = branch * mask * p_keep_scale
    x_plus = (alpha * x.to(compute) + beta * branch).to(x.dtype)
    if norm is None:
        return x_plus, x_plus.to(f.dtype)
    return x_plus, apply_norm(norm, x_plus.to(compute), weight, bias, eps).to(f.dtype)


def _affine(normalised: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        normalised = weight.to(normalised.dtype) * normalised
    if bias is not None:
        normalised = normalised + bias.to(normalised.dtype)
    return normalised
