"""Transformers with every norm, residual scheme and initialisation, trained in Rust.

>>> import normformer_rs as nf
>>> model, training = nf.preset("transformer-tiny")
>>> model.d_model, training.lr
(128, 0.005)
"""

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError('normformer_rs needs torch 2.11, which is not installed: pip install "torch==2.11.*"') from error

# The extension is linked against libtorch 2.11, whose C++ interface no other version has.
if not str(torch.__version__).startswith("2.11."):
    raise ImportError(f'normformer_rs needs torch 2.11, found torch {torch.__version__}: pip install "torch==2.11.*"')

# torch has come first: its import maps the libtorch that the extension is linked against.
from . import analysis, nn, surgery
from ._core import DivergedError, InputError, Interrupted, __version__
from .config import DataConfig, SearchConfig, TrainingConfig, TransformerConfig, tables
from .history import Evaluations, History
from .model import Transformer
from .presets import PRESETS, preset
from .training import DryRun, Trainer
from .translation import Binarised, Perplexity, Translation, average, evaluate_loss, translate

__all__ = [
    "PRESETS",
    "Binarised",
    "DataConfig",
    "DivergedError",
    "DryRun",
    "Evaluations",
    "History",
    "InputError",
    "Interrupted",
    "Perplexity",
    "SearchConfig",
    "Trainer",
    "TrainingConfig",
    "Transformer",
    "TransformerConfig",
    "Translation",
    "__version__",
    "analysis",
    "average",
    "evaluate_loss",
    "nn",
    "preset",
    "surgery",
    "tables",
    "translate",
]
