"""The placement policies that the benchmark compares: the trainer's own, three simple baselines, and the rules of other
trainers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from bench.simulator.pause_at_tools import PauseAtTools
from trainer.scheduling.scheduler import POLICIES as TRAINER_POLICIES
from trainer.scheduling.scheduler import PlacementPolicy, Scheduler
from trainer.scheduling.state import ScheduledEngine, ScheduledEpisode

BALANCE_ABS_THRESHOLD = 8
"""An episode leaves its engine only if the engine has more running turns than the least loaded engine, by more than
this number. The rule is that of sglang's cache-aware router, which verl's pull request 6533 takes over. Their bound is
64. In the simulated 12K workload, a rollout took 501 s with a bound of 64, and 450 s with bounds of 2 to 8."""
BALANCE_REL_THRESHOLD = 1.5
"""The second condition: the engine has more than this multiple of the least loaded engine's running turns."""


def static() -> PlacementPolicy:
    """Give the groups to the engines in turn."""
    group_indices: dict[Hashable, int] = {}

    def pick(scheduler: Scheduler, episode: ScheduledEpisode, _: float) -> ScheduledEngine:
        index = group_indices.setdefault(episode.group, len(group_indices))
        return scheduler.up_engines[index % len(scheduler.up_engines)]

    return PlacementPolicy(pick)


def round_robin() -> PlacementPolicy:
    """Give the episodes to the engines in turn."""

    def pick(scheduler: Scheduler, episode: ScheduledEpisode, _: float) -> ScheduledEngine:
        return scheduler.up_engines[episode.arrival_index % len(scheduler.up_engines)]

    return PlacementPolicy(pick)


def _fewest_episodes(scheduler: Scheduler, _episode: ScheduledEpisode, _now: float) -> ScheduledEngine:
    return min(scheduler.up_engines, key=lambda engine: engine.forecast.num_episodes)


def least_inflight() -> PlacementPolicy:
    """Give each episode to the engine with the fewest unfinished episodes, and keep it there.

    This is what prime-rl (pull request 3563), SkyRL (1791) and rLLM call sticky_least_loaded.
    """
    return PlacementPolicy(_fewest_episodes)


def sticky_least_loaded() -> PlacementPolicy:
    """As `least_inflight`, but an episode leaves its engine if the engine's load exceeds that of the least loaded
    engine by both `BALANCE_ABS_THRESHOLD` and `BALANCE_REL_THRESHOLD`."""
    return PlacementPolicy(_fewest_episodes, pick_next=_home_or_least_loaded)


def _home_or_least_loaded(
    scheduler: Scheduler, _episode: ScheduledEpisode, home: ScheduledEngine, _now: float
) -> ScheduledEngine:
    least = min(scheduler.up_engines, key=lambda engine: engine.num_running)
    most = home.num_running + 1
    is_balanced = most - least.num_running <= BALANCE_ABS_THRESHOLD or most <= BALANCE_REL_THRESHOLD * least.num_running
    return home if is_balanced else least


def _scheduler(policy: Callable[[], PlacementPolicy], max_context_tokens: int) -> Scheduler:
    return Scheduler(max_context_tokens, policy())


POLICIES: dict[str, Callable[[int], Scheduler]] = {
    **{policy.__name__: partial(_scheduler, policy) for policy in (static, round_robin, least_inflight)},
    "sticky_least_loaded": partial(_scheduler, sticky_least_loaded),
    "pause_at_tools": PauseAtTools,
    **{name: partial(Scheduler, policy=policy) for name, policy in TRAINER_POLICIES.items()},
}
"""Functions that make the scheduler of one run from the maximum context, by name of the policy."""
