"""Generates the page of files, which lists every source file with its first sentence."""

import re
from pathlib import Path

from .spec import ROOT
from .tables import table

FOLDERS = ("src", "python/normformer_rs", "tests", "benches", "docs/generate")


def page() -> str:
    """Returns the page, with a table for each folder that has source files."""
    parts = [
        "# Files\n\nMade of each file's first sentence. [Architecture](architecture.md) says how they work together."
    ]
    for top in FOLDERS:
        folders = sorted({path.parent for path in (ROOT / top).rglob("*") if path.suffix in (".rs", ".py")})
        for folder in folders:
            sentences = [(f"`{path.name}`", first_sentence(path)) for path in sorted(folder.iterdir())
                     if path.suffix in (".rs", ".py")]  # fmt: skip
            rows = [row for row in sentences if row[1]]
            if rows:
                parts.append(f"## {folder.relative_to(ROOT).as_posix()}\n\n{table(('file', 'what'), rows)}")
    return "\n\n".join(parts) + "\n"


def first_sentence(path: Path) -> str:
    """Returns the first sentence of a module's documentation; "" if it has none."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".rs":
        lines = re.match(r"(?://!.*\n)*", text)
        opening = " ".join(line[3:].strip() for line in (lines[0] if lines else "").splitlines())
    else:
        docstring = re.match(r'r?"""(.*?)"""', text, re.S)
        opening = " ".join((docstring[1] if docstring else "").split("\n\n")[0].split())
    # "et al." does not end a sentence.
    sentence = re.split(r"(?<!al)(?<=[.:])\s", opening, maxsplit=1)[0].rstrip(":.")
    return sentence.replace("|", "\\|")
