"""Learns how long episodes become: from finished and running episodes, and from the other episodes of a group.

The model has no clock, no random numbers and no I/O: the same events give the same lengths.

Short episodes finish first. So while most episodes still run, the mean length of the finished ones is too small. The
model therefore uses the product-limit estimate (Kaplan and Meier, 1958): of the episodes that reached a length, the
share that ended there, for each length.

All episodes of a hard problem tend to be long. So the mean of a group says more than the mean of all episodes. Running
episodes count in the mean of their group with their expected length.

Lengths are tokens of a whole context, in `NUM_BUCKETS` buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from itertools import accumulate

NUM_BUCKETS = 64
PRIOR_WEIGHT = 4.0
"""The prior counts like this number of episodes. In the prior all lengths are equally likely."""
GROUP_PRIOR_WEIGHT = 2.0
"""A group's mean (`group_mean`) is computed as if the group had this number of further episodes, each with the mean
length of all episodes (shrinkage)."""
NUM_QUANTILES = 4
"""The final length of an episode is unknown. It is represented by this number of equally likely lengths."""
REFRESH_DIVISOR = 50
"""The distribution is recomputed when `_num_changes` reaches 1/REFRESH_DIVISOR of `_num_episodes`."""
STEP_DECAY = 0.5
"""Factor on the weight of all counted episodes at each training step, since lengths change while the model learns."""
PRIOR_ENDED = [PRIOR_WEIGHT / NUM_BUCKETS] * NUM_BUCKETS
"""For each bucket, the number of the prior's episodes that ended in it."""
PRIOR_PASSED = [PRIOR_WEIGHT * (NUM_BUCKETS - 1 - bucket) / NUM_BUCKETS for bucket in range(NUM_BUCKETS)]
"""For each bucket, the number of the prior's episodes that grew beyond it."""


class LengthModel:
    """Expected final lengths of up to `max_length` tokens."""

    def __init__(self, max_length: int) -> None:
        self._bucket_width = max(1.0, max_length / NUM_BUCKETS)
        self._ended, self._passed = list(PRIOR_ENDED), list(PRIOR_PASSED)
        self._in_bucket = [0] * NUM_BUCKETS
        """Number of unfinished episodes whose length is in each bucket."""
        self._density: list[float] = []
        """Share of all episodes that end in each bucket. `_recompute` sets it together with `_mean_above`."""
        self._mean_above: list[float] = []
        """Mean final length of the episodes that end in each bucket or above. Empty until it is recomputed."""
        self._num_episodes = 0.0
        """Number of episodes counted so far, each with its weight, which decays."""
        self._num_changes = 0.0
        """Number of changes since the distribution was last recomputed."""
        self._quantiles: dict[int, list[float]] = {}
        """A cache: quantiles of the growth of an episode, by the bucket of its length. `growth_quantiles` fills it."""
        self._groups: dict[Hashable, list[float]] = {}
        """Sum of the expected lengths and number of episodes, by group."""

    def on_start(self, length: int) -> None:
        """Count an episode that starts with `length` tokens."""
        self._num_episodes += 1
        self._in_bucket[self._bucket(length)] += 1

    def on_growth(self, before: int, now: int) -> None:
        """Move an unfinished episode from length `before` to `now`."""
        if (last := self._bucket(now)) > (first := self._bucket(before)):
            self._in_bucket[first] -= 1
            self._in_bucket[last] += 1
            for bucket in range(first, last):
                self._passed[bucket] += 1
            self._invalidate()

    def on_finish(self, before: int, length: int) -> None:
        """Count an episode that ended with `length`. `before` is its last known length, or an extrapolated length. An
        extrapolated length may be larger than `length`."""
        self.on_growth(before, length)
        for bucket in range(self._bucket(length), self._bucket(before)):
            self._passed[bucket] = max(0.0, self._passed[bucket] - 1)  # `decay` may have made less of the 1 meanwhile
        self._ended[self._bucket(length)] += 1
        self.on_removed(max(before, length))

    def on_removed(self, length: int) -> None:
        """Drop an unfinished episode whose last known length is `length`. The buckets that it passed stay counted."""
        self._in_bucket[self._bucket(length)] -= 1
        self._invalidate()

    def decay(self) -> None:
        """Start a training step: reduce the weight of all counted episodes and drop all groups."""
        self._ended = _decayed(self._ended, PRIOR_ENDED)
        self._passed = _decayed(self._passed, PRIOR_PASSED)
        self._groups.clear()
        self._num_episodes *= STEP_DECAY
        self._num_changes = self._num_episodes  # so that `_invalidate` drops the distribution now
        self._invalidate()

    def mean_length_above(self, length: int) -> float:
        """Return the mean final length of all episodes that become longer than `length`."""
        mean = (self._mean_above or self._recompute())[self._bucket(length)]
        # Here and below, a conditional expression is faster than `min` and `max`, in code that runs for each placement.
        return mean if mean > length else float(length)

    def update_group(self, group: Hashable, before: float | None, now: float) -> None:
        """Change one episode's expected length in `group` from `before` to `now`. `before` is None for a new
        episode."""
        total = self._groups.setdefault(group, [0.0, 0.0])
        if before is None:
            total[1] += 1
        total[0] += now - (before or 0.0)

    def group_mean(self, group: Hashable) -> float:
        """Return the expected length of a new episode in `group`."""
        mean = (self._mean_above or self._recompute())[0]
        total, count = self._groups.get(group, (0.0, 0.0))
        return (total + GROUP_PRIOR_WEIGHT * mean) / (count + GROUP_PRIOR_WEIGHT)

    def growth_quantiles(self, group: Hashable, length: int, max_length: int) -> list[float]:
        """Return how many tokens an episode of `group` with `length` tokens may still grow, at most to `max_length`.

        The `NUM_QUANTILES` numbers are equally likely.
        """
        mean = self.group_mean(group)  # first, because it recomputes `_mean_above` and `_density` if necessary
        scale = mean / self._mean_above[0]
        max_growth = float(max_length - length)
        bucket = self._bucket(length)
        quantiles = self._quantiles.get(bucket)
        if quantiles is None:
            quantiles = self._quantiles[bucket] = _compute_quantiles(self._density[bucket:], self._bucket_width)
        return [scaled if (scaled := growth * scale) < max_growth else max_growth for growth in quantiles]

    def _recompute(self) -> list[float]:
        self._density = _compute_density(self._ended, self._passed, self._in_bucket)
        self._mean_above = _compute_mean_above(self._density, self._bucket_width)
        return self._mean_above

    def _invalidate(self) -> None:
        self._num_changes += 1
        if self._num_changes * REFRESH_DIVISOR >= self._num_episodes:
            self._num_changes = 0.0
            self._mean_above = []
            self._quantiles = {}

    def _bucket(self, length: int) -> int:
        bucket = int(length / self._bucket_width)
        return bucket if bucket < NUM_BUCKETS else NUM_BUCKETS - 1


