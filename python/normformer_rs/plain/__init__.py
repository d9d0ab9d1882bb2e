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
    Remember,
    Residual,
    StreamStep,
    Sum,
    Through,
    TorchAttention,
)
from .mixing import DepthAround, DepthEnd, HyperAround, HyperEnd, One
from .norms import DyT, FixNormEmbedding, GroupScaling, HeadScale, LpNorm, RunningNorm, Scale, Shift

__all__ = [
    "Activation",
    "Around",
    "Attention",
    "Decoder",
    "DecoderLayer",
    "DepthAround",
    "DepthEnd",
    "DyT",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "FixNormEmbedding",
    "GroupScaling",
    "HeadScale",
    "HyperAround",
    "HyperEnd",
    "LpNorm",
    "One",
    "Remember",
    "Residual",
    "RunningNorm",
    "Scale",
    "Shift",
    "StreamStep",
    "Sum",
    "Through",
    "TorchAttention",
]
