"""Tests of `serve` in its own process, with fake executors in further processes.

A fake executor runs no Python: the text of a call's code, such as "slow", selects its result (`tests.fakes`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox.client import AsyncClient
from sandbox.gateway.calls.executor_report import ReadyReport
from sandbox.gateway.server import _announce, _log_machine_limits
from sandbox.settings.server import ServeConfig
from sandbox.types import Result, Status

SERVE_CODE = """
import functools, sys
from sandbox import logs
from sandbox.settings.server import ServeConfig
from sandbox.gateway import serve
from sandbox.gateway.calls.executor_handle import ExecutorProcess
config = ServeConfig(port={port}, drain_s={drain_s}, tenants={tenants!r}, log_format={log_format!r})
logs.configure(config.log_format)
sys.exit(serve(config, functools.partial(ExecutorProcess.launch, {module!r})))
"""


@contextmanager
def serving_process(
    port: int = 0,
    drain_s: float = 5,
    module: str = "tests.fakes",
    max_fds: int | None = None,
    tenants: str | None = None,
    log_format: str = "text",
) -> Iterator[subprocess.Popen[str]]:
    """Run `serve` with `module` as the program of its executors, and kill it at the end."""
    code = SERVE_CODE.format(port=port, drain_s=drain_s, module=module, tenants=tenants, log_format=log_format)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=_limit_descriptors(max_fds)
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _limit_descriptors(max_fds: int | None) -> Callable[[], None] | None:
    return None if max_fds is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (max_fds, max_fds))


def read_url(process: subprocess.Popen[str]) -> str:
    """Wait for the ready line, and return the URL in it."""
    assert process.stderr is not None
    line = process.stderr.readline()
    match = re.fullmatch(
        r"rstar-sandbox \S+ on (http://127\.0\.0\.1:\d+)  isolation=none  slots=64  python=\S+\n", line
    )
    assert match, line
    return match[1]


def post(url: str, body: object) -> dict[str, object]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        result: dict[str, object] = json.load(response)
        return result


def test_the_ready_line_has_the_reason_for_the_isolation_level(capsys: pytest.CaptureFixture[str]) -> None:
    config = ServeConfig(isolation="landlock", isolation_reason="namespaces: this machine lacks it")
    report = ReadyReport(slots=4, isolation="landlock", python="3.11.0")
    dispatcher: Any = types.SimpleNamespace(config=config, executors=[types.SimpleNamespace(ready_report=report)])
    _announce(dispatcher, "http://localhost:1")
    line = capsys.readouterr().err
    assert line.endswith(
        "isolation=landlock  slots=4  python=3.11.0  isolation_reason='namespaces: this machine lacks it'\n"
    )


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server_and_its_executors(signal_number: signal.Signals) -> None:
    with serving_process() as process:
        url = read_url(process)
        assert post(f"{url}/v1/execute", {"code": "hi"})["stdout"] == "hi"
        children = _children(process.pid)
        assert children
        process.send_signal(signal_number)
        assert process.wait(10) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


@pytest.mark.asyncio
async def test_every_call_is_ok_when_one_of_two_servers_restarts_under_load() -> None:
    """A server that ends has `drain_s` to finish its calls. Here more calls wait than it can finish in this time."""
    results: list[Result] = []
    with ExitStack() as stack:
        processes = [stack.enter_context(serving_process(drain_s=0.5)) for _ in range(2)]
        urls = [read_url(process) for process in processes]
        async with AsyncClient(urls, batch_size=16) as client, asyncio.TaskGroup() as tasks:
            may_stop = asyncio.Event()

            async def load() -> None:
                while not may_stop.is_set():
                    results.extend(await client.run_batch(["slow"] * 64))

            for _ in range(16):
                tasks.create_task(load())
            for url in urls:
                while not await asyncio.to_thread(_waiting_calls, url):  # until calls wait for a slot
                    pass
            processes[0].send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(processes[0].wait, 30) == 0
            restarted = stack.enter_context(serving_process(port=_port_of(urls[0]), drain_s=0.5))
            assert await asyncio.to_thread(read_url, restarted) == urls[0]
            while not await asyncio.to_thread(_waiting_calls, urls[0]):
                pass
            may_stop.set()
    assert len(results) >= 16 * 64  # each task has run at least one batch
    assert {result.status for result in results} == {Status.OK}


def test_the_first_signal_logs_what_the_server_waits_for_and_the_second_signal_ends_the_wait() -> None:
    with serving_process(drain_s=60) as process:
        url = read_url(process)
        with socket.create_connection(("127.0.0.1", _port_of(url))) as client:
            body = b'{"code": "hang"}'
            head = b"POST /v1/execute HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            client.sendall(head + body)
            while b"calls_dispatched 1.0" not in urllib.request.urlopen(f"{url}/metrics").read():
                pass
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            assert process.stderr.readline().partition(" INFO ")[2].partition(": ")[2] == (
                "stopping: 1 running calls get up to 60 s to finish, 0 waiting calls get `Stopped`; a second signal "
                "(Ctrl-C or SIGTERM) stops at once, and calls that still run are then lost\n"
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 1
            assert "stopped by a second signal; unfinished calls are lost" in process.stderr.read()


def test_sighup_makes_the_server_read_its_tenants_again(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.a]\ntoken = "first"\n', encoding="utf-8")
    with serving_process(tenants=str(file), log_format="json") as process:
        assert process.stderr is not None
        url = read_url(process)
        assert [_status(url, token) for token in ("first", "second")] == [200, 401]
        for text, level in (('[tenants.a]\ntoken = "second"\n', "INFO"), ('[tenants.a]\ntoken = ""\n', "ERROR")):
            file.write_text(text, encoding="utf-8")
            process.send_signal(signal.SIGHUP)
            line = json.loads(process.stderr.readline())
            assert (line["level"], line["logger"]) == (level, "sandbox.gateway.calls.dispatcher")
            assert str(file) in line["message"]
            assert [_status(url, token) for token in ("first", "second")] == [401, 200]


def test_a_wrong_tenants_file_ends_the_start_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.a]\ntoken = "s3cret"\n[tenants.b]\ntoken = "s3cret"\n', encoding="utf-8")
    with serving_process(tenants=str(file)) as process:
        assert process.wait(10) == 1
        assert process.stderr is not None
        expected = f"{file}: tenant 'b': has the token of tenant 'a'; give each tenant a token of its own"
        assert process.stderr.read() == f"rstar-sandbox: {expected}\n"


def _status(url: str, token: str) -> int:
    """Return the HTTP status of a request with this token."""
    request = urllib.request.Request(f"{url}/v1/stats", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, serving_process(port=taken.getsockname()[1]) as process:
        assert process.wait(10) == 1
        assert process.stderr is not None
        assert "is another server running there?" in process.stderr.read()


def test_too_few_file_descriptors_are_an_error() -> None:
    with serving_process(max_fds=256) as process:
        assert process.wait(10) == 1
        assert process.stderr is not None
        # The server itself needs 356 descriptors. One client opens 256 connections: 356 + 256 = 612. The setting
        # `connections` is 16384: 356 + 16384 = 16740.
        assert "(ulimit -Hn) is 256, but 256 connections need 612; raise it, best to 16740" in process.stderr.read()


def test_a_lowered_connection_limit_is_logged_once() -> None:
    with serving_process(max_fds=1000) as process:
        assert process.stderr is not None
        read_url(process)
        process.send_signal(signal.SIGTERM)
        warnings = [line for line in process.stderr if "WARNING" in line]
        assert [warning.partition(": ")[2] for warning in warnings] == [
            # 644 is 1000 less the 356 descriptors of the server itself.
            "connection limit lowered from 16384 to 644: not enough file descriptors (`ulimit -Hn 16740` is enough)\n"
        ]


def test_the_cgroups_of_all_executors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    reports = [
        ReadyReport(slots=4, cgroups="v2, /a"),
        ReadyReport(slots=4, cgroups=""),
        ReadyReport(slots=4, cgroups="v2, /b"),
    ]
    executors = [types.SimpleNamespace(ready_report=report) for report in reports]
    dispatcher: Any = types.SimpleNamespace(config=ServeConfig(connections=100), executors=executors)
    with caplog.at_level(logging.INFO):
        _log_machine_limits(dispatcher, connections=100)
    assert caplog.messages == ["cgroups: v2, /a; v2, /b"]


def test_what_a_machine_lacks_is_logged_once_for_all_executors(caplog: pytest.LogCaptureFixture) -> None:
    report = ReadyReport.decode({"slots": 4, "warnings": ["no cgroups: permission denied"]})
    executors = [types.SimpleNamespace(ready_report=report)] * 2
    dispatcher: Any = types.SimpleNamespace(config=ServeConfig(connections=100), executors=executors)
    _log_machine_limits(dispatcher, connections=100)
    assert caplog.messages == ["no cgroups: permission denied"]


def test_lowered_slots_and_missing_modules_are_logged_once_for_all_executors(caplog: pytest.LogCaptureFixture) -> None:
    report = ReadyReport(slots=12, long_slots=0, wanted_fds=5000, missing_modules=("numpy", "sympy"))
    config = ServeConfig(python="/their/python", connections=100, slots=32, long_slots=512)
    executors = [types.SimpleNamespace(ready_report=report)] * 2
    dispatcher: Any = types.SimpleNamespace(config=config, executors=executors)
    _log_machine_limits(dispatcher, connections=100)
    slots, missing = caplog.messages
    assert slots.startswith(
        "slots lowered from 32 to 24, long_slots lowered from 512 to 0: not enough file descriptors (`ulimit -Hn 5000`"
    )
    assert missing.startswith("calls cannot import numpy, sympy: not installed for /their/python; install them there")
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_an_executor_that_cannot_start_is_an_error() -> None:
    with serving_process(module="tests.no_such_executor") as process:
        assert process.wait(10) == 1
        assert process.stderr is not None
        assert "rstar-sandbox: executor 0 did not start: " in process.stderr.read()


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def _waiting_calls(url: str) -> int:
    """Return the number of calls that wait for a slot in the server."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        match = re.search(r"^rstar_sandbox_calls_waiting (\d+)\.0$", response.read().decode(), re.MULTILINE)
    assert match
    return int(match[1])


def _children(pid: int) -> list[str]:
    """Return the pids of the children of a process."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()
