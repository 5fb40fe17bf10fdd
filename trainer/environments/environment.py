"""The interface of an environment: the tools of one episode, and its score.

    reset -> step -> step -> ... -> score
      any of them may fail -> close

`trainer.environments.registry` creates an environment by `Problem.environment`. An environment whose class is stateful
belongs to one episode. Any other environment may serve several episodes of its problem, also at the same time.

Invariants of every environment:
- A failure of the model is data: `step` returns a response that says what is wrong.
- An infrastructure failure is a `ToolCall` with the status `UNAVAILABLE`, or a score of None, never a score of 0.
- A score is a finite number. Any other number is a failure of the environment (`check_score`).
- `close` releases all processes and connections, whatever happened before. It is always called, once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass

from trainer.config import STRICT, ConfigError
from trainer.episodes.chat_format import ToolSchema
from trainer.episodes.episode import Episode, Problem, ToolCall
from trainer.episodes.turn_parser import ToolCallRequest

if TYPE_CHECKING:
    from trainer.environments.services import Services

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Seconds that an environment may take to close."""


class EnvironmentFailure(Exception):
    """The environment of this problem does not work, for example because its server ended. Only this episode fails. It
    counts as a failure of the environment and not of the infrastructure."""


@dataclass(frozen=True, slots=True)
class InitialState:
    """The beginning of an episode."""

    text: str
    """The problem as the model reads it."""
    tools: tuple[ToolSchema, ...] = ()
    """The tools that the model may call."""


@validated_dataclass(frozen=True, config=STRICT)
class NoOptions:
    """The options of an environment that has none."""


class Environment(ABC):
    """The environment of an episode, or of all episodes of a problem. It is created without starting anything.

    A subclass has `reset`, `step` and `score`. It has `close` too if it holds processes or connections.
    """

    is_stateful: bool = False
    """Whether a response or a score depends on earlier actions. If an episode is resumed, a stateful environment is
    reset and the recorded actions are repeated. Other environments are only reset."""
    needs_sandbox: ClassVar[bool] = False
    """Whether the environment uses `services.required_sandbox`."""
    instructions: ClassVar[str] = ""
    """What the model reads after the problem, for example the form of an answer."""
    options_type: ClassVar[Any] = NoOptions
    """The type of `Problem.options`: a dataclass, or another type that pydantic can validate. Options that the type
    does not have are refused. `dict` accepts any options."""

    def __init__(self, services: Services, options: Any) -> None:
        """`options` is an object of the type `options_type`."""
        self.services, self.options = services, options

    @classmethod
    def prompt(cls, problem: Problem) -> str:
        """Return the text of a problem with the instructions of this environment."""
        return f"{problem.text}\n\n{cls.instructions}" if cls.instructions else problem.text

    @abstractmethod
    async def reset(self, problem: Problem) -> InitialState:
        """Begin an episode. Raises `EnvironmentFailure`."""

    @abstractmethod
    async def step(self, action: ToolCallRequest) -> ToolCall:
        """Run one tool call. A result with `ends_episode` makes this call the last one. Raises `EnvironmentFailure`."""

    @abstractmethod
    async def score(self, episode: Episode) -> float | None:
        """Return the reward of a finished episode; None if infrastructure failed. Raises `EnvironmentFailure`."""

    async def score_group(self, episodes: Sequence[Episode]) -> list[float | None]:
        """Return the rewards of finished episodes of one problem, in order. Never called if `is_stateful`.

        A subclass may override this method to score all episodes at once.
        """
        return [await self.score(episode) for episode in episodes]

    async def close(self) -> None:  # noqa: B027  most environments hold nothing
        """Release what the environment holds. Raises nothing but cancellation."""


def parse_options(environment: type[Environment], options: Mapping[str, Any]) -> Any:
    """Return `options` as the environment's `options_type`. Raises `ConfigError` for invalid options. An unknown option
    is invalid, since it may be a typo."""
    try:
        return TypeAdapter(environment.options_type).validate_python(dict(options), extra="forbid")
    except ValidationError as invalid:
        error = invalid.errors()[0]
        path = ".".join(["options", *map(str, error["loc"])])
        raise ConfigError(f"{path}: {error['msg']}, got {error['input']!r:.80}") from None


def check_score(problem: Problem, score: float | None) -> float | None:
    """Return `score`, which the environment of `problem` has given. Raises `EnvironmentFailure` if it is not finite,
    since such a score says nothing about the episode."""
    if score is not None and not math.isfinite(score):
        raise EnvironmentFailure(f"{problem.environment}: expected a finite score or None, got {score}")
    return score


async def close_environment(environment: Environment) -> None:
    """Close an environment within `CLOSE_TIMEOUT_S`. A failure is only logged, since the episode is complete."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await environment.close()
    except Exception as error:
        logger.warning("an environment did not close: %s: %s", type(error).__name__, error)
