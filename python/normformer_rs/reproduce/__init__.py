"""The papers' comparisons, each by one command: `normformer-rs reproduce NAME --scale check|here|paper`.

A reproduction is a table of `entries.toml`, or an entry of `comparison.ENTRIES`, made of `declared.py`'s parts. The
command, its help, the site's page, tables and pictures are made of the entries. Nothing here imports torch until a run
begins.
"""

from typing import TYPE_CHECKING, Any

from .declared import SCALES, Reproduction, Row, Scale, Shown

if TYPE_CHECKING:
    REPRODUCTIONS: dict[str, Reproduction]

__all__ = ["REPRODUCTIONS", "SCALES", "Reproduction", "Row", "Scale", "Shown"]


def __getattr__(name: str) -> Any:
    """REPRODUCTIONS, when they are first asked for: other commands need not wait for the file."""
    if name != "REPRODUCTIONS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import comparison, entries

    found = {entry.name: entry for module in (entries, comparison) for entry in module.ENTRIES}
    globals()[name] = found
    return found
