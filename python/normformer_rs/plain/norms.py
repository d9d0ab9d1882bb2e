"""Norms, embeddings, and the changes inside a sublayer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import formulas


def rms_norm(x: Tensor, weight: Tensor | None, shape: list[int], eps: float) -> Tensor:
    """y = γ⊙x/√(mean x² + ε) over the last dimensions, which have this shape."""
    a = formulas.wide(x)
    dims = [-1 - i for i in range(len(shape))]
    # a.square() would make ONNX's RMSNormalization at opset 23, which onnxruntime cannot load for 16-bit rows.
    y = a * torch.rsqrt((a * a).mean(dims, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(a.dtype)).to(x.dtype)


def conventional_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, cast: str, eps_outside: bool, measured: int
) -> Tensor:
    """RMSNorm over the last dimension, the mean taken of its first `measured` numbers. eps_outside: √(mean x²) + ε.
    cast: rounds to x's type "after" the product with γ, "before" it, or the "scale" already."""
    a = formulas.wide(x)
    head, bound = a[..., :measured], 1e100 if a.dtype == torch.float64 else 1e6
    # The squares of a row beyond the bound would overflow, so that row is measured in a larger unit; others by 1.
    unit = head.detach().abs().amax(-1, keepdim=True).clamp_min(bound) / bound
    head = head / unit
    if eps_outside:  # the length's slope is 0 at rows of zeros, where a root's is infinite
        scale = 1.0 / (torch.linalg.vector_norm(head, dim=-1, keepdim=True) * measured**-0.5 + eps / unit)
    else:
        scale = torch.rsqrt(head.square().mean(-1, keepdim=True) + eps)
    scale = scale / unit
    if cast == "scale":  # rounded, its gradient is not: a sum over x⊙dy may lie beyond float16
        scale = scale + (scale.to(x.dtype).to(a.dtype) - scale).detach()
    y = a * scale
    if cast != "after":
        y = y.to(x.dtype).to(a.dtype)
    return (y if weight is None else y * weight.to(a.dtype)).to(x.dtype)


def lp_norm(x: Tensor, weight: Tensor | None, gain: float, p: float, dims: int, eps: float) -> Tensor:
    """y = g·x/max(‖x‖_p, ε) over the last `dims` dimensions; `gain` is g where there is no weight."""
    a = formulas.wide(x)
    over = [-1 - i for i in range(dims)]
    largest = a.detach().abs().amax(over, keepdim=True)
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))  # divided by the largest, no power overflows
    length = (torch.linalg.vector_norm(a / unit, p, over, keepdim=True) * unit).clamp_min(eps)
    y = a / length
    return (y * gain if weight is None else y * weight.to(a.dtype)).to(x.dtype)


