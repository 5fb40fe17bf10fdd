"""How long an episode will be: learnt from those that are over, from those that are not, and from siblings of the same
prompt. Pure.

The first to be over are the short ones, so means of what is over mislead most when they matter most. Hence the
product-limit estimate (Kaplan and Meier, 1958): for each length, which share of those that were known to come so far
ended there. Siblings tell more than the stage (a hard problem is long sixteen times); those that still run count among
them with what is expected of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from itertools import accumulate

BUCKETS = 64
PRIOR = 4.0
"""Observations that the prior, all lengths alike, counts for."""
KINSHIP = 2.0
"""Siblings that the stage's mean counts for."""
PARTS = 4
FRESH = 50
"""What is worked out of what was observed is worked out again after each of so many parts of it."""
FADING = 0.5
"""What a step's lengths count for in the next one: they change as a policy learns."""
ENDED = [PRIOR / BUCKETS] * BUCKETS
PASSED = [PRIOR * (BUCKETS - 1 - bucket) / BUCKETS for bucket in range(BUCKETS)]
"""The prior, in each bucket."""


class Lengths:
    """Expectations of final lengths up to `most` tokens."""

    def __init__(self, most: int) -> None:
        self._width = max(1.0, most / BUCKETS)
        self._ended, self._passed = list(ENDED), list(PASSED)
        self._inside = [0] * BUCKETS
        self._density: list[float] = []
        self._tails: list[float] = []
        self._count = self._news = 0.0
        self._quantiles: dict[int, list[float]] = {}
        self._siblings: dict[Hashable, list[float]] = {}

    def began(self, length: int) -> None:
        """An episode begins at `length`."""
        self._count += 1
        self._inside[self._bucket(length)] += 1

    def grew(self, before: int, now: int) -> None:
        """An episode that was at `before` has come to `now`, and goes on."""
        if (last := self._bucket(now)) > (first := self._bucket(before)):
            self._inside[first] -= 1
            self._inside[last] += 1
            for bucket in range(first, last):
                self._passed[bucket] += 1
            self._forget()

    def ended(self, before: int, length: int) -> None:
        """An episode that was, or was thought to be, at `before` ended with `length`."""
        self.grew(before, length)
        for bucket in range(self._bucket(length), self._bucket(before)):
            self._passed[bucket] = max(0.0, self._passed[bucket] - 1)  # what was seen of it may have faded
        self._ended[self._bucket(length)] += 1
        self.left(max(before, length))

    def left(self, length: int) -> None:
        """An episode at `length` is not heard of any more."""
        self._inside[self._bucket(length)] -= 1
        self._forget()

    def fade(self) -> None:
        """A new step: other prompts, and a policy that may have changed."""
        self._ended = _faded(self._ended, ENDED)
        self._passed = _faded(self._passed, PASSED)
        self._siblings.clear()
        self._count *= FADING
        self._news = self._count
        self._forget()

    def beyond(self, length: int) -> float:
        """The mean final length of those in the stage that are longer than `length`."""
        mean = (self._tails or self._work_out())[self._bucket(length)]
        return mean if mean > length else float(length)

    def tell(self, group: Hashable, before: float | None, now: float) -> None:
        """A sibling in `group`, of which `before` was expected (None: it is new), is expected to have `now`, or has."""
        total = self._siblings.setdefault(group, [0.0, 0.0])
        if before is None:
            total[1] += 1
        total[0] += now - (before or 0.0)

    def of_group(self, group: Hashable) -> float:
        """What is expected of a new episode in `group`."""
        mean = (self._tails or self._work_out())[0]
        total, count = self._siblings.get(group, (0.0, 0.0))
        return (total + KINSHIP * mean) / (count + KINSHIP)

    def growths(self, group: Hashable, length: int, most: int) -> list[float]:
        """By how much an episode of `group` with `length` may grow yet until it ends or has `most`, at the middles of
        `PARTS` equally likely parts."""
        scale = self.of_group(group) / self._tails[0]
        room = float(most - length)
        bucket = self._bucket(length)
        known = self._quantiles.get(bucket)
        if known is None:
            known = self._quantiles[bucket] = _quantiles(self._density[bucket:], self._width)
        return [far if (far := growth * scale) < room else room for growth in known]

    def _work_out(self) -> list[float]:
        self._density = _density(self._ended, self._passed, self._inside)
        self._tails = _tails(self._density, self._width)
        return self._tails

    def _forget(self) -> None:
        self._news += 1
        if self._news * FRESH >= self._count:
            self._news = 0.0
            self._tails = []
            self._quantiles = {}

    def _bucket(self, length: int) -> int:
        bucket = int(length / self._width)
        return bucket if bucket < BUCKETS else BUCKETS - 1


def _faded(counts: list[float], prior: list[float]) -> list[float]:
    return [least + (count - least) * FADING for count, least in zip(counts, prior, strict=True)]


def _density(ended: list[float], passed: list[float], inside: list[int]) -> list[float]:
    """The share of all that end in each bucket. Those that are inside one have, on average, half of its risk behind
    them."""
    alive = 1.0
    density: list[float] = []
    for end, on, half in zip(ended, passed, inside, strict=True):
        density.append(alive * end / (end + on + half / 2))
        alive -= density[-1]
    density[-1] += alive
    return density


def _tails(density: list[float], width: float) -> list[float]:
    """Of each bucket, the mean length of those that end in it or above."""
    tails = [0.0] * len(density)
    count = total = 0.0
    for bucket in range(len(density) - 1, -1, -1):
        count += density[bucket]
        total += density[bucket] * (bucket + 0.5) * width
        tails[bucket] = total / count if count else (bucket + 0.5) * width
    return tails


def _quantiles(density: list[float], width: float) -> list[float]:
    """Of what lies in buckets of `width`, counted from the middle of the first: the middles of `PARTS` equal parts."""
    seen = [0.0, *accumulate(density)]
    if not seen[-1]:
        return [len(density) * width] * PARTS
    made: list[float] = []
    for part in range(PARTS):
        want = (part + 0.5) / PARTS * seen[-1]
        bucket = bisect_left(seen, want) - 1
        made.append(max(0.0, (bucket + (want - seen[bucket]) / density[bucket] - 0.5) * width))
    return made
