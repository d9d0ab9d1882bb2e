"""Estimates what a study will cost in operations, time, memory and disk, from a few measured updates of each arm."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..loop.history import History
from ..loop.training import DryRun
from ..reproduce.corpora import Corpus, Files, prepare
from ..reproduce.runs import trainer_of
from .declared import Cell, Study

_UPDATES = 8
"""The number of updates that are made to estimate the cost of an arm."""
_WARM = 3
"""The number of first updates that are not timed, because they are slower: they allocate memory."""


class Cost(NamedTuple):
    """The cost of an arm at one depth with one initialisation. Unless noted otherwise, a number is the total of all its
    runs."""

    cell: Cell
    runs: int
    parameters: int
    flop: float
    """The floating-point operations: 6 · parameters · padded tokens (Kaplan et al. 2020)."""
    seconds: float
    memory: int
    """The memory that one run needs, in bytes."""
    disk: int
    """The bytes that the folders of all runs need on the disk."""


def costs(study: Study, device: str) -> list[Cost]:
    """Returns the cost of each arm, estimated from a few updates. Errors: the same as those of a run."""
    name, corpus = study.corpus
    with tempfile.TemporaryDirectory() as folder:
        files = prepare(name, Path(study.data), Path(folder), {name: corpus})
        return [_cost(study, cell, corpus, files, device) for cell in study.cells]


def _cost(study: Study, cell: Cell, corpus: Corpus, files: Files, device: str) -> Cost:
    """Returns the cost of a cell's runs, from `_UPDATES` updates of one of them. `files` are the corpus' files by
    role."""
    options = {**corpus.options, **study.row(cell, study.lr[0], seed=1).options}
    # Each seed has one run for each rate, to choose the rate, and one more run, which is reported.
    runs, updates = study.seeds * (len(study.lr) + 1), options["updates"]
    dry_run: DryRun = trainer_of(options, files, device).dry_run()
    short_options = {
        "updates": _UPDATES,
        "evaluate_every": _UPDATES,
        "warmup": _UPDATES,
        "evaluation_beam": 0,
        "criterion": "loss",
    }
    with tempfile.TemporaryDirectory() as output:
        trainer = trainer_of({**options, **short_options}, files, device)
        history: History = trainer.fit(output, progress=False, tensorboard=False, curves=False, overwrite=True)
        # diff[i] is the time of update i + 2. The first _WARM updates are left out, and the last, whose time includes
        # the evaluation.
        seconds = float(np.median(np.diff(history.seconds)[_WARM - 1 : -1]))
        disk = sum(path.stat().st_size for path in Path(output).rglob("*") if path.is_file())
    tokens = updates * trainer.training.max_tokens * trainer.training.accumulate  # type: ignore[attr-defined]
    flop = 6.0 * dry_run.parameters * tokens * runs
    return Cost(cell, runs, dry_run.parameters, flop, seconds * updates * runs, dry_run.training_bytes, disk * runs)
