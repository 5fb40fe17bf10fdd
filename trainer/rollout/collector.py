"""Collects groups of scored episodes from an engine pool.

Invariants:
- An aborted episode loses no sampled ids; `collect_groups` continues it.
- A group is scored as soon as it is complete. An infrastructure failure gives an episode no reward, never a reward of
  0.
- No task outlives `collect_groups`, and a cancellation of `collect_groups` cancels all its tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from trainer.config import SamplingConfig
from trainer.engines.episode_handle import EpisodeHandle
from trainer.engines.pool import EnginePool
from trainer.episodes.chat_format import ChatFormat
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.episodes.reward import VerifyPairs, score_episodes
from trainer.rollout.episode_runner import EpisodeRunner, Tool
from trainer.rollout.runtime import IsGroupDecided


class EpisodeCollector:
    """Runs many episodes at once and scores them. The caller closes `pool` and the resources of `tool` and `verify`."""

    def __init__(self, pool: EnginePool, chat_format: ChatFormat, tool: Tool, verify: VerifyPairs) -> None:
        self._pool, self._chat_format, self._tool, self._verify = pool, chat_format, tool, verify
        self._handles: dict[Episode, EpisodeHandle] = {}
        self._aborted: set[Episode] = set()
        self.overhead_cpu_s = 0.0
        """CPU seconds of the event loop's thread in the last call."""
        self.overhead_s = 0.0
        """Seconds of the last call in which no engine generated, no tool ran and no answer was checked."""
        self.nan_turns = 0
        """Turns of the last call with a log-probability that was not finite."""

    async def collect(
        self, problems: Sequence[Problem], samples_per_problem: int, *, limits: SamplingConfig, seed: int
    ) -> list[list[Episode]]:
        """Return scored episodes of each problem, in order. See `collect_groups`."""
        groups = [[Episode(problem, sample) for sample in range(samples_per_problem)] for problem in problems]
        collected = await self.collect_groups(groups, limits=limits, seed=seed)
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
        """Continue the episodes of each group until at least `min_complete` groups (default: all) are complete, among
        them the first `must_complete` groups. Then abort the other groups and return None for each of them.

        `is_decided` is called after each finished episode. If it returns true, the group's unfinished episodes are
        cancelled and the group is complete.

        Failures of engines and tools make episodes `unavailable`. Any other exception cancels all episodes and is
        raised here, for example `ValueError` if a prompt and `max_response_tokens` exceed the engines' maximum context.
        """
        pool, busy_timer = self._pool, self._pool.busy_timer
        cpu_start_s, wall_start_s, busy_start_s = time.thread_time(), time.perf_counter(), busy_timer.seconds
        nan_turns_before = pool.nan_turns
        runner = EpisodeRunner(self._chat_format, self._tool, limits, seed, busy_timer)
        min_complete = len(groups) if min_complete is None else min_complete
        complete: list[list[Episode] | None] = [None] * len(groups)
        self._aborted.clear()

        async def collect_group(index: int) -> None:
            complete[index] = await self._collect_group(groups[index], runner, is_decided)
            if sum(map(bool, complete)) >= min_complete and all(complete[:must_complete]):
                await self._abort([episode for episodes in groups for episode in episodes])

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(groups)):
                    tasks.create_task(collect_group(index))
        except ExceptionGroup as group:
            raise _root_cause(group) from None
        self.overhead_cpu_s = time.thread_time() - cpu_start_s
        self.overhead_s = time.perf_counter() - wall_start_s - (busy_timer.seconds - busy_start_s)
        self.nan_turns = pool.nan_turns - nan_turns_before
        return complete

    async def _collect_group(
        self, episodes: Sequence[Episode], runner: EpisodeRunner, is_decided: IsGroupDecided | None
    ) -> list[Episode] | None:
        """Return the finished and scored episodes of a group, or None if they were aborted."""
        prompt = tuple(self._chat_format.encode_prompt(episodes[0].problem.text))
        rewards: list[float | None] = []
        is_group_decided = False

        async def run_and_score(episode: Episode) -> None:
            nonlocal is_group_decided
            episode.prompt_ids = prompt
            if not episode.stop_reason:
                await self._run_episode(episode, runner)
            if episode.stop_reason and is_decided:
                with self._pool.busy_timer:
                    (episode.reward,) = await score_episodes([episode], self._verify)
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
            with self._pool.busy_timer:
                rewards = await score_episodes(episodes, self._verify)
            for episode, reward in zip(episodes, rewards, strict=True):
                episode.reward = reward
        return list(episodes)

    async def _run_episode(self, episode: Episode, runner: EpisodeRunner) -> None:
        max_context_tokens = len(episode.prompt_ids) + runner.limits.max_response_tokens
        async with self._pool.open_episode(group=episode.problem.id, max_context_tokens=max_context_tokens) as handle:
            self._handles[episode] = handle
            try:
                if episode not in self._aborted:
                    await runner.run(episode, handle)
                if episode.stop_reason is StopReason.UNAVAILABLE:
                    handle.close(None)  # None: its length must not count, since the episode did not end by itself
            finally:
                del self._handles[episode]

    async def _abort(self, episodes: Iterable[Episode]) -> None:
        """Abort unfinished episodes. Their running tool calls are awaited."""
        unfinished = [episode for episode in episodes if not episode.stop_reason and episode not in self._aborted]
        self._aborted.update(unfinished)
        if handles := [self._handles[episode] for episode in unfinished if episode in self._handles]:
            await self._pool.abort(handles)


def _root_cause(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first exception of the group. It has caused the cancellation of the other tasks."""
    first = group.exceptions[0]
    return _root_cause(first) if isinstance(first, ExceptionGroup) else first
