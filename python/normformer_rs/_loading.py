"""Finds the extension module that fits the installed torch, and loads torch and the module, in this order.

A build from source has one extension module, `_core.SUFFIX`. Its file contains the version of the torch that it is
linked against. A wheel from a package index has one for each minor version of torch, `_core-torch2.13.SUFFIX`. The
right one is found by reading files, because importing torch takes seconds.

The extension module is linked against libtorch, which importing torch maps into memory, so torch is loaded first. The
module registers the operators `torch.ops.normformer_rs` and keeps oneDNN from using broken AMX (src/cpu/amx.rs), so
`import normformer_rs` loads it at once if torch is imported already. Otherwise torch and the module are loaded when a
part of the package first needs them, so that the command line can answer before. Nothing here changes how Python
imports other modules.
"""

import importlib
import importlib.machinery
import importlib.util
import json
import mmap
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from . import _tables

CORE = "normformer_rs._core"
_chosen: Path | None = None
"""The extension module's file, if its name is not the one that Python looks for."""
ANY_TORCH = "NORMFORMER_RS_ANY_TORCH"
"""The environment variable that, set to 1, turns a wrong version into a warning."""
_BUILT_AGAINST = re.compile(rb"normformer_rs is built against torch (\d[\w.]*);")
"""Matches the version in the sentence `_core.BUILT_AGAINST`."""
_OF_A_TORCH = re.compile(r"_core-torch(\d+)\.(\d+)\.")
"""Matches the start of a file name such as _core-torch2.13.SUFFIX, with the minor version of torch."""


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
    # Python's own import would also make the module an attribute of its package.
    package, _, name = CORE.rpartition(".")
    setattr(sys.modules[package], name, core)


def core() -> Path | None:
    """Returns the file of the extension module for the installed torch, if there are several modules. Returns None if
    there is only one, which Python finds by its name.

    Raises ImportError, with the command that fixes it, if none fits. The C++ interface of libtorch changes with every
    minor version, so an extension module works with only one.
    """
    cores = _cores()
    if not cores:
        _check_alone()
        return None
    installed, minors = _installed_torch(), list(cores)
    pip = f'`pip install "torch>={minors[0]},<{_next(minors[-1])}"`'
    if installed is None:
        raise ImportError(f"normformer_rs needs torch {minors[0]} to {minors[-1]}, which is not installed: {pip}")
    if (chosen := cores.get(_minor(installed))) is not None:
        return chosen
    message = (
        f"this wheel of normformer_rs works with torch {', '.join(minors)}; found torch {installed}: {pip}, or look "
        "for a newer normformer_rs"
    )
    if os.environ.get(ANY_TORCH) != "1":
        raise ImportError(message)
    # With stacklevel 3 the warning names the line of the user's `import normformer_rs`.
    warnings.warn(f"{message} (going on with the core for {minors[-1]}, because {ANY_TORCH} is 1)", stacklevel=3)
    return cores[minors[-1]]


def _cores() -> dict[str, Path]:
    """Returns the extension modules by minor version of torch, the oldest first."""
    folder = Path(__file__).parent
    paths = {}
    for name in os.listdir(folder):
        version = _OF_A_TORCH.match(name)
        if version and name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
            paths[int(version[1]), int(version[2])] = folder / name
    return {f"{major}.{minor}": paths[major, minor] for major, minor in sorted(paths)}


def _next(minor: str) -> str:
    """Returns the minor version after this one: 2.14 for 2.13."""
    major, number = minor.split(".")
    return f"{major}.{int(number) + 1}"


def _check_alone() -> None:
    """Raises ImportError if the only extension module was built against another minor version of torch than the
    installed one; warns instead if NORMFORMER_RS_ANY_TORCH is 1."""
    built, installed = _minor(_built()), _installed_torch()
    pin = f'`pip install "torch=={built}.*"`'
    if installed is None:
        raise ImportError(f"normformer_rs needs torch {built}, which is not installed: {pin}")
    if _minor(installed) == built:
        return
    message = (
        f"normformer_rs was built against torch {built}, found torch {installed}. Build it for this torch: "
        f"{_install()}; or go back: {pin}"
    )
    if os.environ.get(ANY_TORCH) != "1":
        raise ImportError(message)
    # With stacklevel 4 the warning names the line of the user's `import normformer_rs`.
    warnings.warn(f"{message} (going on, because {ANY_TORCH} is 1)", stacklevel=4)


def _built() -> str:
    """Returns the version of the torch that the extension module is linked against, as its file says."""
    core = importlib.util.find_spec(f"{__package__}._core")
    if core is None or core.origin is None or not os.path.getsize(core.origin):
        raise ImportError(f"normformer_rs is not built for this Python: {_install()}")
    with open(core.origin, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        # This search takes 0.3 ms. Reading the whole file, 11 MB, would take 7 ms.
        version = _BUILT_AGAINST.search(content)
        if version is None:
            raise ImportError(f"{core.origin} does not say which torch it was built against: {_install()}")
        return version[1].decode()


def _installed_torch() -> str | None:
    """Returns the version of the torch that an import would find; None if torch is not installed."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.M)
    return version[1] if version else None


def _minor(version: str) -> str:
    """Returns the minor version: 2.11 for 2.11.0+cu130."""
    return ".".join(re.split(r"[.+]", version)[:2])


def _install() -> str:
    """Returns the command that rebuilds the package for the installed torch, from the folder that it was installed
    from."""
    import importlib.metadata  # this import takes 18 ms, and only this message needs it
    import shlex
    from urllib.parse import unquote, urlparse

    command = "pip install --force-reinstall --no-deps --no-cache-dir"
    try:
        record = importlib.metadata.distribution("normformer_rs").read_text("direct_url.json")
        origin = json.loads(record) if record else {}
    except (importlib.metadata.PackageNotFoundError, ValueError):
        origin = {}
    if "dir_info" not in origin:  # pip has recorded no local folder
        return f"in a checkout `{command} .`"
    folder = unquote(urlparse(origin["url"]).path)
    return f"`{command} {'--editable ' if origin['dir_info'].get('editable') else ''}{shlex.quote(folder)}`"
