"""The papers' comparisons, each with one command: `normformer-rs reproduce NAME --scale check|here|paper`.

A reproduction is an entry in `ENTRIES` of one of the modules below, made of `declared.py`'s parts. The command, its
help, the site's page, tables and pictures are generated from the entries. Nothing here imports torch until a run
begins.
"""

from . import branch_norm, comparison, power_norm, real_text, without_tears
from .declared import SCALES, Reproduction, Row, Scale, Shown

REPRODUCTIONS: dict[str, Reproduction] = {
    entry.name: entry
    for module in (without_tears, power_norm, branch_norm, real_text, comparison)
    for entry in module.ENTRIES
}
__all__ = ["REPRODUCTIONS", "SCALES", "Reproduction", "Row", "Scale", "Shown"]
