"""Collects groups of scored episodes from an engine pool.

Invariants:
- An aborted episode loses no sampled ids; `collect_groups` continues it.
- The episodes of a group share one environment. The environment must not be stateful.
- A group is scored as soon as it is complete. After a failure of the infrastructure or of the environment, an episode
  has no reward; it never has a reward of 0.
- No task outlives `collect_groups`, and a cancellation of `collect_groups` cancels all its tasks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainer.config import ConfigError, SamplingConfig
from trainer.engines.episode_handle import EpisodeHandle
from trainer.engines.pool import EnginePool
from trainer.environments.environment import (
    Environment,
    EnvironmentFailure,
    InitialState,
    check_score,
    close_environment,
)
from trainer.episodes.chat_format import ChatFormat, ToolSchema
from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus
from trainer.episodes.reward import INFRASTRUCTURE_STOPS
from trainer.episodes.turn_parser import ToolCallRequest
from trainer.rollout.episode_runner import EpisodeRunner
from trainer.rollout.runtime import IsGroupDecided

logger = logging.getLogger(__name__)


class EpisodeCollector:
    """Runs many episodes at once and scores them.

    The caller closes `pool`, and the services that the opened environments use, such as a sandbox.
    """

    def __init__(
        self,
        pool: EnginePool,
        chat_format: Callable[[Sequence[ToolSchema]], ChatFormat],
        open_environment: Callable[[Problem], Environment],
    ) -> None:
        self._pool, self._chat_format, self._open_environment = pool, chat_format, open_environment
        self._handles: dict[Episode, EpisodeHandle] = {}
        self._aborted: set[Episode] = set()
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

        `is_decided` is called after each finished episode. If it returns true, the group's unfinished episodes are
        cancelled and the group is complete.

        Failures of engines, tools and environments make episodes `unavailable`. Any other exception cancels all
        episodes and is raised. An example is `ValueError` if a prompt and `max_response_tokens` together exceed the
        maximum context of the engines.
        """
        busy_timer = self._pool.busy_timer
        cpu_start_s, wall_start_s, busy_start_s = time.thread_time(), time.perf_counter(), busy_timer.seconds
        min_complete = len(groups) if min_complete is None else min_complete
        complete: list[list[Episode] | None] = [None] * len(groups)
        self._aborted.clear()

        async def collect_group(index: int) -> None:
            complete[index] = await self._collect_group(groups[index], limits, seed, is_decided)
            if sum(map(bool, complete)) >= min_complete and all(complete[:must_complete]):
                # `_abort` skips the finished episodes, so only the incomplete groups are aborted.
                await self._abort([episode for episodes in groups for episode in episodes])

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(groups)):
                    tasks.create_task(collect_group(index))
        except ExceptionGroup as group:
            raise _root_cause(group) from None
        self.overhead_cpu_s = time.thread_time() - cpu_start_s
        self.overhead_s = time.perf_counter() - wall_start_s - (busy_timer.seconds - busy_start_s)
        return complete

    async def _collect_group(
        self, episodes: Sequence[Episode], limits: SamplingConfig, seed: int, is_decided: IsGroupDecided | None
    ) -> list[Episode] | None:
        """Return the finished and scored episodes of a group, or None if they were aborted."""
        problem = episodes[0].problem
        environment = self._open_environment(problem)
        if type(environment).is_stateful:  # the actions of one episode would change the state of the others
            raise ConfigError(f"problem {problem.id}: environment {problem.environment!r} is stateful")
        try:
            state = await _reset(environment, episodes)
            if state is None:
                return list(episodes)
            chat_format = self._chat_format(state.tools)
            prompt = tuple(chat_format.encode_prompt(state.text))
            for episode in episodes:
                episode.prompt_ids = prompt
            runner = EpisodeRunner(
                chat_format, _EnvironmentTool(environment, problem), limits, seed, self._pool.busy_timer
            )
            return await self._run_group(episodes, environment, runner, is_decided)
        finally:
            await close_environment(environment)

    async def _run_group(
        self,
        episodes: Sequence[Episode],
        environment: Environment,
        runner: EpisodeRunner,
        is_decided: IsGroupDecided | None,
    ) -> list[Episode] | None:
        rewards: list[float | None] = []
        is_group_decided = False

        async def run_and_score(episode: Episode) -> None:
            nonlocal is_group_decided
            if not episode.stop_reason:
                await self._run_episode(episode, runner)
            # `is_decided` needs each reward at once. Without it, the group is scored together at the end, since an
            # environment may score all episodes in one request.
            if episode.stop_reason and is_decided:
                (episode.reward,) = await self._score([episode], environment)
                rewards.append(episode.reward)
                if not is_group_decided and is_decided(rewards, len(episodes) - len(rewards)):
                    is_group_decided = True
                    await self._abort(episodes)

        async with asyncio.TaskGroup() as tasks:
            for episode in episodes:
                tasks.create_task(run_and_score(episode))
        unfinished = [episode for episode in episodes if not episode.stop_reason]
        if unfinished and not is_group_decided:
            return None
        for episode in unfinished:
            episode.stop_reason = StopReason.CANCELLED
        if not is_decided:
            for episode, reward in zip(episodes, await self._score(episodes, environment), strict=True):
                episode.reward = reward
        return list(episodes)

    async def _score(self, episodes: Sequence[Episode], environment: Environment) -> list[float | None]:
        """Return the rewards in order. The reward of an episode is None if the infrastructure or the environment
        failed."""
        ended = [episode for episode in episodes if episode.stop_reason not in INFRASTRUCTURE_STOPS]
        rewards: dict[Episode, float | None] = {}
        with self._pool.busy_timer:
            try:
                scores = await environment.score_group(ended)  # `ended` may be empty
            except Exception as error:
                message = _log_failure(episodes[0].problem, error)
                for episode in ended:
                    episode.error = message
                scores = [None] * len(ended)
        for episode, score in zip(ended, scores, strict=True):
            try:
                rewards[episode] = check_score(episode.problem, score)
            except EnvironmentFailure as error:
                episode.error = _log_failure(episode.problem, error)
        return [rewards.get(episode) for episode in episodes]

    async def _run_episode(self, episode: Episode, runner: EpisodeRunner) -> None:
        max_context_tokens = len(episode.prompt_ids) + runner.limits.max_response_tokens
        async with self._pool.open_episode(group=episode.problem.id, max_context_tokens=max_context_tokens) as handle:
            self._handles[episode] = handle
            try:
                if episode not in self._aborted:
                    await runner.run(episode, handle)
                if episode.stop_reason is StopReason.UNAVAILABLE:
                    # The scheduler learns from final lengths. A failure ended this episode early, so its length is
                    # not a final length. None reports the episode as cancelled.
                    handle.close(None)
            finally:
                del self._handles[episode]

    async def _abort(self, episodes: Iterable[Episode]) -> None:
        """Abort unfinished episodes. Their running tool calls are awaited."""
        unfinished = [episode for episode in episodes if not episode.stop_reason and episode not in self._aborted]
        self._aborted.update(unfinished)
        if handles := [self._handles[episode] for episode in unfinished if episode in self._handles]:
            await self._pool.abort(handles)


