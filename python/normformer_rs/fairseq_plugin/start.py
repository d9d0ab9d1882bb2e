"""What is settled when fairseq-train has loaded its checkpoint, or found none, and before the first update."""

import functools
from typing import Any

import torch
from fairseq import checkpoint_utils

from normformer_rs._core import InputError

from .criterion import FusedLabelSmoothedCrossEntropy
from .schedules import ValDecay
from .vocabulary import target_types

_load = checkpoint_utils.load_checkpoint


@functools.wraps(_load)
def load_checkpoint(cfg: Any, trainer: Any, **options: Any) -> Any:
    """fairseq's, which only fairseq-train calls."""
    extra, epochs = _load(cfg, trainer, **options)
    if extra is not None and isinstance(trainer.lr_scheduler, ValDecay):
        trainer.lr_scheduler.resume(extra)
    model = trainer.get_model()
    mask = getattr(getattr(model, "decoder", None), "vocab_mask", None)
    if mask is not None:
        _settle_vocabulary(mask, trainer)
    if not getattr(model, "is_profiled", True):
        _check_profiling(model)
    return extra, epochs


checkpoint_utils.load_checkpoint = load_checkpoint


def _settle_vocabulary(mask: torch.Tensor, trainer: Any) -> None:
    """V_t is that of the data to be trained on, a resumed training's like a new one's."""
    if not isinstance(trainer.get_criterion(), FusedLabelSmoothedCrossEntropy):
        raise InputError("--vocab-mask needs --criterion nfrs_label_smoothed_cross_entropy")
    mask.copy_(target_types(trainer.task, trainer.cfg.dataset.train_subset))


def _check_profiling(model: Any) -> None:
    dtype = next(model.parameters()).dtype
    if dtype != torch.float32:
        # fairseq's f32 copies of the parameters were made before and would overwrite the gains
        raise InputError(f"admin sets its gains from the first batch, in f32; got {dtype}: use --amp")
