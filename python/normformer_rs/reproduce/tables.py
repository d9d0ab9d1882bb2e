"""Makes tables of reproductions, with the papers' figures beside ours, for a terminal and for a Markdown file."""

import math
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from .. import text
from ..errors import InputError
from .declared import Reproduction, Row, Scale, Shown
from .results import Found, Results
from .spread import Difference, Spread, corrected, difference


class Column(NamedTuple):
    """The heading and the format of a measured column."""

    heading: str
    form: str
    """The format of the column's numbers, as Python's `format` takes it."""
    falls: bool = False
    """True if a lower value is better."""


COLUMNS = {
    "bleu": Column("BLEU", ".2f"),
    "p": Column("p", ".3f"),
    "verdict": Column("verdict", ""),
    "train_nll": Column("training NLL", ".3f", falls=True),
    "valid_nll": Column("validation NLL", ".3f", falls=True),
    "valid_loss": Column("validation loss", ".4f", falls=True),
    "largest_grad_norm": Column("largest gradient norm", ".2f"),
    "perplexity": Column("validation perplexity", ".2f", falls=True),
    "unigram": Column("the unigram model's", ".2f"),
    "ratio": Column("ratio", ".3f", falls=True),
    "first_norm": Column("first gradient norm", ".2f"),
    "median_norm": Column("median", ".2f"),
    "largest_norm": Column("largest", ".2f"),
    "growth": Column("growth of the stream over the layers", ".1f"),
    "last_nll": Column("training NLL after them", ".2f"),
    "best_bleu": Column("best BLEU of held-out text", ".2f"),
    "largest_gain": Column("largest g", ".2f"),
    "final_gain": Column("g of the last norm", ".2f"),
    "half": Column("share of singular values above a half", ".3f"),
    "tenth": Column("above a tenth", ".3f"),
    "distance": Column("distance of statistics, second half", ".4g"),
    "gradient": Column("their part of the gradient", ".4g"),
    "bleu_valid": Column("BLEU of held-out text", ".2f"),
    "cosine": Column("mean cosine", ".3f"),
    "active": Column("mean share of active units", ".3f"),
    "train_perplexity": Column("perplexity of training text", ".3f", falls=True),
    "test_perplexity": Column("perplexity of test text", ".3f", falls=True),
    "gap": Column("test over training", ".3f", falls=True),
}
COMPARED = {"before": "p against the row before", "first": "p against the first row"}
"""The heading of column `p` with one seed, for the paired bootstrap, by `Shown.compared`."""
DIFFERENCES = {"before": "difference from the row before", "first": "difference from the first row"}
"""The heading of column `p` with several seeds, for the paired t test, by `Shown.compared`."""
WIDTH = 120
"""The width of the lines of text in a section."""
Key = TypeVar("Key")


class Compared(NamedTuple):
    """The comparison of a row with its baseline."""

    is_better: bool
    """True if the mean difference is in the row's favour."""
    p: float
    """The p of the paired t test over seeds, or with one seed of the paired bootstrap over lines. `holm` corrects it
    for the number of rows."""
    words: str
    """The text of the table's cell. It contains `{:.3f}` until `holm` fills in the corrected p."""
    difference: Difference | None = None
    """The difference over several seeds; None with one seed."""


def number(value: str | Spread) -> float | None:
    """Returns the number in a cell, or the mean of a Spread; None if the cell holds no finite number."""
    if isinstance(value, Spread):
        return value.mean
    try:
        return parsed if math.isfinite(parsed := float(value)) else None
    except ValueError:
        return None


def comparisons(results: Results, shown: Shown) -> dict[tuple[str, ...], Compared]:
    """Returns the comparison of each measured row with its baseline, by the row's key. If a run of the row or of its
    baseline failed, there is no test, and p is 1."""
    name = shown.value if results.seeds > 1 and shown.value else "bleu"  # with one seed, the bootstrap resamples BLEU
    compared = {}
    for row in results.scale.rows:
        if (baseline := baseline_of(results.scale, row)) is None:
            continue
        own, others = results.each_seed(row), results.each_seed(baseline)
        seeds = [seed for seed in own if seed in others]
        values = [(number(own[seed].get(name) or ""), number(others[seed].get(name) or "")) for seed in seeds]
        # With one seed the row's column p holds the bootstrap's p; with several the t test below computes p.
        p = number(own[seeds[0]].get("p") or "") if results.seeds == 1 and seeds else None
        if (comparison := paired(values, COLUMNS[name], p)) is not None:
            compared[(*row.key.values(),)] = comparison
    return holm(compared)


