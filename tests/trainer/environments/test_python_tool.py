"""Tests of the Python tool and the answer checker, with a real service and with services that cannot be used."""

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
from sandbox.types import CallError, Limits, Outcome, Result, Status, Verdict, invalid_result
from tests.trainer.fakes import FakePythonTool, FakeVerifier
from trainer.environments.answer_check import AnswerChecker
from trainer.environments.connection import SandboxUnavailable, open_sandbox
from trainer.environments.python_tool import PythonTool
from trainer.episodes.episode import ToolCall, ToolCallStatus
from trainer.episodes.reward import VerifyOutcome

SMALL_SERVICE = ("--profiles", "bare", "--zygote-pools", "1", "--slots", "4")
TOOL_NAME = TOOL_NAMES[0]


@pytest.fixture(scope="module", autouse=True)
def _needs_isolation() -> None:
    try:
        choose_level("auto")
    except (ConfigError, IsolationError) as error:
        pytest.skip(f"needs a level of isolation: {error}")


@pytest.fixture(scope="module")
def address(guest_python: Path) -> Iterator[str]:
    """The URL of a service that `open_sandbox` has started for the tests of this file."""
    with asyncio.Runner() as runner:
        connecting = open_sandbox("local", timeout_s=2, arguments=SMALL_SERVICE)
        yield runner.run(connecting.__aenter__()).endpoints[0]
        runner.run(connecting.__aexit__(None, None, None))


def run_tool(address: str, *tool_calls: tuple[str, Any], **settings: Any) -> list[ToolCall]:
    """Run (tool name, arguments) of each call at the same time."""

    async def main() -> list[ToolCall]:
        async with open_sandbox(address, **settings) as sandbox:
            return await asyncio.gather(*(sandbox.python_tool.call(name, arguments) for name, arguments in tool_calls))

    return asyncio.run(main())


def python_call(code: str, stdin: str = "") -> tuple[str, str]:
    return TOOL_NAME, json.dumps({"code": code, "input": stdin})


