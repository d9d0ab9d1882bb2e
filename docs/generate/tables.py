"""Markdown's tables, and what docs/generate measures from benches/results."""

import csv

from normformer_rs.reproduce.tables import markdown as table

from .spec import ROOT

__all__ = ["RESULTS", "results", "table"]
RESULTS = ROOT / "benches" / "results"


def results(name: str) -> list[dict[str, str]]:
    """The rows of benches/results/`name`.csv; none where it is not there."""
    path = RESULTS / f"{name}.csv"
    return [*csv.DictReader(path.read_text(encoding="utf-8").splitlines())] if path.exists() else []
