"""What an engine's cache holds and will hold: the contexts of its episodes, laid out over the tokens yet to come. Pure.

All that run on an engine grow by a token a step, so steps are the time here (`tick`). An episode is not expected to end
at its mean length but, in equal parts, at the quantiles of the lengths that it may still have: of a hundred episodes
that begin together few will ever be long together, and a hundred reservations of the mean would leave half of the cache
empty. `peak` is the most that the cache is expected to hold at any tick from now on, and some for chance.

Each part is in the bucket of the tick at which it ends, as (count, sum of context - tick): their sum at tick t is
`sum + count * t`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

SPREAD = 1.0
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
        self._sums: dict[int, list[float]] = {}
        """Of each bucket, the parts in it, and their sum of context - tick."""
        self._order: list[int] = []
        """The buckets, ascending."""
        self._base = 0.0
        self.episodes = 0
        self.held = 0
        """Tokens of all contexts, each as of its entry."""

    def enter(self, context: int, tick: float, growths: Sequence[float]) -> Entry:
        """An episode with `context` tokens is to grow by one of `growths`, each as likely."""
        width, sums, share = self._width, self._sums, 1 / len(growths)
        buckets = [int((tick + growth) / width) for growth in growths]
        base = (context - tick) * share
        for bucket in buckets:
            there = sums.get(bucket)
            if there:
                there[0] += share
                there[1] += base
            else:
                sums[bucket] = [share, base]
                insort(self._order, bucket)
        middle = sum(buckets) * share
        entry = Entry(context, tick, buckets, sum([bucket * bucket for bucket in buckets]) * share - middle * middle)
        self._count(entry, 1)
        return entry

    def leave(self, entry: Entry) -> None:
        sums, share = self._sums, 1 / len(entry.buckets)
        base = (entry.context - entry.tick) * share
        for bucket in entry.buckets:
            there = sums[bucket]
            there[0] -= share
            there[1] -= base
            if there[0] < 1e-9:
                del sums[bucket], self._order[bisect_left(self._order, bucket)]
        self._count(entry, -1)
        if not self.episodes:  # rounding ends with the last
            self._base = 0.0
            self._sums.clear()
            self._order.clear()
            self._variance = 0.0

    def peak(self, tick: float) -> float:
        """The most tokens that are expected at any time from `tick` on; parts that are overdue end at once."""
        width, sums = self._width, self._sums
        now, middle = int(tick / width), 0.5 * width + self.margin
        count = base = peak = 0.0
        for bucket in reversed(self._order):
            if bucket <= now:
                break
            parts, contexts = sums[bucket]
            count += parts
            base += contexts
            held = base + count * (bucket * width + middle)
            if held > peak:
                peak = held
        peak = max(peak, self._base + self.episodes * (tick + self.margin))
        return peak + SPREAD * width * math.sqrt(max(0.0, self._variance))

    def _count(self, entry: Entry, sign: int) -> None:
        self._variance += sign * entry.variance
        self._base += sign * (entry.context - entry.tick)
        self.episodes += sign
        self.held += sign * entry.context
