"""Surgery on other libraries' models: other norms and residual schemes, in place, with undo."""

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
