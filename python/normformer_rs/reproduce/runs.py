"""The training runs of reproductions. Each has a folder, is resumed after a stop, and gets a verdict at its end."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import _core, text
from ..config import DataConfig, SearchConfig, TrainingConfig, TransformerConfig, split
from ..errors import DivergedError, InputError, Interrupted
from ..loop.history import LOG, History, read_events
from ..loop.progress import write
from ..loop.training import Trainer
from ..loop.translation import average, translate
from .corpora import CORPORA, Corpus, Files, check_text, prepare
from .declared import Options, Row, Scale, digest

VERDICT = "verdict.json"
"""The file in a run's folder that exists when the run is over."""
_LAST = 50
"""The number of updates in the last window, over which the training NLL is averaged."""
_NUMBERS = ("updates", "train_nll", "slope", "valid_nll", "unigram_entropy", "largest_grad_norm", "seconds")
_MOST_NATS = 100
"""An entropy above this limit, in nats, shows a damaged file: even 2⁶⁴ equally frequent entries have only 44."""


def folder_of(row: Row) -> str:
    """Returns the name of the row's folder. Rows with the same options and corpus share one folder and one run, even if
    they belong to different reproductions."""
    names = [row.options.get(name) for name in ("residual", "encoder_norm", "norm")]
    words = [name if isinstance(name, str) else type(name).__name__ for name in names if name] or [row.corpus]
    return "-".join([*words, digest([row.corpus, row.options, *([row.version] if row.version else [])])])


@dataclass(frozen=True)
class Run:
    """A finished run, and the row and the files that it was trained with."""

    output: Path
    row: Row
    files: Files
    verdict: Options
    """The losses in nats per token, and the verdict: diverged, trains, slow or stuck (docs/spec.md §4.14)."""
    has_ended: bool
    """True if the run reached its end; False if it stopped because its loss was no longer finite."""

    @cached_property
    def history(self) -> History:
        return History.read(self.output)


class Runs:
    """Makes and finds the runs whose folders are in one folder."""

    def __init__(
        self, folder: Path, data: Path, *, device: str, progress: bool, corpora: Mapping[str, Corpus] = CORPORA
    ) -> None:
        """`folder` holds the runs' folders, `data` the corpora. `progress`: True to show progress bars. `corpora`: the
        corpora by the names that rows use."""
        self.folder, self.data, self.device, self.progress = folder, data, device, progress
        self.corpora = corpora
        self._files: dict[str, Files] = {}

    def output(self, row: Row) -> Path:
        """Returns the folder of the row's run."""
        return self.folder / folder_of(row)

    def is_over(self, row: Row) -> bool:
        """Returns True if the row's run has a verdict, so that it is not trained again."""
        return (self.output(row) / VERDICT).exists()

    @contextlib.contextmanager
    def claim(self, row: Row) -> Iterator[bool]:
        """Locks the row's run during the block. Yields True if this process has the lock, False if another process is
        making the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / f".{folder_of(row)}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = True
            except BlockingIOError:
                is_ours = False
            yield is_ours
        finally:
            os.close(handle)

    def files(self, corpus: str) -> Files:
        """Returns the corpus' files by role; they are prepared at the first call only."""
        if corpus not in self._files:
            self._files[corpus] = prepare(corpus, self.data, self.folder / "text", self.corpora)
        return self._files[corpus]

    def run(self, row: Row) -> Run:
        """Returns the finished run of a row. It trains if the run has not begun yet, and continues a stopped run.

        Errors: InputError for options that do not fit and damaged files; Interrupted after Ctrl-C; OSError.
        """
        output = self.output(row)
        if not self.is_over(row):
            has_ended = self._train(row, output)
            verdict = {**judge(output, has_ended), "has_ended": has_ended}
            text.write_lines(str(output / VERDICT), [json.dumps(verdict)])
        verdict = read_verdict(output / VERDICT)
        has_ended = verdict.pop("has_ended")
        return Run(output, row, self.files(row.corpus), verdict, has_ended)

    def _train(self, row: Row, output: Path) -> bool:
        """Trains the row's run, or continues it. Returns True if it reached its end, False if it diverged. Errors: as
        `run`."""
        trainer = trainer_of({**self.corpora[row.corpus].options, **row.options}, self.files(row.corpus), self.device)
        is_begun = (output / "config.json").exists()
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            trainer.fit(output, resume=is_begun, progress=self.progress, tensorboard=False, curves=False)
        except DivergedError as error:
            write(f"{output.name}: {error}")
            return False
        except Interrupted as error:
            raise Interrupted(f"{output.name} {str(error).partition(';')[0]}; the same command goes on") from None
        return True

    def translations(self, run: Run, scale: Scale) -> tuple[list[str], list[str]]:
        """Returns the translations of the scored part, made with the scale's checkpoint and the row's search options,
        and the references. Translations are saved in the run's folder and made only once."""
        settings = [scale.checkpoint, scale.scored, run.row.search]
        saved = run.output / f"{scale.scored}-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]}.txt"
        if not saved.exists():
            if scale.checkpoint == "average":
                keep = max(1, run.row.options.get("keep", TrainingConfig().keep))  # type: ignore[attr-defined]
                # A short run has fewer evaluations, and so fewer checkpoints, than it may keep.
                average(run.output, last=min(len(run.history.evaluations.update), keep))
            lines = text.read_lines(str(run.files[f"{scale.scored}_source"]))
            search = SearchConfig(**run.row.search)
            translated = translate(run.output, lines, search, checkpoint=scale.checkpoint, device=self.device)
            text.write_lines(str(saved), (hypotheses[0].text for hypotheses in translated))
        # The text is split at newlines only, and empty lines stay, because a translation may be empty.
        return saved.read_text(encoding="utf-8").split("\n")[:-1], self.references(run.row, scale)

    def references(self, row: Row, scale: Scale) -> list[str]:
        """Returns the references of the scored part, with pieces of words joined."""
        lines = text.read_lines(str(self.files(row.corpus)[f"{scale.scored}_target"]))
        return [_core.join_line(line) for line in lines] if self.corpora[row.corpus].is_split else lines


