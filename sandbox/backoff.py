"""Exponential back-off between attempts after failures."""

from __future__ import annotations


def backoff_s(failures: int, min_s: float, max_s: float) -> float:
    """Return the seconds to wait after this number of failures in a row: `min_s` after the first failure, doubled by
    each further one, at most `max_s`. Without a failure the wait is 0."""
    if failures <= 0:
        return 0.0
    return min(max_s, min_s * 2.0 ** min(failures - 1, 64))  # the cap on the exponent keeps the power a finite float
