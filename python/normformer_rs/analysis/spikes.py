"""How often a training's losses or gradient norms spike."""

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InputError

_BLOCK = 4096
"""The number of windows that are averaged at a time."""


def spike_score(values: ArrayLike, window: int = 1000, deviations: float = 7.0) -> float:
    """Returns the percentage of values x_t with |x_t − m_t| ≥ `deviations`·s_t, where m_t and s_t are mean and standard
    deviation of the `window` values before x_t.

    >>> rng = np.random.default_rng(0)
    >>> norms = rng.normal(1.0, 0.1, 3000)
    >>> norms[[1500, 2500]] = 4.0
    >>> spike_score(norms)
    0.1

    Args:
        values: one number for each update, in order, such as the losses or gradient norms of `History`. A value that is
            not finite counts as a spike, and is left out of m and s.
        window: the number of values in m_t and s_t, at least 2. The first `window` values are not scored.
        deviations: the distance from m_t that is a spike, in standard deviations; more than 0.

    Errors: InputError if there are not more than `window` values, or an argument is out of range.

    Source: Team OLMo 2024 (2 OLMo 2 Furious), §3: the spike score.
    """
    x = np.asarray(values, np.float64)
    if window < 2 or not deviations > 0:
        raise InputError(f"window must be at least 2, and deviations more than 0; got {window} and {deviations}")
    if x.ndim != 1 or len(x) <= window:
        raise InputError(f"expected a series of more than {window} values (window); got the shape {x.shape}")
    known = np.where(np.isfinite(x), x, np.nan)
    # Row t holds the values before x[window + t]; the last window has no value after it.
    windows = np.lib.stride_tricks.sliding_window_view(known, window)[:-1]
    spikes = 0
    # numpy copies all windows that it averages, so only a block of them is averaged at a time.
    for start in range(0, len(windows), _BLOCK):
        before, scored = windows[start : start + _BLOCK], x[window:][start : start + _BLOCK]
        spikes += int(np.sum(~np.isfinite(scored)))
        is_scored = np.isfinite(scored) & np.isfinite(before).any(-1)
        before, scored = before[is_scored], scored[is_scored]
        distance = np.abs(scored - np.nanmean(before, -1))
        # After equal values the deviation is 0. Then a value that is equal, too, is no spike.
        spikes += int(np.sum((distance >= deviations * np.nanstd(before, -1)) & (distance > 0)))
    return 100.0 * spikes / len(windows)
