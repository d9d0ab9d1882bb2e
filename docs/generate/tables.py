"""Markdown's tables, and what docs/generate measures from benches/results."""

import csv
import re
from collections.abc import Iterable, Sequence

from .spec import ROOT

RESULTS = ROOT / "benches" / "results"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; nothing where it has no rows."""
    lines = [_line(row) for row in rows]
    return "\n".join([_line(head), "|" + "---|" * len(head), *lines, ""]) if lines else ""


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(_cell(str(cell)) for cell in cells) + " |"


def _cell(text: str) -> str:
    """On one line; bars are escaped, but for those in code, which Markdown does not take for the table's."""
    parts = re.split(r"(`[^`]+`)", text.replace("\n", " "))
    return "".join(part if i % 2 else part.replace("|", "\\|") for i, part in enumerate(parts))


def results(name: str) -> list[dict[str, str]]:
    """The rows of benches/results/`name`.csv; none where it is not there."""
    path = RESULTS / f"{name}.csv"
    return [*csv.DictReader(path.read_text(encoding="utf-8").splitlines())] if path.exists() else []
