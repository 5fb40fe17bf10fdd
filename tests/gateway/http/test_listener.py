"""Tests of clients that open too many connections, that send too slowly, or that read too slowly."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import msgpack
import pytest
from aiohttp import web

from sandbox.client import clients as client
from sandbox.errors import ConfigError
from sandbox.gateway import build_app, routes, server
from sandbox.gateway.http import body_reader, listener
from sandbox.gateway.http.body_reader import BodyReader, Reservation
from tests.fakes import FakeFleet
from tests.gateway.serving import Served, serving, until
from tests.http_server import stop_accepting

pytestmark = pytest.mark.asyncio
MEBIBYTE_OF_CODE = "x" * (1 << 20)
"""Code of 1 MiB. Its result is equally long, because a fake executor returns the code as stdout."""


@asynccontextmanager
async def serving_through_listener(
    served: Served, *, send_timeout_s: float = 60.0
) -> AsyncIterator[tuple[listener.Listener, str, int]]:
    """Serve the dispatcher of `served` on a second address, through a `Listener`, as `serve` does.

    There the setting `stall_s` limits only how slowly clients read. `send_timeout_s` limits how slowly they send heads
    and bodies.
    """
    app = build_app(served.dispatcher)
    app[routes.BODY_READER].stall_s = send_timeout_s
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    listening, address = await server._listen(runner, served.dispatcher)
    listening.send_timeout_s = send_timeout_s
    host, _, port = address.removeprefix("http://").rpartition(":")
    try:
        yield listening, host, int(port)
    finally:
        assert listening._server is not None
        await stop_accepting(listening._server)
        listening.close()
        await runner.cleanup()


async def exchange(host: str, port: int, request: bytes, end: bytes = b"") -> bytes:
    """Send a request, and return the received bytes: up to `end` if it is given, else until the connection is
    closed."""
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
        (_, first), (_, second) = [await asyncio.open_connection(host, port) for _ in range(2)]
        await until(lambda: listening.connections == 2)
        response = await exchange(host, port, b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        _, _, body = response.partition(b"\r\n\r\n")
        assert response.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in response
        assert "2 connections are open, which is the limit" in json.loads(body)["error"]["message"]
        assert served.dispatcher.counters.refused[503] == 1
        first.close()
        await until(lambda: listening.connections == 1)
        async with served.http.get(f"http://{host}:{port}/ready") as accepted:
            assert accepted.status == 200
        second.close()


async def test_a_connection_gets_no_response_if_too_many_rejected_ones_are_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "MAX_REJECTED", 0)
    async with serving(port=0, connections=1) as served, serving_through_listener(served) as (listening, host, port):
        _, writer = await asyncio.open_connection(host, port)
        await until(lambda: listening.connections == 1)
        assert await exchange(host, port, b"") == b""
        writer.close()


async def test_a_connection_that_sends_no_whole_head_is_closed() -> None:
    async with (
        serving(port=0) as served,
        serving_through_listener(served, send_timeout_s=0.05) as (listening, host, port),
    ):
        assert await exchange(host, port, b"GET /ready HTTP/1.1\r\nHost: local") == b""
        await until(lambda: listening.connections == 0)


class FakeTransport(asyncio.Transport):
    """Records whether it was aborted."""

    was_aborted = False

    def abort(self) -> None:
        self.was_aborted = True


def connect_fake(stall_s: float = 0.0, on_stalled: Callable[[], None] = lambda: None) -> tuple[Any, FakeTransport]:
    """Return a connection of a listener with the limit `stall_s`, and its transport."""
    connection = listener._Connection(
        listener.Listener(asyncio.Protocol, 1, stall_s, on_rejected=lambda: None, on_stalled=on_stalled)
    )
    transport = FakeTransport()
    connection.connection_made(transport)
    return connection, transport


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
async def test_the_end_of_a_head_is_recognized_however_the_bytes_are_split(
    chunks: tuple[bytes, ...], is_complete: bool
) -> None:
    connection, transport = connect_fake()
    for chunk in chunks:
        connection.data_received(chunk)
    if not is_complete:
        await until(lambda: transport.was_aborted)
    await asyncio.sleep(listener.READ_GRACE_S + 0.05)
    assert transport.was_aborted != is_complete
    connection.connection_lost(None)


async def test_bytes_that_arrived_while_the_loop_was_blocked_are_read_before_the_abort() -> None:
    """After a time in which an event loop was blocked, it first runs its expired timers, and then reads from
    sockets."""
    connection, transport = connect_fake()
    timer = connection._head_timer
    await until(lambda: connection._head_timer is not timer)
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    await asyncio.sleep(listener.READ_GRACE_S + 0.05)
    assert not transport.was_aborted
    connection.connection_lost(None)


async def test_a_body_that_stops_is_a_408() -> None:
    async with (
        serving(port=0) as served,
        serving_through_listener(served, send_timeout_s=0.2) as (listening, host, port),
    ):
        listening.stall_s = 60.0  # so that only the limit for bodies applies
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

    def record_deadline(timeout: asyncio.Timeout, when: float | None) -> None:
        deadlines.append(when)
        reschedule(timeout, when)

    class FakeRequest:
        """The part of a request that `BodyReader.read` uses."""

        content_length = None

        @property
        def content(self) -> FakeRequest:
            return self

        def is_eof(self) -> bool:
            return False

        at_eof = is_eof

        async def iter_any(self) -> AsyncIterator[bytes]:
            for chunk in (b"ab", b"cdef", b"g", b"hijklm"):
                yield chunk

    monkeypatch.setattr(body_reader, "CHUNK_BYTES", 4)
    async with serving() as served:
        reader = BodyReader(served.app[routes.BODY_READER].budget, 100, stall_s=60.0)
        monkeypatch.setattr(asyncio.Timeout, "reschedule", record_deadline)
        with Reservation(reader.budget, None, "bodies") as reservation:
            body = await reader.read(cast(web.Request, FakeRequest()), reservation)
        assert body == b"abcdefghijklm"
        assert (
            len(deadlines) == 3
        )  # deadlines at 0 bytes, 6 bytes (more than one chunk of 4) and 13 bytes (more than 3)


async def _connect_without_reading(host: str, port: int, request: bytes) -> socket.socket:
    """Return a socket with a small receive buffer that has sent a request and reads nothing."""
    slow_client = socket.socket()
    slow_client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow_client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow_client, (host, port))
    await loop.sock_sendall(slow_client, request)
    return slow_client


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
async def test_a_client_that_does_not_read_is_disconnected(accept: str) -> None:
    body = json.dumps({"calls": [{"code": MEBIBYTE_OF_CODE}] * 8}).encode()
    async with serving(port=0, stall_s=0.1) as served, serving_through_listener(served) as (listening, host, port):
        slow_client = await _connect_without_reading(host, port, request_head("/v1/batch", len(body), accept) + body)
        await until(lambda: served.dispatcher.counters.stalled == 1)
        await until(lambda: listening.connections == 0)
        call_table = served.dispatcher.call_table
        await until(lambda: call_table.unread_result_bytes == 0 and call_table.outstanding.calls == 0)
        slow_client.close()


async def test_unread_results_are_bounded() -> None:
    """The client reads nothing at first. The kernel buffers some MiB of its results, and the gateway 1 MiB
    (`results_mb`). The 100 results have 25 MiB, so the last results become `unavailable`."""
    num_calls = 100
    body = json.dumps({"calls": [{"code": "x" * (1 << 18)}] * num_calls}).encode()
    async with (
        serving(FakeFleet(slots=1), port=0, results_mb=1, stall_s=600) as served,
        serving_through_listener(served) as (_, host, port),
    ):
        call_table = served.dispatcher.call_table
        slow_client = await _connect_without_reading(
            host, port, request_head("/v1/batch", len(body), "application/x-ndjson") + body
        )
        await until(lambda: served.dispatcher.counters.by_status.total() == num_calls)
        # Unread are 1 MiB, the result that exceeded this limit, and the small `unavailable` results.
        assert served.dispatcher.counters.by_status["unavailable"] > 0 and call_table.unread_result_bytes < 3 << 20
        reader, writer = await asyncio.open_connection(sock=slow_client, limit=1 << 20)
        lines: list[bytes] = []
        while len(lines) < num_calls:
            line = await reader.readline()
            lines += [line] if line.startswith(b'{"index"') else []  # other lines are heartbeats
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
    limits = [(100, 1000)]  # pairs of a soft limit and a hard limit
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert listener.raise_connection_limit(10_000) == 1000 - listener.RESERVED_FDS
    assert limits[-1] == (1000, 1000)
    assert listener.raise_connection_limit(5) == 5, "5 connections need fewer than 1000 descriptors"


# The server itself needs 356 descriptors (`RESERVED_FDS`), and one client opens 256 connections.
@pytest.mark.parametrize(("connections", "needed"), [(10_000, 356 + 256), (256, 356 + 256), (5, 356 + 5)])
async def test_too_few_descriptors_for_one_client_are_an_error_with_the_needed_number(
    connections: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = needed
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert listener.raise_connection_limit(connections) == needed - listener.RESERVED_FDS
    limit -= 1
    with pytest.raises(ConfigError, match=rf"\(ulimit -Hn\) is {limit}, but \d+ connections need {needed}; raise it"):
        listener.raise_connection_limit(connections)


async def test_the_minimum_of_connections_is_the_maximum_of_one_client() -> None:
    assert listener.MIN_CONNECTIONS == client.MAX_CONNECTIONS


async def test_a_connection_that_stays_paused_is_closed_and_counted() -> None:
    stalled: list[str] = []
    connection, transport = connect_fake(on_stalled=lambda: stalled.append("once"))
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    connection.pause_writing()
    await until(lambda: transport.was_aborted)
    assert stalled == ["once"], f"on_stalled was called {len(stalled)} times"
    connection.connection_lost(None)


@pytest.mark.parametrize("end", ["resume_writing", "connection_lost"])
async def test_a_connection_that_resumes_or_ends_has_no_time_limit_left(end: str) -> None:
    connection, transport = connect_fake(stall_s=600)
    connection.pause_writing()
    timer = connection._read_timer
    getattr(connection, end)(*([None] if end == "connection_lost" else []))
    assert timer.cancelled() and not transport.was_aborted, f"the time limit goes on after {end}"
    if end == "resume_writing":
        connection.connection_lost(None)
