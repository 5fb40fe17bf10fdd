"""A base of simple placement policies."""

from __future__ import annotations

from collections.abc import Hashable

from trainer.scheduling.scheduler import ScheduledEngine, ScheduledEpisode, Scheduler


class FifoScheduler(Scheduler):
    """Episodes are admitted in the order of their arrival, and stay on their engine."""

    def rank(self, group: Hashable) -> tuple[float, ...]:
        return (self._queue[group][0].arrival_index,)

    def pick_next(self, episode: ScheduledEpisode, home: ScheduledEngine, now: float) -> ScheduledEngine:
        return home