def paired(
    values: Sequence[tuple[float | None, float | None]], column: Column, p: float | None = None
) -> Compared | None:
    """Returns the comparison of a row with its baseline, or None if there is nothing to compare. `values` holds both
    values for each seed, with None for a failed run; `p` is the bootstrap's p if there is only one seed. The words
    of a test have a place for its p, `{:.3f}`, which `holm` fills in after the correction."""
    differences = [own - other for own, other in values if own is not None and other is not None]
    if failed := len(values) - len(differences):
        return Compared(is_better=False, p=1.0, words=f"not compared: {failed} of {len(values)} pairs failed")
    if (tested := difference(differences)) is not None:
        low, high = (f"{end:+{column.form}}" for end in tested.interval)
        mean, least = f"{tested.spread.mean:+{column.form}}", f"{tested.least:{column.form}}"
        words = f"{mean} [{low}, {high}], p = {{:.3f}}; least {least}"
        is_better = (tested.spread.mean < 0) == column.falls  # in a column that falls, lower values are better
        return Compared(is_better, tested.p, words, tested)
    if differences and p is not None:
        is_better = (differences[0] < 0) == column.falls
        return Compared(is_better, p, "{:.3f}")
    return None


def holm(compared: dict[Key, Compared]) -> dict[Key, Compared]:
    """Corrects the p-values of the comparisons, in place (Holm 1979), and returns the comparisons. Comparisons with
    failed runs have no test, so they do not count."""
    # Only the text of a comparison with a test has a place for p, `{:.3f}`.
    tested = {key: comparison for key, comparison in compared.items() if "{" in comparison.words}
    p_values = corrected([comparison.p for comparison in tested.values()])
    for (key, comparison), p in zip(tested.items(), p_values):
        compared[key] = comparison._replace(p=p, words=comparison.words.format(p))
    return compared


def table(results: Results, shown: Shown) -> tuple[list[str], list[list[str]]]:
    """Returns the headings and the lines of the table: the row's key, the measurements, the paper's figures.

    Without `shown.across` each row is a line, with the columns that `shown` names; the column "p" holds the comparison
    with the row's baseline. With `shown.across`, a key such as the learning rate, the rows that differ only in this key
    are the cells of one line, one column for each value. `shown.mean` then adds two columns: the mean over a line's
    cells, and its difference from that of the first line with a mean. If the key is the learning rate, "(edge)" marks
    a line's best cell at its lowest or highest rate, beyond which there may be a better one.
    """
    measured, compared = results.measured, comparisons(results, shown)
    papers = list(dict.fromkeys(name for row, _ in measured for name in row.paper))
    if not shown.across:
        keys = list(measured[0][0].key) if measured else []
        headings = [_heading(results, shown, name) for name in shown.columns]
        lines = [
            [*row.key.values(), *(_words_of(compared, row) if name == "p" else _measured(columns, name)
                                  for name in shown.columns),
             *(row.paper.get(name, "") for name in papers)]
            for row, columns in measured
        ]  # fmt: skip
        return [*map(_words, keys), *headings, *papers], lines
    values = list(dict.fromkeys(row.key[shown.across] for row, _ in measured))  # one column for each
    # line (the row's other keys) → value of `across` → the row and its measurements
    grouped: dict[tuple[str, ...], dict[str, tuple[Row, Found]]] = {}
    for row, columns in measured:
        line_key = tuple(value for key, value in row.key.items() if key != shown.across)
        grouped.setdefault(line_key, {})[row.key[shown.across]] = row, columns
    keys = [key for key in measured[0][0].key if key != shown.across] if measured else []
    lines, first_mean = [], None
    for line_key, cells_by_value in grouped.items():
        cells = [_cell(*cells_by_value[value], shown, compared) if value in cells_by_value else "" for value in values]
        if shown.across == "lr" and (best := _best(cells_by_value, shown)) is not None and len(cells_by_value) > 1:
            is_edge = float(best) in (max(map(float, cells_by_value)), min(map(float, cells_by_value)))
            cells[values.index(best)] += " (edge)" if is_edge else ""
        # the paper's figures for the line, which its rows hold between them
        paper_figures: dict[str, str] = {}
        for row, _ in cells_by_value.values():
            paper_figures |= row.paper
        if shown.mean:
            numbers = [number(columns.get(shown.value, "")) for _, columns in cells_by_value.values()]
            known = [value for value in numbers if value is not None]
            mean = sum(known) / len(known) if len(known) == len(values) else None  # a line with gaps has no mean
            first_mean = mean if first_mean is None else first_mean
            form = COLUMNS[shown.value].form
            if mean is None or first_mean is None:
                cells += ["", ""]
            else:
                cells += [f"{mean:{form}}", f"{mean - first_mean:+{form}}"]
        lines.append([*line_key, *cells, *(paper_figures.get(name, "") for name in papers)])
    mean_headings = ["mean", "Δ from the first row"] if shown.mean else []
    value_headings = [f"{_words(shown.across)} {value}" for value in values]
    return [*map(_words, keys), *value_headings, *mean_headings, *papers], lines


