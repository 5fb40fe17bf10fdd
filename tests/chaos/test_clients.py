"""Tests with clients that send half a request, read nothing, or hang up. The gateway forgets their calls, and the calls
of other clients get their results."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.fakes import FakeFleet
from tests.gateway.serving import Served, serving, until

LARGE = "x" * 200_000
HANGING_CALLS = [{"code": "hang"}] * 5
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def request(calls: list[dict[str, Any]], *, missing: int = 0) -> bytes:
    """Return the request of a batch whose results are to be streamed. The last `missing` bytes of its body are left
    out."""
    body = json.dumps({"calls": calls}).encode()
    head = f"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nAccept: application/x-ndjson\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body[: len(body) - missing]


async def connect(served: Served) -> Streams:
    host, _, port = served.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def reset(streams: Streams) -> None:
    """Close a connection so that the other end gets a reset. A linger time of 0 does that."""
    streams[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    streams[1].close()


async def send_half_a_head(served: Served) -> None:
    streams = await connect(served)
    streams[1].write(b"POST /v1/batch HT")
    await reset(streams)


async def send_half_a_body(served: Served) -> None:
    streams = await connect(served)
    streams[1].write(request([{"code": LARGE}], missing=100_000))
    await streams[1].drain()
    await reset(streams)


async def leave_before_any_result(served: Served) -> None:
    streams = await connect(served)
    calls_before = served.dispatcher.call_table.outstanding.calls
    streams[1].write(request(HANGING_CALLS))
    await until(lambda: served.dispatcher.call_table.outstanding.calls > calls_before)
    await reset(streams)


async def leave_before_all_results(served: Served) -> None:
    streams = await connect(served)
    streams[1].write(request([{"code": "1"}, *HANGING_CALLS]))
    assert b"200 OK" in await streams[0].readline()
    await reset(streams)


async def read_no_result(served: Served) -> None:
    streams = await connect(served)
    streams[1].write(request([{"code": LARGE}] * 100))
    assert b"200 OK" in await streams[0].readline()
    await reset(streams)


RUDE_CLIENTS: list[Callable[[Served], Awaitable[None]]] = [
    send_half_a_head,
    send_half_a_body,
    leave_before_any_result,
    leave_before_all_results,
    read_no_result,
]


@pytest.mark.asyncio
async def test_calls_of_clients_that_hang_up_are_cancelled_and_other_calls_get_their_results() -> None:
    async with serving(FakeFleet(slots=16)) as served, asyncio.timeout(100):
        batches = [[{"code": f"# {turn} {n}", "id": f"{turn}-{n}"} for n in range(40)] for turn in range(4)]
        async with asyncio.TaskGroup() as group:
            responses = [group.create_task(served.post("/v1/batch", {"calls": calls})) for calls in batches]
            for _ in range(4):
                for rude_client in RUDE_CLIENTS:
                    group.create_task(rude_client(served))
        for calls, response in zip(batches, responses, strict=True):
            results = response.result()[1]["results"]
            expected = [(call["id"], call["code"]) for call in calls]  # the fake executors print the code
            assert [(result["id"], result["stdout"]) for result in results] == expected
        await until(lambda: not served.dispatcher.call_table.outstanding.calls)
        hanging = [seq for seq, call in served.fleet.last_executor.calls.items() if call["code"] == "hang"]
        await until(lambda: set(hanging) <= set(served.fleet.last_executor.cancelled))
        assert (await served.post("/v1/execute", {"code": "after"}))[1]["stdout"] == "after"
        assert served.dispatcher.call_table.outstanding.bytes == 0
        assert len(served.fleet.executors) == 1, "no executor was replaced"


@pytest.mark.asyncio
async def test_a_client_that_reads_late_gets_all_results_and_delays_no_other_client() -> None:
    async with serving() as served, asyncio.timeout(100):
        reader, writer = await connect(served)
        writer.write(request([{"code": f"{LARGE}{n}"} for n in range(100)]))
        await reader.readuntil(b"\r\n\r\n")
        for n in range(20):
            assert (await served.post("/v1/execute", {"code": str(n)}))[1]["stdout"] == str(n)
        body = b""
        while size := int(await reader.readline(), 16):  # the chunks of the HTTP body
            body += (await reader.readexactly(size + 2))[:-2]
        writer.close()
        results = [json.loads(line) for line in body.splitlines()]
        stdout_by_index = {result["index"]: result["stdout"] for result in results}
        assert len(results) == 100
        assert stdout_by_index == {n: f"{LARGE}{n}" for n in range(100)}
