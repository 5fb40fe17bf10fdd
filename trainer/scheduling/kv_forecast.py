"""What an engine's cache holds and will hold: the contexts of its episodes, laid out over the tokens yet to come. Pure.

All that run on an engine grow by a token a step, so steps are the time here (`tick`). An episode is not expected to end
at its mean length but, in equal parts, at the quantiles of the lengths that it may still have: of a hundred episodes
that begin together few will ever be long together, and a hundred reservations of the mean would leave half of the cache
empty. `peak` is the most that the cache is expected to hold at any tick from now on, and some for chance.

Each part is in the bucket of the tick at which it ends, as (count, sum of context - tick): their sum at tick t is
`sum + count * t`. Ticks never go back, so buckets that are over are given up.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

SPREAD = 1.5
"""Standard deviations of all lengths together that are kept free: chance does more to a few episodes than to many."""


@dataclass(slots=True)
class Entry:
    """An episode: its context was `context` at `tick`, and it ends in `buckets`, in equal parts."""

    context: int
    tick: float
    buckets: list[int]
    variance: float
    """Of the bucket that it ends in."""


class Ledger:
    """`width`: ticks in a bucket."""

    def __init__(self, width: float) -> None:
        self._width = width
        self._variance = 0.0
        self.margin = 0.0
        """Tokens of room that each takes beyond its context, as an engine keeps whole blocks."""
        self._first = 0
        self._parts, self._sums = array("d"), array("d")
        """Of each bucket from `first` on, the parts in it, and their sum of context - tick. Those before are over."""
        self._base = 0.0
        self.episodes = 0
        self.held = 0
        """Tokens of all contexts, each as of its entry."""

    def enter(self, context: int, tick: float, growths: Sequence[float]) -> Entry:
        """An episode with `context` tokens is to grow by one of `growths`, each as likely."""
        width, share, parts, sums = self._width, 1 / len(growths), self._parts, self._sums
        if not self.episodes:
            self._first = int(tick / width)
        buckets = [int((tick + growth) / width) for growth in growths]
        first, base = self._first, (context - tick) * share
        if (more := max(buckets) + 1 - first - len(parts)) > 0:
            parts.extend([0.0] * more)
            sums.extend([0.0] * more)
        for bucket in buckets:
            parts[bucket - first] += share
            sums[bucket - first] += base
        middle = sum(buckets) * share
        entry = Entry(context, tick, buckets, sum([bucket * bucket for bucket in buckets]) * share - middle * middle)
        self._count(entry, 1)
        return entry

    def leave(self, entry: Entry) -> None:
        first, parts, sums, share = self._first, self._parts, self._sums, 1 / len(entry.buckets)
        base = (entry.context - entry.tick) * share
        for bucket in entry.buckets:
            if (at := bucket - first) >= 0:
                parts[at] -= share
                sums[at] = sums[at] - base if parts[at] else 0.0
        self._count(entry, -1)
        if not self.episodes:  # rounding ends with the last
            self._base = 0.0
            del self._parts[:], self._sums[:]
            self._variance = 0.0

    def peak(self, tick: float) -> float:
        """The most tokens that are expected at any time from `tick` on; parts that are overdue end at once."""
        width, now = self._width, int(tick / self._width)
        if (gone := now - self._first) > 0:
            del self._parts[:gone], self._sums[:gone]
            self._first = now
        bucket, middle = self._first + len(self._parts), 0.5 * width + self.margin
        count = base = peak = 0.0
        for parts, contexts in zip(self._parts[:0:-1], self._sums[:0:-1], strict=True):
            bucket -= 1
            count += parts
            base += contexts
            held = base + count * (bucket * width + middle)
            if held > peak:
                peak = held
        peak = max(peak, self._base + self.episodes * (tick + self.margin))
        return peak + SPREAD * width * math.sqrt(max(0.0, self._variance))

    def peak_with(self, context: int, tick: float, growths: Sequence[float]) -> float:
        """The same if such an episode were entered."""
        entry = self.enter(context, tick, growths)
        peak = self.peak(tick)
        self.leave(entry)
        return peak

    def _count(self, entry: Entry, sign: int) -> None:
        self._variance += sign * entry.variance
        self._base += sign * (entry.context - entry.tick)
        self.episodes += sign
        self.held += sign * entry.context
