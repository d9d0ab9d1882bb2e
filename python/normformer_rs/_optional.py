"""Packages that the wheel does without: imported when they are used."""

import importlib
import importlib.util
from types import ModuleType


def require(name: str, purpose: str, extra: str = "train", hint: str = "") -> ModuleType:
    """The module of that name; ImportError that says what it is for and how to install it where it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        note = f" ({hint})" if hint else ""
        raise ImportError(f"{purpose} needs {package}: pip install normformer_rs[{extra}]{note}") from error


def available(name: str) -> bool:
    """Whether the package is installed; it is not imported."""
    return importlib.util.find_spec(name) is not None
