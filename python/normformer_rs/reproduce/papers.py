"""The papers that define names, as BibTeX.

>>> import normformer_rs as nfrs
>>> nfrs.cite("scalenorm")
@misc{nguyen2019transformers,
  title = {{Transformers without Tears: Improving the Normalization of Self-Attention}},
  author = {Toan Q. Nguyen and Julian Salazar},
  year = {2019},
  eprint = {1910.05895},
  archivePrefix = {arXiv},
}
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from ..config import __version__, tables, unknown
from ..errors import InputError

_KINDS = ("norms", "residuals", "inits", "parametrisations", "others", "families")


class Citation(str):
    """BibTeX entries. Notebooks and Python's prompt show the text itself instead of a quoted string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def cite(*names: str) -> Citation:
    """Returns BibTeX of the papers that define these norms, residual schemes, initialisations or parametrisations, each
    paper once; without names, the entry of this package.

    For a name that no paper defines, the result has a comment that names the code that defines it. Errors: InputError
    for an unknown name.
    """
    if not names:
        return Citation(_own())
    sources = _sources()
    entries: dict[str, None] = {}
    for name in names:
        if name not in sources:
            raise InputError(unknown("name", name, sources))
        source = sources[name]
        of_papers = [_bibtex(paper) for paper in papers() if any(_is_named(cited, source) for cited in paper["names"])]
        entries |= dict.fromkeys(of_papers or [f"% {name}: {source}"])
    return Citation("\n".join(entries))


@cache
def papers() -> list[dict[str, Any]]:
    """Returns the papers in papers.json. Each has `names`, by which the tables' sources cite it, authors, title, year,
    and arxiv or url if there is one."""
    entries: list[dict[str, Any]] = json.loads(Path(__file__).with_name("papers.json").read_text("utf-8"))
    return entries


def _sources() -> dict[str, str]:
    """Returns, for each name in the tables of norms, schemes and others, its sources, joined with "; "."""
    sources: dict[str, list[str]] = {}
    for kind in _KINDS:
        for entry in tables()[kind]:
            sources.setdefault(entry["name"], []).append(entry.get("source") or "no source")
    return {name: "; ".join(dict.fromkeys(texts)) for name, texts in sources.items()}


def _is_named(name: str, source: str) -> bool:
    """Returns True if the text `source` contains the paper's whole name: `Chen et al. 2025` is another paper than
    `Chen et al. 2025 (GPAS)`."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w| \()", source) is not None


def _bibtex(paper: dict[str, Any]) -> str:
    """Returns the BibTeX entry of a paper. Its key is the first author's last name, the year, and the title's first
    word of at least four letters."""
    # BibTeX joins authors with "and"; its word "others" stands for "et al.".
    authors = paper["authors"].replace(" et al.", ", others").replace(", ", " and ")
    word = next(word for word in re.findall(r"[^\W\d_]{4,}", paper["title"]))
    first = paper["authors"].split(",")[0].removesuffix(" et al.").split(" ")[-1]
    key = f"{first}{paper['year']}{word}".lower()
    where = [f"  eprint = {{{paper['arxiv']}}}", "  archivePrefix = {arXiv}"] if "arxiv" in paper else []
    where += [f"  url = {{{paper['url']}}}"] if "url" in paper else []
    lines = [
        f"  title = {{{{{paper['title']}}}}}",
        f"  author = {{{authors}}}",
        f"  year = {{{paper['year']}}}",
        *where,
    ]
    return f"@misc{{{key},\n" + "".join(f"{line},\n" for line in lines) + "}"


def _own() -> str:
    """Returns the BibTeX entry of this package."""
    return (
        "@software{normformer_rs,\n  title = {{normformer_rs: Transformer normalisations, residual schemes and "
        "initialisations for PyTorch}},\n  author = {{the normformer_rs developers}},\n  year = {2026},\n"
        f"  version = {{{__version__}}},\n  url = {{https://github.com/normformer-rs/normformer_rs}},\n}}"
    )
