"""Makes the runs of a study, seed by seed: first the runs that choose a rate for each arm, then the reported runs."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InputError
from ..loop.progress import write
from ..reproduce.command import measure
from ..reproduce.corpora import CORPORA
from ..reproduce.declared import Row
from ..reproduce.results import Results
from ..reproduce.tables import COLUMNS, number
from .declared import Cell, Study

if TYPE_CHECKING:
    from ..reproduce.runs import Runs

_WAIT = 1.0
"""The seconds to wait before looking again for rows that other processes make."""


class Chosen(NamedTuple):
    """The rate that was chosen for an arm and a seed."""

    rate: float | None
    """The chosen rate; None if the runs with all rates failed."""
    is_edge: bool
    """True if the chosen rate is the lowest or highest of several, so that a better one may lie beyond."""


def choose(values: Mapping[float, float | None], falls: bool) -> Chosen:
    """Returns the rate with the best value, on a tie the lowest such rate. `values` maps each rate to the metric of its
    run, or to None if the run failed. `falls` is True if lower values are better."""
    succeeded = {rate: value for rate, value in sorted(values.items()) if value is not None}
    if not succeeded:
        return Chosen(None, is_edge=False)
    best = (min if falls else max)(succeeded, key=succeeded.__getitem__)
    return Chosen(best, len(values) > 1 and best in (min(values), max(values)))


def value_of(columns: Mapping[str, str] | None, metric: str) -> float | None:
    """Returns a row's metric. Returns None if there is no row, if its run diverged, or if the metric is not finite."""
    if columns is None or columns.get("verdict") == "diverged":
        return None
    value = number(columns.get(metric) or "")
    return value if value is not None and math.isfinite(value) else None


def chosen_of(study: Study, results: Results, cell: Cell, seed: int) -> Chosen | None:
    """Returns the rate that is chosen for a cell and a reported seed; None if the run with some rate is still
    missing."""
    measured = {rate: results.find(row) for rate, row in zip(study.lr, study.tuning(cell, seed))}
    if None in measured.values():
        return None
    values = {rate: value_of(columns, study.metric) for rate, columns in measured.items()}
    return choose(values, COLUMNS[study.metric].falls)


def results_of(study: Study, output: Path) -> Results:
    """Returns the table of the study's measured rows, in the folder `output`."""
    return Results(study.reproduction, "rows", output, study.seeds, keeps=False)


def runs_of(study: Study, output: Path, device: str, progress: bool) -> "Runs":
    """Returns the runs of the study, in a folder below `output`. `progress`: True to show progress bars."""
    from ..reproduce.runs import Runs

    name, corpus = study.corpus
    corpora = {**CORPORA, name: corpus}
    return Runs(output / "runs", Path(study.data), device=device, progress=progress, corpora=corpora)


def make(study: Study, results: Results, runs: "Runs", only: Sequence[str], max_hours: float) -> bool:
    """Makes the rows that are missing, together with other processes. Returns False if `max_hours` were over before all
    rows were made. `only` names the arms whose rows are made; empty means all.

    Errors: as `Runs.run`; InputError that names the arm, before any run, for options that contradict each other.
    """
    from ..reproduce.runs import trainer_of

    cells = [cell for cell in study.cells if cell.key["arm"] in only or not only]
    # All arms are checked first, so that a wrong one is not found only after hours of training.
    for cell in cells:
        try:
            trainer_of({**study.corpus[1].options, **study.row(cell, study.lr[0], seed=1).options}, {}, "cpu").check()
        except InputError as error:
            raise InputError(f"arm {cell.name}: {error}") from error
    deadline = time.monotonic() + 3600 * max_hours
    for seed in range(1, study.seeds + 1):
        tuning = [row for cell in cells for row in study.tuning(cell, seed)]
        if not _make_all(tuning, results, runs, deadline):
            return False
        results.read()
        reported = []
        for cell in cells:
            chosen = chosen_of(study, results, cell, seed)
            if chosen is not None and chosen.rate is not None:
                reported.append(study.row(cell, chosen.rate, seed))
        if not _make_all(reported, results, runs, deadline):
            return False
    return True


def _make_all(rows: Sequence[Row], results: Results, runs: "Runs", deadline: float) -> bool:
    """Makes rows one by one, and waits for rows that other processes make. Returns False if the time `deadline`, of
    `time.monotonic`, comes before all rows are made."""
    pending, has_told_user = list(rows), False
    while pending := measure(pending, results.scale, results, runs, deadline):
        if time.monotonic() >= deadline:
            return False
        if not has_told_user:
            write(f"another process makes {len(pending)} of these runs: waiting for it")
            has_told_user = True
        time.sleep(_WAIT)
    return True
