"""Loads torch and the extension module, in this order.

The extension module is linked against libtorch, which importing torch maps into memory, so torch comes first. It
registers the operators `torch.ops.normformer_rs` and keeps oneDNN from using broken AMX (src/cpu/amx.rs), so `import
normformer_rs` loads it at once if torch is imported already. Otherwise the first part of the package that needs them
loads both, and the command line can answer before that. Nothing here changes how Python imports other modules.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from . import _tables

CORE = "normformer_rs._core"
_chosen: Path | None = None
"""The extension module's file, if its name is not the one that Python looks for."""


def begin(core: Path | None) -> None:
    """Loads the extension module now if torch is loaded; otherwise `load` will.

    Args:
        core: the extension module's file; None for the one that Python finds by the module's name.
    """
    global _chosen
    _chosen = core
    if "torch" in sys.modules:
        load()


def load() -> Any:
    """Returns the extension module; torch is loaded first. Errors: ImportError if _tables.json differs from its
    tables."""
    importlib.import_module("torch")
    if _chosen is not None and CORE not in sys.modules:
        _load_file(_chosen)
    core: Any = importlib.import_module(CORE)
    _tables.check(core.tables())
    return core


def _load_file(path: Path) -> None:
    """Imports the extension module from a file of another name, the way Python's import does."""
    spec: Any = importlib.util.spec_from_file_location(CORE, path)
    core = sys.modules[CORE] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(core)
    except BaseException:
        del sys.modules[CORE]
        raise
    package, _, name = CORE.rpartition(".")
    setattr(sys.modules[package], name, core)
