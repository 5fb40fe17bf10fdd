"""Tests of the environment `python`, which runs code and checks answers in the sandbox."""

from __future__ import annotations

import pytest

from sandbox.tool import TOOL_NAMES, TOOL_SCHEMA
from tests.trainer.environments.episodes import ended_episode, opened_environment, problem, tool_call_request
from tests.trainer.fakes import FakePythonTool, FakeVerifier
from trainer.environments.connection import SandboxConnection
from trainer.environments.services import Services
from trainer.episodes.episode import StopReason, ToolCallStatus

PROBLEM = problem("python", text="What is 6 * 7?", answer="42")


@pytest.mark.asyncio
async def test_an_episode_runs_code_and_its_answer_is_checked() -> None:
    fake = SandboxConnection((), FakePythonTool({"6 * 7": "42"}), FakeVerifier(), None)  # type: ignore[arg-type]
    async with opened_environment(PROBLEM, Services(fake)) as (environment, initial):
        assert (initial.text, initial.tools) == ("What is 6 * 7?", (TOOL_SCHEMA,))
        assert not environment.is_stateful
        call = await environment.step(tool_call_request(TOOL_NAMES[0], code="6 * 7"))
        assert (call.status, call.response) == (ToolCallStatus.OK, "42")
        assert await environment.score(ended_episode(PROBLEM, "42")) == 1
        assert await environment.score(ended_episode(PROBLEM, "41")) == 0
        assert await environment.score(ended_episode(PROBLEM)) == 0
        assert await environment.score(ended_episode(PROBLEM, "unavailable")) is None
        assert await environment.score(ended_episode(PROBLEM, "42", StopReason.UNAVAILABLE)) is None
