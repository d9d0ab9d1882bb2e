"""The pages of results and benches/results: every table between marks is what its csv file gives."""

import csv
import re
from pathlib import Path

import pytest
from docs.generate import measured

import normformer_rs as nfrs
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


@pytest.mark.parametrize("page", measured.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_rows_of_its_csv_files(page):
    """Where they differ: `python -m docs.generate results`."""
    text = page.read_text()
    assert measured.filled(text) == text and "<!-- ledger" in text


def test_every_table_of_the_ledger_is_on_a_page():
    with (TABLES / "ledger.csv").open() as file:
        named = {row["table"] for row in csv.DictReader(file)} - {""}
    pages = "".join(page.read_text() for page in measured.PAGES)
    assert named == set(re.findall(r"<!-- ledger (\S+) -->", pages))


def test_a_table_without_rows_is_refused():
    with pytest.raises(ValueError, match="nowhere"):
        measured.filled("<!-- ledger nowhere -->\n<!-- end of nowhere -->\n")


def test_authors_code_is_listed_with_the_commits_of_its_tests():
    rows = list(csv.DictReader((TABLES / "authors.csv").read_text().splitlines()))
    texts = [path.read_text() for path in (ROOT / "tests" / "authors").glob("*.py")]
    pinned = (ROOT / "requirements-dev.txt").read_text()
    for row in rows:
        is_installed = row["whose"] == "library" and f"{row['repository'].partition('/')[2]}=={row['commit']}" in pinned
        of_torch = row["repository"] == "pytorch/pytorch"  # the tests know it by torch's version
        assert of_torch or is_installed or any(row["repository"] in t and row["commit"] in t for t in texts), row
    assert len({(row["name"], row["repository"]) for row in rows}) == len(rows)


def test_most_names_are_held_against_other_peoples_code():
    rows = list(csv.DictReader((TABLES / "authors.csv").read_text().splitlines()))
    tables = nfrs.tables()
    named = {entry["name"] for kind in ("norms", "families", "residuals", "inits") for entry in tables[kind]}
    assert named - {row["name"] for row in rows} == {"branchnorm"}
