"""The placement policies that the benchmark compares: the trainer's own, the paper's, three simple baselines, and the
rules of other trainers."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from bench.simulator.fifo import FifoScheduler
from bench.simulator.pause_at_tools import PauseAtTools
from trainer.scheduling.scheduler import ScheduledEngine, ScheduledEpisode, Scheduler

BALANCE_ABS_THRESHOLD = 8
"""An episode leaves its engine only if the engine has more running turns than the least loaded engine, by more than
this number. The rule is that of sglang's cache-aware router, which verl's pull request 6533 takes over. Their bound is
64. In the simulated 12K workload, a rollout took 501 s with a bound of 64, and 450 s with bounds of 2 to 8."""
BALANCE_REL_THRESHOLD = 1.5
"""The second condition: the engine has more than this multiple of the least loaded engine's running turns."""


class Static(FifoScheduler):
    """Gives the groups to the engines in turn."""

    def __init__(self, max_context_tokens: int) -> None:
        super().__init__(max_context_tokens)
        self._group_indices: dict[Hashable, int] = {}

    def pick(self, episode: ScheduledEpisode, now: float) -> ScheduledEngine:
        index = self._group_indices.setdefault(episode.group, len(self._group_indices))
        return self.up_engines[index % len(self.up_engines)]


class RoundRobin(FifoScheduler):
    """Gives the episodes to the engines in turn."""

    def pick(self, episode: ScheduledEpisode, now: float) -> ScheduledEngine:
        return self.up_engines[episode.arrival_index % len(self.up_engines)]


class LeastInflight(FifoScheduler):
    """Gives each episode to the engine with the fewest unfinished episodes, and keeps it there.

    This is what prime-rl (pull request 3563), SkyRL (1791) and rLLM call sticky_least_loaded.
    """

    def pick(self, episode: ScheduledEpisode, now: float) -> ScheduledEngine:
        return min(self.up_engines, key=lambda engine: engine.forecast.num_episodes)


class StickyLeastLoaded(LeastInflight):
    """As `LeastInflight`, but an episode leaves its engine if the engine's load exceeds that of the least loaded engine
    by both `BALANCE_ABS_THRESHOLD` and `BALANCE_REL_THRESHOLD`."""

    def pick_next(self, episode: ScheduledEpisode, home: ScheduledEngine, now: float) -> ScheduledEngine:
        least, most = min(self.up_engines, key=lambda engine: engine.num_running), home.num_running + 1
        is_close = most - least.num_running <= BALANCE_ABS_THRESHOLD
        return home if is_close or most <= BALANCE_REL_THRESHOLD * least.num_running else least


class WorstCaseScheduler(FifoScheduler):
    """Admits an episode only on an engine that has room even if all its episodes grow to their maximum length. This is
    the paper's rule. The authors' code applies it by polling."""

    def pick(self, episode: ScheduledEpisode, now: float) -> ScheduledEngine | None:
        engine = min(self.up_engines, key=lambda engine: worst_case_tokens(engine) - engine.kv_capacity)
        fits = worst_case_tokens(engine) + episode.max_context_tokens <= engine.kv_capacity
        return engine if fits or not engine.forecast.num_episodes else None


def worst_case_tokens(engine: ScheduledEngine) -> int:
    """Return the KV tokens that the engine's episodes will hold if every one of them grows to its maximum length."""
    return sum(episode.max_context_tokens for episode in engine.episodes.values())


POLICIES: dict[str, Callable[[int], Scheduler]] = {
    "static": Static,
    "round_robin": RoundRobin,
    "least_inflight": LeastInflight,
    "sticky_least_loaded": StickyLeastLoaded,
    "pause_at_tools": PauseAtTools,
    "reserve_worst_case": WorstCaseScheduler,
    "kv": Scheduler,
}
"""Functions that make the scheduler of one run from the maximum context, by name of the policy."""
