"""Callbacks for Lightning's Trainer. One profiles admin, exempts gains from weight decay, and logs gains; the other
reports to a trial of a study."""

from collections.abc import Callable
from typing import Any

from .._optional import require
from ..nn.training import profile_at_first_forward
from .gains import Undecayed, gain_values, gradient_values

pytorch: Any = require("lightning.pytorch", "normformer_rs.integrations.lightning")


class NormCallback(pytorch.Callback):
    """Adds to Lightning's Trainer the steps that this package's norms and schemes need.

    * The first training batch profiles admin's gains, unless they have moved from 1 already (a resumed run).
    * Gains and schemes' parameters are not decayed: within each step they are in a group without weight decay.
    * Every `trainer.log_every_n_steps` steps the trainer's loggers get `gain/NAME` of every norm's gain and scheme's
      parameter (a vector's mean), and `alpha/NAME` of branchnorm's α_t.
    * With `gradients=True` the loggers also get `gradient/NAME`: the Euclidean norm of each layer's gradient before
      clipping.

    >>> callback = NormCallback()  # lightning.pytorch.Trainer(callbacks=[callback])

    Args:
        profile, undecayed, log: True for the first, the second and the third of these steps.
        gradients: True to log the norms of gradients; the host then waits for the device at each step.

    Errors: ImportError without lightning; InputError for an optimizer that is not torch's, such as DeepSpeed's.
    """

    def __init__(
        self, *, profile: bool = True, undecayed: bool = True, log: bool = True, gradients: bool = False
    ) -> None:
        self.profile, self.undecayed, self.log, self.gradients = profile, undecayed, log, gradients
        self._norms: dict[str, float] = {}
        """The gradient norms of the last step, by their names in the log."""
        self._logged = -1
        """The number of the step that was logged last; -1 before the first."""
        self._ends: list[Callable[[], None]] = []
        """The functions that undo what `on_train_start` has set up."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._end()  # an earlier training may have been left without `on_train_end`
        self._norms = {}
        if self.profile:
            self._ends.append(profile_at_first_forward(pl_module))
        if self.undecayed:
            self._ends += [Undecayed(optimizer, pl_module).remove for optimizer in trainer.optimizers]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.gradients:
            self._norms = gradient_values(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        step = trainer.global_step
        wanted = self.log or self.gradients
        if wanted and trainer.loggers and step % trainer.log_every_n_steps == 0 and step != self._logged:
            self._logged = step  # with accumulation several batches have the same step, which is logged only once
            values = (gain_values(pl_module) if self.log else {}) | self._norms
            for logger in trainer.loggers if values else ():
                logger.log_metrics(values, step=step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        """Undoes what `on_train_start` has set up. It may be called again."""
        while self._ends:
            self._ends.pop()()


class TrialCallback(pytorch.Callback):
    """Reports a Trainer's losses to a trial of a `Study`, and ends the training when the trial is over.

    `Trainer(callbacks=[TrialCallback(trial)], …)`. For every step the loss of its last batch is reported. The metric
    with the name `monitor` is the trial's validation loss.

    Errors: ImportError without lightning.
    """

    def __init__(self, trial: Any, monitor: str = "val_loss") -> None:
        self.trial, self.monitor = trial, monitor

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is None:  # training_step has returned None, which skips the batch
            return
        loss = loss * trainer.accumulate_grad_batches  # Lightning has divided the loss by this number
        # With accumulation several batches have the same step, of which only the last one counts.
        is_new = trainer.global_step > len(self.trial.losses)
        if is_new and not self.trial.is_over and not self.trial.report(trainer.global_step, loss):
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking and self.monitor in trainer.callback_metrics:
            self.trial.valid = float(trainer.callback_metrics[self.monitor])
