"""Surgery on models that somebody else wrote: other norms, other residual schemes, in place and with a way back."""

from .blocks import Linear, Part, register_block, register_stack
from .undo import Row, Swaps
from .folding import fold_admin
from .norms import swap_norms
from .recognise import register_norm
from .residuals import swap_residuals
from .spec import BlockSpec
from .block_residual import BlockResidual

__all__ = [
    "BlockResidual",
    "BlockSpec",
    "Linear",
    "Part",
    "Row",
    "Swaps",
    "fold_admin",
    "register_block",
    "register_norm",
    "register_stack",
    "swap_norms",
    "swap_residuals",
]
