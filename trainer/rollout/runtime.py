"""The objects that collect episodes, as training and evaluation see them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.config import SamplingConfig
from trainer.episodes.episode import Episode, Problem
from trainer.rollout.loop_thread import LoopThread


class Collector(Protocol):
    """The part of `trainer.rollout.collector.EpisodeCollector` that training and evaluation use."""

    overhead_cpu_s: float
    """CPU seconds of the event loop's thread in the last call of `collect`."""
    overhead_s: float
    """Seconds of the last call in which no engine generated, no tool ran and no answer was checked."""

    async def collect(
        self, problems: Sequence[Problem], samples_per_problem: int, *, limits: SamplingConfig, seed: int
    ) -> list[list[Episode]]:
        """Return `samples_per_problem` finished episodes of each problem, in the order of `problems`.

        `limits`: the limits and sampling parameters of the episodes, such as the maximum number of turns.
        """


@dataclass(frozen=True, slots=True)
class RolloutRuntime:
    """The objects that collect episodes. `collector` and `pool` live in the event loop of `loop_thread`."""

    loop_thread: LoopThread
    collector: Collector
    pool: WeightSync
    """The engines that get new weights. `collector` samples from them, unless its episodes are stored ones."""
    sleep: Callable[[], Awaitable[None]] | None = None
    """Makes the engines free their memory until the next weight sync. None if they keep it."""


class WeightSync(Protocol):
    """The part of `trainer.engines.pool.EnginePool` that training uses."""

    async def sync_weights(self, weights: Mapping[str, Any], version: int) -> int:
        """Give the weights to all engines. Return `version`."""