def _words_of(compared: dict[tuple[str, ...], Compared], row: Row) -> str:
    """Returns the text of the row's comparison with its baseline; "" if it has none."""
    comparison = compared.get((*row.key.values(),))
    return "" if comparison is None else comparison.words


def _best(cells_by_rate: dict[str, tuple[Row, Found]], shown: Shown) -> str | None:
    """Returns the learning rate with the best value; None if no value was measured."""
    values = {rate: value for rate, (_, columns) in cells_by_rate.items()
              if (value := number(columns.get(shown.value, ""))) is not None}  # fmt: skip
    if not values:
        return None
    return (min if COLUMNS[shown.value].falls else max)(values, key=values.__getitem__)


def _heading(results: Results, shown: Shown, name: str) -> str:
    """Returns the heading of a measured column. That of the column `p` names the test and the baseline."""
    if name != "p":
        return COLUMNS[name].heading
    if results.seeds > 1:
        heading = DIFFERENCES.get(shown.compared, f"difference from {shown.compared}")
        return heading + " [95 % interval], p by Holm; least difference found in four of five studies"
    return COMPARED.get(shown.compared, f"p against {shown.compared}") + ", by Holm"


def baseline_of(scale: Scale, row: Row) -> Row | None:
    """Returns the row with which this one is compared, or None if there is none. It has the same text and seed; it is
    the row before, the first row or the named one, as `Shown.compared` says."""
    same_text = [other for other in scale.rows if other.corpus == row.corpus]
    index = [other.key for other in same_text].index(row.key)
    if index == 0 and scale.shown.compared in COMPARED:
        return None
    number = row.seed - same_text[index].seed  # 0 for the row's first seed, 1 for its second, …
    if scale.shown.compared in COMPARED:
        return same_text[index - 1 if scale.shown.compared == "before" else 0].seeded(number)
    # `compared` is a value of the first key. The baseline has this value, and the row's values of all other keys.
    chosen = next((other for other in same_text if _named(other, scale.shown.compared) == _named(row, "")), None)
    return None if chosen is None or chosen.key == row.key else chosen.seeded(number)


def _named(row: Row, name: str) -> tuple[str, ...]:
    """Returns the values of the row's keys without the first one. If the first value is not `name`, "" is put in its
    place, so that the result equals no other row's; if `name` is "", any first value is accepted."""
    first, *rest = row.key.values()
    return tuple(rest) if first == name or not name else ("", *rest)


def _words(key: str) -> str:
    """Returns a key's name as words of a heading."""
    return key.replace("_", " ")


def _measured(columns: Found, name: str) -> str:
    """Returns the text of a measured cell. It is "diverged" if BLEU is missing because the run diverged."""
    value = columns.get(name, "")
    if name == "bleu" and not value:
        return "diverged" if columns.get("verdict") == "diverged" else ""
    if isinstance(value, Spread):
        return f"{value:{COLUMNS[name].form}}"
    # A number gets the column's format. NaN and infinities give an empty cell; any other text is shown as it is.
    figure = number(value)
    return f"{figure:{COLUMNS[name].form}}" if figure is not None else "" if value in ("nan", "inf", "-inf") else value


