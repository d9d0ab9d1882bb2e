"""Reports the curves and rows of a study to TensorBoard, Weights & Biases and trackio, with their own clients."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .._optional import require
from ..loop.history import LOG, History
from ..loop.training import TENSORBOARD
from ..reproduce.declared import Row
from ..reproduce.runs import folder_of
from ..reproduce.tables import number
from ..text import read_json
from .declared import Study
from .outcome import Outcome
from .trials import log_of

_Curve = tuple[str, int, float]
"""A point of a curve: the curve's name, the update, the value."""


def to_tensorboard(outcome: Outcome, output: Path) -> None:
    """Writes TensorBoard's events of each run into a folder below `output`/tensorboard."""
    require("tensorboard", "--report tensorboard")
    from torch.utils.tensorboard import SummaryWriter as writer

    for row, numbers, curves in _runs(outcome, output):
        with writer(str(output / TENSORBOARD / folder_of(row))) as run:
            for name, update, value in curves:
                run.add_scalar(name, value, update)
            # By default add_hparams writes into a folder of its own; "." is the run's folder.
            run.add_hparams({**row.key, "seed": row.seed}, numbers, run_name=".")


def to_wandb(outcome: Outcome, output: Path) -> None:
    """Logs each run to Weights & Biases, in the project with the study's title. W&B's environment variables set account
    and server."""
    _log(require("wandb", "--report wandb"), outcome, output)


def to_trackio(outcome: Outcome, output: Path) -> None:
    """Logs each run to trackio, in the project with the study's title."""
    _log(require("trackio", "--report trackio"), outcome, output)


def _log(client: Any, outcome: Outcome, output: Path) -> None:
    """Logs each run with a client that has the functions init, log and finish of wandb."""
    for row, numbers, curves in _runs(outcome, output):
        name = ", ".join([*row.key.values(), f"seed {row.seed}"])
        client.init(project=outcome.study.title, name=name, config={**row.key, "seed": row.seed})
        values_by_update: dict[int, dict[str, float]] = {}
        for curve, update, value in curves:
            values_by_update.setdefault(update, {})[curve] = value
        # The row's numbers describe the end of the run, so they are logged with the last update.
        last = max(values_by_update, default=0)
        values_by_update.setdefault(last, {}).update({f"row/{column}": value for column, value in numbers.items()})
        for update, values in sorted(values_by_update.items()):
            client.log(values, step=update)
        client.finish()


REPORTS: dict[str, Callable[[Outcome, Path], None]] = {
    TENSORBOARD: to_tensorboard,
    "wandb": to_wandb,
    "trackio": to_trackio,
}
"""The functions that report a study, by the names that --report takes."""


def _runs(outcome: Outcome, output: Path) -> Iterator[tuple[Row, dict[str, float], list[_Curve]]]:
    """Yields, for each measured run, its row, the numbers measured for it, and the points of its curves."""
    for row in _rows(outcome.study):
        columns = outcome.results.find(row)
        if columns is not None:
            yield row, _numbers(columns), list(_curves(output / "runs", row))


def _rows(study: Study) -> Iterator[Row]:
    """Yields the rows that the study may have measured: with every rate, those that choose the rate and those that are
    reported."""
    for seed in range(1, study.seeds + 1):
        for cell in study.cells:
            yield from study.tuning(cell, seed)
            yield from (study.row(cell, rate, seed) for rate in study.lr)


def _numbers(columns: dict[str, str]) -> dict[str, float]:
    """Returns those of a row's losses, scores and times that are finite numbers."""
    names = ("valid_nll", "train_nll", "first_nll", "bleu", "largest_grad_norm", "seconds")
    return {name: value for name in names if (value := number(columns.get(name) or "")) is not None}


def _curves(runs: Path, row: Row) -> Iterator[_Curve]:
    """Yields the points of a run's curves, from the log of the training loop or from the file of a trial's losses."""
    folder, trial = runs / folder_of(row), log_of(row, runs)
    if (folder / LOG).exists():
        history = History.read(folder)
        for update, nll, norm in zip(history.update, history.nll, history.grad_norm):
            yield "train/nll", int(update), float(nll)
            yield "train/grad_norm", int(update), float(norm)
        for update, nll in zip(history.evaluations.update, history.evaluations.nll):
            yield "valid/nll", int(update), float(nll)
    elif trial.exists():
        for update, loss in enumerate(read_json(trial, "its curve cannot be reported: move it away")["losses"], 1):
            yield "train/nll", update, loss
