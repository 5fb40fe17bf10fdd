"""Percentiles, and whether a series of measurements grows.

Growth is a robust slope that exceeds what noise alone could cause:

- The slope is the median of the slopes between all pairs (Theil and Sen); a third of wild values does not move it.
- The residuals are the noise. Autocorrelated residuals count as fewer values, because a slow wave that is seen once
  looks like growth.
- The fewer values there effectively are, the wider the bound (Student's t).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from operator import mul

MIN_VALUES = 10
"""Fewer values than this give no estimate of growth."""
MAX_VALUES = 300
"""Longer series are first reduced to this many medians, because all pairs are compared."""
SIGNIFICANCE = 3.0
"""A rise counts if it exceeds this multiple of the rise that noise alone reaches one time in a thousand."""
MAX_AUTOCORRELATION = 0.98
"""Bound on the estimated autocorrelation. With 1, no value would count."""
STEP_FIT = 0.75
"""A series is a step if one step leaves less than this fraction of the deviations that a line leaves."""
_MAD_TO_SIGMA = 1.4826
"""Standard deviation of normal noise, as a multiple of its median absolute deviation."""
_NORMAL = 3.09
"""The normal distribution's quantile at one in a thousand."""


def percentiles(values: Iterable[float], points: Sequence[int] = (50, 99)) -> dict[str, float]:
    """The percentiles at `points`, as {"p50": ..., "p99": ...}; empty without values."""
    ordered = sorted(values)
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2) for p in points if ordered}


def quantiles(values: Iterable[float], count: int = 201) -> list[float]:
    """The minimum, the maximum, and `count` - 2 quantiles at even steps between them; empty without values."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return [round(ordered[round(last * step / (count - 1))], 2) for step in range(count) if ordered]


def median(values: Iterable[float], digits: int = 3) -> float:
    """The median, rounded."""
    return round(statistics.median(values), digits)


def mean_sd(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and standard deviation of the values that are not None; None if there is no value."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    deviation = statistics.stdev(present) if len(present) > 1 else 0.0
    return {"mean": round(statistics.fmean(present), 4), "sd": round(deviation, 4)}


@dataclass(frozen=True, slots=True)
class Growth:
    """The rise of a series from its first value to its last, and the standard error of the rise."""

    rise: float
    noise: float
    is_step: bool = False
    """True if one step fits the series better than a line, as when an allocator takes one block."""

    def is_over(self, tolerance: float) -> bool:
        """Whether the rise exceeds the noise and `tolerance`."""
        return self.rise > tolerance + SIGNIFICANCE * self.noise

    @property
    def is_line(self) -> bool:
        """Whether the series rises throughout, by however little, and not once or by chance."""
        return self.is_over(0.0) and not self.is_step


def estimate_growth(values: Sequence[float]) -> Growth:
    """Growth of at least `MIN_VALUES` values that were taken at even steps."""
    assert len(values) >= MIN_VALUES
    width = math.ceil(len(values) / MAX_VALUES)
    values = [statistics.median(values[start : start + width]) for start in range(0, len(values), width)]
    n = len(values)
    slope = statistics.median((values[j] - values[i]) / (j - i) for i, j in combinations(range(n), 2))
    level = statistics.median(value - slope * x for x, value in enumerate(values))
    residuals = [value - level - slope * x for x, value in enumerate(values)]
    sigma = _MAD_TO_SIGMA * statistics.median(map(abs, residuals))
    correlation = _autocorrelation(residuals)
    effective_n = n * (1 - correlation) / (1 + correlation)
    # The slope's error is sigma / (sqrt(effective_n) * deviation of x); n even steps deviate by n / sqrt(12).
    noise = sigma * math.sqrt(12 / effective_n) * _student(effective_n - 2) / _NORMAL
    return Growth(slope * (n - 1), noise, _step_deviation(values) < STEP_FIT * sum(map(abs, residuals)))


def _autocorrelation(residuals: Sequence[float]) -> float:
    """The correlation of neighbours, from 0 to `MAX_AUTOCORRELATION`."""
    total = sum(value * value for value in residuals)
    if not total:
        return 0.0
    measured = sum(a * b for a, b in pairwise(residuals)) / total
    # Fitting the line has removed about (2 + 4 r) / n of it (Kendall 1954).
    corrected = measured + (2 + 4 * measured) / len(residuals)
    return min(MAX_AUTOCORRELATION, max(0.0, corrected)) if measured > 0 else 0.0


def _student(freedom: float) -> float:
    """Student's quantile at one in a thousand, by its series in 1 / freedom (Abramowitz and Stegun, 26.7.5)."""
    z, f = _NORMAL, max(2.0, freedom)
    return z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f * f)


def _step_deviation(values: Sequence[float]) -> float:
    """The sum of deviations that the best single step leaves, with at least a tenth of the values on either side."""
    n = len(values)
    splits = ((values[:index], values[index:]) for index in range(n // 10, n - n // 10 + 1))
    return min(
        sum(abs(value - level) for side in sides for level in [statistics.median(side)] for value in side)
        for sides in splits
    )


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of a paired permutation test: the share of all ways to flip signs with which the
    absolute sum of the differences is at least as large as without. With n differences it is at least 2 / 2**n."""
    total = abs(sum(differences))
    sums = (abs(sum(map(mul, differences, signs))) for signs in product((1, -1), repeat=len(differences)))
    return statistics.fmean(value >= total * (1 - 1e-9) for value in sums)
