"""Reads the table facts.csv: settings that the papers and their code releases state, and the deviations of our
reproductions from them."""

import csv
import json
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .declared import Reproduction, Row
from .papers import papers


class Fact(NamedTuple):
    """A line of facts.csv. `entry` and `rows` are patterns for `fnmatch`; several are joined with |."""

    paper: str
    """One of the paper's names in papers.json."""
    entry: str
    """Names of the paper's entries; `*` for all."""
    rows: str
    """The rows of these entries that the fact is about, each named by a value of its key or its corpus; empty for
    all."""
    option: str
    """An option of model, training, data or search, a field of `Scale` or `Corpus`, an argument of `scores.score`, or
    `layers` for the layers of encoder and decoder, if both have the same number."""
    value: Any
    """The paper's value; a text if it cannot be given as one value."""
    where: str
    """The section, table or figure of the paper, or the file of a release."""
    ours: Any
    """Our value if it deviates from the paper's, otherwise empty; `none` if this package has no such option."""
    why: str
    """The reason for the deviation."""

    def is_about(self, entry: Reproduction, row: Row) -> bool:
        """Returns True if the fact is about this row of the entry."""
        names_of_paper = [name for paper in papers() if self.paper in paper["names"] for name in paper["names"]]
        is_of_paper = any(name in entry.source for name in names_of_paper)
        return is_of_paper and _matches(self.entry, entry.name) and (not self.rows or bool(self.names(row)))

    def names(self, row: Row) -> list[str]:
        """Returns those values of the row's key, and its corpus, that match a pattern in `rows`."""
        return [value for value in (*row.key.values(), row.corpus) if _matches(self.rows, value)]


def _matches(patterns: str, name: str) -> bool:
    """Returns True if the name matches one of the patterns, which are joined with |."""
    return any(fnmatchcase(name, pattern) for pattern in patterns.split("|"))


@cache
def facts() -> list[Fact]:
    """Returns the facts in the order of the file."""
    with Path(__file__).with_name("facts.csv").open(encoding="utf-8", newline="") as file:
        return [Fact(**{**line, "value": _read(line["value"]), "ours": _read(line["ours"])})
                for line in csv.DictReader(file)]  # fmt: skip


def _read(text: str) -> Any:
    """Returns the value of the text if it is JSON, otherwise the text itself."""
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
            # If every row deviates in this way, no row is named.
            names = dict.fromkeys(name for row in about for name in fact.names(row)) if len(about) < len(rows) else ()
            option = f"{fact.option} ({'; '.join(names)})" if names else fact.option
            source = f"the {fact.where}" if fact.where.startswith("release") else f"the paper ({fact.where})"
            lines.append(f"{option}: {fact.ours} here, {fact.value} in {source}: {fact.why}")
    return lines
