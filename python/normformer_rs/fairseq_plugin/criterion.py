"""The plug-in's criterion: label-smoothed cross-entropy over the target vocabulary, computed by one fused operator."""

import dataclasses
from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.dataclass import ChoiceEnum
from torch import Tensor

from normformer_rs.config import TrainingConfig
from normformer_rs.errors import InputError

OPS = torch.ops.normformer_rs
_SMOOTHING = next(field for field in TrainingConfig.FIELDS if field.name == "smoothing")
_Smoothing = ChoiceEnum(list(_SMOOTHING.choices))


@dataclasses.dataclass
class FusedConfig(LabelSmoothedCrossEntropyCriterionConfig):
    smoothing: _Smoothing = dataclasses.field(  # type: ignore[valid-type]
        default=_SMOOTHING.default, metadata={"help": f"{_SMOOTHING.help} Default: {_SMOOTHING.default}."}
    )


@register_criterion("nfrs_label_smoothed_cross_entropy", dataclass=FusedConfig)
class FusedLabelSmoothedCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """Computes A·(−log p_t) + B·Σ_{v∈V_t} −log p_v, summed over the real targets; V_t is the model's vocabulary mask,
    or the whole vocabulary.

    `fairseq`: A = 1 − ε − ε_i, B = ε_i = ε/(|V_t| − 1). `twt`: A = 1 − ε, B = ε/|V_t|. Targets outside V_t, which only
    validation data may have, count as UNK.
    """

    # fairseq finds the arguments by these names, so they cannot be renamed.
    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        smoothing: Any,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
    ) -> None:
        """Reads the rule of smoothing and the id of UNK; the other arguments are fairseq's."""
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.smoothing, self.unknown = str(smoothing), task.target_dictionary.unk()
        self._known: tuple[Tensor, int, Tensor, int] | None = None
        """The model's mask, its version, and the two results of `_vocabulary` for them."""

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Returns the results of fairseq's method. In training the log also has the number of targets outside V_t."""
        loss, size, log = super().forward(model, sample, reduce)
        mask, _ = self._vocabulary(model)
        if mask is not None and model.training:
            target = sample["target"]
            log["outside"] = (target.ne(self.padding_idx) & ~mask[target]).sum()
        return loss, size, log

    @classmethod
    def reduce_metrics(cls, logging_outputs: Any) -> None:
        """Raises InputError for training targets outside V_t. The check is here, because fairseq waits for the GPU here
        anyway."""
        if sum(log.get("outside", 0) for log in logging_outputs) > 0:
            raise InputError(
                "--vocab-mask: the training data hold targets that were not there when the training began: start "
                "it again, or leave --vocab-mask out"
            )
        super().reduce_metrics(logging_outputs)

    def compute_loss(self, model: Any, net_output: Any, sample: Any, reduce: bool = True) -> tuple[Tensor, Tensor]:
        """Returns the loss and the NLL: their sums over the targets, or with `reduce` False their values for each
        target."""
        logits, target, mask = self._prepare(model, net_output, sample)
        entries = logits.shape[-1] if mask is None else self._vocabulary(model)[1]
        if self.smoothing == "fairseq":
            per_entry = self.eps / max(entries - 1, 1)  # the weight of every vocabulary entry: B
            on_target = 1 - self.eps - per_entry  # the target's further weight: A
        else:
            per_entry = self.eps / entries
            on_target = 1 - self.eps
        loss, nll, _ = OPS.label_smoothed_cross_entropy(logits, target, mask, on_target, per_entry, self.padding_idx)
        return (loss.sum(), nll.sum()) if reduce else (loss, nll)

    def compute_accuracy(self, model: Any, net_output: Any, sample: Any) -> tuple[Tensor, Tensor]:
        """Returns the number of targets that the model predicts, and the number of real targets."""
        logits, target, mask = self._prepare(model, net_output, sample)
        is_real = target.ne(self.padding_idx)
        guessed = (logits if mask is None else logits.masked_fill(~mask, float("-inf"))).argmax(1)
        return (guessed.eq(target) & is_real).sum(), is_real.sum()

    def _prepare(self, model: Any, net_output: Any, sample: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the logits (N, V), the targets (N,), both without the ignored prefix, and the mask of V_t, or None.
        Targets outside V_t are replaced by UNK."""
        if getattr(_decoder(model), "adaptive_softmax", None) is not None:
            raise InputError(
                "--criterion nfrs_label_smoothed_cross_entropy takes logits of the whole vocabulary, and a model with "
                "--adaptive-softmax-cutoff has none: use --criterion adaptive_loss"
            )
        logits, target = net_output[0], model.get_targets(sample, net_output)
        if self.ignore_prefix_size > 0:
            logits, target = logits[:, self.ignore_prefix_size :], target[:, self.ignore_prefix_size :]
        logits, target = logits.flatten(0, -2), target.flatten()
        mask, _ = self._vocabulary(model)
        if mask is None:
            return logits, target, None
        is_known = mask[target] | target.eq(self.padding_idx)
        return logits, torch.where(is_known, target, self.unknown), mask

    def _vocabulary(self, model: Any) -> tuple[Tensor | None, int]:
        """Returns V_t as a flag for each vocabulary entry, and |V_t|; (None, 0) if the model has no mask. |V_t| is
        counted again only after the mask was written to, because counting waits for the GPU."""
        mask = getattr(_decoder(model), "vocab_mask", None)
        if mask is None:
            return None, 0
        # `_version` is torch's count of writes to the tensor.
        if self._known is not None:
            known_mask, version, flags, size = self._known
            if known_mask is mask and version == mask._version:
                return flags, size
        flags, size = mask.bool(), int(mask.sum())
        self._known = mask, mask._version, flags, size
        return flags, size


def _decoder(model: Any) -> Any:
    """Returns the model's decoder, or None. The model may be inside a distributed wrapper."""
    while hasattr(model, "module"):
        model = model.module
    return getattr(model, "decoder", None)
