"""Runs episodes from the reset of their environment to their score.

Invariants:
- A failure of an engine, the sandbox or the environment ends the episodes that it concerns, and no others. Such an
  episode has no reward, never a reward of 0, and its `error` says why.
- A failure of an engine or of the sandbox is an infrastructure failure. So is a score that could not be computed. An
  exception of the environment, and a context that no engine can serve, are failures of the environment.
- An unfinished episode continues after its last finished turn. The tokens are kept as they were sampled. For a stateful
  environment, the recorded actions are repeated. If a response then differs from the recorded one, the episode fails.
- The environment is closed, whatever happens.
- An episode that exceeds its deadline ends at once, with `StopReason.DEADLINE` and without a reward.
- An episode with a call that the sandbox will not run again (`ToolCall.ends_episode`) ends at this call, with
  `StopReason.UNAVAILABLE`. This is no failure, since another try would end in the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from trainer.config import SamplingConfig
from trainer.engines.pool import EnginePool
from trainer.environments.environment import Environment, EnvironmentFailure, check_score, close_environment
from trainer.episodes.chat_format import ChatFormat, ToolSchema
from trainer.episodes.episode import Episode, FailureKind, Problem, StopReason, ToolCall, ToolCallStatus
from trainer.episodes.reward import INFRASTRUCTURE_STOPS
from trainer.episodes.turn_parser import ToolCallRequest
from trainer.rollout.turn_loop import TurnLoop, run_all, truncate_response

MAX_ERROR_CHARS = 500


class EpisodeError(Exception):
    """An episode has failed. Its cause is set if the failure may be a bug of the environment."""

    def __init__(self, kind: FailureKind, error: str) -> None:
        text = error[:MAX_ERROR_CHARS]
        super().__init__(text.encode("utf-8", "replace").decode())  # files of episodes hold no unpaired surrogates
        self.kind = kind


Failures = dict[Episode, EpisodeError]


class EpisodeRunner:
    """Runs episodes, any number at once.

    `deadline_s`: seconds of wall-clock time for the turns of each episode, over all its tries. Each computation of the
    score may take `deadline_s` too, in addition. None means no deadline.
    """

    def __init__(
        self,
        pool: EnginePool,
        chat_format: Callable[[Sequence[ToolSchema]], ChatFormat],
        open_environment: Callable[[Problem], Environment],
        limits: SamplingConfig,
        seed: int,
        deadline_s: float | None = None,
    ) -> None:
        self._pool, self._chat_format, self._open_environment = pool, chat_format, open_environment
        self._limits, self._seed, self._deadline_s = limits, seed, deadline_s

    async def run(
        self, episodes: Sequence[Episode], on_growth: Callable[[Episode], None] = lambda _episode: None
    ) -> Failures:
        """Complete and score episodes of one problem in place, all in one environment. Return those that have failed.

        The episodes are scored together, since an environment may score all of them in one request. `on_growth` is
        called after each turn of an episode and at its end.
        """
        failures: Failures = {}
        if not _unscored(episodes):
            return failures
        environment: Environment | None = None
        try:
            with _recorded(failures, _unscored(episodes)):
                with _environment_errors():
                    environment = self._open_environment(episodes[0].problem)
                await self._run_turns(episodes, environment, on_growth, failures)
            ended = [episode for episode in _unscored(episodes) if episode not in failures]
            if environment is not None and ended:
                with _recorded(failures, ended):
                    await self._score(ended, environment, failures)
        finally:
            if environment is not None:
                await close_environment(environment)
        return failures

    async def _run_turns(
        self,
        episodes: Sequence[Episode],
        environment: Environment,
        on_growth: Callable[[Episode], None],
        failures: Failures,
    ) -> None:
        """Begin the episodes, and sample turns until each has a stop reason or has failed."""
        unfinished = [episode for episode in episodes if not episode.stop_reason]
        spent_s = max((episode.duration_s for episode in unfinished), default=0.0)
        try:
            async with asyncio.timeout(None if self._deadline_s is None else self._deadline_s - spent_s):
                chat_format = await self._begin(episodes, environment)
                if unfinished:
                    await run_all(
                        self._run_episode(episode, environment, chat_format, on_growth, failures)
                        for episode in unfinished
                    )
        except TimeoutError:  # only the deadline raises it here
            assert self._deadline_s is not None
            if not unfinished:
                raise self._no_score() from None
            for episode in unfinished:
                if not episode.stop_reason:
                    episode.stop_reason, episode.duration_s = StopReason.DEADLINE, self._deadline_s
                    episode.error = f"the episode did not end within {self._deadline_s:g} s (collect.deadline_s)"
                    on_growth(episode)

    async def _begin(self, episodes: Sequence[Episode], environment: Environment) -> ChatFormat:
        """Reset the environment and bring it to the state after the last turn of its episode."""
        started_at = time.perf_counter()
        with _environment_errors():
            state = await environment.reset(episodes[0].problem)
        chat_format = self._chat_format(state.tools)
        prompt = tuple(chat_format.encode_prompt(state.text))
        for episode in episodes:
            episode.prompt_ids = episode.prompt_ids or prompt
            if environment.is_stateful:
                await replay_actions(episode, environment, self._limits.max_tool_response_chars)
            episode.duration_s += time.perf_counter() - started_at
        return chat_format

    async def _run_episode(
        self,
        episode: Episode,
        environment: Environment,
        chat_format: ChatFormat,
        on_growth: Callable[[Episode], None],
        failures: Failures,
    ) -> None:
        pool, limits, tool = self._pool, self._limits, _EnvironmentTool(environment)
        seed = self._seed if episode.seed is None else episode.seed
        turns = TurnLoop(chat_format, tool, limits, seed, pool.busy_timer, on_turn=on_growth)
        max_context_tokens = len(episode.prompt_ids) + limits.max_response_tokens
        if episode.weight_version is not None:
            pool.set_weight_version(episode.weight_version)
        with _recorded(failures, [episode]):
            try:
                async with pool.open_episode(group=episode.problem.id, max_context_tokens=max_context_tokens) as handle:
                    await turns.run(episode, handle)
                    if episode.stop_reason is StopReason.UNAVAILABLE:
                        # The scheduler learns from final lengths, and the length at a failure is not a final one.
                        handle.close(None)
                        if not tool.has_poisonous_call:
                            raise tool.error or EpisodeError(FailureKind.INFRASTRUCTURE, episode.error)
            except ValueError as error:  # no engine can serve the context, for example since the prompt is too long
                raise EpisodeError(FailureKind.ENVIRONMENT, f"engine: {error}") from None
            on_growth(episode)

    async def _score(self, episodes: Sequence[Episode], environment: Environment, failures: Failures) -> None:
        """Set the rewards of finished episodes."""
        for episode in episodes:
            episode.error = ""  # that of an earlier try
        try:
            async with asyncio.timeout(self._deadline_s):
                with self._pool.busy_timer, _environment_errors():
                    if type(environment).is_stateful:
                        scores = [await environment.score(episode) for episode in episodes]
                    else:
                        scores = await environment.score_group(episodes)
        except TimeoutError:
            raise self._no_score() from None
        for episode, score in zip(episodes, scores, strict=True):
            with _recorded(failures, [episode]):
                with _environment_errors():
                    episode.reward = check_score(episode.problem, score)
                if episode.reward is None:  # a reward function sets the error of an episode that it cannot score
                    kind = FailureKind.ENVIRONMENT if episode.error else FailureKind.INFRASTRUCTURE
                    raise EpisodeError(kind, episode.error or "the answer could not be checked")

    def _no_score(self) -> EpisodeError:
        return EpisodeError(FailureKind.ENVIRONMENT, f"no score after {self._deadline_s:g} s")


async def replay_actions(episode: Episode, environment: Environment, max_response_chars: int) -> None:
    """Repeat the recorded actions of an episode. Raises `EpisodeError` if a response differs from the recorded one.
    Only the part of a response that the model has read is compared."""
    for recorded in (call for turn in episode.turns for call in turn.tool_calls):
        if recorded.status is ToolCallStatus.MALFORMED:
            continue  # a malformed call has changed nothing
        with _environment_errors():
            call = await environment.step(ToolCallRequest(recorded.name, recorded.arguments))
        if call.status is ToolCallStatus.UNAVAILABLE:
            raise EpisodeError(FailureKind.INFRASTRUCTURE, f"replay: {call.error}")
        call = truncate_response(call, max_response_chars)
        if (call.status, call.response) != (recorded.status, recorded.response):
            raise EpisodeError(
                FailureKind.ENVIRONMENT,
                f"replay of {recorded.name}: expected the recorded response {recorded.response!r:.200}, "
                f"got {call.response!r:.200}",
            )


class _EnvironmentTool:
    """The tools of an environment, as `TurnLoop` calls them. The calls of one turn run at the same time. In a stateful
    environment they run one after the other, because they may depend on each other."""

    def __init__(self, environment: Environment) -> None:
        self.error: EpisodeError | None = None
        """The failure of the environment, which ended the episode as `unavailable`."""
        self.has_poisonous_call = False
        """Whether the sandbox will not run a call of the episode again."""
        self._environment = environment
        self._lock = asyncio.Lock()

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolCall:
        async with self._lock if self._environment.is_stateful else nullcontext():
            try:
                with _environment_errors():
                    call = await self._environment.step(ToolCallRequest(name, arguments))
            except EpisodeError as error:
                self.error = error
                return ToolCall(name, arguments, ToolCallStatus.UNAVAILABLE, "", error=str(error))
            self.has_poisonous_call |= call.status is ToolCallStatus.UNAVAILABLE and call.ends_episode
            return call


def _unscored(episodes: Iterable[Episode]) -> list[Episode]:
    """Return the episodes that can still get a reward."""
    return [
        episode for episode in episodes if episode.reward is None and episode.stop_reason not in INFRASTRUCTURE_STOPS
    ]


@contextmanager
def _recorded(failures: Failures, episodes: Iterable[Episode]) -> Iterator[None]:
    """End these episodes if the block fails, except for those that have failed before."""
    try:
        yield
    except EpisodeError as error:
        for episode in episodes:
            if episode not in failures:
                failures[episode], episode.error = error, str(error)
                episode.stop_reason = episode.stop_reason or StopReason.UNAVAILABLE


@contextmanager
def _environment_errors() -> Iterator[None]:
    """Turn any exception of an environment into an `EpisodeError`."""
    try:
        yield
    except Exception as error:
        is_bug = not isinstance(error, EnvironmentFailure)
        text = f"{type(error).__name__}: {error}" if is_bug else error
        raise EpisodeError(FailureKind.ENVIRONMENT, f"environment: {text}") from (error if is_bug else None)
