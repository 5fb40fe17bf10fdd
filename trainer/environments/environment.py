"""The interface of an environment: the tools of one episode, and its score.

    reset -> step -> step -> ... -> score
      any of them may fail -> close

An environment belongs to one episode. It is created by name (`Problem.environment`) in
`trainer.environments.registry`.

Invariants of every environment:
- A failure of the model is data: `step` returns a response that says what is wrong.
- An infrastructure failure is a `ToolCall` with the status `UNAVAILABLE`, or a score of None, never a score of 0.
- `close` releases all processes and connections, whatever happened before. It is always called, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trainer.episodes.chat_format import ToolSchema
from trainer.episodes.episode import Episode, Problem, ToolCall
from trainer.episodes.turn_parser import ToolCallRequest


class EnvironmentFailure(Exception):
    """The environment of this problem does not work: its options are wrong, or its server ended. It fails this episode
    only, as a failure of the task and not of the infrastructure."""


@dataclass(frozen=True, slots=True)
class InitialState:
    """What an episode begins with."""

    text: str
    """The problem as the model reads it."""
    tools: tuple[ToolSchema, ...] = ()
    """The tools that the model may call."""


class Environment(Protocol):
    is_stateful: bool
    """Whether a response depends on the actions before it. A resumed episode replays the actions of such an
    environment; others are only reset."""

    async def reset(self, problem: Problem) -> InitialState:
        """Begin an episode. Raises `EnvironmentFailure`."""
        ...

    async def step(self, action: ToolCallRequest) -> ToolCall:
        """Run one tool call. A call with `ends_episode` is the last. Raises `EnvironmentFailure`."""
        ...

    async def score(self, episode: Episode) -> float | None:
        """Return the reward of a finished episode; None if infrastructure failed. Raises `EnvironmentFailure`."""
        ...

    async def close(self) -> None: ...
