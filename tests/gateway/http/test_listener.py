"""Tests of clients that open too many connections, that send too slowly, or that read too slowly."""

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
MEBIBYTE_OF_CODE = "x" * (1 << 20)


@asynccontextmanager
async def serving_through_listener(
    served: Served, *, senders_s: float = 60.0
) -> AsyncIterator[tuple[listener.Listener, str, int]]:
    """Serve the same dispatcher through a `Listener`, as `serve` does. The setting `stall_s` applies to reading clients
    only; `senders_s` replaces it for heads and bodies."""
    app = build_app(served.dispatcher)
    app[routes.BODIES].stall_s = senders_s
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    listening, address = await server._listen(runner, served.dispatcher)
    listening.stall_s = senders_s
    host, _, port = address.removeprefix("http://").rpartition(":")
    try:
        yield listening, host, int(port)
    finally:
        listening.close()
        await runner.cleanup()


async def exchange(host: str, port: int, request: bytes, end: bytes = b"") -> bytes:
    """Send a request, and return all bytes received until the connection is closed, or until `end`."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    try:
        async with asyncio.timeout(60):
            return await (reader.readuntil(end) if end else reader.read())
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def request_head(path: str, length: int, accept: str = "application/json") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAccept: {accept}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def test_a_connection_over_the_limit_gets_503() -> None:
    async with serving(port=0, connections=2) as served, serving_through_listener(served) as (listening, host, port):
        first = [await asyncio.open_connection(host, port) for _ in range(2)]
        await until(lambda: listening.connections == 2)
        response = await exchange(host, port, b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        _, _, body = response.partition(b"\r\n\r\n")
        assert response.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in response
        assert "2 connections are open, which is the limit" in json.loads(body)["error"]["message"]
        assert served.dispatcher.counters.refused[503] == 1
        first[0][1].close()
        await until(lambda: listening.connections == 1)
        async with served.http.get(f"http://{host}:{port}/ready") as accepted:
            assert accepted.status == 200
        first[1][1].close()


async def test_rejected_connections_over_their_own_limit_get_no_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "MAX_REJECTED", 0)
    async with serving(port=0, connections=1) as served, serving_through_listener(served) as (listening, host, port):
        _, writer = await asyncio.open_connection(host, port)
        await until(lambda: listening.connections == 1)
        assert await exchange(host, port, b"") == b""
        writer.close()


async def test_a_connection_that_sends_no_whole_head_is_closed() -> None:
    async with serving(port=0) as served, serving_through_listener(served, senders_s=0.05) as (listening, host, port):
        assert await exchange(host, port, b"GET /ready HTTP/1.1\r\nHost: local") == b""
        await until(lambda: listening.connections == 0)


class FakeTransport(asyncio.Transport):
    """Records whether it was aborted."""

    was_aborted = False

    def abort(self) -> None:
        self.was_aborted = True


@pytest.mark.parametrize(
    ("chunks", "is_complete"),
    [
        ((b"GET / HTTP/1.1\r\n\r\n",), True),
        ((b"GET / HTTP/1.1\r\n\r", b"\n"), True),
        ((b"GET / HTTP/1.1\r", b"\n", b"\r", b"\n{"), True),
        ((), False),
        ((b"GET / HTTP/1.1\r\n",), False),
        ((b"GET / HTTP/1.1\r\n\r", b"x\n"), False),
    ],
)
async def test_a_head_is_complete_however_it_is_split(chunks: tuple[bytes, ...], is_complete: bool) -> None:
    connection = listener._Connection(listener.Listener(asyncio.Protocol, 1, 0.0, lambda: None))
    transport = FakeTransport()
    connection.connection_made(transport)
    for chunk in chunks:
        connection.data_received(chunk)
    if not is_complete:
        await until(lambda: transport.was_aborted)
    await asyncio.sleep(listener.READ_GRACE_S + 0.05)
    assert transport.was_aborted != is_complete
    connection.connection_lost(None)


async def test_bytes_that_arrived_while_the_loop_was_blocked_are_read_before_the_abort() -> None:
    """A loop that was blocked runs the expired timers first, and reads from sockets after that."""
    connection = listener._Connection(listener.Listener(asyncio.Protocol, 1, 0.0, lambda: None))
    transport = FakeTransport()
    connection.connection_made(transport)
    timer = connection._timer
    await until(lambda: connection._timer is not timer)
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    await asyncio.sleep(listener.READ_GRACE_S + 0.05)
    assert not transport.was_aborted
    connection.connection_lost(None)


async def test_a_body_that_stops_is_a_408() -> None:
    async with serving(port=0) as served, serving_through_listener(served, senders_s=0.2) as (listening, host, port):
        listening.stall_s = 60.0
        response = await exchange(host, port, request_head("/v1/execute", 100) + b'{"code": ', end=b"}}")
    assert response.startswith(b"HTTP/1.1 408 ")
    assert b"the body stopped after 9 bytes" in response and b"--stall-s" in response


async def test_a_body_that_arrives_too_slowly_is_a_408() -> None:
    """Bytes arrive all the time, but fewer than `CHUNK_BYTES` per `stall_s`."""

    async def slow_body() -> Any:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    headers = {"Content-Type": "application/json"}
    async with (
        serving(stall_s=0.2) as served,
        served.http.post(f"{served.url}/v1/execute", data=slow_body(), headers=headers) as response,
    ):
        assert response.status == 408


async def test_the_time_limit_of_a_large_body_is_renewed_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float | None] = []
    reschedule = asyncio.Timeout.reschedule

    def count(limit: asyncio.Timeout, when: float | None) -> None:
        deadlines.append(when)
        reschedule(limit, when)

    class Request:
        """The part of a request that `BodyReader.read` uses."""

        content_length = None

        @property
        def content(self) -> Request:
            return self

        async def iter_any(self) -> AsyncIterator[bytes]:
            for chunk in (b"ab", b"cdef", b"g", b"hijklm"):
                yield chunk

    monkeypatch.setattr(codec, "CHUNK_BYTES", 4)
    monkeypatch.setattr(asyncio.Timeout, "reschedule", count)
    body = await codec.BodyReader(100, 100, 1, stall_s=60.0).read(cast(web.Request, Request()))
    assert body == b"abcdefghijklm"
    assert len(deadlines) == 3  # at the start, after 6 bytes and after 13


async def _connect_without_reading(host: str, port: int, request: bytes) -> socket.socket:
    """Return a socket with a small receive buffer that has sent a request and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, port))
    await loop.sock_sendall(client, request)
    return client


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
async def test_a_client_that_does_not_read_is_disconnected(accept: str) -> None:
    body = json.dumps({"calls": [{"code": MEBIBYTE_OF_CODE}] * 8}).encode()
    async with serving(port=0, stall_s=0.1) as served, serving_through_listener(served) as (listening, host, port):
        client = await _connect_without_reading(host, port, request_head("/v1/batch", len(body), accept) + body)
        await until(lambda: served.dispatcher.counters.stalled == 1)
        await until(lambda: listening.connections == 0)
        assert (
            served.dispatcher.call_table.unread_result_bytes == 0
            and served.dispatcher.call_table.outstanding.calls == 0
        )
        client.close()


