"""Loads torch and the core, in this order.

The core is linked against libtorch, which torch's import maps, so torch comes first. The core registers the operators
`torch.ops.normformer_rs` and keeps oneDNN from broken AMX (src/cpu/amx.rs), so it comes with `import normformer_rs`
where torch is there already. Else both come with the first part of the package that needs them: the command line
answers before. Nothing here changes how Python imports other modules.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from . import _tables

CORE = "normformer_rs._core"
_chosen: Path | None = None
"""The core's file, where it has another name than Python looks for."""


def begin(core: Path | None) -> None:
    """Loads the core now if torch is loaded; otherwise `load` will.

    Args:
        core: its file; None: the one that Python finds by the module's name.
    """
    global _chosen
    _chosen = core
    if "torch" in sys.modules:
        load()


def load() -> Any:
    """The core, after torch. Errors: ImportError where _tables.json is not the core's."""
    importlib.import_module("torch")
    if _chosen is not None and CORE not in sys.modules:
        _load_file(_chosen)
    core: Any = importlib.import_module(CORE)
    _tables.check(core.tables())
    return core


def _load_file(path: Path) -> None:
    """Imports the core from a file of another name, as Python's import does."""
    spec: Any = importlib.util.spec_from_file_location(CORE, path)
    core = sys.modules[CORE] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(core)
    except BaseException:
        del sys.modules[CORE]
        raise
    package, _, name = CORE.rpartition(".")
    setattr(sys.modules[package], name, core)
