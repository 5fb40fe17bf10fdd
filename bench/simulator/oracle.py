"""A schedule that no policy can make, for it knows how long every episode will be: how near the bound one comes who
does, and so what it costs not to. On simulated engines only.

Wherever something fits, the longest that does begins: caches are full soon, and the long ones begin early. It evicts
nothing that it need not, and keeps no room for chance.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from bench.simulator.simulation import Plan
from trainer.scheduling.length_model import Lengths
from trainer.scheduling.scheduler import APPETITE, Placement, Scheduler


class _Known(Lengths):
    """Of each episode, a group of its own, what it will be."""

    def __init__(self, most: int, plans: Sequence[Plan]) -> None:
        super().__init__(most)
        self._plans = plans

    def growths(self, group: Any, length: int, most: int) -> list[float]:
        return [float(self._plans[group].length - length)]


class Oracle(Scheduler):
    """Episodes are known by their place in `plans`."""

    def __init__(self, most_tokens: int, plans: Sequence[Plan]) -> None:
        super().__init__(most_tokens)
        self.lengths = _Known(most_tokens, plans)
        self._plans = plans
        self._choice: Any = None
        self._pick = lambda _scheduler, _episode, _now: self._choice
        self._shortest_first: list[tuple[int, Any, int, int]] = []
        self._full: dict[str, tuple[int, int]] = {}
        """Engines for which nothing was short enough, and their books then."""

    def up(
        self, name: str, capacity: int, most_running: int = 1 << 30, *, block: int = 1, preemptions: int = 0
    ) -> None:
        super().up(name, int(capacity / APPETITE), most_running, block=block, preemptions=preemptions)

    def submit(self, key: Any, group: Hashable, length: int, most: int) -> None:
        insort(self._shortest_first, (self._plans[key].length, key, length, most))

    def place(self, now: float) -> list[Placement]:
        placed = super().place(now)
        while (which := self._longest_that_fits(now)) is not None:
            _, key, length, most = self._shortest_first.pop(which)
            super().submit(key, key, length, most)
            placed += super().place(now)
        return placed

    def _longest_that_fits(self, now: float) -> int | None:
        self.settle(now)
        for engine in sorted(self.engines, key=lambda engine: -engine.free):
            books = engine.ledger.episodes, engine.ledger.held
            if engine.running >= engine.most_running or self._full.get(engine.name) == books:
                continue
            fits = partial(self._fits, engine, now)
            which = bisect_left(self._shortest_first, True, key=lambda episode: not fits(episode)) - 1
            if which >= 0:
                self._choice = engine
                return which
            self._full[engine.name] = books
        return None

    def _fits(self, engine: Any, now: float, episode: tuple[int, Any, int, int]) -> bool:
        total, _, length, _ = episode
        ledger = engine.ledger
        peak = ledger.peak_with(length, engine.tick(now), [float(total - length)])
        return bool(peak <= engine.capacity * engine.appetite or not ledger.episodes)
