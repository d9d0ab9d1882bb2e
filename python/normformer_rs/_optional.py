"""Optional packages, which are imported when they are used."""

import importlib
import importlib.util
from types import ModuleType

REQUIREMENTS = {
    "datasets": "datasets>=4",
    "fairseq": "fairseq==0.12.2",
    "lightning": "lightning>=2.6.6",
    "matplotlib": "matplotlib>=3.8",
    "num2words": "num2words>=0.5.13",
    "pandas": "pandas>=2.2",
    "sacrebleu": "sacrebleu>=2.4",
    "sacremoses": "sacremoses>=0.1.1",
    "shtab": "shtab>=1.7",
    "submitit": "submitit>=1.5.4",
    "subword_nmt": "subword-nmt>=0.3.8",
    "tensorboard": "tensorboard>=2.20",
    "trackio": "trackio>=0.43",
    "transformers": "transformers[torch]>=5.20",
    "wandb": "wandb>=0.31",
}
"""The requirement that installs each package, as in the extras of pyproject.toml."""


def require(name: str, purpose: str, hint: str = "") -> ModuleType:
    """Returns the module of that name. Errors: ImportError if it is missing; the message has the `purpose`, the command
    that installs the package, and the `hint`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:  # the package is there, but lacks one that it needs
            raise
        raise ImportError(f"{purpose} needs {package}: {command(package)}{f' ({hint})' if hint else ''}") from error


def command(package: str) -> str:
    """Returns the command that installs the package; it works from any folder."""
    return f'pip install "{REQUIREMENTS[package]}"'


def available(name: str) -> bool:
    """Returns True if the package is installed, without importing it."""
    return importlib.util.find_spec(name) is not None
