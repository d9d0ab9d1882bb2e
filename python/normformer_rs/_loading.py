"""Loads torch and the core in this order, each when it is first needed.

The core is linked against libtorch, which torch's import maps, so torch comes first. The core registers the operators
`torch.ops.normformer_rs` and keeps oneDNN from broken AMX (src/cpu/amx.rs), so it comes right after torch, also where
a script imports only torch. `import normformer_rs` alone loads neither: the command line answers before both.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from . import _tables

CORE = "normformer_rs._core"


def begin(core: Path | None) -> None:
    """Loads the core now where torch is loaded already, otherwise as soon as torch is.

    Args:
        core: its file; None: the one that Python finds by the module's name.
    """
    if core is not None:
        sys.meta_path.append(_Chosen(core))
    if "torch" in sys.modules:
        load()
    else:
        sys.meta_path.insert(0, _Finder())


def load() -> Any:
    """The core, after torch. Errors: ImportError where _tables.json is not the core's."""
    core: Any = importlib.import_module(CORE)
    _tables.check(core.tables())
    return core


class _Chosen:
    """Finds the core in a file of another name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the core; None for other modules."""
        return importlib.util.spec_from_file_location(name, self._path) if name == CORE else None


class _Finder:
    """At the first import of torch or of the core, imports the other too, and removes itself.

    It wraps the loader, not the search, so that looking for a module imports nothing.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of torch or of the core, as the other finders have it; None for other modules."""
        if name not in ("torch", CORE):
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec: Any = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            (self._import_core_after if name == "torch" else self._import_torch_before)(spec.loader)
        return spec

    def _import_core_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            loader.exec_module = execute
            execute(module)
            self._leave()
            load()

        loader.exec_module = exec_module

    def _import_torch_before(self, loader: Any) -> None:
        create = loader.create_module

        def create_module(spec: Any) -> Any:
            loader.create_module = create
            self._leave()
            importlib.import_module("torch")
            return create(spec)

        loader.create_module = create_module

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
