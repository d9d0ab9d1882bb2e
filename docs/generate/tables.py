"""Makes Markdown tables, and reads the tables in benches/results."""

import csv

from normformer_rs.reproduce.tables import markdown as table

from .spec import ROOT

__all__ = ["RESULTS", "results", "table"]
RESULTS = ROOT / "benches" / "results"


def results(name: str) -> list[dict[str, str]]:
    """Returns the rows of benches/results/`name`.csv; an empty list if there is no such file."""
    path = RESULTS / f"{name}.csv"
    return [*csv.DictReader(path.read_text(encoding="utf-8").splitlines())] if path.exists() else []
