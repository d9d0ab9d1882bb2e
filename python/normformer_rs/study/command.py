"""Makes a study: checks that the text exists, makes the missing runs, writes the page of results."""

import math
from collections.abc import Sequence
from pathlib import Path

from ..errors import InputError
from ..loop.progress import duration
from ..loop.quantities import size
from ..reproduce.command import quiet
from ..reproduce.corpora import check_text
from .cost import costs
from .declared import Study
from .measured import make, results_of, runs_of
from .outcome import Outcome, outcome
from .page import rules, write


def run(
    study: Study,
    output: Path,
    *,
    device: str = "cpu",
    only: Sequence[str] = (),
    max_hours: float = math.inf,
    train: bool = True,
    progress: bool = True,
    words: str = "",
) -> Outcome:
    """Makes the runs that are missing, writes the page of results, and returns the outcome.

    Without `train` only the page is written. `only` names the arms whose runs are made; empty means all. `words` is the
    command that made the study, which the page shows; "" for the call in Python.

    Errors: InputError for a text that is missing, arms that the loop cannot train, and a folder without rows if `train`
    is False; Interrupted after Ctrl-C, and the same call continues.
    """
    _refuse_own_loop(study)
    results = results_of(study, output)
    if train:
        check_text(study.corpus[0], Path(study.data))
        with quiet(wanted=True):
            make(study, results, runs_of(study, output, device, progress), only, max_hours)
        results.read()
    return finish(study, output, words)


def finish(study: Study, output: Path, words: str = "") -> Outcome:
    """Writes the page of results from the rows that have been measured, and returns the outcome. Errors: InputError if
    no row has been measured."""
    results = results_of(study, output)
    if not results.rows:
        raise InputError(f"{results.path('.csv')}: nothing of this study has been measured yet")
    result = outcome(study, results)
    write(result, output, words or repr(study))
    return result


def print_plan(study: Study, device: str) -> None:
    """Prints the study's rules, runs and cost. Errors: as those of `run`."""
    _refuse_own_loop(study)
    check_text(study.corpus[0], Path(study.data))
    print(f"{study.title}: {study.question}\n")
    print("\n".join(f"- {rule}" for rule in rules(study)))
    total = 0.0
    print(f"\n{study.runs} runs; each arm, by a few measured updates:\n")
    for cost in costs(study, device):
        total += cost.seconds
        print(
            f"  {cost.cell.name}: {cost.runs} runs, {cost.parameters:,} parameters, {cost.flop:.2g} FLOP, "
            f"{duration(cost.seconds)}, {size(cost.memory)} of memory, {size(cost.disk)} on the disk"
        )
    print(f"\nall, in one process: about {duration(total)}, without evaluations")


def _refuse_own_loop(study: Study) -> None:
    """Raises InputError for a study that only a training loop of the user's own can train."""
    if not study.is_of_the_loop:
        raise InputError("the arms of this study change models of your own: use `for trial in study`")
