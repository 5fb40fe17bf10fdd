"""Collects scored episodes of problems from an engine pool.

Invariants:
- The episodes of a problem share one environment, and are scored together once all of them have ended. If the class of
  the environment is stateful, each episode has an environment of its own.
- No task outlives `collect`, and a cancellation of `collect` cancels all its tasks.
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
from trainer.episodes.episode import Episode, Problem
from trainer.rollout.episode_runner import EpisodeRunner, Failures
from trainer.rollout.turn_loop import run_all

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
        """Return `samples_per_problem` finished and scored episodes of each problem, in the order of `problems`.

        `limits` also has the sampling parameters, such as the temperature.

        A failure ends only the episodes that it concerns (`EpisodeRunner`): they have no reward, and the log names
        them. Any other exception cancels all episodes and is raised.
        """
        busy_timer = self._pool.busy_timer
        cpu_start_s, wall_start_s, busy_start_s = time.thread_time(), time.perf_counter(), busy_timer.seconds
        runner = EpisodeRunner(self._pool, self._chat_format, self._open_environment, limits, seed)
        groups = [[Episode(problem, sample) for sample in range(samples_per_problem)] for problem in problems]
        await run_all(self._run(runner, share) for group in groups for share in _shares(group))
        self.overhead_cpu_s = time.thread_time() - cpu_start_s
        self.overhead_s = time.perf_counter() - wall_start_s - (busy_timer.seconds - busy_start_s)
        return groups

    async def _run(self, runner: EpisodeRunner, episodes: Sequence[Episode]) -> None:
        async with self._stateful_slots if _is_stateful(episodes) else nullcontext():
            _log(await runner.run(episodes))


def _shares(group: Sequence[Episode]) -> list[Sequence[Episode]]:
    """Divide a group into the episodes that share an environment."""
    return [[episode] for episode in group] if _is_stateful(group) else [group]


def _is_stateful(episodes: Sequence[Episode]) -> bool:
    return environment_class(episodes[0].problem.environment).is_stateful


def _log(failures: Failures) -> None:
    """Log the failures of one problem, equal ones in one line. The log has a traceback if the cause may be a bug."""
    errors = {str(error): error for error in failures.values()}
    for text, error in errors.items():
        samples = [episode for episode, failure in failures.items() if str(failure) == text]
        names = ", ".join(str(episode.sample) for episode in samples)
        problem = samples[0].problem.id
        logger.warning("problem %s, sample %s: no reward: %s", problem, names, text, exc_info=error.__cause__)
