"""A parameter's declaration."""

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter or buffer. `start`: its first value, one number for all elements; None: drawn (docs/spec.md §3), or
    from N(0, std²) where `std` is set."""

    name: str
    shape: tuple[int, ...]
    start: float | Tensor | None = None
    std: float | None = None
