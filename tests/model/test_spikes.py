"""The spike score against a loop in Python."""

import numpy as np
import pytest

from normformer_rs import InputError, analysis


def by_hand(values, window, deviations):
    spikes = 0
    for t in range(window, len(values)):
        before = [v for v in values[t - window : t] if np.isfinite(v)]
        if not np.isfinite(values[t]):
            spikes += 1
        elif before:
            mean = sum(before) / len(before)
            std = (sum((v - mean) ** 2 for v in before) / len(before)) ** 0.5
            spikes += abs(values[t] - mean) >= deviations * std and values[t] != mean
    return 100 * spikes / (len(values) - window)


@pytest.mark.parametrize("window", [2, 50, 400])
def test_the_score_is_that_of_a_loop(window):
    rng = np.random.default_rng(window)
    values = rng.standard_t(2, 5000) + np.linspace(3, 1, 5000)  # heavy tails: several percent of spikes
    values[[700, 4600, 4601]] = np.nan, np.inf, -np.inf
    found = analysis.spike_score(values, window=window, deviations=3.0)
    assert found == pytest.approx(by_hand(values, window, 3.0), abs=1e-12) and found > 1


def test_equal_values_have_no_spike_and_a_step_has_one():
    steady = np.full(30, 0.1)
    assert analysis.spike_score(steady, window=10) == 0
    steady[20:] = 0.3
    assert analysis.spike_score(steady, window=10) == 5  # one of twenty: from then on both values are in the window


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (np.ones(1000), {}, r"more than 1000 values \(window\); got the shape \(1000,\)"),
        (np.ones((3, 4)), {"window": 2}, r"got the shape \(3, 4\)"),
        (np.ones(9), {"window": 1}, "window must be at least 2"),
        (np.ones(9), {"window": 2, "deviations": np.nan}, "deviations more than 0; got 2 and nan"),
    ],
)
def test_bad_arguments_are_refused(values, options, message):
    with pytest.raises(InputError, match=message):
        analysis.spike_score(values, **options)
