"""`normformer-rs --version --all`: prints the facts about the machine that a bug report needs."""

import os
import platform
import sys

from ..config import __version__
from . import PROG

_PACKAGES = ("numpy", "transformers", "lightning", "fairseq", "timm", "sacrebleu")
FLAGS = ["--version", "--all"]
"""The command line that prints `report`."""


def report() -> str:
    """Returns a text with a line for each of: the package and its extension module, Python, torch, the processor,
    GPUs, the operating system, installed packages, environment variables."""
    import torch

    from .. import _core

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    set_here = [f"{name}={value}" for name, value in sorted(os.environ.items())
                if name.startswith("NORMFORMER_RS_") or name in ("OMP_NUM_THREADS", "LD_PRELOAD")]  # fmt: skip
    # BUILT_AGAINST reads "normformer_rs is built against torch VERSION;".
    lines = {
        PROG: f"{__version__}, {_core.BUILT_AGAINST.removesuffix(';').partition(' is ')[2]}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "processor": f"{processor()}, {os.cpu_count()} cores, instructions {_core.cpu_level(None)}",
        "devices": ", ".join(devices) or "none",
        "system": platform.platform(),
        "packages": ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name))) or "none",
        "variables": " ".join(set_here) or "none",
    }
    return "\n".join(f"{name}: {what}" for name, what in lines.items())


def processor() -> str:
    """Returns the processor's model name from /proc/cpuinfo, or else the machine's type, such as x86_64."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _version(package: str) -> str | None:
    """Returns a package's version; None if the package is not installed."""
    from importlib import metadata  # imported here, because it is slow and --help does not need it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
