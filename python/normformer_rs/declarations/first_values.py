"""Random initial values of parameters, and the numbers in declarations of norms and schemes."""

from typing import Any, NamedTuple

from ..errors import InputError


class Normal(NamedTuple):
    """Random initial values from N(0, std²)."""

    std: float


_LARGEST = 3.4028234663852886e38
"""The largest number of float32, in which most models have their parameters."""


def number(value: Any, what: str) -> float:
    """Returns a declared number, which must be finite in float32. `what` names the number in messages. Errors:
    InputError for any other value."""
    try:
        converted = None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several numbers
        converted = None
    if converted is None:
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}…"
        raise InputError(f"{what} must be a finite number; got {shown}")
    if not abs(converted) <= _LARGEST:  # written so that it refuses NaN, for which every comparison is False
        raise InputError(f"{what} is {converted}: it must be finite in float32")
    return converted
