"""Clients that send half, read nothing, or hang up: theirs is forgotten, and others do not notice."""

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
HANGING = [{"code": "hang"}] * 5
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def request(calls: list[dict[str, Any]], *, missing: int = 0) -> bytes:
    """A batch whose answers are streamed; of the body, the last bytes are `missing`."""
    body = json.dumps({"calls": calls}).encode()
    head = f"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nAccept: application/x-ndjson\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body[: len(body) - missing]


async def connect(served: Served) -> Streams:
    host, _, port = served.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def vanish(streams: Streams) -> None:
    """Hang up without a word: the other end gets a reset."""
    streams[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    streams[1].close()


async def half_a_head(served: Served) -> None:
    streams = await connect(served)
    streams[1].write(b"POST /v1/batch HT")
    await vanish(streams)


async def half_a_body(served: Served) -> None:
    streams = await connect(served)
    streams[1].write(request([{"code": LARGE}], missing=100_000))
    await streams[1].drain()
    await vanish(streams)


async def no_patience(served: Served) -> None:
    streams = await connect(served)
    before = served.dispatcher.call_table.outstanding.calls
    streams[1].write(request(HANGING))
    await until(lambda: served.dispatcher.call_table.outstanding.calls > before)
    await vanish(streams)


async def the_first_line_only(served: Served) -> None:
    streams = await connect(served)
    streams[1].write(request([{"code": "1"}, *HANGING]))
    assert b"200 OK" in await streams[0].readline()
    await vanish(streams)


async def no_reading(served: Served) -> None:
    streams = await connect(served)
    streams[1].write(request([{"code": LARGE}] * 100))
    assert b"200 OK" in await streams[0].readline()
    await vanish(streams)


RUDE: list[Callable[[Served], Awaitable[None]]] = [
    half_a_head,
    half_a_body,
    no_patience,
    the_first_line_only,
    no_reading,
]


@pytest.mark.asyncio
async def test_clients_that_vanish_leave_nothing_behind_and_disturb_nobody() -> None:
    async with serving(FakeFleet(slots=16)) as served, asyncio.timeout(100):
        batches = [[{"code": f"# {turn} {n}", "id": f"{turn}-{n}"} for n in range(40)] for turn in range(4)]
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(served.post("/v1/batch", {"calls": calls})) for calls in batches]
            for _ in range(4):
                for rude in RUDE:
                    group.create_task(rude(served))
        for calls, answer in zip(batches, asking, strict=True):
            results = answer.result()[1]["results"]
            assert [(result["id"], result["stdout"]) for result in results] == [(c["id"], c["code"]) for c in calls]
        await until(lambda: not served.dispatcher.call_table.outstanding.calls)
        hung = [seq for seq, call in served.fleet.last_executor.calls.items() if call["code"] == "hang"]
        await until(lambda: set(hung) <= set(served.fleet.last_executor.cancelled))
        assert (await served.post("/v1/execute", {"code": "after"}))[1]["stdout"] == "after"
        assert served.dispatcher.call_table.outstanding.bytes == 0
        assert len(served.fleet.executors) == 1


@pytest.mark.asyncio
async def test_a_client_that_reads_late_gets_all_and_holds_up_nobody() -> None:
    async with serving() as served, asyncio.timeout(100):
        reader, writer = await connect(served)
        writer.write(request([{"code": f"{LARGE}{n}"} for n in range(100)]))
        await reader.readuntil(b"\r\n\r\n")
        for n in range(20):
            assert (await served.post("/v1/execute", {"code": str(n)}))[1]["stdout"] == str(n)
        seen: dict[int, str] = {}
        while size := int(await reader.readline(), 16):
            chunk = await reader.readexactly(size + 2)
            for line in chunk[:-2].splitlines():
                answer = json.loads(line)
                assert answer["index"] not in seen
                seen[answer["index"]] = answer["stdout"]
        writer.close()
        assert seen == {n: f"{LARGE}{n}" for n in range(100)}
