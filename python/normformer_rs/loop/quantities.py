"""Formats and reads sizes of memory, such as 4.5 GiB."""

import re

from ..errors import InputError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(count: float) -> str:
    """Formats a size, given in bytes: 4.5 GiB for 4.5·2³⁰."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def in_bytes(text: str) -> int:
    """Returns the bytes of a size such as 20GB, 1.5G, 800 MiB or 4000000. Units are powers of 1,024, with and
    without the i."""
    # Group 1 is the number, group 2 the unit's first letter or nothing.
    parsed = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not parsed or float(parsed[1]) == 0:
        raise InputError(f"expected a size of memory, such as 20GB or 800MiB; got {text!r}")
    return int(float(parsed[1]) * _UNITS[parsed[2].upper()])
