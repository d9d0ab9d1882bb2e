"""Transformers with every norm, residual scheme and initialisation, trained in Rust.

>>> import normformer_rs as nfrs
>>> model, training = nfrs.preset("transformer-tiny")
>>> model.d_model, training.lr
(128, 0.005)
"""

import importlib
import sys
from typing import TYPE_CHECKING

from . import _loading

_loading.begin(_loading.core())
if "transformers" in sys.modules:  # importing surgery makes its Auto classes load swapped models
    importlib.import_module(".surgery", __name__)

__all__ = [
    "PRESETS",
    "Binarised",
    "DataConfig",
    "DivergedError",
    "DryRun",
    "Evaluations",
    "Generation",
    "GenerationConfig",
    "History",
    "InputError",
    "Interrupted",
    "Norm",
    "Perplexity",
    "Scheme",
    "SearchConfig",
    "Study",
    "Swaps",
    "Trainer",
    "TrainingConfig",
    "Transformer",
    "TransformerConfig",
    "Translation",
    "WindowPerplexity",
    "__version__",
    "analysis",
    "average",
    "cite",
    "evaluate_loss",
    "evaluate_windows",
    "figures",
    "fold_norms",
    "generate",
    "keep_memory",
    "load_swapped",
    "nn",
    "norms",
    "param_groups",
    "plot",
    "preset",
    "schemes",
    "surgery",
    "swap_norms",
    "swap_residuals",
    "tables",
    "to_huggingface",
    "translate",
    "unit_matrices_",
]

if TYPE_CHECKING:
    from . import analysis, figures, nn, norms, schemes, surgery
    from .config import (
        DataConfig,
        GenerationConfig,
        SearchConfig,
        TrainingConfig,
        TransformerConfig,
        __version__,
        tables,
    )
    from .errors import DivergedError, InputError, Interrupted
    from .formats.huggingface import to_huggingface
    from .loop.generation import Generation, WindowPerplexity, evaluate_windows, generate
    from .loop.history import Evaluations, History, plot
    from .loop.memory import keep_memory
    from .loop.model import Transformer
    from .loop.parametrisation import param_groups
    from .loop.presets import PRESETS, preset
    from .loop.training import DryRun, Trainer
    from .loop.translation import Binarised, Perplexity, Translation, average, evaluate_loss, translate
    from .norms import Norm
    from .reproduce.papers import cite
    from .schemes import Scheme
    from .study import Study
    from .surgery import Swaps, fold_norms, load_swapped, swap_norms, swap_residuals, unit_matrices_
else:
    _HOMES = {
        "config": (
            *("DataConfig", "GenerationConfig", "SearchConfig", "TrainingConfig", "TransformerConfig"),
            *("__version__", "tables"),
        ),
        "errors": ("DivergedError", "InputError", "Interrupted"),
        "loop.generation": ("Generation", "WindowPerplexity", "evaluate_windows", "generate"),
        "loop.history": ("Evaluations", "History", "plot"),
        "formats.huggingface": ("to_huggingface",),
        "loop.memory": ("keep_memory",),
        "loop.model": ("Transformer",),
        "loop.parametrisation": ("param_groups",),
        "loop.presets": ("PRESETS", "preset"),
        "norms": ("Norm",),
        "reproduce.papers": ("cite",),
        "schemes": ("Scheme",),
        "study": ("Study",),
        "surgery": ("Swaps", "fold_norms", "load_swapped", "swap_norms", "swap_residuals", "unit_matrices_"),
        "loop.training": ("DryRun", "Trainer"),
        "loop.translation": ("Binarised", "Perplexity", "Translation", "average", "evaluate_loss", "translate"),
        **dict.fromkeys(("analysis", "figures", "nn"), ()),
    }
    """The public names by the module that defines them. A module is imported on first use, because most of them import
    torch. A module without names is public itself."""

    def __getattr__(name):
        """Imports the module that defines a public name, when the name is first used, and returns the name's value."""
        if name == "_core":
            return _loading.load()
        home = name if name in _HOMES else next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f".{home}", __name__)
        # Python calls this function only for missing globals, so it is called once for each name.
        globals()[name] = module if home == name else getattr(module, name)
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__all__})
