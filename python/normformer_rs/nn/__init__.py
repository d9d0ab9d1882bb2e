"""Drop-in modules: norms, residual connections, and torch.nn's Transformer with every scheme of the package."""

from . import composed, sharding
from .attention import MultiheadAttention
from .blended import PRepBN, RepBN
from .composed import *  # noqa: F403
from .foreign import place_layers
from .layers import Residual, TransformerDecoderLayer, TransformerEncoderLayer
from .masks import padding_mask
from .norms import FixNormEmbedding, LayerNorm, LpNorm, RMSNorm, ScaleNorm
from .registry import norm_class, norm_of_config
from .running import BatchNorm, GroupScaling, PowerNorm, PowerNormV
from .stacks import Transformer, TransformerDecoder, TransformerEncoder
from .training import parameter_groups, profile, set_num_updates

__all__ = [
    "BatchNorm",
    "FixNormEmbedding",
    "GroupScaling",
    "LayerNorm",
    "LpNorm",
    "MultiheadAttention",
    "PRepBN",
    "PowerNorm",
    "PowerNormV",
    "RMSNorm",
    "RepBN",
    "Residual",
    "ScaleNorm",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "norm_class",
    "norm_of_config",
    "padding_mask",
    "parameter_groups",
    "place_layers",
    "profile",
    "set_num_updates",
]
__all__ += composed.__all__

sharding.register()  # comes last, because all operators must be defined before
