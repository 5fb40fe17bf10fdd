"""Runs one episode in this process: environment, turns, score.

Invariants:
- A repeated try of an episode continues after the episode's last finished turn. The tokens are kept as they were
  sampled. For a stateful environment, the recorded actions are repeated. If a response then differs from the recorded
  one, the try fails.
- The environment is closed, whatever happens.
- A failure of an engine or of the sandbox is an infrastructure failure. So is a score that could not be computed. An
  exception of the environment is a failure of the environment. Both kinds end the try with `TryError`, without an
  episode.
- An episode that exceeds its deadline ends at once, with `StopReason.DEADLINE` and without a reward.
- An episode with a call that the sandbox will not run again (`ToolCall.ends_episode`) ends at this call, with
  `StopReason.UNAVAILABLE`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.collection.store import FailureKind, Growth
from trainer.collection.work import TryError
from trainer.config import SamplingConfig
from trainer.engines.pool import EnginePool
from trainer.environments.environment import Environment, EnvironmentFailure, check_score, close_environment
from trainer.episodes.chat_format import ChatFormat, ToolSchema
from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus
from trainer.episodes.reward import INFRASTRUCTURE_STOPS
from trainer.episodes.turn_parser import ToolCallRequest
from trainer.rollout.episode_runner import EpisodeRunner, truncate_response

MAX_ERROR_CHARS = 500

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpisodeHost:
    """Runs episodes, any number at once. `run` has the type `trainer.collection.work.RunEpisode`.

    `deadline_s`: seconds of wall-clock time for the turns of each episode, over all its tries. Each computation of the
    score may take `deadline_s` too, in addition.
    """

    pool: EnginePool
    chat_format: Callable[[Sequence[ToolSchema]], ChatFormat]
    open_environment: Callable[[Problem], Environment]
    limits: SamplingConfig
    seed: int
    deadline_s: float

    async def run(self, episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        """Complete an episode in place and return its reward. Raises `TryError`."""
        try:
            environment = self.open_environment(episode.problem)
        except Exception as error:
            raise _environment_failed(error) from error
        is_finished = episode.stop_reason is not None
        try:
            if not is_finished:
                await self._run_turns(episode, environment, on_growth)
            return await self._score(episode, environment, begin=is_finished)
        finally:
            await close_environment(environment)

    async def _run_turns(self, episode: Episode, environment: Environment, on_growth: Callable[[Growth], None]) -> None:
        journal = _Journal(episode, on_growth)
        with suppress(TimeoutError):  # only the deadline raises it here
            async with asyncio.timeout(self.deadline_s - episode.duration_s):
                chat_format = await self._begin(episode, environment)
                await self._sample(episode, environment, chat_format, journal)
                return
        # Here the deadline has passed, since all other ways out of the block return or raise.
        episode.stop_reason, episode.duration_s = StopReason.DEADLINE, self.deadline_s
        episode.error = f"the episode did not end within {self.deadline_s:g} s (collect.deadline_s)"
        journal.write(episode)

    async def _begin(self, episode: Episode, environment: Environment) -> ChatFormat:
        """Reset the environment and bring it to the state after the episode's last turn."""
        started_at = time.perf_counter()
        state = await _act(environment.reset(episode.problem))
        chat_format = self.chat_format(state.tools)
        if not episode.prompt_ids:
            episode.prompt_ids = tuple(chat_format.encode_prompt(state.text))
        if environment.is_stateful:
            await replay_actions(episode, environment, self.limits.max_tool_response_chars)
        episode.duration_s += time.perf_counter() - started_at
        return chat_format

    async def _sample(
        self, episode: Episode, environment: Environment, chat_format: ChatFormat, journal: _Journal
    ) -> None:
        """Sample turns until the episode has a stop reason."""
        pool, limits, tool = self.pool, self.limits, _EnvironmentTool(environment)
        seed = self.seed if episode.seed is None else episode.seed
        runner = EpisodeRunner(chat_format, tool, limits, seed, pool.busy_timer, on_turn=journal.write)
        max_context_tokens = len(episode.prompt_ids) + limits.max_response_tokens
        async with pool.open_episode(group=episode.problem.id, max_context_tokens=max_context_tokens) as handle:
            try:
                await runner.run(episode, handle)
            except ValueError as error:  # no engine can serve the request, for example if the prompt is too long
                raise TryError(FailureKind.ENVIRONMENT, f"engine: {error}"[:MAX_ERROR_CHARS]) from error
            if episode.stop_reason is StopReason.UNAVAILABLE:
                handle.close(None)  # None: the length at a failure says nothing about how long such episodes become
                if not tool.has_poisonous_call:
                    raise tool.error or TryError(FailureKind.INFRASTRUCTURE, episode.error[:MAX_ERROR_CHARS])
        journal.write(episode)

    async def _score(self, episode: Episode, environment: Environment, *, begin: bool) -> float | None:
        """Return the reward of a finished episode. If an earlier try has run the turns, `begin` is true: the
        environment is reset first."""
        if episode.stop_reason in INFRASTRUCTURE_STOPS:
            return None
        try:
            async with asyncio.timeout(self.deadline_s):
                if begin:
                    await self._begin(episode, environment)
                reward = await _act(_checked_score(environment, episode))
        except TimeoutError:
            raise TryError(FailureKind.ENVIRONMENT, f"no score after {self.deadline_s:g} s") from None
        if reward is None:
            raise TryError(FailureKind.INFRASTRUCTURE, "the answer could not be checked")
        return reward


