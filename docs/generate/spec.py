"""Finds the section of docs/spec.md about a name, and the papers that a source cites."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "docs" / "spec.md"


@cache
def text() -> str:
    """Returns the text of docs/spec.md."""
    return SPEC.read_text(encoding="utf-8")


def section(name: str) -> tuple[str, str] | None:
    """Returns the anchor and the text, without heading, of the section that has `name` in its heading; None if there is
    none."""
    for match in re.finditer(
        r"^((?:<a id=\"[\w-]+\"></a>)*)\n#+ [^\n]*`" + re.escape(name) + r"`[^\n]*\n", text(), re.M
    ):
        end = re.compile(r"^(?:<a id=|#)", re.M).search(text(), match.end())
        anchors = re.findall(r'id="([\w-]+)"', match[1])
        if anchors:
            anchor = name if name in anchors else anchors[0]
            return anchor, text()[match.end() : end.start() if end else None].strip("\n")
    return None


def papers(source: str, name: str) -> list[str]:
    """Returns the full references, from docs/spec.md §7.1, of the papers that `source` cites for `name`."""
    begin = text().index('<a id="papers"></a>')
    table = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text()[begin : text().index("<a id=", begin + 1)], re.M)
    references = []
    for keys, paper in table:
        # A row may name one norm or scheme for which a source means this paper.
        citations = [key.strip(" *") for key in re.split("[;,]", keys)]
        if (
            any(re.search(re.escape(key) + r"(?!\w| \()", source) for key in citations)
            or f"where {name} is meant" in keys
        ):
            references.append(paper.strip())
    return references
