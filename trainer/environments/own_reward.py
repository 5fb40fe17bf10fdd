"""Rewards by a function of the user, `package.module:function`, in place of the environment's own score.

    def score(problem, response, episode): ...             one episode: returns a number
    async def score(problem, responses, episodes): ...     the episodes of a problem: returns a list of numbers

A function gets those of these arguments that it names. `response` is the text of the model's turns, one after the
other. A number is an int, a float or a bool, or an array or a tensor with one element.

Invariants:
- A call that fails gives no reward, and `Episode.error` has the reason. It gives no reward of 0, and raises nothing but
  cancellation.
- A call fails if it raises an exception, exceeds its time limit, or returns anything but a finite number, or for a
  group a list of as many numbers as episodes.
- At most `max_concurrent` calls run at once. No call runs in the event loop that collects the episodes: those of an
  `async def` share a loop of their own (`trainer.environments.reward_loop`), and each other call has a thread.
- Nothing can end a call that blocks in a thread. Such calls are abandoned, and so is a loop that a call blocks. While
  there are `max_concurrent` abandoned threads, further calls fail at once.
- Infrastructure failures are not scored.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import Any

from trainer.config import ConfigError, RewardConfig, RunConfig
from trainer.environments.environment import Environment, EnvironmentFailure
from trainer.environments.imports import import_named
from trainer.environments.reward_loop import RewardLoop
from trainer.episodes.episode import Episode, Problem, StopReason, Turn
from trainer.episodes.reward import INFRASTRUCTURE_STOPS

logger = logging.getLogger(__name__)

SINGLE, GROUP = ("problem", "response", "episode"), ("problem", "responses", "episodes")
"""The names of the arguments of a function for one episode, and of a function for a group."""
MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class RewardFunction:
    name: str
    call: Callable[..., Any]
    parameters: frozenset[str]
    is_group: bool
    is_async: bool

    def arguments(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return the arguments for episodes of one problem."""
        responses = ["\n".join(turn.text for turn in episode.turns) for episode in episodes]
        values: tuple[Any, Any] = (responses, list(episodes)) if self.is_group else (responses[0], episodes[0])
        named = zip(GROUP if self.is_group else SINGLE, (episodes[0].problem, *values), strict=True)
        return {name: value for name, value in named if name in self.parameters}


@cache
def load_reward(name: str) -> RewardFunction:
    """Import a reward function. Raises `ConfigError` if that fails, or if it requires other arguments than `SINGLE` or
    `GROUP`."""
    try:
        call = import_named(name)
        parameters = inspect.signature(call).parameters.values()
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"reward {name!r}: expected package.module:function; {error}") from error
    names = {each.name for each in parameters}
    expected = GROUP if names & {*GROUP[1:]} else SINGLE
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {each.name for each in parameters if each.default is each.empty and each.kind not in variadic}
    positional = {each.name for each in parameters if each.kind is each.POSITIONAL_ONLY}
    if wrong := positional | required - {*expected}:
        raise ConfigError(
            f"reward {name!r}: expected arguments named {', '.join(SINGLE)}, or {', '.join(GROUP)}, got "
            f"{', '.join(sorted(wrong))}"
        )
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    is_async = any(map(inspect.iscoroutinefunction, (call, getattr(call, "__call__", None))))  # noqa: B004
    return RewardFunction(
        name, call, frozenset(expected if takes_any else names & {*expected}), expected is GROUP, is_async
    )


def check_reward(config: RunConfig, *, is_collection: bool = False) -> None:
    """Check that `reward.function` can be imported, and that it gets the groups that it needs. Raises `ConfigError`.

    `is_collection`: whether the settings are for `rstar-train collect`, which scores each episode alone.
    """
    name, stages = config.reward.function, config.stages.items()
    alone = [f"stages.{key}" for key, stage in stages if stage.episodes != "online"]
    alone += ["collect"] if is_collection else []
    if name and load_reward(name).is_group and alone:
        raise ConfigError(
            f"reward.function={name} scores the episodes of a problem together, but {alone[0]} scores each one alone: "
            "expected a function of one episode, or stages with episodes=online"
        )


