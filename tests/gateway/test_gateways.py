"""Several gateways on one port, over fake executors: one answer for all, and one life."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.gateway.siblings import Siblings
from tests.gateway.test_server import post, server

GATEWAYS = 2


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.fullmatch(
        r"rstar-sandbox \S+ on (http://127\.0\.0\.1:\d+)  isolation=none  slots=128  python=\S+  gateways=2\n", line
    )
    assert found, line
    return found[1]


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_there(pid: int) -> bool:
    """Whether it lives; one that nobody has buried yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(claim: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
        text: str = response.read().decode()
        return text


def answered(text: str) -> dict[str, int]:
    """Calls answered, by gateway."""
    return {number: int(n) for number, n in re.findall(r'calls_total\{gateway="(\d)",status="ok"\} (\d+)', text)}


def test_whoever_is_asked_answers_for_all() -> None:
    with server(gateways=GATEWAYS) as process:
        address = address_of(process)
        sent = 0
        while len(answered(scrape(address))) < GATEWAYS:  # the kernel chooses by a hash of the connection's ports
            assert post(f"{address}/v1/execute", {"code": "hi"})["stdout"] == "hi"
            sent += 1
        scrapes = [scrape(address) for _ in range(20)]
        assert {sum(answered(text).values()) for text in scrapes} == {sent}
        stats = [json.load(urllib.request.urlopen(f"{address}/v1/stats", timeout=60)) for _ in range(10)]
        assert {one["totals"]["statuses"]["ok"] for one in stats} == {sent}
        assert {one["now"]["slots"] for one in stats} == {128} and len(stats[0]["executors"]) == GATEWAYS
        assert (stats[0]["service"]["gateways"], stats[0]["service"]["gateways_up"]) == (GATEWAYS, GATEWAYS)
        assert all("rstar_sandbox_gateways_up 2\n" in text for text in scrapes)
        assert all(len(re.findall("^# TYPE rstar_sandbox_calls_total ", text, re.MULTILINE)) == 1 for text in scrapes)


def test_all_end_together_and_leave_nothing_behind() -> None:
    with server(gateways=GATEWAYS) as process:
        address_of(process)
        gateways = children(process.pid)
        executors = [pid for gateway in gateways for pid in children(gateway)]
        assert len(gateways) == GATEWAYS and len(executors) == GATEWAYS
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert not any(map(is_there, gateways + executors))


def test_a_gateway_that_is_killed_is_started_again() -> None:
    with server(gateways=GATEWAYS) as process:
        address = address_of(process)
        lost, kept = children(process.pid)
        os.kill(lost, signal.SIGKILL)
        until(lambda: len(children(process.pid)) == GATEWAYS and lost not in children(process.pid))
        until(lambda: len(re.findall(r'executors_ready\{gateway="\d"\} 1', scrape(address))) == GATEWAYS)
        assert kept in children(process.pid)
        assert post(f"{address}/v1/execute", {"code": "hi"})["stdout"] == "hi"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_second_signal_does_not_wait() -> None:
    with server(gateways=GATEWAYS, drain_s=600) as process:
        address = address_of(process)
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
            body = b'{"code": "hang"}'
            head = b"POST /v1/execute HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            client.sendall(head + body)
            until(lambda: bool(re.search(r'calls_running\{gateway="\d"\} 1', scrape(address))))
            gateways = children(process.pid)
            process.send_signal(signal.SIGTERM)
            until(lambda: sum(map(is_there, gateways)) == 1)  # that which has nothing to wait for
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 1
            assert not any(map(is_there, gateways))


def test_gateways_end_with_their_parent() -> None:
    with server(gateways=GATEWAYS) as process:
        address_of(process)
        gateways = children(process.pid)
        process.kill()
        process.wait()
        until(lambda: not any(map(is_there, gateways)))


def test_a_port_in_use_is_said() -> None:
    """Also if it is in use by gateways that share it."""
    with server(gateways=GATEWAYS) as first:
        port = int(address_of(first).rpartition(":")[2])
        with server(port=port, gateways=GATEWAYS) as second:
            assert second.wait(60) == 1
            assert second.stderr is not None
            assert "is another server running there?" in second.stderr.read()


def test_executors_that_cannot_start_end_the_start() -> None:
    with server(module="tests.no_such_executor", gateways=GATEWAYS) as process:
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert "rstar-sandbox: executor 0 did not start: " in process.stderr.read()


@pytest.mark.asyncio
async def test_a_sibling_that_says_nothing_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.gateway.siblings.ASK_S", 0.1)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(hang, tmp_path / "1"):
        assert await Siblings(0, 3, str(tmp_path)).ask() == {}


@pytest.mark.asyncio
async def test_a_sibling_that_has_more_to_say_than_a_socket_holds_is_heard_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.gateway.siblings.ASK_S", 60.0)
    state = {"executors": ["x" * 1000] * 4000}
    sibling = Siblings(1, 2, str(tmp_path))
    await sibling.open(lambda: state)
    assert await Siblings(0, 2, str(tmp_path)).ask() == {1: state}
    sibling.close()


@pytest.mark.asyncio
async def test_a_sibling_that_babbles_is_left_out_and_one_that_is_new_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.gateway.siblings.ASK_S", 60.0)
    first, second = (Siblings(1, 3, str(tmp_path)) for _ in range(2))

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xc1")
        writer.close()

    async with await asyncio.start_unix_server(babble, tmp_path / "2"):
        for sibling, says in ((first, 1), (second, 2)):
            await sibling.open(lambda says=says: {"says": says})  # type: ignore[misc]
            assert await Siblings(0, 3, str(tmp_path)).ask() == {1: {"says": says}}
    first.close()
    second.close()
