"""Replaces two functions of fairseq: `load_checkpoint`, after which this package checks and sets up the training, and
`build_ema`, so that the average over time leaves out tensors that have no mean."""

import functools
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq import trainer as trainer_module
from fairseq.criterions.label_smoothed_cross_entropy_with_alignment import (
    LabelSmoothedCrossEntropyCriterionWithAlignment,
)

from normformer_rs.errors import InputError

from .criterion import FusedLabelSmoothedCrossEntropy
from .model import Decoder
from .schedules import ValDecay
from .vocabulary import target_types

_load, _average = checkpoint_utils.load_checkpoint, trainer_module.build_ema


@functools.wraps(_load)
def load_checkpoint(cfg: Any, trainer: Any, **options: Any) -> Any:
    """Runs fairseq's own function, then this package's checks and settings. Only fairseq-train calls it, before the
    first update."""
    extra, epochs = _load(cfg, trainer, **options)
    # A resumed val-decay schedule still needs the result of the last validation.
    if extra is not None and isinstance(trainer.lr_scheduler, ValDecay):
        trainer.lr_scheduler.resume(extra)
    model = trainer.get_model()
    is_ours = isinstance(getattr(model, "decoder", None), Decoder)
    if is_ours and isinstance(trainer.get_criterion(), LabelSmoothedCrossEntropyCriterionWithAlignment):
        raise InputError(
            "--load-alignments trains attention weights, which these architectures compute in evaluation only: leave "
            "it and its criterion out"
        )
    mask = getattr(getattr(model, "decoder", None), "vocab_mask", None)
    if mask is not None:
        _settle_vocabulary(mask, trainer)
    if not getattr(model, "is_profiled", True):  # a model without gains to profile has no such flag
        _check_profiling(model)
    return extra, epochs


checkpoint_utils.load_checkpoint = load_checkpoint


@functools.wraps(_average)
def build_ema(model: Any, config: Any, device: Any) -> Any:
    """Returns fairseq's average of the model over time (EMA). Counters, switches and masks are copied instead of
    averaged, because they have no mean."""
    ema = _average(model, config, device)
    if ema is not None:
        named = ((name, t) for name, t in model.state_dict().items() if isinstance(t, torch.Tensor))
        ema.skip_keys = {*ema.skip_keys, *(name for name, t in named if not t.is_floating_point())}
    return ema


trainer_module.build_ema = build_ema


def _settle_vocabulary(mask: torch.Tensor, trainer: Any) -> None:
    """Fills the mask of V_t from the training data, also when a training is resumed."""
    if not isinstance(trainer.get_criterion(), FusedLabelSmoothedCrossEntropy):
        raise InputError("--vocab-mask needs --criterion nfrs_label_smoothed_cross_entropy")
    if getattr(trainer.cfg.task, "add_bos_token", False):
        raise InputError("--vocab-mask leaves BOS out of V_t, and --add-bos-token makes it a target: leave one out")
    mask.copy_(target_types(trainer.task, trainer.cfg.dataset.train_subset))


def _check_profiling(model: Any) -> None:
    """Raises InputError if admin's gains cannot be set from the first batch, because the parameters are not in f32."""
    dtype = next(model.parameters()).dtype
    if dtype != torch.float32:
        # Profiling would be lost: fairseq has copied the parameters to f32 already, and the copies, which do not have
        # the new gains, overwrite the parameters at the first update.
        raise InputError(f"admin sets its gains from the first batch, in f32; got {dtype}: use --amp")
