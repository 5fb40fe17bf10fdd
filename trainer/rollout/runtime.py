"""The objects that collect episodes, as training and evaluation see them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.config import SamplingConfig
from trainer.episodes.episode import Episode, Problem
from trainer.rollout.loop_thread import LoopThread

IsGroupDecided = Callable[[Sequence[float | None], int], bool]
"""Takes the rewards of a group's finished episodes and the number of its unfinished episodes. Returns whether the
unfinished episodes can be cancelled."""


class GroupCollector(Protocol):
    """The part of `trainer.rollout.collector.EpisodeCollector` that training and evaluation use."""

    overhead_cpu_s: float
    """CPU seconds of the event loop's thread in the last call of `collect` or `collect_groups`."""
    overhead_s: float
    """Seconds of the last call in which no engine generated, no tool ran and no answer was checked."""

    async def collect_groups(
        self,
        groups: Sequence[Sequence[Episode]],
        *,
        limits: SamplingConfig,
        seed: int,
        min_complete: int | None = None,
        must_complete: int = 0,
        is_decided: IsGroupDecided | None = None,
    ) -> list[list[Episode] | None]:
        """Continue the episodes of each group, and return the episodes of each complete group.

        `limits`: the limits and sampling parameters of the episodes, such as the maximum number of turns.
        `min_complete`: stop once this number of groups is complete (default: all groups).
        `must_complete`: do not stop before the first `must_complete` groups are complete.

        A group that is not complete when the collection stops is None in the result. It can be continued by a later
        call.
        """

    async def collect(
        self, problems: Sequence[Problem], samples_per_problem: int, *, limits: SamplingConfig, seed: int
    ) -> list[list[Episode]]:
        """Return `samples_per_problem` finished episodes of each problem, in the order of `problems`."""


@dataclass(frozen=True, slots=True)
class RolloutRuntime:
    """The objects that collect episodes. `collector` and `pool` live in the event loop of `loop_thread`."""

    loop_thread: LoopThread
    collector: GroupCollector
    pool: WeightSync
    """The engines that get new weights. `collector` samples from them, unless its episodes are stored ones."""
    sleep: Callable[[], Awaitable[None]] | None = None
    """Makes the engines free their memory until the next weight sync. None if they keep it."""


class WeightSync(Protocol):
    """The part of `trainer.engines.pool.EnginePool` that training uses."""

    async def sync_weights(self, weights: Mapping[str, Any], version: int) -> int:
        """Give the weights to all engines. Return `version`."""
