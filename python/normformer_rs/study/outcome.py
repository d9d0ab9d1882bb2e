"""The outcome of a study: for each arm its rates, its values and its comparison with the baseline."""

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..reproduce.results import Results
from ..reproduce.spread import interval, merged
from ..reproduce.tables import COLUMNS, Compared, holm, markdown, number, paired
from .declared import Cell, Study
from .measured import chosen_of, value_of


class Arm(NamedTuple):
    """The results of one arm at one depth with one initialisation."""

    cell: Cell
    values: dict[int, float | None]
    """The metric of the reported runs by seed; None if the run failed, or if its rate could not be chosen, because the
    runs with all rates failed."""
    rates: dict[int, float | None]
    """The rate chosen for each seed."""
    edges: int
    """The number of seeds whose rate is the lowest or highest of the grid."""
    verdicts: str
    """The verdict of the reported runs; if they differ, each verdict with its number of runs."""
    curve: dict[float, list[float | None]]
    """By rate, the metrics of the runs among which the rate was chosen, one for each seed; None for a failed run."""
    sensitivity: float
    """The sensitivity to the rate (Wortsman et al. 2023, §2.2) in nats: E_η[min(ℓ(η), ℓ₀) − min_η ℓ(η)] over the rates
    η of the grid. ℓ is the validation NLL, ℓ₀ the loss before the first update, which also replaces that of a failed
    run. The value is the mean over seeds."""
    seconds: float
    """The training time of all runs of the arm, in seconds."""
    compared: Compared | None = None
    """The comparison with the baseline; None for the baseline itself, and for fewer than two seeds."""
    is_equal: bool | None = None
    """True if the 90 % interval of the difference lies within the margin (two one-sided tests at 0.05); None without a
    margin."""

    @property
    def failed(self) -> int:
        """The number of reported seeds without a value."""
        return sum(value is None for value in self.values.values())

    @property
    def found(self) -> list[float]:
        """The values of the runs that did not fail."""
        return [value for value in self.values.values() if value is not None]


class Outcome(NamedTuple):
    """The outcome of a study. `print` shows the main table of the study's page."""

    study: Study
    arms: list[Arm]
    results: Results
    missing: int
    """The number of runs that are still to be made."""
    stale: int = 0
    """The number of missing runs that were made before, but with other options, another text or another version."""

    def __str__(self) -> str:
        return markdown(*main_table(self), aligned=True)

    def _repr_html_(self) -> str:
        from .._html import table

        return table(*main_table(self), caption=self.study.title)


def outcome(study: Study, results: Results) -> Outcome:
    """Returns the outcome of the study as far as its rows have been measured."""
    arms = [_arm(study, results, cell) for cell in study.cells]
    values_by_key = {_key(arm.cell): arm.values for arm in arms}
    comparisons: dict[tuple[str, ...], Compared] = {}
    for arm in arms:
        baseline = study.baseline_of(arm.cell)
        if baseline is None:
            continue
        baseline_values = values_by_key[_key(baseline)]
        pairs = [(value, baseline_values[seed]) for seed, value in arm.values.items() if seed in baseline_values]
        if len(pairs) > 1 and (comparison := paired(pairs, COLUMNS[study.metric])) is not None:
            comparisons[_key(arm.cell)] = comparison
    comparisons = holm(comparisons)
    arms = [_compared(study, arm, comparisons.get(_key(arm.cell))) for arm in arms]
    missing = study.runs - sum(map(_count_runs, arms))
    # `results.stale` counts only rows of reported seeds, so the rows that choose rates are counted here.
    tuning = [row for cell in study.cells for seed in range(1, study.seeds + 1) for row in study.tuning(cell, seed)]
    return Outcome(study, arms, results, missing, sum(map(results.is_stale, tuning)) + results.stale)


def _key(cell: Cell) -> tuple[str, ...]:
    """Returns the values of the cell's key, as a key of dictionaries."""
    return tuple(cell.key.values())


def _compared(study: Study, arm: Arm, comparison: Compared | None) -> Arm:
    """Returns the arm with its comparison and, if the study has a margin, with the test of equality."""
    if comparison is None or comparison.difference is None or study.margin is None:
        return arm._replace(compared=comparison)
    low, high = interval(comparison.difference.spread.numbers, share=0.9)
    return arm._replace(compared=comparison, is_equal=-study.margin < low and high < study.margin)


def _arm(study: Study, results: Results, cell: Cell) -> Arm:
    """Returns the results of a cell as far as its rows have been measured."""
    values: dict[int, float | None] = {}
    rates: dict[int, float | None] = {}
    curve: dict[float, list[float | None]] = {rate: [] for rate in study.lr}
    verdicts, sensitivities, edges, seconds = [], [], 0, 0.0
    for seed in range(1, study.seeds + 1):
        tuned = {rate: results.find(row) for rate, row in zip(study.lr, study.tuning(cell, seed))}
        measured = {rate: columns for rate, columns in tuned.items() if columns is not None}
        for rate, columns in measured.items():
            curve[rate].append(value_of(columns, study.metric))
            seconds += number(columns.get("seconds") or "") or 0.0
        chosen = chosen_of(study, results, cell, seed)
        if chosen is None:  # runs that choose the rate are still missing
            continue
        sensitivities.append(_sensitivity(measured))
        reported = results.find(study.row(cell, chosen.rate, seed)) if chosen.rate is not None else None
        if chosen.rate is not None and reported is None:  # the reported run is still missing
            continue
        rates[seed], values[seed] = chosen.rate, value_of(reported, study.metric)
        edges += chosen.is_edge
        verdicts.append("failed with every rate" if reported is None else reported["verdict"])
        seconds += number((reported or {}).get("seconds") or "") or 0.0
    words = str(merged(verdicts)) if verdicts else ""
    sensitivity = statistics.fmean(sensitivities) if sensitivities else math.nan
    return Arm(cell, values, rates, edges, words, curve, sensitivity, seconds)


