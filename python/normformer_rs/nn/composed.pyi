"""Made by `python -m normformer_rs._stubs --write` out of Rust's table of norms; do not edit."""

import collections.abc
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .norms import RowNorm

class Composed(RowNorm):
    name: str
    option_names: tuple[str, ...]
    def options(self, x: Tensor) -> list[float]: ...

CLASSES: dict[str, type[Composed]]

def signature(entry: collections.abc.Mapping[str, Any]) -> inspect.Signature: ...
def doc(entry: collections.abc.Mapping[str, Any]) -> str: ...

__all__ = ["DyT"]

class DyT(Composed):
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
