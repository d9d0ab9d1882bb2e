"""Recomputes the stored figures of a table from the kept files, for `reproduce NAME --recompute`.

BLEU, sacreBLEU's line and p are computed from the kept n-gram counts of each line. If the reference text is available,
the counts are first checked against the kept translations.
"""

import itertools
import json
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

from ..errors import InputError
from ..scores import RESAMPLES, Counts, counts, score_counts
from .declared import Row
from .kept import KEPT, Kept, about, digest_of, read
from .made import FIGURES, valid_nll
from .results import RECIPE, Results
from .tables import baseline_of

ABOUT = ("seed", RECIPE, KEPT, "updates", "seconds", "date", "version", "commit", "torch", "processor")
"""Columns that say how a row was made and are no measurements."""


class Figure(NamedTuple):
    """A stored figure, beside the recomputed one or the reason why there is none."""

    row: Row
    name: str
    """The figure's column; "" if the whole row is meant."""
    stored: str
    made: str
    """The recomputed figure, or the reason why there is none."""
    state: str
    """The result of the comparison: equal, different, or "cannot" if the figure cannot be recomputed."""


References = Callable[[Row], "list[str] | None"]
"""A function that returns the references of a row's scored part, or None if that text is not available."""


def remade(results: Results, references: References) -> Iterator[Figure]:
    """Yields each stored figure of the table, beside the recomputed one.

    Figures that need the log of all updates or the weights, such as `train_nll` and `growth`, are left out.
    """
    for row, columns in stored(results):
        try:
            if (kept := of_row(results, row, columns)) is None:
                yield Figure(row, name="", stored="", made="nothing is kept of its run", state="cannot")
                continue
            yield from _recompute_row(results, row, columns, kept, references)
        except InputError as error:
            yield Figure(row, name="", stored="", made=str(error), state="different")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError, MemoryError) as error:
            reason = f"expected what a run keeps; got others ({type(error).__name__}: {error})"
            yield Figure(row, name="", stored="", made=reason, state="different")


def stored(results: Results) -> list[tuple[Row, dict[str, str]]]:
    """Returns the measured rows of the entry and their columns, for every seed in the table. Rows that were measured
    with other options are left out."""
    rows = []
    for row in results.scale.rows:
        # `seeded` takes a seed as its offset from the row's first seed.
        numbers = sorted({_seed(results, line) - row.seed for line in results.rows})
        for number in numbers:
            if number >= 0 and (columns := results.find(row.seeded(number))) is not None:
                rows.append((row.seeded(number), columns))
    return rows


def _seed(results: Results, columns: dict[str, str]) -> int:
    """Returns the seed of a line of the table; a line from before that column has seed 1."""
    try:
        return int(columns.get("seed") or 1)
    except ValueError as error:
        raise InputError(f"{results.path('.csv')}: expected a whole number as seed; got {columns['seed']!r}") from error


def of_row(results: Results, row: Row, columns: dict[str, str]) -> Kept | None:
    """Returns the data that are kept of a row, or None if none are. Errors: InputError if its files are missing,
    damaged, changed or another run's."""
    if not columns.get(KEPT):
        return None
    kept = read(results.kept, columns[KEPT])
    # The detour over JSON gives the values the types of those that were read, such as lists instead of tuples.
    wanted = json.loads(json.dumps(about(row, results.scale)))
    if differing := [name for name, value in wanted.items() if kept.content.get(name) != value]:
        raise InputError(f"{KEPT} {columns[KEPT]} is kept of another run: its {', '.join(differing)} differ")
    return kept


def left_out(results: Results, made: Container[str]) -> list[str]:
    """Returns the measured columns of the table that are not in `made`, the recomputed ones."""
    not_measured = {*results.scale.rows[0].key, *ABOUT}
    names = dict.fromkeys(itertools.chain.from_iterable(results.rows))
    names_left = [name for name in names if name not in not_measured and name not in made]
    return [name for name in names_left if any(row.get(name) for row in results.rows)]


def _recompute_row(
    results: Results, row: Row, columns: dict[str, str], kept: Kept, references: References
) -> Iterator[Figure]:
    """Yields the stored figures of a row, beside the recomputed ones."""
    recomputed: dict[str, object] = {**valid_nll(kept.content)}
    for measure in results.scale.shown.measures:
        recomputed |= FIGURES[measure](kept.content) if measure in FIGURES else {}
    if columns.get("bleu") and "bleu" in results.scale.shown.measures:
        if mismatch := _mismatch(kept, references(row)):
            yield Figure(row, name="", stored="", made=mismatch, state="different")
        bleu, line, _ = score_counts(_counts(kept))
        recomputed |= {"bleu": round(bleu, 2), "sacrebleu": line}
        if columns.get("p"):
            reason, p = _p(results, row, kept)
            if reason:
                yield Figure(row, "p", columns["p"], made=reason, state="cannot")
            else:
                recomputed["p"] = p
    for name, value in recomputed.items():
        if stored_value := columns.get(name):
            state = "equal" if str(value) == stored_value else "different"
            yield Figure(row, name, stored_value, str(value), state)


def _counts(kept: Kept) -> Counts:
    """Returns the kept n-gram counts of each line, and sacreBLEU's signature."""
    return Counts(kept.content["counts"]["lines"], kept.content["counts"]["signature"])


def _mismatch(kept: Kept, references: list[str] | None) -> str:
    """Returns an error if the kept n-gram counts do not belong to the kept translations, otherwise "". Without
    references this cannot be checked, and the result is ""."""
    if references is None:
        return ""
    if digest_of(references) != kept.content["references"]:
        return "the references are not those that it was scored with: --data has another text"
    # `of_row` has checked already that the kept tokeniser is the corpus' own.
    tokenize = kept.content["tokenize"] or kept.content["counts"]["tokenize"]
    recounted = counts(kept.translations, references, tokenize)
    if recounted.lines != kept.content["counts"]["lines"]:
        return "the counts of lines are not those of the translations"
    return ""


def _p(results: Results, row: Row, kept: Kept) -> tuple[str, float]:
    """Returns ("", p), or the reason why p cannot be recomputed and 0.0."""
    baseline = baseline_of(results.scale, row)
    columns = results.find(baseline) if baseline is not None else None
    theirs = of_row(results, baseline, columns) if baseline is not None and columns is not None else None
    if baseline is None or theirs is None:
        name = ", ".join(baseline.key.values()) if baseline is not None else "a baseline"
        return f"no translations of {name} are kept", 0.0
    settings = kept.content["counts"]
    if kept.content["baseline"] != digest_of(theirs.translations):
        return f"it was computed against another run of {', '.join(baseline.key.values())}", 0.0
    if settings["seed"].lower() == "none":
        return "its resamples were drawn with another seed each time", 0.0
    if settings["resamples"] != RESAMPLES:
        raise InputError(f"expected {RESAMPLES} resamples, as every run has; got {settings['resamples']!r}")
    resamples, seed = settings["resamples"], settings["seed"]
    _, _, comparison = score_counts(_counts(kept), _counts(theirs), resamples=resamples, seed=seed)
    return "", round(comparison.p_value, 4) if comparison is not None else 1.0
