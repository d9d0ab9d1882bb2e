"""The papers' learning-rate schedules for fairseq. The rates are computed by the training loop's own schedules."""

import dataclasses
import math
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II, DictConfig

from normformer_rs import _core
from normformer_rs.config import TrainingConfig
from normformer_rs.errors import InputError


def _field(default: Any, text: str) -> Any:
    """Returns a dataclass field with a default and a help text, from which fairseq makes a flag."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class InverseSqrtConfig(FairseqDataclass):
    warmup_updates: int = _field(4000, "n_w, updates of linear warm-up; 0: a constant rate")
    warmup_init_lr: float = _field(0.0, "rate that the warm-up to --lr starts from")
    lr_scale: Optional[float] = _field(  # noqa: UP045
        None, "λ of Nguyen & Salazar 2019, eq 7: λ/√d·min(1/√n, n/n_w^1.5); --lr is not used then"
    )
    lr_width: Optional[int] = _field(None, "d of eq 7; none: the model's width")  # noqa: UP045
    lr: list[float] = II("optimization.lr")  # noqa: RUF009


@dataclasses.dataclass
class ValDecayConfig(FairseqDataclass):
    warmup_updates: int = _field(0, "updates of linear warm-up")
    warmup_init_lr: float = _field(0.0, "rate that the warm-up starts from")
    lr_decay_rule: str = _field(
        "release", "when the rate falls: release (a validation below each of the last) or paper (no new best)"
    )
    lr_decay_factor: float = _field(0.8, "what the rate is then multiplied by")
    lr_decay_patience: int = _field(3, "how many validations the rule looks at")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
    lr: list[float] = II("optimization.lr")  # noqa: RUF009


class _Schedule(FairseqLRScheduler):
    """A learning-rate schedule of fairseq whose rates are those of a schedule of the training loop. Updates are counted
    from 1."""

    def __init__(self, cfg: Any, optimizer: Any, name: Any, width: int = 1, **options: Any) -> None:
        """`name` is the schedule's name in the training loop, `width` the model's width, and `options` are options of
        `TrainingConfig`. Sets the rate of the first update."""
        super().__init__(cfg, optimizer)
        if len(cfg.lr) > 1:
            raise InputError(f"the schedule takes one --lr, not one an epoch; got {list(cfg.lr)}")
        lr = float(cfg.lr[0])
        if not 0 < lr < math.inf:
            raise InputError(f"--lr must be greater than 0; got {lr}")
        options = {"lr": lr, "warmup_init_lr": _warmup_init_lr(cfg), **options}
        training = TrainingConfig(schedule=name, warmup=cfg.warmup_updates, **options)
        self.schedule, self.made = _core.Schedule(training.to_json(), width), 0
        """The schedule of the training loop, and the number of updates made so far."""
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        """Sets the rate of the next update and returns it. fairseq passes the number of updates made so far."""
        self.made = num_updates
        self.optimizer.set_lr(self.schedule.learning_rate(num_updates + 1))
        return self.optimizer.get_lr()


def _warmup_init_lr(cfg: Any) -> float:
    """Returns the rate from which the warm-up starts; 0 if the flag is not given. Errors: InputError for a rate that
    does not fit."""
    rate = float(cfg.warmup_init_lr)
    if rate == -1:  # fairseq's value for a flag that is not given
        return 0.0
    if not 0 <= rate < math.inf:
        raise InputError(f"--warmup-init-lr must be at least 0; got {rate}")
    if rate > 0 and cfg.warmup_updates == 0:
        raise InputError(f"--warmup-init-lr {rate} begins a warm-up: give --warmup-updates, or leave it out")
    return rate


@register_lr_scheduler("nfrs_inverse_sqrt", dataclass=InverseSqrtConfig)
class InverseSqrt(_Schedule):
    """A schedule with the rate λ/√d·min(1/√n, n/n_w^1.5) in update n if --lr-scale λ is given. Otherwise the rate rises
    linearly to --lr in n_w updates, and then is lr·√(n_w/n)."""

    def __init__(self, cfg: Any, optimizer: Any) -> None:
        """Makes the schedule from --lr, or from λ and the width. Errors: InputError for flags that do not fit."""
        if cfg.lr_scale is None:
            if cfg.lr_width is not None:
                raise InputError("--lr-width is an option of --lr-scale: give that too, or leave it out")
            super().__init__(cfg, optimizer, "inverse-sqrt")
            return
        if not 0 < cfg.lr_scale < math.inf:
            raise InputError(f"--lr-scale must be greater than 0; got {cfg.lr_scale}")
        if _warmup_init_lr(cfg) > 0:
            raise InputError("--lr-scale warms up from 0: leave --warmup-init-lr out")
        width = _model_width(cfg) if cfg.lr_width is None else cfg.lr_width
        if width < 1:
            raise InputError(f"--lr-width must be at least 1; got {width}")
        super().__init__(cfg, optimizer, "inverse-sqrt", width, lr=None, lr_scale=float(cfg.lr_scale))


def _model_width(cfg: Any) -> int:
    """Returns the width of the embeddings of the model that is trained with this schedule."""
    root: Any = cfg._get_root() if isinstance(cfg, DictConfig) else {}
    widths = [getattr(root.get("model"), f"{side}_embed_dim", None) for side in ("encoder", "decoder")]
    width = next(filter(None, widths), None)
    if width is None:
        raise InputError(
            "--lr-scale needs --lr-width here: the model has neither encoder_embed_dim nor decoder_embed_dim"
        )
    return int(width)


@register_lr_scheduler("nfrs_val_decay", dataclass=ValDecayConfig)
class ValDecay(_Schedule):
    """A schedule with linear warm-up to --lr; then the rate is multiplied by --lr-decay-factor whenever
    --lr-decay-rule says so (Nguyen & Salazar 2019, §2.4, and their release). The rule looks at the validations at the
    ends of epochs, measured by --best-checkpoint-metric."""

    def __init__(self, cfg: Any, optimizer: Any) -> None:
        rule = {name: getattr(cfg, name) for name in ("lr_decay_rule", "lr_decay_factor", "lr_decay_patience")}
        super().__init__(cfg, optimizer, "val-decay", **rule)
        self.is_resumed = False

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        """Passes the result of a validation to the schedule. A higher result is better there, so a loss changes its
        sign."""
        super().step(epoch, val_loss)
        if val_loss is not None:
            self.schedule.evaluated(self.made, val_loss if self.cfg.maximize_best_checkpoint_metric else -val_loss)
        return self.step_update(self.made)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "memory": self.schedule.memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a checkpoint's state. Errors: InputError for the state of another schedule."""
        if "memory" not in state:
            raise InputError("the checkpoint was trained with another --lr-scheduler: give --reset-lr-scheduler")
        super().load_state_dict(state)
        self.schedule.memory, self.is_resumed = state["memory"], True

    def resume(self, extra: dict[str, Any]) -> None:
        """Passes the result of the validation at the end of the previous epoch to the schedule. fairseq wrote the
        checkpoint before the schedule got that result, so the loaded state does not contain it."""
        if self.is_resumed and extra["train_iterator"].get("iterations_in_epoch") == 0:
            self.step(extra["train_iterator"]["epoch"] - 1, extra.get("val_loss"))
