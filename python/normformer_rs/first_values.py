"""First values of parameters that are drawn, and the numbers in declarations of norms and schemes."""

import math
from typing import Any, NamedTuple

from .errors import InputError


class Normal(NamedTuple):
    """First values drawn from N(0, std²)."""

    std: float


def number(value: Any, what: str) -> float:
    """A finite number that is declared. Errors: InputError that says `what` for anything else."""
    try:
        found = None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of tensors with many numbers
        found = None
    if found is None:
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}…"
        raise InputError(f"{what} must be a finite number; got {shown}")
    if not math.isfinite(found):
        raise InputError(f"{what} is {found}: it must be finite")
    return found
