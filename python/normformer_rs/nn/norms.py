"""Norms as modules, with torch.nn's constructors and keys."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .._core import InputError
from ..config import unknown

OPS = torch.ops.normformer_rs


class _RowNorm(nn.Module):
    """A norm over the last dimension, each row for itself."""

    operator: str
    has_bias = False

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1:
            raise InputError(f"normalized_shape must be one width, the last dimension's; got {normalized_shape!r}")
        self.normalized_shape, self.eps, self.elementwise_affine = shape, eps, elementwise_affine
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if elementwise_affine:
            width = 1 if self.operator == "scale_norm" else shape[0]
            self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
            if self.has_bias and bias:
                self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, self.gain())
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def gain(self) -> float:
        """The weight at the start."""
        return 1.0

    def parameters_in_use(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        return getattr(OPS, self.operator)(x, *self.parameters_in_use(x), self.eps)[0]

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class LayerNorm(_RowNorm):
    """y = γ⊙(x−μ)/√(σ²+ε)+β."""

    operator = "layer_norm"
    has_bias = True


class RMSNorm(_RowNorm):
    """y = γ⊙x/√(mean x²+ε)."""

    operator = "rms_norm"


class ScaleNorm(_RowNorm):
    """y = g·x/max(‖x‖₂, ε)."""

    operator = "scale_norm"

    def gain(self) -> float:
        return math.sqrt(self.normalized_shape[0])

    def parameters_in_use(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.weight is not None:
            return self.weight, None
        return x.new_full((1,), self.gain(), dtype=torch.promote_types(x.dtype, torch.float32)), None


_CLASSES: dict[str, type[_RowNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm, "scalenorm": ScaleNorm}


def norm_class(name: str) -> type[_RowNorm]:
    """The class of a norm's name."""
    if name not in _CLASSES:
        raise InputError(unknown("norm", name, _CLASSES))
    return _CLASSES[name]
