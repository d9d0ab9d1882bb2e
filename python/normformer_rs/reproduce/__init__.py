"""Repeats comparisons from papers, each with one command: `normformer-rs reproduce NAME --scale check|here|paper`.

A reproduction is declared as a table in `entries.toml` or as an entry in `comparison.ENTRIES`, with the classes of
`declared.py`. The command, its help, the site's page, tables and pictures are generated from these declarations. No
module here imports torch until a run begins.
"""

from typing import TYPE_CHECKING, Any

from .declared import SCALES, Reproduction, Row, Scale, Shown

if TYPE_CHECKING:
    REPRODUCTIONS: dict[str, Reproduction]

__all__ = ["REPRODUCTIONS", "SCALES", "Reproduction", "Row", "Scale", "Shown"]


def __getattr__(name: str) -> Any:
    """Returns REPRODUCTIONS. The entries are read when they are first used, so that other commands do not wait for
    entries.toml."""
    if name != "REPRODUCTIONS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import comparison, entries

    reproductions = {entry.name: entry for module in (entries, comparison) for entry in module.ENTRIES}
    # Python asks this function only for names that the module lacks, so the entries are read once.
    globals()[name] = reproductions
    return reproductions
