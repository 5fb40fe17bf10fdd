"""A reference schedule that knows the final length of every episode, for simulated engines only.

Whenever waiting episodes fit on an engine, the longest of them is started. So caches fill early and long episodes start
early. No headroom is kept, and nothing is preempted without need. The gap between the policy `kv` and this schedule is
the cost of not knowing the lengths.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from bench.simulator.scripts import EpisodeScript
from trainer.scheduling.scheduler import (
    INITIAL_TARGET_UTILIZATION,
    LengthModel,
    Placement,
    ScheduledEngine,
    ScheduledEpisode,
    Scheduler,
)

ORACLE = "oracle"
"""The name of this schedule beside those of the placement policies."""


class _KnownLengths(LengthModel):
    """The length model of episodes whose scripts are known. Each episode is its own group."""

    def __init__(self, max_length: int, scripts: Sequence[EpisodeScript]) -> None:
        super().__init__(max_length)
        self._scripts = scripts

    def growth_quantiles(self, group: Any, length: int, max_length: int) -> list[float]:
        return [float(self._scripts[group].length - length)]


class Oracle(Scheduler):
    """A scheduler that knows the final length of every episode. An episode's key is its index in `scripts`."""

    def __init__(self, max_context_tokens: int, scripts: Sequence[EpisodeScript]) -> None:
        super().__init__(max_context_tokens, lengths=_KnownLengths(max_context_tokens, scripts))
        self._scripts = scripts
        self._next_engine: ScheduledEngine | None = None
        self._shortest_first: list[tuple[int, Any, int, int]] = []
        """Episodes that have not started: final length, key, prompt tokens, maximum context."""
        self._full: dict[str, tuple[int, int]] = {}
        """Engines on which no waiting episode has fitted, each with its number of episodes and its tokens at that
        time."""

    def add_engine(
        self, name: str, kv_capacity: int, max_running: int = 1 << 30, *, block_size: int = 1, preemptions: int = 0
    ) -> None:
        capacity = int(kv_capacity / INITIAL_TARGET_UTILIZATION)  # the oracle needs no headroom
        super().add_engine(name, capacity, max_running, block_size=block_size, preemptions=preemptions)

    def submit(self, key: Any, group: Hashable, length: int, max_context_tokens: int) -> None:
        insort(self._shortest_first, (self._scripts[key].length, key, length, max_context_tokens))

    def pick(self, episode: ScheduledEpisode, now: float) -> ScheduledEngine | None:
        return self._next_engine

    def place(self, now: float) -> list[Placement]:
        placements = super().place(now)
        while (index := self._longest_that_fits(now)) is not None:
            _, key, length, max_context_tokens = self._shortest_first.pop(index)
            super().submit(key, key, length, max_context_tokens)
            placements += super().place(now)
        return placements

    def _longest_that_fits(self, now: float) -> int | None:
        self.refresh_free_tokens(now)
        for engine in sorted(self.up_engines, key=lambda engine: -engine.free_tokens):
            load = engine.forecast.num_episodes, engine.forecast.resident_tokens
            if engine.num_running >= engine.max_running or self._full.get(engine.name) == load:
                continue
            fits = partial(self._is_within_target, engine, now)
            index = bisect_left(self._shortest_first, True, key=lambda episode: not fits(episode)) - 1
            if index >= 0:
                self._next_engine = engine
                return index
            self._full[engine.name] = load
        return None

    def _is_within_target(self, engine: ScheduledEngine, now: float, episode: tuple[int, Any, int, int]) -> bool:
        final_length, _, length, _ = episode
        peak = engine.forecast.peak_with(length, engine.decode_step(now), [float(final_length - length)])
        return bool(peak <= engine.kv_capacity * engine.target_utilization or not engine.forecast.num_episodes)
