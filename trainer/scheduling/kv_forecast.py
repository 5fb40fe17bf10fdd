"""Forecasts how many tokens of an engine's KV cache its episodes will use.

The forecast has no clock, no random numbers and no I/O. Time is measured in decode steps, because every running context
grows by one token per step. The forecast splits each episode into equal shares, one for each length at which the
episode may end. It does not reserve the mean final length of every episode: the episodes do not reach this length at
the same time, so half of the cache would stay empty.

Decode steps are counted in *buckets* of equal width.

Example: `reserve(context=100, step=0, growths=[50, 150])` with a bucket width of 100 steps

    bucket       0 (steps 0-99)     1 (steps 100-199)
    count        0.5                0.5
    offset       0.5 * (100 - 0)    0.5 * (100 - 0)

    tokens at step t = sum of (offset + count * t) over the buckets that end after t

Steps never decrease, so buckets in the past are dropped.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

HEADROOM_SIGMAS = 1.5
"""Headroom above the expected peak, in standard deviations of the summed lengths. Relative to the peak, the headroom is
larger for few episodes than for many."""


@dataclass(slots=True)
class Reservation:
    """The tokens reserved for one episode."""

    context: int
    """Tokens of the episode's context at `step`."""
    step: float
    """Decode step at which the reservation was made."""
    buckets: list[int]
    """The buckets in which equal shares of the episode end."""
    variance: float
    """Variance of `buckets`."""


class KvForecast:
    """The reservations of one engine. `bucket_width` is in decode steps."""

    def __init__(self, bucket_width: float) -> None:
        self._bucket_width = bucket_width
        self._variance = 0.0
        self.block_slack = 0.0
        """Tokens that each context occupies beyond its length, because the engine allocates whole blocks."""
        self._first_bucket = 0
        self._counts = array("d")
        """Number of episodes that end in each bucket, from `_first_bucket` on."""
        self._offsets = array("d")
        """Sum of (context - step) over the episodes that end in each bucket, from `_first_bucket` on."""
        self._total_offset = 0.0
        self.num_episodes = 0
        self.resident_tokens = 0
        """Sum of all contexts. The tokens of a context are those at the time of its reservation."""

    def reserve(self, context: int, step: float, growths: Sequence[float]) -> Reservation:
        """Add an episode with `context` tokens that will grow by one of the equally likely `growths`."""
        width, share, counts, offsets = self._bucket_width, 1 / len(growths), self._counts, self._offsets
        if not self.num_episodes:
            self._first_bucket = int(step / width)
        buckets = [int((step + growth) / width) for growth in growths]
        first, offset = self._first_bucket, (context - step) * share
        if (missing := max(buckets) + 1 - first - len(counts)) > 0:
            counts.extend([0.0] * missing)
            offsets.extend([0.0] * missing)
        for bucket in buckets:
            counts[bucket - first] += share
            offsets[bucket - first] += offset
        mean = sum(buckets) * share
        variance = sum([bucket * bucket for bucket in buckets]) * share - mean * mean
        reservation = Reservation(context, step, buckets, variance)
        self._add_to_totals(reservation, 1)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Remove an episode."""
        first, counts, offsets, share = self._first_bucket, self._counts, self._offsets, 1 / len(reservation.buckets)
        offset = (reservation.context - reservation.step) * share
        for bucket in reservation.buckets:
            if (index := bucket - first) >= 0:
                counts[index] -= share
                offsets[index] = offsets[index] - offset if counts[index] else 0.0  # no rest from rounding errors
        self._add_to_totals(reservation, -1)
        if not self.num_episodes:  # the sums may differ from 0 by rounding errors
            self._total_offset = 0.0
            del self._counts[:], self._offsets[:]
            self._variance = 0.0

    def peak(self, step: float) -> float:
        """Return the largest expected number of tokens at or after `step`, headroom included.

        Shares of episodes that should have ended before `step` are counted at `step`, but not at later steps.
        """
        width, current = self._bucket_width, int(step / self._bucket_width)
        if (num_past := current - self._first_bucket) > 0:
            del self._counts[:num_past], self._offsets[:num_past]
            self._first_bucket = current
        # The loop goes from the last bucket to the second one. It computes the tokens at the middle of each bucket,
        # where the episodes that end in this bucket or later are resident. The tokens at the current step, at which all
        # episodes are resident, are computed after the loop.
        bucket, to_middle = self._first_bucket + len(self._counts), 0.5 * width + self.block_slack
        count = offset = peak = 0.0
        for bucket_count, bucket_offset in zip(self._counts[:0:-1], self._offsets[:0:-1], strict=True):
            bucket -= 1
            count += bucket_count
            offset += bucket_offset
            tokens = offset + count * (bucket * width + to_middle)
            if tokens > peak:
                peak = tokens
        peak = max(peak, self._total_offset + self.num_episodes * (step + self.block_slack))
        return peak + HEADROOM_SIGMAS * width * math.sqrt(max(0.0, self._variance))

    def peak_with(self, context: int, step: float, growths: Sequence[float]) -> float:
        """Return the peak that there would be with one more episode (see `reserve`)."""
        reservation = self.reserve(context, step, growths)
        peak = self.peak(step)
        self.release(reservation)
        return peak

    def _add_to_totals(self, reservation: Reservation, sign: int) -> None:
        self._variance += sign * reservation.variance
        self._total_offset += sign * (reservation.context - reservation.step)
        self.num_episodes += sign
        self.resident_tokens += sign * reservation.context
