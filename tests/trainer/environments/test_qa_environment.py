"""Tests of the environment `qa`: the files of a problem reach the code of the model, and answers are compared by the
public rule of GAIA."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.generated_gaia import generate
from sandbox.errors import ConfigError as SandboxConfigError
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from sandbox.tool import TOOL_NAMES
from tests.trainer.environments.episodes import ended_episode, opened_environment, problem, tool_call_request
from tests.trainer.environments.test_python_tool import SMALL_SERVICE
from tests.trainer.fakes import FakePythonTool, FakeVerifier
from trainer.config import ConfigError
from trainer.environments.connection import SandboxConnection, open_sandbox
from trainer.environments.environment import EnvironmentFailure
from trainer.environments.registry import check_problem, environment_class
from trainer.environments.services import Services
from trainer.episodes.episode import StopReason, ToolCall, ToolCallStatus


class FileTool(FakePythonTool):
    """A fake that records the files of its last call."""

    files: Mapping[str, bytes] | None = None

    async def call(self, name: str, arguments: Any, *, files: Mapping[str, bytes] | None = None) -> ToolCall:
        self.files = files
        return await super().call(name, arguments)


TOOL = FileTool()
SERVICES = Services(SandboxConnection((), TOOL, FakeVerifier(), None))  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_the_prompt_names_the_files_and_each_call_gets_them(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x00\xff")
    question = problem(
        "qa", {"level": 1, "files": [str(tmp_path / "a.bin")], "texts": {"b.txt": "é"}}, text="How many?"
    )
    check_problem(question)
    async with opened_environment(question, SERVICES) as (environment, initial):
        assert not environment.is_stateful
        assert initial.text.startswith(
            "How many?\n\nAttached files, in the working directory of your Python code: b.txt, a.bin\n\n"
        )
        assert initial.text == environment_class("qa").prompt(question)  # `prepare` limits the length of this prompt
        await environment.step(tool_call_request(TOOL_NAMES[0], code="1"))
    assert TOOL.files == {"a.bin": b"\x00\xff", "b.txt": "é".encode()}


@pytest.mark.asyncio
async def test_a_question_without_files_names_none() -> None:
    async with opened_environment(problem("qa", text="How many?"), SERVICES) as (_, initial):
        assert "Attached" not in initial.text


def test_attached_files_of_the_same_name_are_refused() -> None:
    for options in ({"files": ["2023/a.csv", "2024/a.csv"]}, {"files": ["a.csv"], "texts": {"a.csv": ""}}):
        with pytest.raises(ConfigError, match="expected files and texts with different names, got"):
            check_problem(problem("qa", options))


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        ({"files": ["/nowhere/a.csv"]}, "/nowhere/a.csv: cannot be read (No such file or directory)"),
        ({"files": ["/dev"]}, "/dev: cannot be read (Is a directory)"),
        ({"texts": {"../a": ""}}, "call.files: expected a relative path"),
        ({"texts": {"a": "x" * (65 << 20)}}, "expected files of at most 64 MiB, got 65 MiB"),
    ],
)
@pytest.mark.asyncio
async def test_unusable_files_fail_the_episode(options: dict[str, Any], expected_text: str) -> None:
    with pytest.raises(EnvironmentFailure) as raised:
        async with opened_environment(problem("qa", options), SERVICES):
            pass
    assert expected_text in str(raised.value)


@pytest.mark.asyncio
async def test_a_score_is_exact_match_and_a_missing_answer_is_wrong() -> None:
    question = problem("qa", answer="New York, 5")
    async with opened_environment(question, SERVICES) as (environment, _):
        assert await environment.score(ended_episode(question, r"\text{new york}, \$5")) == 1
        assert await environment.score(ended_episode(question, "New York")) == 0
        assert await environment.score(ended_episode(question)) == 0
        assert await environment.score(ended_episode(question, "New York, 5", StopReason.UNAVAILABLE)) is None
    none = problem("qa", answer="None")
    async with opened_environment(none, SERVICES) as (environment, _):
        assert await environment.score(ended_episode(none)) == 0
    hidden = problem("qa", {"answer_is_hidden": True}, answer="?")
    async with opened_environment(hidden, SERVICES) as (environment, _):
        assert await environment.score(ended_episode(hidden, "?")) == 0


@pytest.fixture(scope="module")
def sandbox(guest_python: Path) -> Iterator[tuple[asyncio.Runner, SandboxConnection]]:
    try:
        choose_level("auto")
    except (SandboxConfigError, IsolationError) as error:
        pytest.skip(f"needs a level of isolation: {error}")
    with asyncio.Runner() as runner:
        local = open_sandbox("local", timeout_s=5, arguments=SMALL_SERVICE)
        yield runner, runner.run(local.__aenter__())
        runner.run(local.__aexit__(None, None, None))


def test_code_in_the_sandbox_reads_the_attached_files(sandbox: tuple[asyncio.Runner, SandboxConnection]) -> None:
    runner, connection = sandbox
    questions = generate(6, 0)

    async def main() -> list[ToolCall]:
        calls = []
        for question in questions:
            async with opened_environment(question, Services(connection)) as (environment, _):
                code = "import os; [name] = os.listdir(); print(open(name).read(), end='')"
                calls.append(await environment.step(tool_call_request(TOOL_NAMES[0], code=code)))
        large = problem("qa", {"texts": {"a": "x" * (8 << 20)}})
        async with opened_environment(large, Services(connection)) as (environment, _):
            code = "open('b', 'w').write('y' * (60 << 20)); print(len(open('a').read()))"
            calls.append(await environment.step(tool_call_request(TOOL_NAMES[0], code=code)))
        return calls

    *calls, large = runner.run(main())
    for question, call in zip(questions, calls, strict=True):
        (text,) = question.options["texts"].values()
        assert (call.status, call.response) == (ToolCallStatus.OK, text.rstrip("\n"))
    assert (large.status, large.response) == (ToolCallStatus.OK, json.dumps(8 << 20))
