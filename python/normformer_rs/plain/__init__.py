"""Modules in PyTorch's own operations alone, which TorchScript compiles: `to_torch` builds models of them.

In evaluation they compute the same as the package's modules. A saved TorchScript file of them needs PyTorch alone.
"""

from .layers import (
    Activation,
    Around,
    Attention,
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeedForward,
    Residual,
    StreamStep,
    Sum,
    Through,
    TorchAttention,
)
from .norms import (
    BiasedRMSNorm,
    Derf,
    DyT,
    FixNormEmbedding,
    GroupScaling,
    HeadScale,
    JoinedHeads,
    LpNorm,
    RunningNorm,
    Scale,
    Shift,
    Times,
)

__all__ = [
    "Activation",
    "Around",
    "Attention",
    "BiasedRMSNorm",
    "Decoder",
    "DecoderLayer",
    "Derf",
    "DyT",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "FixNormEmbedding",
    "GroupScaling",
    "HeadScale",
    "JoinedHeads",
    "LpNorm",
    "Residual",
    "RunningNorm",
    "Scale",
    "Shift",
    "StreamStep",
    "Sum",
    "Through",
    "Times",
    "TorchAttention",
]
