"""Percentiles, medians and deviations, and a permutation test."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import product
from operator import mul


def percentiles(values: Iterable[float], points: Sequence[int] = (50, 99)) -> dict[str, float]:
    """The percentiles at `points`, as {"p50": ..., "p99": ...}; empty without values."""
    ordered = sorted(values)
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2) for p in points if ordered}


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


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of a paired permutation test. Each difference may keep or change its sign. The
    p-value is the share of all combinations of signs in which the absolute sum of the differences is at least as large
    as with the given signs. With n differences it is at least 2 / 2**n."""
    total = abs(sum(differences))
    sums = (abs(sum(map(mul, differences, signs))) for signs in product((1, -1), repeat=len(differences)))
    return statistics.fmean(value >= total * (1 - 1e-9) for value in sums)
