"""Trains models. The training loop runs in Rust and reports to this module between updates."""

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from .. import _core
from .._optional import available
from ..config import DataConfig, TrainingConfig, TransformerConfig, readable
from ..declarations.norm import own_norms, using
from ..errors import InputError
from ..nn.distributed import world
from .advice import warnings_of
from .history import History, layer_values
from .progress import Progress, Silent, choose, number
from .quantities import size
from .signals import as_ctrl_c, held, listening

logger = logging.getLogger("normformer_rs")
logger.addHandler(logging.NullHandler())
Callback = Callable[[str, Mapping[str, Any]], None]
"""A function that `fit` calls with an event's name and its values."""
CURVES, TENSORBOARD = "curves.png", "tensorboard"
"""The names of a run's picture and of the folder with its TensorBoard events."""
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@dataclasses.dataclass(frozen=True)
class DryRun:
    """The sizes of a run: of model, vocabulary and data in numbers, of memory in bytes."""

    parameters: int
    parameter_bytes: int
    activation_bytes: int
    """The peak of the tensors' memory in the forward and backward pass over the largest batch, without parameters,
    gradients and moments. It is measured on the CPU, on a few of many layers and a part of a large batch."""
    training_bytes: int
    """The sum of `activation_bytes`, parameters, gradients and moments; on the CPU also the memory that the process
    has now: libraries and text. The allocator's gaps come on top: see `NORMFORMER_RS_ALLOCATOR` in docs/train.md."""
    vocabulary: int
    sentences: int
    """The number of sentence pairs, or of segments of a language model's text."""
    skipped: int
    """The number of pairs left out because they are too long."""


