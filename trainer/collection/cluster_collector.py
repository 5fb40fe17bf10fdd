"""Collects the groups of a training step with an `EpisodeExecutor`, such as that of a Ray cluster.

    step: groups -> Collection into a store of the step -> groups with their episodes

The store makes a step durable: after a kill, the training continues the step's episodes after their last turn. The
store is deleted once a later step begins.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.collection.driver import Collection
from trainer.collection.store import EpisodeStore, Key, StoreReader, remove_episodes
from trainer.collection.work import CollectionError, EpisodeExecutor
from trainer.config import CollectConfig
from trainer.engines.pool import EnginePool
from trainer.episodes.episode import Episode, Problem, StopReason

WEIGHTS_POLL_S = 1.0
"""Seconds between two checks of engines that lack the weights."""


async def require_weights(engines: EnginePool, max_down_s: float) -> None:
    """Wait until all engines have the weights of the last sync, since the workers do not check the weights.

    Raises `CollectionError` after `max_down_s`.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(max_down_s):
            while engines.down_reasons():  # noqa: ASYNC110  # an engine comes up without an event
                await asyncio.sleep(WEIGHTS_POLL_S)
    if down := engines.down_reasons():
        reasons = "; ".join(f"{name}: {reason}" for name, reason in down.items())
        raise CollectionError(
            f"{len(down)} of {len(engines.engine_states)} engines lack the last weights: {reasons}. Mend them, or "
            "remove them from engines.endpoints, and run the same command again: it continues"
        )


class ClusterCollector:
    """Collects episodes as `EpisodeCollector` does, and passes weight syncs on to `engines`.

    `sync_weights` is called only between steps, and all servers must load the weights. The episodes of a step tell the
    workers the version. A server that restarts within a step gets no more turns of the workers until the next sync,
    except from a worker that starts later in this step.
    """

    overhead_cpu_s = overhead_s = 0.0

    def __init__(
        self,
        executor: EpisodeExecutor,
        engines: EnginePool,
        limits: CollectConfig,
        directory: Path,
        *,
        max_down_s: float = 0.0,
    ) -> None:
        """`max_down_s`: seconds that a weight sync waits for an engine that has not loaded the weights."""
        self._executor, self._engines, self._limits, self._dir = executor, engines, limits, directory
        self._max_down_s = max_down_s
        self._weight_version = 0

    async def sync_weights(self, weights: Mapping[str, Any], version: int) -> int:
        self._weight_version = await self._engines.sync_weights(weights, version)
        await require_weights(self._engines, self._max_down_s)
        return self._weight_version

    async def collect(
        self, problems: Sequence[Problem], samples_per_problem: int, *, seed: int, **_: object
    ) -> list[list[Episode]]:
        """Return the episodes of each problem. An episode that failed for good is `unavailable`, and has no reward.

        Raises `CollectionError`.
        """
        path = self._dir / f"weights-{self._weight_version:06}"
        for other in set(self._dir.glob("weights-*")) - {path}:
            shutil.rmtree(other)
        # An earlier try of this step may have failed because of these episodes.
        remove_episodes(path, StopReason.DEADLINE)
        limits = replace(self._limits, samples_per_problem=samples_per_problem)
        identity = {"weight_version": self._weight_version, "problems": [problem.id for problem in problems]}
        with EpisodeStore(path, identity) as store:
            version = self._weight_version
            collection = Collection(store, self._executor, problems, limits, seed=seed, weight_version=version)
            await collection.run()
        with StoreReader(path) as reader:
            return [self._group(reader, problem, samples_per_problem, collection.lost) for problem in problems]

    def _group(self, reader: StoreReader, problem: Problem, size: int, lost: Mapping[Key, str]) -> list[Episode]:
        episodes = list(reader.episodes("problem = ?", (problem.id,)))
        unused = sorted(set(range(size + self._limits.max_refills)) - {episode.sample for episode in episodes})
        for sample in unused[: size - len(episodes)]:
            error = lost.get(Key(problem.id, sample), "each try of the episode failed; an earlier log has the reasons")
            episodes.append(Episode(problem, sample, stop_reason=StopReason.UNAVAILABLE, error=error))
        return episodes
