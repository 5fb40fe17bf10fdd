"""Helpers for tests of environments: one episode in an environment, without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from trainer.environments.environment import Environment, InitialState
from trainer.environments.registry import open_environment
from trainer.environments.services import Services, open_services
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.episodes.turn_parser import ToolCallRequest


def problem(environment: str, options: Mapping[str, Any] | None = None, *, text: str = "", answer: str = "") -> Problem:
    return Problem("p0", text, answer, "test", environment, options or {})


def ended_episode(
    problem: Problem, answer: str | None = None, stop_reason: StopReason = StopReason.FINISHED
) -> Episode:
    return Episode(problem, 0, stop_reason=stop_reason, answer=answer)


def tool_call_request(name: str, /, **arguments: Any) -> ToolCallRequest:
    return ToolCallRequest(name, arguments)


@asynccontextmanager
async def opened_environment(
    problem: Problem, services: Services | None = None
) -> AsyncIterator[tuple[Environment, InitialState]]:
    """Open and reset the environment of a problem, and close it at the end."""
    async with open_services() as own_services:
        environment = open_environment(problem, services or own_services)
        try:
            yield environment, await environment.reset(problem)
        finally:
            await environment.close()
