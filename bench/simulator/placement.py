"""The placement policies that the benchmark compares: the trainer's own and three simple baselines."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from trainer.scheduling.scheduler import POLICIES as TRAINER_POLICIES
from trainer.scheduling.scheduler import PlacementPolicy, Scheduler
from trainer.scheduling.state import ScheduledEngine, ScheduledEpisode


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


def least_inflight() -> PlacementPolicy:
    """Give each episode to the engine with the fewest unfinished episodes."""

    def pick(scheduler: Scheduler, episode: ScheduledEpisode, _: float) -> ScheduledEngine:
        return min(scheduler.up_engines, key=lambda engine: engine.forecast.num_episodes)

    return PlacementPolicy(pick)


POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "static": static,
    "round_robin": round_robin,
    "least_inflight": least_inflight,
    **{name: lambda policy=policy: policy for name, policy in TRAINER_POLICIES.items()},
}
"""Functions that make the policy of one run, by name."""
