"""Made by `python -m normformer_rs._stubs --write` out of Rust's table of norms; do not edit."""

import collections.abc
import inspect
from typing import Any

import torch
from torch.nn import Parameter

from .norms import RowNorm
from .running import RunningNorm

ENTRIES: list[collections.abc.Mapping[str, Any]]
CLASSES: dict[str, type[RowNorm | RunningNorm]]

def signature(entry: collections.abc.Mapping[str, Any]) -> inspect.Signature: ...
def doc(entry: collections.abc.Mapping[str, Any]) -> str: ...
def build(entry: collections.abc.Mapping[str, Any]) -> type[RowNorm | RunningNorm]: ...

__all__ = ["Derf", "DyT", "GatedRMSNorm", "L2Norm"]

class DyT(RowNorm):
    """y = γ⊙tanh(αx)+β, one learned α, 1/2 at the start; no statistics and no ε; source: Zhu et al. 2025. Arguments,
    shapes, dtypes and errors are LayerNorm's."""

    alpha: Parameter
    weight: Parameter | None
    bias: Parameter | None
    def __init__(
        self,
        normalized_shape: int | collections.abc.Sequence[int],
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...

class Derf(RowNorm):
    """y = γ⊙erf(αx+s)+β, learned α = 1/2 and s = 0, one number each; no statistics and no ε; source: Chen et al. 2025.
    Arguments, shapes, dtypes and errors are LayerNorm's."""

    alpha: Parameter
    s: Parameter
    weight: Parameter | None
    bias: Parameter | None
    def __init__(
        self,
        normalized_shape: int | collections.abc.Sequence[int],
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...

class L2Norm(RowNorm):
    """y = x/max(‖x‖₂, ε) over the last dimension, ε = 1e-12, nothing learned; source: Loshchilov et al. 2024.
    Arguments, shapes, dtypes and errors are LayerNorm's."""

    eps: float
    def __init__(
        self,
        normalized_shape: int | collections.abc.Sequence[int],
        eps: float = 1e-12,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...

class GatedRMSNorm(RowNorm):
    """y = n⊙σ(W₂ silu(W₁ n)), n = γ⊙x/√(mean x²+ε) over the last dimension; W₁ (r, d), W₂ (d, r), r = 16; source:
    A.X-K2; transformers' AXK2GatedRMSNorm. Arguments, shapes, dtypes and errors are LayerNorm's."""

    weight: Parameter | None
    gate_down: Parameter
    gate_up: Parameter
    eps: float
    rank: int
    def __init__(
        self,
        normalized_shape: int | collections.abc.Sequence[int],
        eps: float = 1e-05,
        rank: int = 16,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...
