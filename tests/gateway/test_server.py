"""`serve` as a process of its own, over a fake executor in another."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sandbox.config import ServeConfig
from sandbox.gateway.server import _greet

SERVE = """
import functools, sys
from sandbox.config import ServeConfig
from sandbox.gateway import serve
from sandbox.gateway.node import ExecutorProcess
config = ServeConfig(port={port}, drain_s={drain_s}, gateways={gateways})
sys.exit(serve(config, functools.partial(ExecutorProcess.launch, {module!r})))
"""


@contextmanager
def server(
    port: int = 0, drain_s: float = 5, module: str = "tests.fakes", gateways: int = 1
) -> Iterator[subprocess.Popen[str]]:
    code = SERVE.format(port=port, drain_s=drain_s, module=module, gateways=gateways)
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.fullmatch(
        r"rstar-sandbox \S+ on (http://127\.0\.0\.1:\d+)  isolation=none  slots=64  python=\S+\n", line
    )
    assert found, line
    return found[1]


def post(url: str, body: object) -> dict[str, object]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        answer: dict[str, object] = json.load(response)
        return answer


def test_greeting_says_what_auto_gave_up(capsys: pytest.CaptureFixture[str]) -> None:
    config = ServeConfig(isolation="landlock", isolation_reason="namespaces: this machine lacks it")
    _greet(config, "http://localhost:1", [{"isolation": "landlock", "slots": 4, "python": "3.11.0"}])
    line = capsys.readouterr().err
    assert line.endswith(
        "isolation=landlock  slots=4  python=3.11.0  isolation_reason='namespaces: this machine lacks it'\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_leaves_nothing_behind(number: signal.Signals) -> None:
    with server() as process:
        address = address_of(process)
        assert post(f"{address}/v1/execute", {"code": "hi"})["stdout"] == "hi"
        children = _children(process.pid)
        assert children
        process.send_signal(number)
        assert process.wait(10) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


def test_a_second_signal_does_not_wait() -> None:
    with server(drain_s=600) as process:
        address = address_of(process)
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
            body = b'{"code": "hang"}'
            head = b"POST /v1/execute HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            client.sendall(head + body)
            while b"calls_running 1" not in urllib.request.urlopen(f"{address}/metrics").read():
                pass
            process.send_signal(signal.SIGTERM)
            while _is_ready(address):
                pass
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 1


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, server(port=taken.getsockname()[1]) as process:
        assert process.wait(10) == 1
        assert process.stderr is not None
        assert "is another server running there?" in process.stderr.read()


def test_an_executor_that_cannot_start_ends_the_start() -> None:
    with server(module="tests.no_such_executor") as process:
        assert process.wait(10) == 1
        assert process.stderr is not None
        assert "rstar-sandbox: executor 0 did not start: " in process.stderr.read()


def _is_ready(address: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{address}/ready").status == 200)
    except OSError:
        return False


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()
