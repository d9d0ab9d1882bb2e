"""Rust's lists of options and names, from _tables.json: read in a millisecond, without torch and the core.

`python -m normformer_rs._stubs --write` writes the file. An import of torch compares it with the core.
"""

import functools
import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("_tables.json")


@functools.cache
def read() -> dict[str, Any]:
    """{version, options: {model, training, data, search, generation}, resume: {option: effect of a change}, tables:
    {norms, families, residuals, inits, parametrisations, others}}."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def check(core: str) -> None:
    """Raises ImportError where the file differs from `core`, the text of `_core.tables()`."""
    try:
        is_current = read() == json.loads(core)
    except (OSError, ValueError):
        is_current = False
    if not is_current:
        raise ImportError(
            f"{PATH} and the compiled core disagree. After a change of Rust's tables run `make build`, then "
            "`python -m normformer_rs._stubs --write`"
        )
