"""BranchNorm's α_t."""

import math


def branchnorm_alpha(t: int, steps: int, growth: str = "linear") -> float:
    """α_t, at most 1, with u = t/T (BrN eq 8); T = 0: 1.

    linear: u; exp: (e^{5u}−1)/(e⁵−1); sigmoid: logistic(10(u−½)), rescaled to run from 0 at u = 0 to 1 at u = 1.
    """
    if steps == 0 or t >= steps:
        return 1.0
    u = t / steps
    if growth == "linear":
        return u
    if growth == "exp":
        return math.expm1(5 * u) / math.expm1(5)
    if growth == "sigmoid":
        low, here, high = (1 / (1 + math.exp(-10 * (v - 0.5))) for v in (0.0, u, 1.0))
        return (here - low) / (high - low)
    raise ValueError(f"unknown growth {growth!r}; the growths are linear, exp, sigmoid")