class Trainer:
    """Trains a model on text files.

    Args:
        model: the options of the model. The size of the data's vocabulary takes the place of its `vocab_size`.
        training: the options of training; `TrainingConfig()` has defaults for everything.
        data: the files.

    >>> import normformer_rs as nfrs
    >>> trainer = nfrs.Trainer(*nfrs.preset("transformer-tiny"), nfrs.DataConfig(train_target="train.en"))
    """

    chosen: set[str] | None = None
    """The names of the options that a user has given on the command line; None if they are not known."""

    def __init__(self, model: TransformerConfig, training: TrainingConfig, data: DataConfig) -> None:
        for name, given, kind in (
            ("model", model, TransformerConfig),
            ("training", training, TrainingConfig),
            ("data", data, DataConfig),
        ):
            if not isinstance(given, kind):
                raise InputError(f"{name} must be a {kind.__name__}; got a {type(given).__name__}")
        self.model, self.training, self.data = model, training, data

    def warn(self, parameters: int) -> None:
        """Logs warnings about options that are valid but rarely wanted; `parameters` is the model's number of
        parameters."""
        for sentence in warnings_of(self.model, self.training, parameters, self.chosen):
            logger.warning(sentence)

    def check(self) -> None:
        """Checks the options of model and training, without the data. Errors: InputError for contradictions."""
        # A user's own norm is written to JSON as a declaration; inside the block it stands for the user's class.
        with using(*own_norms(self.model.asdict())):
            _core.check_options(*self._json()[:2])

    def dry_run(self) -> DryRun:
        """Reads the data and computes the size of the run, without training. Errors as for `fit`."""
        with using(*own_norms(self.model.asdict())):
            needs = json.loads(_core.dry_run(*self._json()))
        return DryRun(**{field.name: needs[field.name] for field in dataclasses.fields(DryRun)})

    def within(self, memory: int) -> "Trainer":
        """Returns a trainer of the same run that needs at most `memory` bytes, as `dry_run` counts them.

        If the run needs more, it recomputes activations (`activation_checkpointing`), which changes no result.

        Args:
            memory: the limit in bytes.

        Errors: InputError if the run needs more even when it recomputes activations; the message says which
        `max_tokens` would fit.
        """
        # The latest attempt needs `activations` bytes for activations, and `fixed` bytes for everything else.
        fixed = activations = 0
        # The run is tried as it is, then with recomputation: False sorts before True.
        for checkpointing in sorted({self.training.activation_checkpointing, True}):
            training = self.training.replace(activation_checkpointing=checkpointing)
            trainer = Trainer(self.model, training, self.data)
            trainer.chosen = self.chosen
            needs = trainer.dry_run()
            if needs.training_bytes <= memory:
                if checkpointing and not self.training.activation_checkpointing:
                    logger.info("activations are recomputed: training needs about %s so", size(needs.training_bytes))
                return trainer
            fixed, activations = needs.training_bytes - needs.activation_bytes, needs.activation_bytes
        total = size(fixed + activations)
        problem = f"training needs about {total} with activation_checkpointing, memory is {size(memory)}"
        if fixed >= memory:
            raise InputError(
                f"{problem}; parameters, gradients and moments alone are {size(fixed)}: take a smaller model"
            )
        # The activations' memory is taken as proportional to max_tokens, and `fixed` does not depend on max_tokens.
        fits = int(self.training.max_tokens * (memory - fixed) / activations)
        raise InputError(
            f"{problem}: max_tokens of about {fits} would fit; accumulate makes an update of several such batches"
        )

    def fit(
        self,
        output: str | PathLike[str],
        *,
        resume: bool = False,
        from_checkpoint: str | int | None = None,
        init_from: str | PathLike[str] | None = None,
        overwrite: bool = False,
        progress: bool = True,
        tensorboard: bool = True,
        curves: bool = True,
        callbacks: Sequence[Callback] = (),
    ) -> History:
        """Trains, and returns the log.

        Args:
            output: the folder of checkpoints, vocabulary, log.jsonl and curves.png.
            resume: continue from the last checkpoint in `output`. If that is missing or damaged, continue from the
                newest whole one before it, with a warning.
            from_checkpoint: with `resume`, the checkpoint to continue from: "best", "last", its name, or its update.
            init_from: begin a new run with the weights of another run's best checkpoint, or of another one,
                "RUN:CHECKPOINT" ("average", "last", an update): trained, averaged or converted. Rows of tables are
                copied by vocabulary entry; entries that the other run does not have keep their initial values, with a
                warning. The model must have the same parameters; a warning names other options that differ.
            overwrite: start again if `output` holds a run.
            progress: a bar in a terminal or, if ipywidgets is installed, in a notebook; elsewhere a line every ten
                seconds; both on standard error.
            tensorboard: write `output`/tensorboard if tensorboard is installed.
            curves: draw `output`/curves.png at the end if matplotlib is installed.
            callbacks: functions of (event, values), called on the first process after the run's own log has the event:
                "started" (values update, updates, parameters, vocabulary, device, …), "updated" (update, epoch, loss,
                nll, lr, grad_norm, tokens_per_second, seconds, …; with `qk_clip` largest_logit; with `log_layers`
                layers: {gradients, gains} and, with `qk_clip`, logits),
                "evaluated" (update, epoch, loss, nll, perplexity, bleu, best, seconds). A number that JSON cannot hold,
                and BLEU that was not measured, is None. If one raises, the run saves and ends, and the error is raised
                here.

        Under `torchrun --nproc-per-node K`, or in a process group of torch.distributed that exists already, K processes
        train one model: each takes its share of the `accumulate`·K batches of an update, and the first one evaluates,
        writes and shows progress. The group that torchrun's processes form here stays until they end.

        Evaluations and warnings (of omitted sentences, of refused statistics) go to the logger "normformer_rs" and into
        log.jsonl.

        Only one run at a time may write to `output`; a second one is refused. If the process was killed, call again
        with `resume`; if config.json was not written yet, repeat the same call. checksums.txt shows whether the files
        that determine the weights are undamaged.

        Errors: InputError for wrong options or data, a folder in use, damaged files; DivergedError when the loss stops
        being finite; Interrupted after Ctrl-C, SIGTERM or SIGHUP, when everything is saved; OSError from the file
        system. An error in a signal's handler is raised here, too, after saving.
        """
        if resume and overwrite:
            raise InputError("resume and overwrite exclude each other: go on with the run, or start again?")
        if from_checkpoint is not None and not resume:
            raise InputError(f"from_checkpoint = {from_checkpoint!r} is a checkpoint to resume from: give resume, too")
        folder = readable("output", str(output))
        checkpoint = None if from_checkpoint is None else str(from_checkpoint)
        mode: Literal["new", "resume", "overwrite"] = "resume" if resume else "overwrite" if overwrite else "new"
        events = Path(output) / TENSORBOARD  # the folder of TensorBoard's files
        if tensorboard and os.path.lexists(events) and (events.is_symlink() or not events.is_dir()):
            what = "symbolic link, and a run writes through none but checkpoints" if events.is_symlink() else "file"
            raise InputError(f"{events} is a {what}: move it away, or choose another output")
        rank = world(self.training.device)  # (group's name, rank, size); None if this process trains alone
        is_first = rank is None or rank.rank == 0
        observer = _Silent()
        if is_first:
            uses_tensorboard = tensorboard and available("tensorboard")
            observer = _Observer(Path(output), choose(progress), uses_tensorboard, [self._started, *callbacks])
        norms = using(*own_norms(self.model.asdict()))
        # Signals act like Ctrl-C, but raise nothing until the loop asks for them between updates.
        with as_ctrl_c(), held(), contextlib.closing(observer), _own_modes(), norms:
            initial = None if init_from is None else readable("init_from", str(init_from))
            _core.train(*self._json(), folder, mode, rank, observer, from_checkpoint=checkpoint, init_from=initial)
        history = History.read(output)
        if is_first and curves and len(history.update) and available("matplotlib"):
            picture = Path(output) / CURVES
            if os.path.lexists(picture) and not _core.is_runs(str(picture)):
                logger.warning("%s is not a picture that a run has drawn: it stays, and no curves are drawn", picture)
            else:
                logger.info("curves: %s", history.plot(picture))
        return history

    def _started(self, name: str, event: Mapping[str, Any]) -> None:
        """Logs the warnings about options when the run has started; it is a callback of `fit`."""
        if name == "started":
            self.warn(event["parameters"])

    def _json(self) -> tuple[str, str, str]:
        """Returns the options of model, training and data as JSON. Errors: InputError for a `data_bin` with several
        shards of training data."""
        shards = sorted(Path(self.data.data_bin).glob("train1.*idx")) if self.data.data_bin else []
        if shards:
            raise InputError(
                f"{shards[0]}: fairseq reads train, train1, … as one; this loop reads train alone: preprocess the text "
                "into a single train"
            )
        return self.model.to_json(), self.training.to_json(), self.data.to_json()


