"""Clients that come too many, or keep us waiting: in a head, in a body, in reading."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgpack
import pytest
from aiohttp import web

from sandbox import client
from sandbox.errors import ConfigError
from sandbox.gateway import build_app, server
from sandbox.gateway.http import codec, listener, routes
from tests.fakes import FakeFleet
from tests.gateway.serving import Served, serving, until

pytestmark = pytest.mark.asyncio
LARGE = "x" * (1 << 20)


@asynccontextmanager
async def through_listener(
    served: Served, *, senders_s: float = 60.0
) -> AsyncIterator[tuple[listener.Listener, str, int]]:
    """The same service on a port of its own, whose doors `serve` opens; `stall_s` is for reading alone."""
    app = build_app(served.dispatcher.config, served.dispatcher)
    app[routes.BODIES].stall_s = senders_s
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    opened, address = await server._listen(runner, served.dispatcher)
    opened.stall_s = senders_s
    host, _, port = address.removeprefix("http://").rpartition(":")
    try:
        yield opened, host, int(port)
    finally:
        opened.close()
        await runner.cleanup()


async def ask(host: str, port: int, request: bytes, end: bytes = b"") -> bytes:
    """All that is said on a connection until it is closed, or until `end`."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    try:
        async with asyncio.timeout(60):
            return await (reader.readuntil(end) if end else reader.read())
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def head(path: str, length: int, accept: str = "application/json") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAccept: {accept}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def test_a_connection_too_many_is_told_so() -> None:
    async with serving(port=0, connections=2) as served, through_listener(served) as (opened, host, port):
        first = [await asyncio.open_connection(host, port) for _ in range(2)]
        await until(lambda: opened.connections == 2)
        said = await ask(host, port, b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        _, _, body = said.partition(b"\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in said
        assert "2 connections are open, which is the limit" in json.loads(body)["error"]["message"]
        assert served.dispatcher.counters.refused[503] == 1
        first[0][1].close()
        await until(lambda: opened.connections == 1)
        async with served.http.get(f"http://{host}:{port}/ready") as response:
            assert response.status == 200
        first[1][1].close()


async def test_even_telling_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_REJECTED", 0)
    async with serving(port=0, connections=1) as served, through_listener(served) as (opened, host, port):
        _, writer = await asyncio.open_connection(host, port)
        await until(lambda: opened.connections == 1)
        assert await ask(host, port, b"") == b""
        writer.close()


async def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    async with serving(port=0) as served, through_listener(served, senders_s=0.05) as (opened, host, port):
        assert await ask(host, port, b"GET /ready HTTP/1.1\r\nHost: local") == b""
        await until(lambda: opened.connections == 0)


class Line(asyncio.Transport):
    """Notes whether it was cut."""

    was_cut = False

    def abort(self) -> None:
        self.was_cut = True


@pytest.mark.parametrize(
    ("pieces", "is_whole"),
    [
        ((b"GET / HTTP/1.1\r\n\r\n",), True),
        ((b"GET / HTTP/1.1\r\n\r", b"\n"), True),
        ((b"GET / HTTP/1.1\r", b"\n", b"\r", b"\n{"), True),
        ((), False),
        ((b"GET / HTTP/1.1\r\n",), False),
        ((b"GET / HTTP/1.1\r\n\r", b"x\n"), False),
    ],
)
async def test_a_head_is_whole_however_it_comes(pieces: tuple[bytes, ...], is_whole: bool) -> None:
    connection = listener._Connection(listener.Listener(asyncio.Protocol, 1, 0.0, lambda: None))
    line = Line()
    connection.connection_made(line)
    for piece in pieces:
        connection.data_received(piece)
    if not is_whole:
        await until(lambda: line.was_cut)
    await asyncio.sleep(listener.READ_GRACE_S + 0.05)
    assert line.was_cut != is_whole
    connection.connection_lost(None)


async def test_what_came_while_we_were_held_up_is_read_before_a_connection_is_cut() -> None:
    """As a loop does that was held up: the timers that have passed first, then what there is to read."""
    connection = listener._Connection(listener.Listener(asyncio.Protocol, 1, 0.0, lambda: None))
    line = Line()
    connection.connection_made(line)
    timer = connection._timer
    await until(lambda: connection._timer is not timer)
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    await asyncio.sleep(listener.READ_GRACE_S + 0.05)
    assert not line.was_cut
    connection.connection_lost(None)


async def test_a_body_that_does_not_come_on_is_a_408() -> None:
    async with serving(port=0) as served, through_listener(served, senders_s=0.2) as (opened, host, port):
        opened.stall_s = 60.0
        said = await ask(host, port, head("/v1/execute", 100) + b'{"code": ', end=b"}}")
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"the body stopped after 9 bytes" in said and b"--stall-s" in said


async def test_a_body_that_dribbles_is_a_408() -> None:
    """It comes on all the time, and much too slowly."""

    async def dribble() -> Any:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    headers = {"Content-Type": "application/json"}
    async with (
        serving(stall_s=0.2) as served,
        served.http.post(f"{served.url}/v1/execute", data=dribble(), headers=headers) as response,
    ):
        assert response.status == 408


async def test_a_large_body_has_its_time_for_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[float | None] = []
    reschedule = asyncio.Timeout.reschedule

    def count(limit: asyncio.Timeout, when: float | None) -> None:
        starts.append(when)
        reschedule(limit, when)

    class Request:
        """As much of one as is read."""

        content_length = None

        @property
        def content(self) -> Request:
            return self

        async def iter_any(self) -> AsyncIterator[bytes]:
            for piece in (b"ab", b"cdef", b"g", b"hijklm"):
                yield piece

    monkeypatch.setattr(codec, "CHUNK_BYTES", 4)
    monkeypatch.setattr(asyncio.Timeout, "reschedule", count)
    body = await codec.BodyReader(100, 100, 1, stall_s=60.0).read(cast(web.Request, Request()))
    assert body == b"abcdefghijklm"
    assert len(starts) == 3  # the beginning, after 6 bytes, and after 13


async def _never_read(host: str, port: int, request: bytes) -> socket.socket:
    """A client with little room that has asked, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, port))
    await loop.sock_sendall(client, request)
    return client


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
async def test_a_client_that_does_not_read_is_cut_off(accept: str) -> None:
    body = json.dumps({"calls": [{"code": LARGE}] * 8}).encode()
    async with serving(port=0, stall_s=0.1) as served, through_listener(served) as (opened, host, port):
        client = await _never_read(host, port, head("/v1/batch", len(body), accept) + body)
        await until(lambda: served.dispatcher.counters.stalled == 1)
        await until(lambda: opened.connections == 0)
        assert (
            served.dispatcher.call_table.unread_result_bytes == 0
            and served.dispatcher.call_table.outstanding.calls == 0
        )
        client.close()


async def test_results_that_nobody_reads_are_bounded() -> None:
    """The kernel holds some megabytes for a reader that is slow, the service one, and the rest is given up."""
    calls = 100
    body = json.dumps({"calls": [{"code": "x" * (1 << 18)}] * calls}).encode()
    async with (
        serving(FakeFleet(slots=1), port=0, results_mb=1, stall_s=600) as served,
        through_listener(served) as (_, host, port),
    ):
        call_table = served.dispatcher.call_table
        client = await _never_read(host, port, head("/v1/batch", len(body), "application/x-ndjson") + body)
        await until(lambda: served.dispatcher.counters.by_status.total() == calls)
        assert served.dispatcher.counters.by_status["unavailable"] > 0 and call_table.unread_result_bytes < 3 << 20
        reader, writer = await asyncio.open_connection(sock=client, limit=1 << 20)
        lines: list[bytes] = []
        while len(lines) < calls:
            line = await reader.readline()
            lines += [line] if line.startswith(b'{"index"') else []
        given_up = sum(b'"ResultsUnread"' in line for line in lines)
        assert given_up == served.dispatcher.counters.by_status["unavailable"]
        await until(lambda: call_table.unread_result_bytes == 0)
        writer.close()


async def test_nothing_is_admitted_while_too_many_results_are_held() -> None:
    async with serving(results_mb=1) as served:
        served.dispatcher.call_table.unread_result_bytes = 2 << 20
        status, answer = await served.post("/v1/execute", {"code": "1"})
    assert status == 429
    assert "clients have not read results of 2097152 bytes, at most 1048576" in answer["error"]["message"]


async def test_the_results_of_a_stream_that_is_read_are_let_go() -> None:
    calls = {"calls": [{"code": f"{number}"} for number in range(300)]}
    async with serving() as served:
        headers = {"Accept": "application/x-msgpack-stream"}
        async with served.http.post(f"{served.url}/v1/batch", json=calls, headers=headers) as response:
            unpacker = msgpack.Unpacker()
            unpacker.feed(await response.read())
        assert sorted(line["index"] for line in unpacker) == list(range(300))
        assert served.dispatcher.call_table.unread_result_bytes == 0


async def test_more_connections_than_descriptors_are_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(100, 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert listener.raise_connection_limit(10_000) == 1000 - listener.RESERVED_FDS
    assert limits[-1] == (1000, 1000)
    assert listener.raise_connection_limit(5) == 5


@pytest.mark.parametrize(("connections", "needed"), [(10_000, 612), (256, 612), (5, 361)])
async def test_too_few_descriptors_for_a_single_client_are_refused_with_the_number(
    connections: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hard = needed
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert listener.raise_connection_limit(connections) == needed - listener.RESERVED_FDS
    hard -= 1
    with pytest.raises(ConfigError, match=rf"\(ulimit -Hn\) is {hard}, but \d+ connections need {needed}; raise it"):
        listener.raise_connection_limit(connections)


async def test_the_floor_is_what_one_client_opens() -> None:
    assert listener.MIN_CONNECTIONS == client.MAX_CONNECTIONS
