"""Collects groups of scored episodes from an engine pool.

Invariants:
- An aborted episode loses no sampled ids; `collect_groups` continues it.
- The episodes of a group share one environment. If its class is stateful, each episode has an environment of its own.
- A group is scored as soon as it is complete.
- No task outlives `collect_groups`, and a cancellation of `collect_groups` cancels all its tasks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from trainer.config import SamplingConfig
from trainer.engines.pool import EnginePool
from trainer.environments.environment import Environment
from trainer.environments.registry import environment_class
from trainer.episodes.chat_format import ChatFormat, ToolSchema
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.rollout.episode_runner import EpisodeRunner, Failures
from trainer.rollout.runtime import IsGroupDecided
from trainer.rollout.turn_loop import root_cause

logger = logging.getLogger(__name__)


class EpisodeCollector:
    """Runs many episodes at once and scores them.

    The caller closes `pool`, and the services that the opened environments use, such as a sandbox.

    `max_stateful`: episodes in stateful environments that run at once, since each of them may need a process.
    """

    def __init__(
        self,
        pool: EnginePool,
        chat_format: Callable[[Sequence[ToolSchema]], ChatFormat],
        open_environment: Callable[[Problem], Environment],
        max_stateful: int = 64,
    ) -> None:
        self._pool, self._chat_format, self._open_environment = pool, chat_format, open_environment
        self._stateful_slots = asyncio.Semaphore(max_stateful)
        self.overhead_cpu_s = 0.0
        """CPU seconds of the event loop's thread in the last call."""
        self.overhead_s = 0.0
        """Seconds of the last call in which no engine generated, no tool ran and no answer was checked."""

    async def collect(
        self, problems: Sequence[Problem], samples_per_problem: int, *, limits: SamplingConfig, seed: int
    ) -> list[list[Episode]]:
        """Return scored episodes of each problem, in order. See `collect_groups`."""
        groups = [[Episode(problem, sample) for sample in range(samples_per_problem)] for problem in problems]
        collected = await self.collect_groups(groups, limits=limits, seed=seed)
        # By default all groups must complete, so no group is None here. The condition is for the type checker.
        return [episodes for episodes in collected if episodes]

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
        """Continue the episodes of each group. Stop once at least `min_complete` groups (default: all) are complete and
        the first `must_complete` groups are among them. Then abort the other groups and return None for each of them.

        `limits` also has the sampling parameters, such as the temperature.

        `is_decided` is called after each scored episode. If it returns true, the group's unfinished episodes are
        cancelled and the group is complete.

        A failure ends only the episodes that it concerns (`EpisodeRunner`): they have no reward, and the log names
        them. Any other exception cancels all episodes and is raised.
        """
        busy_timer = self._pool.busy_timer
        cpu_start_s, wall_start_s, busy_start_s = time.thread_time(), time.perf_counter(), busy_timer.seconds
        min_complete = len(groups) if min_complete is None else min_complete
        runner = EpisodeRunner(self._pool, self._chat_format, self._open_environment, limits, seed)
        complete: list[list[Episode] | None] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._collect_group(runner, group, is_decided)) for group in groups]
                for ended in asyncio.as_completed(running):
                    await ended
                    complete = [task.result() if task.done() else None for task in running]
                    if sum(map(bool, complete)) >= min_complete and all(complete[:must_complete]):
                        # `abort` skips the finished episodes, so only the incomplete groups are aborted.
                        await runner.abort(episode for group in groups for episode in group)
        except ExceptionGroup as group:
            raise root_cause(group) from None
        self.overhead_cpu_s = time.thread_time() - cpu_start_s
        self.overhead_s = time.perf_counter() - wall_start_s - (busy_timer.seconds - busy_start_s)
        return complete

    async def _collect_group(
        self, runner: EpisodeRunner, episodes: Sequence[Episode], is_decided: IsGroupDecided | None
    ) -> list[Episode] | None:
        """Return the finished and scored episodes of a group, or None if they were aborted."""
        is_stateful = environment_class(episodes[0].problem.environment).is_stateful
        # The episodes of one environment are scored together, but `is_decided` needs each reward at once.
        shares = [[episode] for episode in episodes] if is_stateful or is_decided else [episodes]
        rewards: list[float | None] = []
        is_group_decided = False
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._run(runner, share, is_stateful)) for share in shares]
            for ended in asyncio.as_completed(running):
                new_rewards = [episode.reward for episode in await ended if episode.stop_reason]
                rewards += new_rewards
                if is_decided and new_rewards and not is_group_decided:
                    is_group_decided = is_decided(rewards, len(episodes) - len(rewards))
                    if is_group_decided:
                        await runner.abort(episodes)
        unfinished = [episode for episode in episodes if not episode.stop_reason]
        if unfinished and not is_group_decided:
            return None
        for episode in unfinished:
            episode.stop_reason = StopReason.CANCELLED
        return list(episodes)

    async def _run(self, runner: EpisodeRunner, episodes: Sequence[Episode], is_stateful: bool) -> Sequence[Episode]:
        async with self._stateful_slots if is_stateful else nullcontext():
            _log(await runner.run(episodes))
        return episodes


def _log(failures: Failures) -> None:
    """Log the failures of one problem, equal ones in one line. The log has a traceback if the cause may be a bug."""
    errors = {str(error): error for error in failures.values()}
    for text, error in errors.items():
        samples = [episode for episode, failure in failures.items() if str(failure) == text]
        names = ", ".join(str(episode.sample) for episode in samples)
        problem = samples[0].problem.id
        logger.warning("problem %s, sample %s: no reward: %s", problem, names, text, exc_info=error.__cause__)
