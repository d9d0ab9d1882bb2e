"""Callbacks for Hugging Face's Trainer. One profiles admin, exempts gains from weight decay, and logs gains; the other
reports to a trial of a study."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from .._optional import require
from ..nn.training import profile_at_first_forward
from .gains import Undecayed, gain_values, gradient_values

transformers: Any = require("transformers", "normformer_rs.integrations.huggingface")


class NormCallback(transformers.TrainerCallback):
    """Adds to Hugging Face's Trainer the steps that this package's norms and schemes need.

    * The first training batch profiles admin's gains, unless they have moved from 1 already (a resumed run).
    * Gains and schemes' parameters are not decayed: during each step they are in the group without weight decay. The
      Trainer itself decides by the names and classes of modules, and decays some of them.
    * Each log of a training loss gets `gain/NAME` of every norm's gain and scheme's parameter (a vector's mean), and
      `alpha/NAME` of branchnorm's α_t.
    * With `gradients=True` each such log also gets `gradient/NAME`: the Euclidean norm of each layer's gradient at the
      last step, after the Trainer's clipping. The Trainer's own `grad_norm` is measured before clipping.

    `NormCallback.add_to(trainer)` puts the callback before those that report to TensorBoard, W&B and others.
    `Trainer(callbacks=[NormCallback()])` puts it after them: then gains appear only on the screen and in
    `trainer.state.log_history`.

    Args:
        profile, undecayed, log: True for the first, the second and the third of these steps.
        gradients: True to log the norms of gradients; the host then waits for the device at each step.

    Errors: ImportError without transformers; InputError for an optimizer that is not torch's, such as DeepSpeed's.
    """

    def __init__(
        self, *, profile: bool = True, undecayed: bool = True, log: bool = True, gradients: bool = False
    ) -> None:
        self.profile, self.undecayed, self.log, self.gradients = profile, undecayed, log, gradients
        self._is_first = False
        """True if the Trainer calls this callback before those that report."""
        self._norms: dict[str, float] = {}
        """The gradient norms of the last step, by their names in the log."""
        self._ends: list[Callable[[], None]] = []
        """The functions that undo what `on_train_begin` has set up."""

    @classmethod
    def add_to(cls, trainer: Any, **options: Any) -> "NormCallback":
        """Adds a new callback to the trainer as its first one, and returns it."""
        callback = cls(**options)
        callback._is_first = True
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, optimizer: Any, **_: Any) -> None:
        self._end()  # an earlier training may have ended with an error
        self._norms = {}
        if self.profile:
            self._ends.append(profile_at_first_forward(model))
        if self.undecayed:
            self._ends.append(Undecayed(optimizer, model).remove)
        if (self.log or self.gradients) and args.report_to and not self._is_first:
            warnings.warn(
                f"{', '.join(args.report_to)} will not show gains, because it gets each log before NormCallback: "
                "use NormCallback.add_to(trainer)",
                stacklevel=2,
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if self.gradients:
            self._norms = gradient_values(model)

    def on_log(self, args: Any, state: Any, control: Any, model: nn.Module, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            values = (gain_values(model) if self.log else {}) | self._norms
            logs.update(values)
            # The Trainer has already appended a copy of the logs to the history.
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end()

    def _end(self) -> None:
        """Undoes what `on_train_begin` has set up. It may be called again."""
        while self._ends:
            self._ends.pop()()


class TrialCallback(transformers.TrainerCallback):
    """Reports a Trainer's losses to a trial of a `Study`, and ends the training when the trial is over.

    `Trainer(model=trial.apply(model), callbacks=[TrialCallback(trial)], …)`. Each log of a training loss is reported
    with the number of its step, so `logging_steps` sets how often the trial gets a loss; `eval_loss` is the trial's
    validation loss. The Trainer's `logging_nan_inf_filter`, which would hide a loss that is not finite, is turned off.

    Errors: ImportError without transformers.
    """

    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.logging_nan_inf_filter = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        is_new = logs and "loss" in logs and not self.trial.is_over
        if is_new and not self.trial.report(state.global_step, logs["loss"]):
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        if metrics and "eval_loss" in metrics:
            self.trial.valid = float(metrics["eval_loss"])
