"""The papers' learning-rate schedules, of update n counted from 1."""

import dataclasses
import math
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from normformer_rs._core import InputError

LOOK_BACK = 3


def _field(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class InverseSqrtConfig(FairseqDataclass):
    warmup_updates: int = _field(4000, "n_w, updates of linear warm-up; 0: a constant rate")
    warmup_init_lr: float = _field(0.0, "rate that the warm-up to --lr starts from")
    lr_scale: Optional[float] = _field(  # noqa: UP045
        None, "λ of Nguyen & Salazar 2019, eq 7: λ/√d·min(1/√n, n/n_w^1.5); --lr is not used then"
    )
    lr_width: int = _field(512, "d of eq 7, the model's width")
    lr: list[float] = II("optimization.lr")  # noqa: RUF009


class _Schedule(FairseqLRScheduler):
    """A rate that depends on the update, and on what was remembered of validations."""

    def __init__(self, cfg: Any, optimizer: Any) -> None:
        super().__init__(cfg, optimizer)
        if len(cfg.lr) > 1:
            raise InputError(f"the schedule takes one --lr, not one an epoch; got {list(cfg.lr)}")
        self.peak, self.made = float(cfg.lr[0]), 0
        self.step_update(0)

    def rate(self, n: int) -> float:
        raise NotImplementedError

    def warm(self, n: int) -> float:
        """Linear from the initial rate to the peak, reached at n_w."""
        if n >= self.cfg.warmup_updates:
            return self.peak
        return self.cfg.warmup_init_lr + (self.peak - self.cfg.warmup_init_lr) * n / self.cfg.warmup_updates

    def step_update(self, num_updates: int) -> float:
        """fairseq says how many updates were made; the rate is for the one to come."""
        self.made = num_updates
        self.optimizer.set_lr(self.rate(num_updates + 1))
        return self.optimizer.get_lr()


@register_lr_scheduler("nfrs_inverse_sqrt", dataclass=InverseSqrtConfig)
class InverseSqrt(_Schedule):
    """λ/√d·min(1/√n, n/n_w^1.5) with --lr-scale λ, else linear to --lr over n_w, then lr·√(n_w/n)."""

    def rate(self, n: int) -> float:
        cfg, warmup = self.cfg, self.cfg.warmup_updates
        if cfg.lr_scale is None:
            return self.warm(n) * math.sqrt(warmup / max(n, warmup)) if warmup else self.peak
        if not warmup:
            return cfg.lr_scale / math.sqrt(cfg.lr_width)
        return cfg.lr_scale / math.sqrt(cfg.lr_width) * min(n**-0.5, n / warmup**1.5)


@dataclasses.dataclass
class ValDecayConfig(FairseqDataclass):
    warmup_updates: int = _field(0, "updates of linear warm-up")
    warmup_init_lr: float = _field(0.0, "rate that the warm-up starts from")
    val_decay: float = _field(0.8, "what the rate is multiplied by")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
    lr: list[float] = II("optimization.lr")  # noqa: RUF009


@register_lr_scheduler("nfrs_val_decay", dataclass=ValDecayConfig)
class ValDecay(_Schedule):
    """Linear warm-up, then the peak, times 0.8 whenever a validation is worse than each of the three before it (the
    release of Nguyen & Salazar 2019). Validations are those at the ends of epochs, by --best-checkpoint-metric."""

    def __init__(self, cfg: Any, optimizer: Any) -> None:
        self.factor, self.scores = 1.0, []  # type: tuple[float, list[float]]
        super().__init__(cfg, optimizer)

    def rate(self, n: int) -> float:
        return self.warm(n) * self.factor

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        super().step(epoch, val_loss)
        if val_loss is not None:
            score = val_loss if self.cfg.maximize_best_checkpoint_metric else -val_loss
            earlier = self.scores[-LOOK_BACK:]
            if len(earlier) == LOOK_BACK and score < min(earlier) and self.made >= self.cfg.warmup_updates:
                self.factor *= self.cfg.val_decay
            self.scores.append(score)
        return self.step_update(self.made)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "factor": self.factor, "scores": self.scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.factor, self.scores = state["factor"], list(state["scores"])
