"""First values of parameters that are drawn, as declarations of norms and schemes have them."""

from typing import NamedTuple


class Normal(NamedTuple):
    """First values drawn from N(0, std²)."""

    std: float
