"""Makes the runs of a study, seed by seed: first the runs that choose a rate for each arm, then the reported runs."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
    """Returns the rate with the best value; of equal values that with the lowest rate. A value is None if its run
    failed. `falls` is True if lower values are better."""
    found = {rate: value for rate, value in sorted(values.items()) if value is not None}
    if not found:
        return Chosen(None, False)
    best = (min if falls else max)(found, key=found.__getitem__)
    return Chosen(best, len(values) > 1 and best in (min(values), max(values)))


def value_of(found: Mapping[str, str] | None, metric: str) -> float | None:
    """Returns a row's metric. Returns None if there is no row, if its run diverged, or if the metric is not finite."""
    if found is None or found.get("verdict") == "diverged":
        return None
    value = number(found.get(metric) or "")
    return value if value is not None and math.isfinite(value) else None


def chosen_of(study: Study, results: Results, cell: Cell, seed: int) -> Chosen | None:
    """Returns the rate that is chosen for a cell and a reported seed; None if the run with some rate is still
    missing."""
    found = {rate: results.find(row) for rate, row in zip(study.lr, study.tuning(cell, seed))}
    if None in found.values():
        return None
    return choose({rate: value_of(one, study.metric) for rate, one in found.items()}, COLUMNS[study.metric].falls)


def results_of(study: Study, output: Path) -> Results:
    return Results(study.reproduction, "rows", output, study.seeds, keeps=False)


def runs_of(study: Study, output: Path, device: str, progress: bool) -> "Runs":
    from ..reproduce.runs import Runs

    corpora = {**CORPORA, study.corpus[0]: study.corpus[1]}
    return Runs(output / "runs", Path(study.data), device=device, progress=progress, corpora=corpora)


def make(study: Study, results: Results, runs: "Runs", only: Sequence[str], max_hours: float) -> bool:
    """Makes the rows that are missing, together with other processes. Returns False if `max_hours` were over before all
    rows were made.

    Errors: as `Runs.run`.
    """
    cells = [cell for cell in study.cells if cell.key["arm"] in only or not only]
    ends = time.monotonic() + 3600 * max_hours
    for seed in range(1, study.seeds + 1):
        tuning = [row for cell in cells for row in study.tuning(cell, seed)]
        if not _made(tuning, results, runs, ends):
            return False
        results.read()
        rates = [(cell, chosen_of(study, results, cell, seed)) for cell in cells]
        reported = [study.row(cell, one.rate, seed) for cell, one in rates if one is not None and one.rate is not None]
        if not _made(reported, results, runs, ends):
            return False
    return True


def _made(rows: Sequence[Row], results: Results, runs: "Runs", ends: float) -> bool:
    """Makes rows one by one, and waits for those that other processes make. Returns False if the time `ends` comes
    before all rows are made."""
    pending, is_told = list(rows), False
    while pending := measure(pending, results.scale, results, runs, ends):
        if time.monotonic() >= ends:
            return False
        if not is_told:
            write(f"another process makes {len(pending)} of these runs: waiting for it")
            is_told = True
        time.sleep(_WAIT)
    return True
