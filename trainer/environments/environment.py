"""The interface of an environment: the tools of one episode, and its score.

    reset -> step -> step -> ... -> score
      any of them may fail -> close

An environment belongs to one episode. `trainer.environments.registry` creates it by `Problem.environment`.

Invariants of every environment:
- A failure of the model is data: `step` returns a response that says what is wrong.
- An infrastructure failure is a `ToolCall` with the status `UNAVAILABLE`, or a score of None, never a score of 0.
- `close` releases all processes and connections, whatever happened before. It is always called, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
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


class EnvironmentFailure(Exception):
    """The environment of this problem does not work, for example because its server ended. It fails this episode only,
    as a failure of the task and not of the infrastructure."""


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
    """One episode's environment. It is created without starting anything."""

    is_stateful: bool = False
    """Whether a response depends on the actions before it. A resumed episode replays the actions of such an
    environment; others are only reset."""
    needs_sandbox: ClassVar[bool] = False
    options_type: ClassVar[Any] = NoOptions
    """The type of `Problem.options`: a dataclass, or another type that pydantic can validate."""

    def __init__(self, services: Services, options: Any) -> None:
        """`options` is an `options_type`."""
        self.services, self.options = services, options

    @abstractmethod
    async def reset(self, problem: Problem) -> InitialState:
        """Begin an episode. Raises `EnvironmentFailure`."""

    @abstractmethod
    async def step(self, action: ToolCallRequest) -> ToolCall:
        """Run one tool call. A call with `ends_episode` is the last. Raises `EnvironmentFailure`."""

    @abstractmethod
    async def score(self, episode: Episode) -> float | None:
        """Return the reward of a finished episode; None if infrastructure failed. Raises `EnvironmentFailure`."""

    async def close(self) -> None:  # noqa: B027  most environments hold nothing
        """Release what the environment holds. Raises nothing but cancellation."""


def parse_options(environment: type[Environment], options: Mapping[str, Any]) -> Any:
    """Return `options` as the environment's `options_type`. Raises `ConfigError`."""
    try:
        return TypeAdapter(environment.options_type).validate_python(dict(options))
    except ValidationError as invalid:
        error = invalid.errors()[0]
        path = ".".join(["options", *map(str, error["loc"])])
        raise ConfigError(f"{path}: {error['msg']}, got {error['input']!r:.80}") from None
