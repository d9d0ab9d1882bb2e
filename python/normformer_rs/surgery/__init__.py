"""Model patching: exchanges norms and residual schemes of other libraries' models, in place, with undo."""

import sys

from .block_residual import BlockResidual
from .blocks import Linear, Part, register_block
from .configuration import register as _register
from .folding import fold_admin, fold_norms
from .loading import load_swapped
from .norms import swap_norms
from .recognise import register_norm
from .residuals import swap_residuals
from .undo import Row, Swaps
from .unit import unit_matrices_

__all__ = [
    "BlockResidual",
    "Linear",
    "Part",
    "Row",
    "Swaps",
    "fold_admin",
    "fold_norms",
    "load_swapped",
    "register_block",
    "register_norm",
    "swap_norms",
    "swap_residuals",
    "unit_matrices_",
]

if "transformers" in sys.modules:
    _register()
