"""docs/results-training.md and benches/results: every table between marks is what its csv file gives."""

import re
from pathlib import Path

import pytest

from normformer_rs.reproduce import REPRODUCTIONS
from normformer_rs.reproduce.results import Results
from normformer_rs.reproduce.tables import section

ROOT = Path(__file__).parents[2]
PAGE, TABLES = ROOT / "docs" / "results-training.md", ROOT / "benches" / "results"
MARKS = re.findall(r"<!-- reproduce (\S+) --scale (\S+) -->", PAGE.read_text())


def test_there_are_tables():
    assert len(MARKS) > 5 and len(MARKS) == len(set(MARKS))


@pytest.mark.parametrize("name, scale", MARKS, ids=str)
def test_a_table_is_its_csv(name, scale):
    """Where they differ: `reproduce NAME --scale here --no-train --results benches/results --write` the page."""
    results = Results(REPRODUCTIONS[name], scale, TABLES)
    assert section(REPRODUCTIONS[name], scale, results, PAGE) in PAGE.read_text()


def test_every_csv_of_a_reproduction_is_on_the_page():
    measured = {entry.name for entry in REPRODUCTIONS.values() if (TABLES / f"{entry.name}-here.csv").exists()}
    assert measured <= {name for name, scale in MARKS if scale == "here"}
