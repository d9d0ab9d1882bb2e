"""The class that declares a parameter or a buffer."""

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Declares a parameter or a buffer. `start` is its initial value, a tensor or one number for all elements. If it is
    None, values are drawn from N(0, std²), or, without `std`, as the initialisation says (docs/spec.md §3)."""

    name: str
    shape: tuple[int, ...]
    start: float | Tensor | None = None
    std: float | None = None
