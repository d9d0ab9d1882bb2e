"""Turns names of norms and residual schemes in code font into links to their pages, and sources into links to
GitHub."""

import inspect
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from normformer_rs import config

from .spec import ROOT

GITHUB = "https://github.com/normformer-rs/normformer_rs/blob/main/"
_KEPT = re.compile(r"(^ *```.*?^ *```$|^#[^\n]*$|<a [^>]*>.*?</a>|<[^>]+>|!?\[[^\]]*\]\([^)]*\)|``.*?``)", re.M | re.S)
"""Matches the parts of a page in which no link is added."""


def homes() -> dict[str, str]:
    """Returns the page of each norm and scheme, with an anchor if the page describes several names."""
    pages = {e["name"]: f"{kind}/{e['name']}.md" for kind in ("norms", "residuals") for e in config.tables()[kind]}
    return pages | {e["name"]: f"names.md#{e['name']}" for e in config.tables()["families"]}


def linked(page: str, text: str) -> str:
    """Returns the page's text with links. A page does not link to itself."""
    known = {name: posixpath.relpath(home, posixpath.dirname(page) or ".") for name, home in homes().items()
             if home.partition("#")[0] != page}  # fmt: skip

    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}]({known[match[1]]})" if match[1] in known else match[0]

    parts = _KEPT.split(text)  # the matches of _KEPT have odd indices
    return "".join(part if i % 2 else re.sub(r"`([^`\n]+)`", link, part) for i, part in enumerate(parts))


def source(value: Any) -> str:
    """Returns a link to the lines on GitHub that define a class or function; "" if no file of the project does."""
    plain = inspect.unwrap(getattr(value, "fget", value))
    try:
        path = Path(inspect.getsourcefile(plain) or "")
        lines, first = inspect.getsourcelines(plain)
        last = first + len(lines) - 1
    except (OSError, TypeError):
        stub = _stub(getattr(plain, "__name__", ""))
        if stub is None:
            return ""
        path, first = stub
        last = first
    name = os.path.relpath(path, ROOT)
    return "" if name.startswith((".", os.sep)) else f"[source]({GITHUB}{name}#L{first}-L{last})"


def _stub(name: str) -> tuple[Path, int] | None:
    """Returns the file and line of the stub (.pyi) that declares a class generated from Rust's tables; None if there is
    none."""
    for path in sorted((ROOT / "python").rglob("*.pyi")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if name and line.startswith(f"class {name}("):
                return path, number
    return None