@contextlib.contextmanager
def _own_modes() -> Iterator[None]:
    """Turns gradients on and autocast off inside the block, because a run sets its own precision whatever modes the
    caller has set."""
    cpu, cuda = torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), cpu, cuda:
        yield


class _Silent:
    """An observer that reports nothing; every process but the first has it."""

    def started(self, event: Mapping[str, Any]) -> None: ...
    def updated(self, event: Mapping[str, Any]) -> None: ...
    def evaluated(self, event: Mapping[str, Any]) -> None: ...
    def message(self, level: str, text: str) -> None: ...
    def close(self) -> None: ...


class _Observer(_Silent):
    """Passes the loop's reports to the progress bar, the logger and TensorBoard, then to the user's callbacks. Signals
    may interrupt only the callbacks: an interrupted TensorBoard writer would leave its queue's lock taken."""

    def __init__(self, output: Path, progress: Progress, tensorboard: bool, callbacks: Sequence[Callback]) -> None:
        self._output, self._progress, self._tensorboard, self._callbacks = output, progress, tensorboard, callbacks
        self._writer: Any = None

    def started(self, event: Mapping[str, Any]) -> None:
        logger.info(
            "%s parameters, %s types, %s, from update %s",
            f"{event['parameters']:,}",
            f"{event['vocabulary']:,}",
            event["device"],
            event["update"],
        )
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # From `purge_step` on TensorBoard drops older events, because a resumed run repeats their updates.
            self._writer = SummaryWriter(str(self._output / TENSORBOARD), purge_step=event["update"] + 1)
        self._show("started", event)
        self._call("started", event)

    def updated(self, event: Mapping[str, Any]) -> None:
        self._show("updated", event)
        self._write("train", event, "loss", "nll", "lr", "grad_norm", "largest_logit", "tokens_per_second")
        if self._writer is not None:
            for name, value in layer_values(event).items():
                self._writer.add_scalar(name, value, event["update"])
        self._call("updated", event)

    def evaluated(self, event: Mapping[str, Any]) -> None:
        bleu = event.get("bleu")
        logger.info(
            "update %s, epoch %s: validation loss %.3f, perplexity %.2f%s%s",
            event["update"],
            event["epoch"],
            number(event, "loss"),
            number(event, "perplexity"),
            "" if bleu is None else f", BLEU {bleu:.2f}",
            " (best)" if event["best"] else "",
        )
        self._show("evaluated", event)
        self._write("valid", event, "loss", "nll", "perplexity", "bleu")
        self._call("evaluated", event)

    def message(self, level: str, text: str) -> None:
        logger.log(_LEVELS.get(level, logging.INFO), text)

    def close(self) -> None:
        self._show("close")
        if self._writer is not None:
            self._writer.close()

    def _show(self, name: str, *event: Mapping[str, Any]) -> None:
        """Shows an event. If the terminal has closed, nothing is shown from then on, and the run continues."""
        try:
            getattr(self._progress, name)(*event)
        except OSError:
            self._progress = Silent()

    def _call(self, name: str, event: Mapping[str, Any]) -> None:
        """Calls the callbacks; signals may interrupt each of them."""
        for callback in self._callbacks:
            with listening():
                callback(name, event)

    def _write(self, group: str, event: Mapping[str, Any], *names: str) -> None:
        """Writes the event's values of these names to TensorBoard, as `group`/NAME."""
        if self._writer is not None:
            for name in names:
                if event.get(name) is not None:
                    self._writer.add_scalar(f"{group}/{name}", event[name], event["update"])
