"""Generates the list of reproductions on docs/reproduce.md: each with its runs, and with its figures if benches/results
has them."""

import shutil
from pathlib import Path

from normformer_rs.reproduce import REPRODUCTIONS, SCALES, Reproduction
from normformer_rs.reproduce.results import Results
from normformer_rs.reproduce.tables import markdown, table

from .tables import RESULTS


def entries(page: str, folder: Path) -> str:
    """Returns the page with its last section, "Names", filled. Pictures are written to `folder`/images."""
    head, mark, _ = page.partition("\n## Names\n")
    if not mark:
        raise ValueError("docs/reproduce.md has no section Names")
    return head + mark + "\n" + "\n".join(_entry(entry, folder) for entry in REPRODUCTIONS.values())


def _entry(entry: Reproduction, folder: Path) -> str:
    """Returns the section about a reproduction: claim, source, scales, and the tables and pictures of measured
    scales."""
    parts = [f"### {entry.name}", f"{entry.title}. {entry.claim} Source: {entry.source}."]
    rows = [(scale, len(declared.rows), declared.about) for scale, declared in entry.scales.items()]
    parts.append(markdown(("scale", "runs", "recipe"), rows))
    for scale, declared in entry.scales.items():
        results = Results(entry, scale, RESULTS)
        if not results.measured:
            continue
        parts += [f"Measured at scale {scale} ({SCALES[scale].partition(';')[0]}):",
                  markdown(*table(results, declared.shown))]  # fmt: skip
        if (picture := results.path(".png")).exists():
            (folder / "images").mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, folder / "images" / picture.name)
            parts.append(f"![{entry.title}](images/{picture.name})")
    return "\n\n".join(parts) + "\n"
