"""Random initial values of parameters, and the numbers in declarations of norms and schemes."""

import math
from typing import Any, NamedTuple

from .errors import InputError


class Normal(NamedTuple):
    """Random initial values from N(0, std²)."""

    std: float


def number(value: Any, what: str) -> float:
    """Returns a declared number, which must be finite. Errors: InputError that says `what` for anything else."""
    try:
        found = None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several numbers
        found = None
    if found is None:
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}…"
        raise InputError(f"{what} must be a finite number; got {shown}")
    if not math.isfinite(found):
        raise InputError(f"{what} is {found}: it must be finite")
    return found
