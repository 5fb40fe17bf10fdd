"""Whether a series of measurements grows, or only wavers: a robust slope and how far noise alone could tilt it.

The slope is the median of those between all pairs (Theil and Sen), which a third of wild values does not move. What is
left around it is the noise; neighbouring values that waver together count for fewer than they are, since a slow wave
seen once looks like growth.
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
MOST_ALIKE = 0.95
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True)
class Growth:
    """By how much a series rose from its first value to its last, and the standard error of that."""

    by: float
    noise: float

    def is_over(self, tolerance: float) -> bool:
        """Whether it is more than noise, and more than `tolerance`."""
        return self.by > tolerance + SURE * self.noise


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
    return Growth(slope * (n - 1), sigma * math.sqrt(12 / worth))


def _alike(rest: Sequence[float]) -> float:
    """How much neighbours waver together: from 0, not at all, to `MOST_ALIKE`."""
    whole = sum(value * value for value in rest)
    if not whole:
        return 0.0
    together = sum(one * other for one, other in pairwise(rest)) / whole
    return min(MOST_ALIKE, max(0.0, together))