def trainer_of(options: Options, files: Files, device: str) -> Trainer:
    """Returns the trainer of a run with these options and files. Errors: InputError for options that do not fit."""
    paths = {role: str(path) for role, path in files.items() if not role.startswith("test")}
    parts = split({**paths, **options, "device": device}, TransformerConfig, TrainingConfig, DataConfig)
    model, training, data = parts
    return Trainer(TransformerConfig(**model), TrainingConfig(**training), DataConfig(**data))


def parameters_of(options: Options, name: str, corpus: Corpus, data: Path) -> int:
    """Returns the number of parameters of a model with these options and the corpus' vocabulary. Errors: InputError for
    missing files."""
    check_text(name, data)
    with tempfile.TemporaryDirectory() as folder:
        files = prepare(name, data, Path(folder), {name: corpus})
        return trainer_of({**corpus.options, **options}, files, "cpu").dry_run().parameters


def read_verdict(path: Path) -> dict[str, Any]:
    """Returns the content of a verdict file: the result of `judge` and `has_ended`. Errors: InputError for a damaged
    file; FileNotFoundError."""
    advice = "remove it to judge the run again"
    content = text.read_json(path, advice)
    is_whole = (
        content.keys() == {"verdict", "has_ended", *_NUMBERS}
        and isinstance(content["verdict"], str)
        and isinstance(content["has_ended"], bool)
        and {type(content[name]) for name in _NUMBERS} <= {int, float}
        and not content["unigram_entropy"] > _MOST_NATS
    )
    if not is_whole:
        raise InputError(f"{path}: expected the numbers and words of a run's verdict; got others; {advice}")
    return content


def judge(output: Path, has_ended: bool) -> dict[str, Any]:
    """Returns a run's losses in nats per token, and its verdict by docs/spec.md §4.14. `output` is the run's folder;
    `has_ended` as in `Run`."""
    events = read_events(output / LOG)
    # The log of a resumed run has several events of its start.
    started = [event for event in events if event["event"] == "started"]
    entropy = next((event["unigram_entropy"] for event in started if event.get("unigram_entropy")), None)
    if entropy is None:
        raise InputError(f"{output / LOG}: the line of the run's start is damaged: remove {output} to run again")
    history = History.of(events, output)
    course = Course.of(history.nll)
    valid = float(history.evaluations.nll[-1]) if len(history.evaluations.nll) else math.nan
    return {
        "verdict": course.verdict(has_ended, entropy, valid),
        "updates": len(history.update),
        "train_nll": round(course.last, 4),
        "slope": round(course.slope, 4),
        "valid_nll": round(valid, 4),
        "unigram_entropy": round(entropy, 4),
        "largest_grad_norm": round(float(np.max(history.grad_norm)), 2) if len(history.grad_norm) else math.nan,
        "seconds": round(float(np.nanmax(history.seconds, initial=0.0))),
    }


class Course(NamedTuple):
    """Numbers that describe how the training NLL has changed, from its means over windows of 50 updates, or of a third
    of the run if that is less."""

    last: float
    """The mean of the last window."""
    fall: float
    """The mean of the window before the last minus the mean of the last: positive if the loss falls."""
    window: int
    """The number of updates in a window."""
    rise: float
    """The mean of the last window minus the lowest mean of any window."""
    error: float
    """The standard error of the difference of two windows, from the changes between neighbouring updates (von Neumann
    1941)."""

    @staticmethod
    def of(nll: Any) -> "Course":
        """Returns the numbers for a run's training NLL, one value for each update; NaN where the run is too short."""
        window = min(_LAST, len(nll) // 3)
        if window < 1:
            last, rise = (float(nll[-1]), 0.0) if len(nll) else (math.nan, math.nan)
            return Course(last, fall=math.nan, window=1, rise=rise, error=0.0)
        means = np.convolve(nll, np.full(window, 1 / window), "valid")
        last, before = float(means[-1]), float(means[-1 - window])
        # mean(diff²)/2 estimates the variance σ² of one update's loss. The difference of two means has 2σ²/window.
        error = math.sqrt(float(np.mean(np.diff(nll) ** 2)) / window)
        return Course(last, fall=before - last, window=window, rise=last - float(means.min()), error=error)

    def verdict(self, has_ended: bool, entropy: float, valid: float) -> str:
        """Returns the verdict by docs/spec.md §4.14. `has_ended`: False if the loss stopped being finite. `entropy`:
        the unigram model's entropy, in nats per token. `valid`: the validation NLL."""
        # A comparison with NaN is False, so with "not <" a rise of NaN counts as diverged, too.
        if not has_ended or not self.rise < max(0.05 * entropy, 2 * self.error):
            return "diverged"
        if valid <= 0.75 * entropy:
            return "trains"
        return "slow" if self.fall > 2 * self.error else "stuck"

    @property
    def slope(self) -> float:
        """The change per 1,000 updates."""
        return -1000 * self.fall / self.window
