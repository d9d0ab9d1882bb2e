"""Drop-in modules: norms with torch.nn's constructors and keys."""

from .masks import padding_mask
from .norms import (
    BatchNorm,
    FixNormEmbedding,
    GroupScaling,
    LayerNorm,
    LpNorm,
    PowerNorm,
    PowerNormV,
    RMSNorm,
    ScaleNorm,
    norm_class,
    norm_of_config,
)

__all__ = [
    "BatchNorm",
    "FixNormEmbedding",
    "GroupScaling",
    "LayerNorm",
    "LpNorm",
    "PowerNorm",
    "PowerNormV",
    "RMSNorm",
    "ScaleNorm",
    "norm_class",
    "norm_of_config",
    "padding_mask",
]
