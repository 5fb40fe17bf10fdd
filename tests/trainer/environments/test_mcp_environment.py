"""Tests of the environment `mcp` with real servers: tools with a state, and faults, which end only their episode and
leave no process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.environments.episodes import ended_episode, opened_environment, problem, tool_call_request
from trainer.config import ConfigError
from trainer.environments.environment import EnvironmentFailure
from trainer.environments.registry import check_problem, environment_class
from trainer.environments.services import open_services
from trainer.episodes.episode import Problem, StopReason, ToolCallStatus
from trainer.episodes.turn_parser import ToolCallRequest, parse_turn

pytest.importorskip("mcp")

SERVER = str(Path(__file__).with_name("mcp_server.py"))
REPOSITORY = Path(__file__).parents[3]


def stdio(*arguments: str, **options: Any) -> Problem:
    return problem("mcp", {"command": [sys.executable, SERVER, *arguments], **options}, text="Count.", answer="5")


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended, or is a zombie."""
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return 0 if state in "ZX" else int(parent)
    return 0


def is_running(pid: int) -> bool:
    return parent_of(pid) != 0


def children() -> set[int]:
    """Return the processes below this one."""
    parents = {int(name): parent_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


async def eventually(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_the_tools_of_a_server_are_called_and_each_episode_has_its_own_server() -> None:
    before = children()
    for _ in range(2):
        async with opened_environment(stdio()) as (environment, initial):
            assert environment.is_stateful
            assert initial.text == "Count."
            schemas = {tool["function"]["name"]: tool["function"] for tool in initial.tools}
            assert schemas["add"]["description"] == "Add an amount to a counter of this server."
            assert schemas["add"]["parameters"]["required"] == ["name", "amount"]
            calls = [
                await environment.step(ToolCallRequest("add", '{"name": "a", "amount": 2}')),
                await environment.step(tool_call_request("add", name="a", amount=3)),
                await environment.step(tool_call_request("fail")),
                await environment.step(tool_call_request("picture")),
                await environment.step(tool_call_request("record")),
                await environment.step(tool_call_request("add", name="a", amount="many")),
            ]
            assert await environment.score(ended_episode(stdio(), "5")) == 1
            assert await environment.score(ended_episode(stdio())) == 0
            assert await environment.score(ended_episode(stdio(), "5", StopReason.UNAVAILABLE)) is None
        assert [call.status.value for call in calls] == ["ok", "ok", "error", "ok", "ok", "error"]
        assert [call.response for call in calls[:2]] == ["a is 2", "a is 5"]
        assert "it failed" in calls[2].response
        assert calls[3].response == "a dot\n[image]"
        assert '"a": 1' in calls[4].response
    assert children() == before


@pytest.mark.parametrize(
    ("request_", "expected_text"),
    [
        (ToolCallRequest("subtract", "{}"), "NameError: there is no tool 'subtract'; there are add, environment"),
        (ToolCallRequest("add", "{"), "JSONDecodeError"),
        (ToolCallRequest("add", "[1]"), "TypeError: the arguments must be a JSON object"),
    ],
)
@pytest.mark.asyncio
async def test_a_malformed_call_is_answered_without_the_server(request_: ToolCallRequest, expected_text: str) -> None:
    async with opened_environment(stdio()) as (environment, _):
        call = await environment.step(request_)
    assert call.status is ToolCallStatus.MALFORMED
    assert call.response.startswith(expected_text)


@pytest.mark.asyncio
async def test_a_server_gets_only_listed_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RSTAR_SANDBOX_TOKEN", "RAY_ADDRESS", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    async with opened_environment(stdio(env={"COLOUR": "red"})) as (environment, _):
        lines = (await environment.step(tool_call_request("environment"))).response.split("\n")
    assert "COLOUR=red" in lines
    names = {line.partition("=")[0] for line in lines}
    assert names <= {"COLOUR", "HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LC_CTYPE"}


@pytest.mark.parametrize(
    ("target", "expected_text"),
    [
        (stdio("hang", start_timeout_s=0.5), "did not start within 0.5 s"),
        (stdio("exit"), "Connection closed (there is no licence)"),
        (stdio("nonsense", start_timeout_s=5), "mcp_server.py nonsense: "),
        (stdio("endless_line"), "(the server wrote a line of more than 16 MiB)"),
        (problem("mcp", {"command": ["no-such-program"]}), "(no-such-program: cannot be started ("),
        (problem("mcp", {"command": ["false"]}), "false: MCPError: Connection closed (exit code 1)"),
        (problem("mcp", {"command": ["cat"], "start_timeout_s": 5}), "cat: "),
        (problem("mcp", {"url": "http://127.0.0.1:1/mcp", "start_timeout_s": 5}), "http://127.0.0.1:1/mcp: "),
    ],
)
@pytest.mark.asyncio
async def test_a_server_that_does_not_start_fails_its_episode(
    target: Problem, expected_text: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = children()
    start = time.monotonic()
    with pytest.raises(EnvironmentFailure) as raised:
        async with opened_environment(target):
            pass
    assert expected_text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) <= 500
    assert time.monotonic() - start < 30
    assert children() == before
    captured = capfd.readouterr()
    assert (captured.out, captured.err, caplog.records) == ("", "", [])


@pytest.mark.parametrize(
    ("tool", "expected_text"),
    [
        ("hang", "did not answer a call of hang within 1 s"),
        ("crash", "crash: Connection closed (the disk is on fire)"),
        ("long_line", "long_line: Connection closed (the server wrote a line of more than 16 MiB)"),
        ("flood_stdout_forever", "Connection closed (the server wrote more than 256 MiB)"),
    ],
)
@pytest.mark.asyncio
async def test_a_server_that_fails_in_a_call_fails_its_episode_only(tool: str, expected_text: str) -> None:
    before = children()
    async with opened_environment(stdio()) as (other, _):
        timeout_s = 1 if tool == "hang" else 60
        with pytest.raises(EnvironmentFailure) as raised:
            async with opened_environment(stdio(call_timeout_s=timeout_s)) as (environment, _):
                await environment.step(tool_call_request(tool))
        assert expected_text in str(raised.value)
        assert (await other.step(tool_call_request("add", name="a", amount=1))).response == "a is 1"
    assert children() == before


@pytest.mark.parametrize("tool", ["flood_stdout", "flood_stderr"])
@pytest.mark.asyncio
async def test_output_that_is_no_message_is_dropped(
    tool: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened_environment(stdio()) as (environment, _):
        assert (await environment.step(tool_call_request(tool))).response == "flooded"
    captured = capfd.readouterr()
    assert (captured.out, captured.err, caplog.records) == ("", "", [])


@pytest.mark.parametrize("fault", ["in a call", "at the start"])
@pytest.mark.asyncio
async def test_a_process_that_outlives_its_server_is_killed(fault: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    if fault == "at the start":
        with pytest.raises(EnvironmentFailure, match="and away"):
            async with opened_environment(stdio("leak", str(pid_file))):
                pass
    else:
        async with opened_environment(stdio()) as (environment, _):
            await environment.step(tool_call_request("leak", pid_file=str(pid_file)))
            assert is_running(int(pid_file.read_text()))
    assert not is_running(int(pid_file.read_text()))


@pytest.mark.asyncio
async def test_a_cancelled_episode_leaves_no_server() -> None:
    before = children()

    async def episode(target: Problem, tool: str) -> None:
        async with opened_environment(target) as (environment, _):
            await environment.step(tool_call_request(tool))

    for target in (stdio("hang"), stdio()):
        task = asyncio.create_task(episode(target, "hang"))
        await eventually(lambda: any(SERVER in command_line(pid) for pid in children() - before))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert children() == before


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@pytest.mark.asyncio
async def test_nothing_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import asyncio, sys\n"
        "from tests.trainer.environments.test_mcp_environment import tool_call_request, opened_environment, stdio\n"
        "async def main():\n"
        "    async with opened_environment(stdio()) as (environment, _):\n"
        "        await environment.step(tool_call_request('leak', pid_file=sys.argv[1]))\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(pid_file)]
    trainer = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert trainer.stdout and trainer.stdout.readline() == "ready\n"
    started = {int(pid_file.read_text())} | {pid for pid in children() if SERVER in command_line(pid)}
    assert len(started) == 3  # the supervisor, the server and its leaked process
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
    await eventually(lambda: not any(map(is_running, started)))


@asynccontextmanager
async def http_server(port: int = 0) -> AsyncIterator[tuple[str, int]]:
    """Serve on HTTP, and return the URL and the port."""
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    command = [sys.executable, SERVER, "http", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:  # noqa: ASYNC220
        try:

            def accepts() -> bool:
                with socket.socket() as connection:
                    return connection.connect_ex(("127.0.0.1", port)) == 0

            await eventually(accepts)
            yield f"http://127.0.0.1:{port}/mcp", port
        finally:
            server.kill()


@pytest.mark.asyncio
async def test_episodes_share_a_server_over_http_and_its_restart_fails_only_those_that_run() -> None:
    async with open_services() as services:
        async with http_server() as (url, port):
            shared = problem("mcp", {"url": url, "call_timeout_s": 10, "per_episode": False, "is_stateful": False})
            async with (
                opened_environment(shared, services) as (first, _),
                opened_environment(shared, services) as (second, _),
            ):
                assert first._session is second._session  # type: ignore[attr-defined]
                calls = [
                    first.step(tool_call_request("add", name="a", amount=1)),
                    second.step(tool_call_request("add", name="b", amount=1)),
                ]
                assert {call.response for call in await asyncio.gather(*calls)} == {"a is 1", "b is 1"}
        async with opened_environment(shared, services) as (environment, _):
            with pytest.raises(EnvironmentFailure, match=url):
                await environment.step(tool_call_request("add", name="a", amount=1))
        async with http_server(port), opened_environment(shared, services) as (environment, _):
            assert (await environment.step(tool_call_request("add", name="a", amount=1))).response == "a is 1"


@pytest.mark.asyncio
async def test_each_episode_has_its_own_session_over_http_unless_it_asks_for_a_shared_one() -> None:
    async with http_server() as (url, _), open_services() as services:
        own = problem("mcp", {"url": url})
        check_problem(own)
        async with opened_environment(own, services) as (first, _), opened_environment(own, services) as (second, _):
            assert first.is_stateful
            counts = [await episode.step(ToolCallRequest("count", {})) for episode in (first, second, first)]
            assert [count.response for count in counts] == ["1", "1", "2"]
        shared = problem("mcp", {"url": url, "per_episode": False, "is_stateful": False})
        async with (
            opened_environment(shared, services) as (first, _),
            opened_environment(shared, services) as (second, _),
        ):
            counts = [await episode.step(ToolCallRequest("count", {})) for episode in (first, second)]
            assert [count.response for count in counts] == ["1", "2"]


@pytest.mark.asyncio
async def test_a_call_without_arguments_runs_a_tool_that_requires_none() -> None:
    async with opened_environment(stdio()) as (environment, _):
        for text, status in (('{"name": "record"}', "ok"), ('{"name": "add", "arguments": null}', "error")):
            (call,) = parse_turn(f"<tool_call>{text}</tool_call>").tool_calls
            assert isinstance(call, ToolCallRequest)
            assert (await environment.step(call)).status == status


@pytest.mark.asyncio
async def test_a_call_that_hangs_over_http_does_not_hold_up_other_episodes() -> None:
    async with http_server() as (url, _), open_services() as services:
        shared = problem("mcp", {"url": url, "call_timeout_s": 2, "per_episode": False, "is_stateful": False})
        async with (
            opened_environment(shared, services) as (first, _),
            opened_environment(shared, services) as (second, _),
        ):
            with pytest.raises(EnvironmentFailure, match="did not answer a call of hang within 2 s"):
                await first.step(tool_call_request("hang"))
            assert (await second.step(tool_call_request("record"))).status is ToolCallStatus.OK


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        ({}, "expected either command or url"),
        ({"command": ["true"], "url": "http://x"}, "expected either command or url"),
        ({"command": []}, "options.command: "),
        ({"url": "http://x", "per_episode": False}, "per_episode: expected true, since episodes that share a session"),
        ({"command": "true"}, "options.command: Input should be a valid tuple, got 'true'"),
        ({"url": "ftp://x"}, "options.url: String should match pattern"),
        ({"command": ["true"], "env": {"RAY_ADDRESS": "x"}}, "env.RAY_ADDRESS: variables of the trainer and of Ray"),
        ({"command": ["true"], "start_timeout_s": 0}, "options.start_timeout_s: Input should be greater than 0"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(options: dict[str, Any], expected_text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_problem(problem("mcp", options))
    assert expected_text in str(raised.value)


def test_without_the_sdk_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trainer.environments.mcp_environment", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    environment_class.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'rstar-sandbox\[mcp\]'"):
        check_problem(stdio())
    environment_class.cache_clear()
