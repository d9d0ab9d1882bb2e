"""Drop-in modules: norms, residual connections, and torch.nn's Transformer with every scheme of the package."""

from .attention import MultiheadAttention
from .layers import Residual, TransformerDecoderLayer, TransformerEncoderLayer
from .norms import LayerNorm, RMSNorm, ScaleNorm, norm_class
from .stacks import Transformer, TransformerDecoder, TransformerEncoder
from .training import parameter_groups, profile, set_num_updates

__all__ = [
    "LayerNorm",
    "MultiheadAttention",
    "RMSNorm",
    "Residual",
    "ScaleNorm",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "norm_class",
    "parameter_groups",
    "profile",
    "set_num_updates",
]