class _EnvironmentTool:
    """Passes the tool calls of an `EpisodeRunner` to an environment. A failure of the environment becomes a call with
    the status `UNAVAILABLE`."""

    def __init__(self, environment: Environment, problem: Problem) -> None:
        self._environment, self._problem = environment, problem

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolCall:
        try:
            return await self._environment.step(ToolCallRequest(name, arguments))
        except Exception as error:
            return ToolCall(name, arguments, ToolCallStatus.UNAVAILABLE, "", error=_log_failure(self._problem, error))


async def _reset(environment: Environment, episodes: Sequence[Episode]) -> InitialState | None:
    """Reset the environment, and return the initial state that all episodes of the group share. If the reset fails,
    make the unfinished episodes unavailable and return None."""
    try:
        return await environment.reset(episodes[0].problem)
    except Exception as error:
        message = _log_failure(episodes[0].problem, error)
        for episode in episodes:
            if not episode.stop_reason:
                episode.stop_reason, episode.error = StopReason.UNAVAILABLE, message
        return None


def _log_failure(problem: Problem, error: Exception) -> str:
    """Log a failure of an environment, and return its message. Only an `EnvironmentFailure` is logged without a
    traceback, since any other error may be a bug."""
    message = f"environment: {type(error).__name__}: {error}"
    logger.warning("problem %s: %s", problem.id, message, exc_info=not isinstance(error, EnvironmentFailure))
    return message


def _root_cause(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first exception of the group. It has caused the cancellation of the other tasks."""
    first = group.exceptions[0]
    return _root_cause(first) if isinstance(first, ExceptionGroup) else first