def dyt(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y = γ⊙tanh(αx) + β."""
    a = formulas.wide(x)
    return formulas.affine(torch.tanh(a * alpha.to(a.dtype)), weight, bias).to(x.dtype)


def derf(x: Tensor, alpha: Tensor, s: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y = γ⊙erf(αx + s) + β."""
    a = formulas.wide(x)
    return formulas.affine(torch.erf(a * alpha.to(a.dtype) + s.to(a.dtype)), weight, bias).to(x.dtype)


def group_scaling(x: Tensor, groups: int, eps: float = 1e-5) -> Tensor:
    """x/√(mean over each group of x² + ε), `groups` equal parts of the last dimension."""
    parts = x.unflatten(-1, [groups, x.shape[-1] // groups])
    return rms_norm(parts, None, [x.shape[-1] // groups], eps).flatten(-2)


def keep(module: nn.Module, **tensors: Tensor | None) -> None:
    """Registers parameters (trained or frozen), buffers (any other tensor), and absent ones (None)."""
    for name, tensor in tensors.items():
        if tensor is None or isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)


class LpNorm(nn.Module):
    """y = g·x/max(‖x‖_p, ε) over the last `dims` dimensions; `gain` is g where there is no weight."""

    weight: Tensor | None

    def __init__(self, weight: Tensor | None, gain: float, p: float, dims: int, eps: float) -> None:
        super().__init__()
        self.gain, self.p, self.dims, self.eps = float(gain), float(p), dims, float(eps)
        keep(self, weight=weight)

    def forward(self, x: Tensor) -> Tensor:
        return lp_norm(x, self.weight, self.gain, self.p, self.dims, self.eps)


class ConventionalRMSNorm(nn.Module):
    """`conventional_rms_norm` over the dimensions of `shape`; `zero_centred`: γ is the weight plus 1."""

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None,
        shape: list[int],
        eps: float,
        zero_centred: bool,
        cast: str,
        eps_outside: bool,
        measured: int,
    ) -> None:
        super().__init__()
        self.shape, self.eps, self.zero_centred = shape, float(eps), zero_centred
        self.cast, self.eps_outside, self.measured = cast, eps_outside, measured
        keep(self, weight=weight)

    def forward(self, x: Tensor) -> Tensor:
        gain, weight = self.weight, self.weight
        if weight is not None:
            gain = formulas.wide(weight).flatten() + 1.0 if self.zero_centred else weight.flatten()
        rows = x.flatten(-len(self.shape))
        y = conventional_rms_norm(rows, gain, self.eps, self.cast, self.eps_outside, self.measured)
        return y.unflatten(-1, self.shape)


class BiasedRMSNorm(nn.Module):
    """y = γ⊙x/√(mean x² + ε) + β over the dimensions of `shape`."""

    weight: Tensor | None
    bias: Tensor

    def __init__(self, weight: Tensor | None, bias: Tensor, shape: list[int], eps: float) -> None:
        super().__init__()
        self.shape, self.eps = shape, float(eps)
        keep(self, weight=weight, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.shape, self.eps) + self.bias


class DyT(nn.Module):
    """y = γ⊙tanh(αx) + β."""

    alpha: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        keep(self, alpha=alpha, weight=weight, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return dyt(x, self.alpha, self.weight, self.bias)


class Derf(nn.Module):
    """y = γ⊙erf(αx + s) + β."""

    alpha: Tensor
    s: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, alpha: Tensor, s: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        keep(self, alpha=alpha, s=s, weight=weight, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return derf(x, self.alpha, self.s, self.weight, self.bias)


class GroupScaling(nn.Module):
    """x/√(mean over each group of x² + 1e-5)."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return group_scaling(x, self.groups)


class RunningNorm(nn.Module):
    """y = γ⊙(x − μ)/√(s + ε) + β with constant statistics, after group scaling (groups = 0: none)."""

    shift: Tensor | None
    square: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        shift: Tensor | None,
        square: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        groups: int,
    ) -> None:
        super().__init__()
        self.eps, self.groups = float(eps), groups
        keep(self, shift=shift, square=square, weight=weight, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("this norm's statistics are constant, so it cannot train: call eval()")
        if self.groups > 0:
            x = group_scaling(x, self.groups)
        return formulas.running_norm(x, self.shift, self.square, self.weight, self.bias, self.eps, None)


class FixNormEmbedding(nn.Module):
    """Rows of a table, of unit length, times `scale`."""

    weight: Tensor

    def __init__(self, weight: Tensor, scale: float, eps: float) -> None:
        super().__init__()
        self.scale, self.eps = float(scale), eps
        keep(self, weight=weight)

    def forward(self, input: Tensor) -> Tensor:
        return lp_norm(F.embedding(input, self.weight), None, self.scale, 2.0, 1, self.eps)

    @torch.jit.export
    def normalised_weight(self) -> Tensor:
        """The table, its rows of unit length."""
        return lp_norm(self.weight, None, 1.0, 2.0, 1, self.eps)


# Changes inside a sublayer.


class Shift(nn.Module):
    """x − b."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        keep(self, value=value)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.value.to(x.dtype)


class Scale(nn.Module):
    """x⊙s."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        keep(self, value=value)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value.to(x.dtype)


class Times(nn.Module):
    """c·x with a constant c."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class JoinedHeads(nn.Module):
    """A norm over all heads of x (B, heads, T, d_head) joined."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        joined = self.norm(x.transpose(1, 2).flatten(-2))
        return joined.unflatten(-1, [x.shape[1], x.shape[-1]]).transpose(1, 2)


class HeadScale(nn.Module):
    """Every head's part of x times a number of its own."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        keep(self, value=value)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.value.numel()
        parts = x.unflatten(-1, [heads, x.shape[-1] // heads])
        return (parts * self.value.flatten().to(x.dtype).unsqueeze(-1)).flatten(-2)
