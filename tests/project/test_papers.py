"""Citations: every name has its papers, and the specification's list is the data's."""

import re
from pathlib import Path

import pytest

import normformer_rs as nfrs
from normformer_rs.reproduce import papers

ROOT = Path(__file__).parents[2]
WITHOUT_A_PAPER = {
    *("gated-rmsnorm", "x0-lambdas", "depth-scaled", "variance-gate", "fairseq-0.12.2", "normal", "llama-depth"),
    *("fan-in", "standard", "rmsnorm:llama", "rmsnorm:olmo", "rmsnorm:gemma", "rmsnorm:gemma4", "rmsnorm:nanochat"),
    "rmsnorm:deepseek-v4",
}


def test_every_name_has_a_paper_or_says_which_code_defines_it():
    without = {name for name in papers._sources() if nfrs.cite(name).startswith("%")}
    assert without == WITHOUT_A_PAPER
    assert nfrs.cite("x0-lambdas") == "% x0-lambdas: nanochat (commit 92d63d4, gpt.py)"


def test_papers_of_one_author_and_year_are_told_apart():
    assert "GPAS" in nfrs.cite("gpas") and nfrs.cite("gpas").count("@misc") == 1
    assert "Normalization-Free" in nfrs.cite("derf") and nfrs.cite("derf").count("@misc") == 1
    assert "Fixup" in nfrs.cite("r-fixup") and "Depth-Scaled" in nfrs.cite("ds-init")
    assert nfrs.cite("r-fixup").count("@misc") == nfrs.cite("ds-init").count("@misc") == 1


def test_entries_are_bibtex_and_each_paper_stands_once():
    text = nfrs.cite(*(name for name in papers._sources()))
    keys = re.findall(r"^@misc\{(.+),$", text, re.M)
    assert len(keys) == len(set(keys)) > 30
    for entry in re.findall(r"@misc\{.*?\n\}", text, re.S):
        assert entry.count("{") == entry.count("}")
        assert re.search(r"author = \{[^,]+( and [^,]+)*\},", entry), entry
    assert repr(nfrs.cite("rezero")) == str(nfrs.cite("rezero"))


def test_the_packages_own_entry_is_the_citation_file():
    own, file = nfrs.cite(), (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{nfrs.__version__}}}" in own and f"version: {nfrs.__version__}\n" in file
    (title,) = re.findall(r'^title: "(.*)"$', file, re.M)
    (home,) = re.findall(r"^repository-code: (.*)$", file, re.M)
    assert title in own and home in own


def test_an_unknown_name_is_named():
    with pytest.raises(nfrs.InputError, match='unknown name "deepnrom" \\(did you mean "deepnorm"'):
        nfrs.cite("deepnrom")


def test_the_specifications_list_is_the_datas():
    text = (ROOT / "docs" / "spec.md").read_text()
    table = text[text.index("| short name | paper |") : text.index('<a id="releases"></a>')]
    rows = []
    for paper in papers.papers():
        names = re.sub(r"^(TwT|PN|BrN)\b", r"**\1**", "; ".join(paper["names"]))
        end = f". arXiv {paper.get('arxiv')}" * ("arxiv" in paper) + f". {paper.get('url')}" * ("url" in paper)
        end += f"; {paper.get('more')}" * ("more" in paper)
        rows.append(f"| {names} | {paper['authors']}: {paper['title']}. {paper['year']}{end} |")
    assert table.strip().splitlines()[2:] == rows


def test_what_is_no_name_is_said():
    with pytest.raises(nfrs.InputError, match='unknown name "3"'):
        nfrs.cite(3)