async def _checked_score(environment: Environment, episode: Episode) -> float | None:
    return check_score(episode.problem, await environment.score(episode))


async def replay_actions(episode: Episode, environment: Environment, max_response_chars: int) -> None:
    """Repeat the recorded actions of an episode. Raises `TryError` if a response differs from the recorded one. Only
    the part of a response that the model has read is compared."""
    for recorded in (call for turn in episode.turns for call in turn.tool_calls):
        if recorded.status is ToolCallStatus.MALFORMED:
            continue  # a malformed call has changed nothing
        call = await _act(environment.step(ToolCallRequest(recorded.name, recorded.arguments)))
        if call.status is ToolCallStatus.UNAVAILABLE:
            raise TryError(FailureKind.INFRASTRUCTURE, f"replay: {call.error}"[:MAX_ERROR_CHARS])
        call = truncate_response(call, max_response_chars)
        if (call.status, call.response) != (recorded.status, recorded.response):
            raise TryError(
                FailureKind.ENVIRONMENT,
                f"replay of {recorded.name}: expected the recorded response {recorded.response!r:.200}, "
                f"got {call.response!r:.200}",
            )


class _EnvironmentTool:
    """The tools of an environment, as `EpisodeRunner` calls them. The calls of one turn run at the same time. In a
    stateful environment they run one after the other, because they may depend on each other."""

    def __init__(self, environment: Environment) -> None:
        self.error: TryError | None = None
        """The failure of the environment, which ended the episode as `unavailable`."""
        self.has_poisonous_call = False
        """Whether the sandbox will not run a call of the episode again."""
        self._environment = environment
        self._lock = asyncio.Lock()

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolCall:
        async with self._lock if self._environment.is_stateful else nullcontext():
            try:
                call = await _act(self._environment.step(ToolCallRequest(name, arguments)))
                self.has_poisonous_call |= call.status is ToolCallStatus.UNAVAILABLE and call.ends_episode
                return call
            except TryError as error:
                self.error = error
                return ToolCall(name, arguments, ToolCallStatus.UNAVAILABLE, "", error=str(error))


class _Journal:
    """Calls `on_growth` with the tokens and turns that an episode has gained since the last call."""

    def __init__(self, episode: Episode, on_growth: Callable[[Growth], None]) -> None:
        self._on_growth = on_growth
        self._tokens, self._turns = len(episode.response_ids), len(episode.turns)

    def write(self, episode: Episode) -> None:
        self._on_growth(Growth(self._tokens, episode.tail(self._tokens, self._turns)))
        self._tokens, self._turns = len(episode.response_ids), len(episode.turns)


async def _act(action: Awaitable[T]) -> T:
    """Await an action of an environment. Any exception is a failure of the environment."""
    try:
        return await action
    except Exception as error:
        raise _environment_failed(error) from error


def _environment_failed(error: Exception) -> TryError:
    text = str(error) if isinstance(error, EnvironmentFailure) else f"{type(error).__name__}: {error}"
    return TryError(FailureKind.ENVIRONMENT, text[:MAX_ERROR_CHARS])