def _sensitivity(columns_by_rate: Mapping[float, Mapping[str, str]]) -> float:
    """Returns `Arm.sensitivity` for one seed, from the table's columns by rate; NaN if no run has a loss before the
    first update."""
    first_losses = [number(columns.get("first_nll") or "") for columns in columns_by_rate.values()]
    known = [loss for loss in first_losses if loss is not None]
    if not known:
        return math.nan
    losses = []  # min(ℓ(η), ℓ₀) of each rate; a run without ℓ₀ gets the largest of the others
    for columns in columns_by_rate.values():
        value, first_loss = value_of(columns, "valid_nll"), number(columns.get("first_nll") or "")
        first_loss = first_loss if first_loss is not None else max(known)
        losses.append(first_loss if value is None else min(value, first_loss))
    return statistics.fmean(losses) - min(losses)


def _count_runs(arm: Arm) -> int:
    """Returns the number of the arm's runs that have been made."""
    tuning_runs = sum(len(values) for values in arm.curve.values())
    return tuning_runs + len(arm.values)


def main_table(outcome: Outcome) -> tuple[list[str], list[list[str]]]:
    """Returns the headings and the lines of the main table, which has a line for each arm."""
    study, column = outcome.study, COLUMNS[outcome.study.metric]
    keys = [*outcome.arms[0].cell.key]
    difference = f"difference from {study.baseline} [95 % interval], p by Holm; least difference found in four of five"
    tested = [difference] if study.seeds > 1 and len(study.arms) > 1 else []  # a column only if there are tests
    head = [*keys, f"{column.heading} [95 % interval]", "failed", "rate", "verdict", *tested, "sensitivity to the rate"]
    lines = []
    for arm in outcome.arms:
        compared = "baseline" if study.baseline_of(arm.cell) is None else arm.compared.words if arm.compared else ""
        sensitivity = "" if math.isnan(arm.sensitivity) else f"{arm.sensitivity:.3f}"
        mark = _mark(arm)
        cells = [mean(arm, column.form), f"{arm.failed} of {len(arm.values)}", _rates(arm), arm.verdicts]
        lines.append([*arm.cell.key.values(), *cells, *([compared + mark] if tested else []), sensitivity])
    return head, lines


def _mark(arm: Arm) -> str:
    """Returns " *" for an arm that is better than the baseline at p < 0.05, "" for any other."""
    return " *" if arm.compared is not None and arm.compared.is_better and arm.compared.p < 0.05 else ""


def mean(arm: Arm, form: str) -> str:
    """Returns a text with the mean of an arm's values and its 95 % interval, or with the number of seeds if some
    failed. `form` is the format of the numbers, such as ".3f"."""
    values = arm.found
    if not values:
        return "failed" if arm.values else "not measured"
    text = f"{statistics.fmean(values):{form}}"
    if arm.failed:
        return f"{text} ({len(values)} of {len(arm.values)} seeds)"
    if len(values) < 2:
        return text
    low, high = interval(values)
    return f"{text} [{low:{form}}, {high:{form}}]"


def _rates(arm: Arm) -> str:
    """Returns the table's cell with the chosen rates: with their numbers of seeds, if the seeds chose several rates."""
    rates = [f"{rate:g}" if rate is not None else "none" for rate in arm.rates.values()]
    counts = {rate: rates.count(rate) for rate in dict.fromkeys(rates)}
    words = ", ".join(f"{rate} ({n})" if len(counts) > 1 else rate for rate, n in counts.items())
    return f"{words}, edge in {arm.edges}" if arm.edges else words


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Returns the numbers of the page as dictionaries, lists and numbers, for study.json."""
    study = outcome.study
    return {
        "title": study.title,
        "question": study.question,
        "metric": study.metric,
        "baseline": study.baseline,
        "rates": [*study.lr],
        "seeds": study.seeds,
        "missing_runs": outcome.missing,
        "arms": [_plain(study, arm) for arm in outcome.arms],
    }


def _plain(study: Study, arm: Arm) -> dict[str, Any]:
    """Returns an arm's numbers by name, as study.json holds them."""
    values = arm.found
    numbers: dict[str, Any] = {
        **arm.cell.key,
        "values": arm.values,
        "rates": arm.rates,
        "failed": arm.failed,
        "verdicts": arm.verdicts,
        "mean": statistics.fmean(values) if values else None,
        "interval": [*interval(values)] if len(values) > 1 and not arm.failed else None,
        "rate_is_at_the_edge": arm.edges,
        "sensitivity": None if math.isnan(arm.sensitivity) else arm.sensitivity,
        "by_rate": {f"{rate:g}": values for rate, values in arm.curve.items()},
        "seconds": arm.seconds,
    }
    if arm.compared is not None and (difference := arm.compared.difference) is not None:
        numbers |= {
            "difference": difference.spread.mean,
            "difference_interval": [*difference.interval],
            "p_holm": arm.compared.p,
            "least_difference": difference.least,
        }
        numbers |= {} if arm.is_equal is None else {"is_equal_within_margin": arm.is_equal}
    return numbers
