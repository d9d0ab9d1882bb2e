"""The table of facts, facts.csv: the settings that the papers and their releases state, and where a plan deviates."""

import csv
import json
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .declared import Reproduction, Row
from .papers import papers


class Fact(NamedTuple):
    """A line of the table. `entry` and `rows` have patterns of `fnmatch`, with | between several."""

    paper: str
    """One of the paper's names in papers.json."""
    entry: str
    """Names of the paper's entries; `*` for all."""
    rows: str
    """Rows of these entries, each by a value of its key or by its corpus; empty for all."""
    option: str
    """An option of model, training, data or search, a field of `Scale` or `Corpus`, an argument of `scores.score`, or
    `layers`, if both stacks have as many."""
    value: Any
    """The paper's value, in words if it is not one value."""
    where: str
    """The section, table or figure of the paper, or the file of a release."""
    ours: Any
    """The plan's value where it deviates, otherwise empty; `none` if the package has no such option."""
    why: str
    """The reason for the deviation."""

    def is_about(self, entry: Reproduction, row: Row) -> bool:
        """True if the fact is about this row of the entry."""
        papers_names = [paper["names"] for paper in papers() if self.paper in paper["names"]]
        is_of_paper = any(name in entry.source for names in papers_names for name in names)
        return is_of_paper and _matches(self.entry, entry.name) and (not self.rows or bool(self.names(row)))

    def names(self, row: Row) -> list[str]:
        """Returns the values of the row's key, or its corpus, that `rows` names."""
        return [value for value in (*row.key.values(), row.corpus) if _matches(self.rows, value)]


def _matches(patterns: str, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split("|"))


@cache
def facts() -> list[Fact]:
    """Returns the facts in the order of the file."""
    with Path(__file__).with_name("facts.csv").open(encoding="utf-8", newline="") as file:
        return [Fact(**{**line, "value": _read(line["value"]), "ours": _read(line["ours"])})
                for line in csv.DictReader(file)]  # fmt: skip


def _read(text: str) -> Any:
    """Returns the value that the text is in JSON, or else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def deviations(entry: Reproduction) -> list[str]:
    """Returns a line for each deviation of the entry's plan at scale `paper`, such as
    `dropout (iwslt14): 0.3 here, 0.0 in the paper (App A.1): the release's train-iwslt14.sh has 0.3`."""
    rows = entry.scales["paper"].rows
    lines = []
    for fact in facts():
        about = [row for row in rows if fact.is_about(entry, row)]
        if fact.why and about:
            names = dict.fromkeys(name for row in about for name in fact.names(row)) if len(about) < len(rows) else ()
            option = f"{fact.option} ({'; '.join(names)})" if names else fact.option
            source = f"the {fact.where}" if fact.where.startswith("release") else f"the paper ({fact.where})"
            lines.append(f"{option}: {fact.ours} here, {fact.value} in {source}: {fact.why}")
    return lines