def test_a_tool_call_has_a_response_and_a_status(address: str) -> None:
    replies = run_tool(
        address,
        python_call("print(input())", "hello"),
        python_call("6 * 7"),
        python_call("1 / 0"),
        python_call("while True: pass"),
        python_call("import ctypes; ctypes.string_at(0)"),
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
        (TOOL_NAME, '{"code": 1', "JSONDecodeError"),
        (TOOL_NAME, '{"stdin": ""}', "TypeError"),
        (TOOL_NAME, '{"code": 1}', "TypeError"),
        (TOOL_NAME, "[]", "TypeError"),
        ("jupyter_code", '{"code": "1"}', "NameError: there is no tool 'jupyter_code'; there is " + TOOL_NAME),
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
    long, too_long = run_tool(address, python_call("print('x' * 50_000)"), python_call("print('y' * 2_000_000)"))
    assert (long.is_truncated, too_long.is_truncated) == (False, True)
    assert long.response == "x" * 50_000
    assert too_long.status is ToolCallStatus.OUTPUT_LIMIT


class FakeClient(AsyncClient):
    """A client whose requests all return or raise `outcome`."""

    def __init__(self, outcome: Result | Exception) -> None:
        super().__init__()
        self.outcome = outcome

    async def execute(self, *_: Any, **__: Any) -> Result:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def run_batch(self, calls: Any, *_: Any) -> list[Result]:
        return [await self.execute() for _ in calls]


UNAVAILABLE_RESULT = Result("", Status.UNAVAILABLE, error=CallError("NodeError", "tried 3 times"))


@pytest.mark.parametrize("outcome", [UNAVAILABLE_RESULT, Overloaded("the service is full")])
def test_an_infrastructure_failure_is_unavailable_without_a_response(outcome: Result | Exception) -> None:
    client = FakeClient(outcome)
    reply = asyncio.run(PythonTool(client, Limits()).call(*python_call("1")))
    assert (reply.status, reply.response) == (ToolCallStatus.UNAVAILABLE, "")
    assert reply.arguments["code"] == "1"
    assert "tried 3 times" in reply.error or "is full" in reply.error
    outcomes = asyncio.run(AnswerChecker(client, Limits()).verify([("1", "1"), ("1", "2")]))
    assert outcomes == [VerifyOutcome.UNAVAILABLE] * 2


@pytest.mark.parametrize(("error_type", "ends_episode"), [("Poison", True), ("NodeError", False)])
def test_a_poisonous_call_ends_its_episode(error_type: str, ends_episode: bool) -> None:
    client = FakeClient(Result("", Status.UNAVAILABLE, error=CallError(error_type, "tried 3 times")))
    reply = asyncio.run(PythonTool(client, Limits()).call(*python_call("1")))
    assert (reply.status, reply.ends_episode) == (ToolCallStatus.UNAVAILABLE, ends_episode)


def test_a_call_that_the_sandbox_rejects_is_logged_and_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient(invalid_result("", "call.limits: expected an object"))
    reply = asyncio.run(PythonTool(client, Limits()).call(*python_call("1")))
    assert (reply.status, reply.response) == (ToolCallStatus.UNAVAILABLE, "")
    assert "malformed call" in reply.error and "call.limits: expected an object" in reply.error
    assert asyncio.run(AnswerChecker(client, Limits()).verify([("1", "1")])) == [VerifyOutcome.UNAVAILABLE]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"], "of the tool and of the checker"


def test_the_answer_checker_sends_its_rules() -> None:
    sent: list[dict[str, Any]] = []

    class RecordingClient:
        async def verify(self, pairs: Any, **fields: Any) -> list[Verdict]:
            sent.append(fields)
            return [Verdict(Outcome.EQUIVALENT)] * len(pairs)

    client: Any = RecordingClient()
    for rules in ((), ("math-verify",), ("strict", True)):
        outcomes = asyncio.run(AnswerChecker(client, Limits(), *rules).verify([("1", "1")]))
        assert outcomes == [VerifyOutcome.EQUIVALENT]
    assert [(fields["strictness"], fields["rounding"]) for fields in sent] == [
        ("strict", False),
        ("math-verify", False),
        ("strict", True),
    ]


def test_the_answer_checker_returns_the_sandboxs_outcomes(address: str) -> None:
    async def main() -> list[VerifyOutcome]:
        async with open_sandbox(address) as sandbox:
            return await sandbox.answer_checker.verify([(r"\frac{1}{2}", "0.5"), ("7", "8"), ("7", "")])

    assert asyncio.run(main()) == [VerifyOutcome.EQUIVALENT, VerifyOutcome.NOT_EQUIVALENT, VerifyOutcome.UNPARSABLE]


def test_outcomes_and_statuses_have_the_names_of_the_sandbox() -> None:
    assert {outcome.value for outcome in VerifyOutcome} == {outcome.value for outcome in Outcome} - {"invalid"}
    statuses, tool_statuses = {status.value for status in Status}, {status.value for status in ToolCallStatus}
    # The sandbox rejects an invalid call; the trainer answers a malformed call without the sandbox.
    assert statuses - {"invalid"} == tool_statuses - {"malformed"}


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
            pytest.fail("connected to an unusable service")

    with pytest.raises(SandboxUnavailable) as raised:
        asyncio.run(main())
    assert expected_text in str(raised.value)


def test_invalid_limits_are_an_error_at_once(address: str) -> None:
    with pytest.raises(SandboxUnavailable, match=r"limits\.memory_mb: expected a whole number from 16"):
        run_tool(address, memory_mb=1)


@asynccontextmanager
async def open_tool(kind: str, address: str) -> AsyncIterator[Any]:
    """Yield an object with the tool's `call` and the answer checker's `verify`."""
    if kind == "fake":
        yield SimpleNamespace(call=FakePythonTool({"6 * 7": "42"}).call, verify=FakeVerifier().verify)
    else:
        async with open_sandbox(address) as sandbox:
            yield SimpleNamespace(call=sandbox.python_tool.call, verify=sandbox.answer_checker.verify)


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_the_fake_tool_behaves_like_the_real_one(kind: str, address: str) -> None:
    async def main() -> None:
        async with open_tool(kind, address) as tool:
            reply = await tool.call(*python_call("6 * 7"))
            assert replace(reply, duration_s=0) == ToolCall(
                TOOL_NAME, {"code": "6 * 7", "input": ""}, ToolCallStatus.OK, "42"
            )
            reply = await tool.call(TOOL_NAME, "{")
            assert (reply.status, reply.arguments) == (ToolCallStatus.MALFORMED, "{")
            assert reply.response
            pairs = [("7", "7"), ("7", "8")]
            assert await tool.verify(pairs) == [VerifyOutcome.EQUIVALENT, VerifyOutcome.NOT_EQUIVALENT]
            assert await tool.verify([]) == []

    asyncio.run(main())