def _decayed(counts: list[float], prior: list[float]) -> list[float]:
    """Return the counts after a decay. The part of a count that comes from the prior does not decay."""
    return [base + (count - base) * STEP_DECAY for count, base in zip(counts, prior, strict=True)]


def _compute_density(ended: list[float], passed: list[float], in_bucket: list[int]) -> list[float]:
    """Return the share of all episodes that end in each bucket: the product-limit estimate.

    For each bucket, the number of episodes that ended there is divided by the number that could have ended there. An
    unfinished episode inside the bucket counts as half, because on average it has grown through half of the bucket
    without ending.
    """
    alive = 1.0
    density: list[float] = []
    for num_ended, num_passed, num_inside in zip(ended, passed, in_bucket, strict=True):
        density.append(alive * num_ended / (num_ended + num_passed + num_inside / 2))
        alive -= density[-1]
    density[-1] += alive  # the rest ends at the maximum
    return density


def _compute_mean_above(density: list[float], width: float) -> list[float]:
    """Return, for each bucket, the mean length of the episodes that end in it or above."""
    means = [0.0] * len(density)
    share = total = 0.0
    for bucket in range(len(density) - 1, -1, -1):
        share += density[bucket]
        total += density[bucket] * (bucket + 0.5) * width
        means[bucket] = total / share if share else (bucket + 0.5) * width
    return means


def _compute_quantiles(density: list[float], width: float) -> list[float]:
    """Return the growth of an episode whose length is in the first bucket of `density`, in tokens.

    `density` is divided into `NUM_QUANTILES` equally likely parts, and the median of each part is returned. Growth is
    measured from the middle of the first bucket, since the episode is there on average. A bucket is `width` tokens
    wide.
    """
    cumulative = [0.0, *accumulate(density)]
    if not cumulative[-1]:  # no episode is known to end from here on: rather reserve too many tokens than too few
        return [len(density) * width] * NUM_QUANTILES
    quantiles: list[float] = []
    for part in range(NUM_QUANTILES):
        target = (part + 0.5) / NUM_QUANTILES * cumulative[-1]
        bucket = bisect_left(cumulative, target) - 1
        quantiles.append(max(0.0, (bucket + (target - cumulative[bucket]) / density[bucket] - 0.5) * width))
    return quantiles