def _cell(row: Row, columns: Found, shown: Shown, compared: dict[tuple[str, ...], Compared]) -> str:
    """Returns the text of a cell, `Shown.cell` filled with the measurements. It has a star if the row is better than
    its baseline with p below `Shown.significance`. If a number was not measured, the cell is the run's verdict."""
    values: dict[str, str | float | Spread] = dict(columns)
    for name, value in columns.items():
        if not isinstance(value, Spread) and (measured := number(value)) is not None:
            values[name] = measured
    comparison = compared.get((*row.key.values(),))
    is_significant = comparison is not None and comparison.is_better and comparison.p < shown.significance
    star = "*" if is_significant else ""
    try:
        return shown.cell.format_map(values) + star
    except (KeyError, ValueError):
        return str(columns.get("verdict", ""))


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]], *, aligned: bool = False) -> str:
    """Returns a table in Markdown; "" if it has no lines. Bars within cells are escaped, except in code."""
    cells = [[_escaped(str(cell)) for cell in line] for line in (head, *lines)]
    if len(cells) == 1:
        return ""
    widths = [max(map(len, column)) if aligned else 0 for column in zip(*cells)]
    rows = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in cells]
    rule = "|".join("-" * (width + 2) if aligned else "---" for width in widths)
    return "\n".join([rows[0], f"|{rule}|", *rows[1:], ""])


def _escaped(cell: str) -> str:
    """Returns a cell on one line, with its bars escaped, except in code."""
    parts = re.split(r"(`[^`]+`)", cell.replace("\n", " "))  # the parts with odd numbers are code
    return "".join(part if i % 2 else part.replace("|", "\\|") for i, part in enumerate(parts))


def marks(entry: Reproduction, scale: str) -> tuple[str, str]:
    """Returns the two lines of a Markdown file, begin and end, between which the command writes."""
    return f"<!-- reproduce {entry.name} --scale {scale} -->", f"<!-- end of {entry.name} --scale {scale} -->"


def section(entry: Reproduction, scale: str, results: Results, file: Path) -> str:
    """Returns the part of a Markdown file, including its marks: the recipe, the table, the picture."""
    begin, end = marks(entry, scale)
    chosen = entry.scales[scale]
    dates = sorted({line["date"] for line in results.rows if line.get("date")})
    lacking = sum(results.find(row) is None for row in results.wanted)
    not_made = f"; {lacking} of {len(results.wanted)} runs have not been made" if lacking else ""
    not_made += f", {results.stale} of them only with other options" if results.stale else ""
    when = f"; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else ""
    recipe = f"{chosen.about}{_seeds(results)}{when}{not_made} (`{results.path('.csv').name}`)."
    about = f"`normformer-rs reproduce {entry.name} --scale {scale}`: {recipe}"
    parts = [begin, "", *textwrap.wrap(about, WIDTH, break_long_words=False, break_on_hyphens=False), ""]
    parts.append(markdown(*table(results, chosen.shown)))
    picture = results.path(".png")
    if picture.exists():
        path = Path(os.path.relpath(picture, file.parent)).as_posix()
        parts += [f"![{entry.title}]({path})", ""]
    return "\n".join([*parts, end])


def _seeds(results: Results) -> str:
    """Returns the words of a section about its seeds; "" if no row has more than one."""
    most = max((len(results.each_seed(row)) for row in results.scale.rows), default=0)
    return f"; mean ± standard deviation of {most} seeds" if most > 1 else ""


def write_section(file: Path, entry: Reproduction, scale: str, results: Results) -> None:
    """Puts the section between its marks, or at the file's end, under a heading, if there are no marks yet.

    Errors: InputError for a file that does not exist, and for one of the marks without the other.
    """
    whole = "\n".join(text.read_lines(str(file))) + "\n"
    begin, end = marks(entry, scale)
    new_section = section(entry, scale, results, file)
    if (begin in whole) != (end in whole) or whole.find(end) < whole.find(begin):
        raise InputError(f"{file}: expected the line {begin} and, after it, {end}; one is missing: write both, or none")
    if begin in whole:
        before, after_begin = whole.split(begin, 1)
        whole = before + new_section + after_begin.split(end, 1)[1]
    else:
        whole = f"{whole.rstrip()}\n\n## {entry.title}\n\n{new_section}\n"
    text.write_lines(str(file), whole.removesuffix("\n").split("\n"))
