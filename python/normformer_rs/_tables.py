"""Reads Rust's lists of options and names from _tables.json, in a millisecond, without torch and the extension module.

`python -m normformer_rs._stubs --write` writes the file. Loading the extension module checks that both agree.
"""

import functools
import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("_tables.json")
_FIELDS = {"version", "options", "resume", "tables"}
"""The keys of the file's JSON object."""


@functools.cache
def read() -> dict[str, Any]:
    """Returns {version, options: {model, training, data, search, generation}, resume: {option: effect of a change},
    tables: {norms, families, residuals, inits, parametrisations, others}}. Raises ImportError if the file is missing
    or damaged."""
    try:
        content = json.loads(PATH.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise _disagreement() from reason
    if content.keys() != _FIELDS:
        raise _disagreement()
    return content


def check(core: str) -> None:
    """Raises ImportError if the file differs from `core`, the text of `_core.tables()`."""
    if read() != json.loads(core):
        raise _disagreement()


def _disagreement() -> ImportError:
    """Returns the error for a file that is missing, damaged or older than the extension module."""
    return ImportError(
        f"{PATH} and the compiled core disagree. After a change of Rust's tables run `make build`, then "
        "`python -m normformer_rs._stubs --write`"
    )
