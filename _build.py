"""maturin as the build backend, with torch-sys told to take libtorch from the interpreter that builds.

torch-sys asks whatever ``python3`` comes first on PATH where libtorch is, and is not run again when PATH changes; so
each version of Python and torch gets a target folder of its own (a shared one would hand a second install the first
one's libtorch), and in it an interpreter that sees torch under a path which stays: an isolated build's torch lies in a
new temporary folder each time, and everything would be compiled anew.
"""

import hashlib
import importlib.util
import os
import platform
import shlex
import sys
from pathlib import Path


def _prepare() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SystemExit(
            f"normformer_rs builds on Linux x86-64, this is {sys.platform} {platform.machine()}: "
            "use such a machine, a container or WSL 2"
        )
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        raise SystemExit(
            f"normformer_rs needs Python 3.10 to 3.13, this is {platform.python_version()}: "
            "create the virtual environment with one of those"
        )
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        raise SystemExit(
            "building normformer_rs needs torch 2.11: `pip install torch==2.11.0` first, or drop --no-build-isolation"
        )
    version = {}
    with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
        exec(file.read(), version)  # torch's own two lines; importing torch would cost seconds
    torch = str(version["__version__"])
    if not torch.startswith("2.11."):
        raise SystemExit(f"normformer_rs needs torch 2.11, found {torch}: `pip install torch==2.11.0`")

    os.environ["LIBTORCH_USE_PYTORCH"] = "1"
    if "CARGO_TARGET_DIR" not in os.environ:
        key = hashlib.sha256(f"{sys.version} {torch}".encode()).hexdigest()[:12]
        os.environ["CARGO_TARGET_DIR"] = os.path.join("target", f"python-{key}")
    interpreter = _interpreter(Path(os.environ["CARGO_TARGET_DIR"]).absolute(), Path(spec.origin).parents[1])
    os.environ["PATH"] = f"{interpreter}{os.pathsep}{os.environ.get('PATH', '')}"


def _interpreter(target: Path, packages: Path) -> Path:
    """A folder with this interpreter under both names that torch-sys uses; it imports torch from `target/packages`."""
    bin = target / "bin"
    bin.mkdir(parents=True, exist_ok=True)
    link = target / "packages"
    link.unlink(missing_ok=True)
    link.symlink_to(packages, target_is_directory=True)
    for name in ("python", "python3"):
        script = bin / name
        script.write_text(
            f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(link))}${{PYTHONPATH:+:$PYTHONPATH}} "
            f'exec {shlex.quote(sys.executable)} "$@"\n'
        )
        script.chmod(0o755)
    return bin


_prepare()

from maturin import *  # noqa: E402, F403  (the PEP 517 and PEP 660 hooks)
