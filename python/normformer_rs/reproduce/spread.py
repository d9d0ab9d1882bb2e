"""Statistics of several seeds: mean and standard deviation, and t tests that are paired by seed."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """The numbers of at least two seeds. It is formatted as mean ± sample standard deviation."""

    numbers: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.numbers)

    @property
    def sd(self) -> float:
        return statistics.stdev(self.numbers)

    def __format__(self, form: str) -> str:
        deviation = form.lstrip("+")  # the sign is for the mean alone
        return f"{self.mean:{form}} ± {self.sd:{deviation}}"

    def __str__(self) -> str:
        return f"{self:.4g}"


class Difference(NamedTuple):
    """The difference between two rows that were measured with the same seeds."""

    spread: Spread
    p: float
    """The p of the two-sided paired t test, whose hypothesis is that the mean difference is 0."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean difference."""
        return interval(self.spread.numbers)

    @property
    def least(self) -> float:
        """The smallest true difference that a test with as many seeds and this spread finds (p < 0.05) with a power of
        80 %."""
        # The power of 80 % is one-sided: 80 % of T lie below the t with P(|T| ≤ t) = 0.6.
        return self._error * (quantile(0.95, self._freedom) + quantile(0.6, self._freedom))

    @property
    def _error(self) -> float:
        """The standard error of the mean difference."""
        return self.spread.sd / math.sqrt(len(self.spread.numbers))

    @property
    def _freedom(self) -> int:
        """The degrees of freedom of Student's distribution."""
        return len(self.spread.numbers) - 1


def merged(values: Sequence[str]) -> "str | Spread":
    """Returns one value for the values that several seeds have in a column. Numbers become a Spread; if some seeds have
    none, a text with mean and count. Words become the common word, or each word with its count."""
    if not values:
        return ""
    if len(values) == 1 or not any(values):  # one seed, or no seed with a value
        return values[0]
    numbers = [number for value in values if (number := _number(value)) is not None and math.isfinite(number)]
    if len(numbers) == len(values):
        return Spread(tuple(numbers))
    if numbers:  # some of the runs, but not all, have a number
        mean = f"{Spread(tuple(numbers)):.4g}" if len(numbers) > 1 else f"{numbers[0]:.4g}"
        return f"{mean} ({len(numbers)} of {len(values)})"
    counts = {word: values.count(word) for word in dict.fromkeys(values)}
    if len(counts) == 1:
        return values[0]
    return ", ".join(f"{word} {count}" for word, count in counts.items())


def interval(numbers: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Returns the confidence interval of the mean of at least two numbers, by Student's t; `share` is its level."""
    spread, freedom = Spread(tuple(numbers)), len(numbers) - 1
    half = spread.sd / math.sqrt(len(numbers)) * quantile(share, freedom)
    return spread.mean - half, spread.mean + half


def difference(differences: Sequence[float]) -> Difference | None:
    """Returns the paired t test of the differences, one for each seed; None if there are fewer than two."""
    if len(differences) < 2:
        return None
    spread = Spread(tuple(differences))
    if spread.sd == 0:  # t would be 0/0 or infinite
        return Difference(spread, 1.0 if spread.mean == 0 else 0.0)
    t = spread.mean / (spread.sd / math.sqrt(len(differences)))
    return Difference(spread, 1 - within(t, len(differences) - 1))


def within(t: float, freedom: int) -> float:
    """Returns Student's P(|T| ≤ |t|), by its finite series (Abramowitz & Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    # Equation 26.7.3 is for odd degrees of freedom, 26.7.4 for even ones. `term` is the next term of the series.
    if freedom % 2:
        term, total = cosine, 0.0
        for k in range(1, freedom - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        return 2 / math.pi * (angle + sine * total)
    term, total = 1.0, 0.0
    for k in range(0, freedom - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return sine * total


def quantile(share: float, freedom: int) -> float:
    """Returns Student's t with P(|T| ≤ t) = share, by bisection."""
    low, high = 0.0, 1.0
    while within(high, freedom) < share:
        high *= 2
    for _ in range(60):  # a float has 53 binary digits, so 60 halvings suffice
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < share else (low, middle)
    return high


def corrected(values: Sequence[float]) -> list[float]:
    """Returns the p-values corrected for their number (Holm 1979). With corrected values, the probability that any of
    several equal rows is called different is no larger than for a single row."""
    result, largest = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        # A corrected p must not be below that of a smaller p, so it is at least the largest so far.
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        result[i] = largest
    return result


def _number(text: str) -> float | None:
    """Returns the number in a text, or None if it is no number."""
    try:
        return float(text)
    except ValueError:
        return None
