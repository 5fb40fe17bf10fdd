"""The Python tool and the answer checker, with a real service and with unusable ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.client import AsyncClient
from sandbox.errors import ConfigError, IsolationError, Overloaded
from sandbox.jail import choose_level
from sandbox.tool import TOOL_NAMES
from sandbox.types import CallError, Limits, Outcome, Result, Status, invalid_result
from tests.trainer.fakes import FakePythonTool, FakeVerifier
from trainer.environments.answer_check import AnswerChecker
from trainer.environments.connection import SandboxUnavailable, open_sandbox
from trainer.environments.python_tool import PythonTool
from trainer.episodes.episode import ToolCall, ToolCallStatus
from trainer.episodes.reward import VerifyOutcome

LEAN = ("--profiles", "bare", "--zygote-pools", "1", "--slots", "4")
NAME = TOOL_NAMES[0]


@pytest.fixture(scope="module", autouse=True)
def _isolation() -> None:
    try:
        choose_level("auto")
    except (ConfigError, IsolationError) as missing:
        pytest.skip(f"needs some isolation: {missing}")


@pytest.fixture(scope="module")
def address(guest_python: Path) -> Iterator[str]:
    """The URL of a service that `open_sandbox` has started for this file."""
    with asyncio.Runner() as runner:
        local = open_sandbox("local", timeout_s=2, arguments=LEAN)
        yield runner.run(local.__aenter__()).endpoints[0]
        runner.run(local.__aexit__(None, None, None))


def run(address: str, *tool_calls: tuple[str, Any], **settings: Any) -> list[ToolCall]:
    async def main() -> list[ToolCall]:
        async with open_sandbox(address, **settings) as sandbox:
            return await asyncio.gather(*(sandbox.python_tool.call(name, arguments) for name, arguments in tool_calls))

    return asyncio.run(main())


def code(text: str, stdin: str = "") -> tuple[str, str]:
    return NAME, json.dumps({"code": text, "input": stdin})


def test_a_tool_call_has_a_response_and_a_status(address: str) -> None:
    replies = run(
        address,
        code("print(input())", "hello"),
        code("6 * 7"),
        code("1 / 0"),
        code("while True: pass"),
        code("import ctypes; ctypes.string_at(0)"),
        (TOOL_NAMES[1], {"code": "print(1)"}),
        timeout_s=0.5,
    )
    assert [reply.status.value for reply in replies] == ["ok", "ok", "error", "timeout", "killed", "ok"]
    assert [reply.response for reply in replies[:2]] == ["hello", "42"]
    assert "ZeroDivisionError" in replies[2].response
    assert replies[3].response.startswith("TimeoutError")
    assert replies[0].arguments == {"code": "print(input())", "input": "hello"}
    assert all(reply.duration_s > 0 and not reply.error and not reply.is_truncated for reply in replies)


@pytest.mark.parametrize(
    ("name", "arguments", "expected_text"),
    [
        (NAME, '{"code": 1', "JSONDecodeError"),
        (NAME, '{"stdin": ""}', "TypeError"),
        (NAME, '{"code": 1}', "TypeError"),
        (NAME, "[]", "TypeError"),
        ("jupyter_code", '{"code": "1"}', "NameError: there is no tool 'jupyter_code'; there is " + NAME),
        ("x" * 10_000, "{}", "NameError"),
    ],
)
def test_a_malformed_call_is_answered_without_the_service(name: str, arguments: str, expected_text: str) -> None:
    tool = PythonTool(AsyncClient("http://127.0.0.1:1"), Limits())
    reply = asyncio.run(tool.call(name, arguments))
    assert reply.status is ToolCallStatus.MALFORMED
    assert reply.response.startswith(expected_text)
    assert len(reply.response) < 500


def test_a_response_is_complete_or_marked_as_truncated_by_the_sandbox(address: str) -> None:
    whole, flood = run(address, code("print('x' * 50_000)"), code("print('y' * 2_000_000)"))
    assert (whole.is_truncated, flood.is_truncated) == (False, True)
    assert whole.response == "x" * 50_000
    assert flood.status is ToolCallStatus.OUTPUT_LIMIT


class Refusing(AsyncClient):
    """A client whose requests return or raise the given value."""

    def __init__(self, gives: Result | Exception) -> None:
        super().__init__()
        self.gives = gives

    async def execute(self, *_: Any, **__: Any) -> Result:
        if isinstance(self.gives, Exception):
            raise self.gives
        return self.gives

    async def run_batch(self, calls: Any, *_: Any) -> list[Result]:
        return [await self.execute() for _ in calls]


NO_VERDICT = Result("", Status.UNAVAILABLE, error=CallError("NodeError", "tried 3 times"))


@pytest.mark.parametrize("gives", [NO_VERDICT, Overloaded("the service is full")])
def test_an_infrastructure_failure_is_unavailable_without_a_response(gives: Result | Exception) -> None:
    client = Refusing(gives)
    reply = asyncio.run(PythonTool(client, Limits()).call(*code("1")))
    assert (reply.status, reply.response) == (ToolCallStatus.UNAVAILABLE, "")
    assert reply.arguments["code"] == "1"
    assert "tried 3 times" in reply.error or "is full" in reply.error
    verdicts = asyncio.run(AnswerChecker(client, Limits()).verify([("1", "1"), ("1", "2")]))
    assert verdicts == [VerifyOutcome.UNAVAILABLE] * 2


def test_a_call_that_the_sandbox_rejects_is_logged_and_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    client = Refusing(invalid_result("", "call.limits: expected an object"))
    reply = asyncio.run(PythonTool(client, Limits()).call(*code("1")))
    assert (reply.status, reply.response) == (ToolCallStatus.UNAVAILABLE, "")
    assert "malformed call" in reply.error and "call.limits: expected an object" in reply.error
    assert asyncio.run(AnswerChecker(client, Limits()).verify([("1", "1")])) == [VerifyOutcome.UNAVAILABLE]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_the_answer_checker_returns_the_sandboxs_outcomes(address: str) -> None:
    async def main() -> list[VerifyOutcome]:
        async with open_sandbox(address) as sandbox:
            return await sandbox.answer_checker.verify([(r"\frac{1}{2}", "0.5"), ("7", "8"), ("7", "")])

    assert asyncio.run(main()) == [VerifyOutcome.EQUIVALENT, VerifyOutcome.NOT_EQUIVALENT, VerifyOutcome.UNPARSABLE]


def test_outcomes_and_statuses_equal_the_sandboxs() -> None:
    assert {verdict.value for verdict in VerifyOutcome} == {outcome.value for outcome in Outcome} - {"invalid"}
    assert {status.value for status in Status} - {"invalid"} == {status.value for status in ToolCallStatus} - {
        "malformed"
    }


@pytest.mark.parametrize(
    ("endpoint", "settings", "expected_text"),
    [
        ("http://127.0.0.1:1", {}, "no sandbox at http://127.0.0.1:1"),
        ("local", {"arguments": ("--no-such-flag",)}, "ended (2)"),
        ("127.0.0.1:8642", {}, "endpoints[0]: expected a URL such as http://127.0.0.1:8642, got '127.0.0.1:8642'"),
    ],
)
def test_an_unusable_service_is_an_error_at_once(
    endpoint: Any, settings: dict[str, Any], expected_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.environments.connection.MAX_RETRIES", 0)

    async def main() -> None:
        async with open_sandbox(endpoint, **settings):
            pytest.fail("there is none")

    with pytest.raises(SandboxUnavailable) as raised:
        asyncio.run(main())
    assert expected_text in str(raised.value)


def test_invalid_limits_are_an_error_at_once(address: str) -> None:
    with pytest.raises(SandboxUnavailable, match=r"limits\.memory_mb: expected a whole number from 16"):
        run(address, memory_mb=1)


@asynccontextmanager
async def tools_of(kind: str, address: str) -> AsyncIterator[Any]:
    if kind == "fake":
        yield SimpleNamespace(call=FakePythonTool({"6 * 7": "42"}).call, verify=FakeVerifier().verify)
    else:
        async with open_sandbox(address) as sandbox:
            yield SimpleNamespace(call=sandbox.python_tool.call, verify=sandbox.answer_checker.verify)


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_the_fake_tool_behaves_like_the_real_one(kind: str, address: str) -> None:
    async def main() -> None:
        async with tools_of(kind, address) as tool_under_test:
            reply = await tool_under_test.call(*code("6 * 7"))
            assert replace(reply, duration_s=0) == ToolCall(
                NAME, {"code": "6 * 7", "input": ""}, ToolCallStatus.OK, "42"
            )
            reply = await tool_under_test.call(NAME, "{")
            assert (reply.status, reply.arguments) == (ToolCallStatus.MALFORMED, "{")
            assert reply.response
            pairs = [("7", "7"), ("7", "8")]
            assert await tool_under_test.verify(pairs) == [VerifyOutcome.EQUIVALENT, VerifyOutcome.NOT_EQUIVALENT]
            assert await tool_under_test.verify([]) == []

    asyncio.run(main())
