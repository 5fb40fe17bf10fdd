"""Whether a series of measurements grows, or only wavers: a robust slope and how far noise alone could tilt it.

The slope is the median of those between all pairs (Theil and Sen), which a third of wild values does not move. What is
left around it is the noise; neighbouring values that waver together count for fewer than they are, since a slow wave
seen once looks like growth. The fewer they count for, the less is known of the noise, so the more of it is needed
(Student's t). What is found depends on the noise alone, so a line of any height is found once there are values enough.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

LEAST = 10
"""Values fewer than which say nothing."""
MOST = 300
"""More than so many are taken together, by their medians: all pairs are compared."""
SURE = 3.0
"""Growth counts if it is so many times what noise alone would make of it, one time in a thousand."""
MOST_ALIKE = 0.98
STEP_FIT = 0.75
"""A series is a step if one step leaves less than this share of the deviations that a line leaves."""
_MAD_TO_SIGMA = 1.4826
_NORMAL = 3.09
"""The normal distribution's quantile at one in a thousand."""


@dataclass(frozen=True, slots=True)
class Growth:
    """By how much a series rose from its first value to its last, and the standard error of that."""

    by: float
    noise: float
    is_step: bool = False
    """One step fits the series better than a line does: an allocator took a block, say, and took no other since."""

    def is_over(self, tolerance: float) -> bool:
        """Whether it is more than noise, and more than `tolerance`."""
        return self.by > tolerance + SURE * self.noise

    @property
    def is_line(self) -> bool:
        """Whether the series rises throughout, by however little, rather than once or by chance."""
        return self.is_over(0.0) and not self.is_step


def of(values: Sequence[float]) -> Growth:
    """Growth of values taken at even steps. Expects `LEAST` of them or more."""
    assert len(values) >= LEAST
    together = math.ceil(len(values) / MOST)
    values = [statistics.median(values[start : start + together]) for start in range(0, len(values), together)]
    n = len(values)
    slope = statistics.median((values[j] - values[i]) / (j - i) for i, j in combinations(range(n), 2))
    level = statistics.median(value - slope * x for x, value in enumerate(values))
    rest = [value - level - slope * x for x, value in enumerate(values)]
    sigma = _MAD_TO_SIGMA * statistics.median(map(abs, rest))
    worth = n * (1 - (alike := _alike(rest))) / (1 + alike)
    # The slope's error is sigma / (sqrt(worth) * spread of x), and n even steps spread by n / sqrt(12).
    noise = sigma * math.sqrt(12 / worth) * _student(worth - 2) / _NORMAL
    return Growth(slope * (n - 1), noise, _steps(values) < STEP_FIT * sum(map(abs, rest)))


def _alike(rest: Sequence[float]) -> float:
    """How much neighbours waver together: from 0, not at all, to `MOST_ALIKE`."""
    whole = sum(value * value for value in rest)
    if not whole:
        return 0.0
    together = sum(one * other for one, other in pairwise(rest)) / whole
    # The line has taken some of it away, by about (2 + 4 r) / n (Kendall 1954).
    return min(MOST_ALIKE, max(0.0, together + (2 + 4 * together) / len(rest))) if together > 0 else 0.0


def _student(freedom: float) -> float:
    """Student's quantile at one in a thousand, by its series in 1 / freedom (Abramowitz and Stegun, 26.7.5)."""
    z, f = _NORMAL, max(2.0, freedom)
    return z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f * f)


def _steps(values: Sequence[float]) -> float:
    """The sum of deviations that the best single step leaves. It has a tenth of the values on either side."""
    n = len(values)
    sides = ((values[:at], values[at:]) for at in range(n // 10, n - n // 10 + 1))
    return min(
        sum(abs(value - level) for side in both for level in [statistics.median(side)] for value in side)
        for both in sides
    )