async def test_unread_results_are_bounded() -> None:
    """The kernel buffers some megabytes for a slow reader, the gateway one; further results become `unavailable`."""
    calls = 100
    body = json.dumps({"calls": [{"code": "x" * (1 << 18)}] * calls}).encode()
    async with (
        serving(FakeFleet(slots=1), port=0, results_mb=1, stall_s=600) as served,
        serving_through_listener(served) as (_, host, port),
    ):
        call_table = served.dispatcher.call_table
        client = await _connect_without_reading(
            host, port, request_head("/v1/batch", len(body), "application/x-ndjson") + body
        )
        await until(lambda: served.dispatcher.counters.by_status.total() == calls)
        assert served.dispatcher.counters.by_status["unavailable"] > 0 and call_table.unread_result_bytes < 3 << 20
        reader, writer = await asyncio.open_connection(sock=client, limit=1 << 20)
        lines: list[bytes] = []
        while len(lines) < calls:
            line = await reader.readline()
            lines += [line] if line.startswith(b'{"index"') else []
        unavailable = sum(b'"ResultsUnread"' in line for line in lines)
        assert unavailable == served.dispatcher.counters.by_status["unavailable"]
        await until(lambda: call_table.unread_result_bytes == 0)
        writer.close()


async def test_no_call_is_admitted_while_too_many_results_are_unread() -> None:
    async with serving(results_mb=1) as served:
        served.dispatcher.call_table.unread_result_bytes = 2 << 20
        status, reply = await served.post("/v1/execute", {"code": "1"})
    assert status == 429
    assert "clients have not read results of 2097152 bytes, at most 1048576" in reply["error"]["message"]


async def test_results_that_a_stream_has_sent_are_no_longer_counted() -> None:
    calls = {"calls": [{"code": f"{number}"} for number in range(300)]}
    async with serving() as served:
        headers = {"Accept": "application/x-msgpack-stream"}
        async with served.http.post(f"{served.url}/v1/batch", json=calls, headers=headers) as response:
            unpacker = msgpack.Unpacker()
            unpacker.feed(await response.read())
        assert sorted(line["index"] for line in unpacker) == list(range(300))
        assert served.dispatcher.call_table.unread_result_bytes == 0


async def test_the_connection_limit_is_lowered_to_the_available_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(100, 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert listener.raise_connection_limit(10_000) == 1000 - listener.RESERVED_FDS
    assert limits[-1] == (1000, 1000)
    assert listener.raise_connection_limit(5) == 5


@pytest.mark.parametrize(("connections", "needed"), [(10_000, 612), (256, 612), (5, 361)])
async def test_too_few_descriptors_for_one_client_are_an_error_with_the_needed_number(
    connections: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hard = needed
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert listener.raise_connection_limit(connections) == needed - listener.RESERVED_FDS
    hard -= 1
    with pytest.raises(ConfigError, match=rf"\(ulimit -Hn\) is {hard}, but \d+ connections need {needed}; raise it"):
        listener.raise_connection_limit(connections)


async def test_the_minimum_is_what_one_client_opens() -> None:
    assert listener.MIN_CONNECTIONS == client.MAX_CONNECTIONS