async def try_reward(problem: Problem, responses: Sequence[str], config: RewardConfig) -> str:
    """Call the reward function of a problem for `responses`. Return why one of them has no reward; empty if all have
    one."""
    episodes = [
        Episode(problem, sample, turns=[Turn(0, 0, text)], stop_reason=StopReason.FINISHED)
        for sample, text in enumerate(responses)
    ]
    calls, function = RewardCalls(config), load_reward(problem.reward)
    try:
        await asyncio.gather(*(calls._score(function, batch) for batch in _batches(function, episodes)))
    finally:
        calls.close()
    return next((episode.error for episode in episodes if episode.error), "")


class RewardCalls:
    """Calls reward functions. All calls of a process share one object, which belongs to one event loop."""

    def __init__(self, config: RewardConfig | None = None) -> None:
        self._config = config or RewardConfig()
        self._free = asyncio.Semaphore(self._config.max_concurrent)
        self._num_threads = 0
        """The number of threads that have not ended, those of abandoned calls included."""
        self._loop: RewardLoop | None = None

    def close(self) -> None:
        """End the thread of the functions with `async def`, unless one of them blocks."""
        if self._loop:
            self._loop.stop()
            self._loop = None

    async def score(self, function: RewardFunction, episodes: Sequence[Episode]) -> list[float | None]:
        """Return the rewards of finished episodes of one problem, in order."""
        scored = [episode for episode in episodes if episode.stop_reason not in INFRASTRUCTURE_STOPS]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._score(function, batch)) for batch in _batches(function, scored)]
        rewards = dict(zip(scored, (reward for task in running for reward in task.result()), strict=True))
        if failed := [episode for episode in scored if rewards[episode] is None]:
            number = f"{len(failed)} of {len(scored)} episodes have no reward"
            logger.warning("problem %s: %s: %s", scored[0].problem.id, number, failed[0].error)
        return [rewards.get(episode) for episode in episodes]

    async def _score(self, function: RewardFunction, episodes: Sequence[Episode]) -> list[float | None]:
        """Return the rewards that one call gives to its episodes."""
        try:
            async with self._free:
                value = await self._call(function, function.arguments(episodes))
            values = _as_list(value, len(episodes)) if function.is_group else [value]
        except Exception as error:
            values = [error] * len(episodes)  # `_as_number` raises it for each episode
        rewards: list[float | None] = []
        for episode, value in zip(episodes, values, strict=True):
            try:
                rewards.append(_as_number(value))
            except Exception as error:  # a value may be an object of any class
                episode.error = f"reward {function.name}: {_reason(error)}"[:MAX_ERROR_CHARS]
                rewards.append(None)
        return rewards

    async def _call(self, function: RewardFunction, arguments: Mapping[str, Any]) -> Any:
        """Return the value of a call. Raises what the function raises, or `EnvironmentFailure` after its time limit."""
        call = asyncio.ensure_future(self._value(function, arguments))
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # otherwise asyncio may log it
        try:
            # `asyncio.timeout` would wait for a function that ignores its cancellation.
            done, _ = await asyncio.wait({call}, timeout=self._config.timeout_s)
        finally:
            call.cancel()  # a call that is done stays as it is
        if not done:
            reason = f"no value after {self._config.timeout_s:g} s (reward.timeout_s)"
            raise EnvironmentFailure(reason + await self._blocked_advice())
        if call.cancelled():
            raise EnvironmentFailure("CancelledError")
        return call.result()

    async def _value(self, function: RewardFunction, arguments: Mapping[str, Any]) -> Any:
        try:
            if function.is_async:
                return await self._in_loop(lambda: function.call(**arguments))
            value = await self._in_thread(function, arguments)
            return await self._in_loop(lambda: value) if inspect.isawaitable(value) else value
        except (SystemExit, KeyboardInterrupt) as error:  # of the function; it would end the event loop
            raise EnvironmentFailure(_reason(error)) from None

    async def _in_loop(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Await `function()` in the loop of functions with `async def`."""
        if self._loop is None:
            self._count_thread()
            mine = asyncio.get_running_loop()

            def end() -> None:
                with suppress(RuntimeError):  # the loop is closed
                    mine.call_soon_threadsafe(self._forget_thread)

            self._loop = RewardLoop(end)
        return await self._loop.call(function)

    async def _blocked_advice(self) -> str:
        """Abandon the loop of functions with `async def` if one of them blocks it. Return what to do then."""
        loop = self._loop
        if loop is None or not await loop.is_blocked():
            return ""
        if self._loop is loop:
            self.close()
        return "; an `async def` blocks the loop that all of them share: await instead, or use `def`"

    def _count_thread(self) -> None:
        """Count a thread that is about to start. Raises `EnvironmentFailure` if too many have not ended."""
        if self._num_threads >= 2 * self._config.max_concurrent:
            raise EnvironmentFailure(
                f"{self._num_threads} earlier calls have not returned; mend the function, which blocks"
            )
        self._num_threads += 1

    def _forget_thread(self) -> None:
        self._num_threads -= 1

    async def _in_thread(self, function: RewardFunction, arguments: Mapping[str, Any]) -> Any:
        """Return the value of a call in a thread of its own. The thread is a daemon, so that a call that never returns
        does not keep the process alive."""
        self._count_thread()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def end(value: object, failure: EnvironmentFailure | None) -> None:
            self._forget_thread()
            if future.cancelled():
                return
            if failure:
                future.set_exception(failure)
            else:
                future.set_result(value)

        def run() -> None:
            value, failure = None, None
            try:
                value = function.call(**arguments)
            except BaseException as error:
                failure = EnvironmentFailure(_reason(error))  # a future accepts no `StopIteration`
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, value, failure)

        Thread(target=run, name=f"reward {function.name}", daemon=True).start()
        return await future


class OwnReward(Environment):
    """Overrides the score of an environment with the reward function of the problem (`with_own_reward`)."""

    async def score(self, episode: Episode) -> float | None:
        (reward,) = await self.score_group([episode])
        if reward is None and episode.stop_reason not in INFRASTRUCTURE_STOPS:
            raise EnvironmentFailure(episode.error)
        return reward

    async def score_group(self, episodes: Sequence[Episode]) -> list[float | None]:
        if not episodes:
            return []
        return await self.services.reward_calls.score(load_reward(episodes[0].problem.reward), episodes)


@cache
def with_own_reward(kind: type[Environment]) -> type[Environment]:
    """Return a subclass of an environment in which a reward function scores the episodes."""
    return type(kind.__name__, (OwnReward, kind), {})


def _batches(function: RewardFunction, episodes: list[Episode]) -> list[list[Episode]]:
    """Return the episodes of each call, for finished episodes of one problem."""
    return [episodes] if function.is_group and episodes else [[episode] for episode in episodes]


def _as_list(value: Any, count: int) -> list[Any]:
    """Return the value of a group as a list. Raises `EnvironmentFailure`."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple) or len(values) != count:
        size = f" of {len(values)}" if isinstance(values, list | tuple) else ""
        raise EnvironmentFailure(f"expected a list of {count} numbers, got a {type(value).__name__}{size}")
    return list(values)


def _as_number(value: Any) -> float:
    """Return a reward as a float. Raises `EnvironmentFailure` for anything but a finite number, and `value` itself if
    it is an exception."""
    if isinstance(value, Exception):
        raise value
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # an array or a tensor with several elements, or with none
        number = None
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise EnvironmentFailure(f"expected a finite number, got {value!r:.80}")
    return float(number)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, EnvironmentFailure) else f"{type(error).__name__}: {error}"
