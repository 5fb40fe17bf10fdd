"""Tests that requests leave no objects in memory, even while the cyclic garbage collector is off."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import tracemalloc
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
from aiohttp import web

from bench.probes import processes
from bench.servers.stub_executor import serving as stubbed_server
from sandbox.gateway.calls.batch import Batch, PendingCall
from sandbox.gateway.http.errors import HttpError
from sandbox.gateway.observe.history import MAX_STEPS, History, Snapshot
from sandbox.types import Call, Status
from tests.gateway.observe.test_stats import NO_LATENCIES
from tests.gateway.serving import Served, serving, until

CALLS = [{"code": str(n)} for n in range(20)]
# Path, body, headers and the expected HTTP status, by name.
REQUESTS: dict[str, tuple[str, Any, dict[str, str], int]] = {
    "a call": ("/v1/execute", {"code": "1"}, {}, 200),
    "a batch": ("/v1/batch", {"calls": CALLS}, {}, 200),
    "a verify request": ("/v1/verify", {"pairs": [{"gold": "1", "answer": "1"}] * 20}, {}, 200),
    "malformed calls": ("/v1/batch", {"calls": [*CALLS, {}]}, {}, 200),
    "a malformed batch": ("/v1/batch", {"call": CALLS}, {}, 400),
    "malformed JSON": ("/v1/batch", b"{", {"Content_Type": "application/json"}, 400),
    "an unsupported type": ("/v1/batch", b"{}", {"Content_Type": "text/plain"}, 415),
    "a full queue": ("/v1/batch", {"calls": CALLS + CALLS}, {}, 413),
    "no such path": ("/v1/nothing", {"calls": CALLS}, {}, 404),
}


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    """Switch the collector off, so that objects in reference cycles stay in memory."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _live_objects() -> Counter[str]:
    kinds = (Batch, PendingCall, Call, HttpError, web.Request)
    return Counter(type(item).__name__ for item in gc.get_objects() if issubclass(type(item), kinds))


async def _stream(served: Served) -> None:
    headers = {"Accept": "application/x-ndjson"}
    async with served.http.post(served.url + "/v1/batch", json={"calls": CALLS}, headers=headers) as response:
        assert len((await response.read()).splitlines()) == len(CALLS)


async def _disconnect(served: Served) -> None:
    """Send a batch, and disconnect before any of its calls has a result."""
    response = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang"}] * 20}))
    await until(lambda: served.dispatcher.call_table.running(0) > 0)
    response.cancel()
    await until(lambda: served.dispatcher.call_table.outstanding.calls == 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [*REQUESTS, "a stream", "a client that disconnects"])
async def test_no_request_leaves_objects_for_the_garbage_collector(name: str) -> None:
    async with serving(queue_calls=30) as served:
        with _garbage_collector_off():
            objects_before = _live_objects()
            for _ in range(3):
                if name in REQUESTS:
                    path, body, headers, expected = REQUESTS[name]
                    status, _ = await served.post(path, body, **headers)
                    assert status == expected
                else:
                    await (_stream if name == "a stream" else _disconnect)(served)
            for _ in range(20):  # the server finishes the request after its last byte
                await asyncio.sleep(0)
            open_connection = Counter(Request=1)  # an open connection keeps its last request
            assert not _live_objects() - objects_before - open_connection


def _busy_snapshot(second: int) -> Snapshot:
    """Return a snapshot of a busy server: each number differs from that in the snapshot of the second before."""
    rng = random.Random(second)
    return Snapshot(
        second + rng.random(),
        dict.fromkeys(Status, 1000 * second),
        {f"refused_{code}": second for code in (400, 413, 429, 503)},
        {
            name: tuple(second * (index % 7) for index in range(len(NO_LATENCIES)))
            for name in ("queue_ms", "run_ms", "answer_ms")
        },
        {f"gauge_of_a_name_as_long_as_{number}": rng.random() * 1e10 for number in range(16)},
    )


def test_ten_minutes_of_history_take_less_than_a_mebibyte() -> None:
    """The history fills after the start of a server, so a large history would look like a leak."""
    tracemalloc.start()
    try:
        history = History(_busy_snapshot(0))
        for second in range(1, MAX_STEPS + 1):
            history.add(_busy_snapshot(second))
        allocated_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert allocated_bytes < 1 << 20
    assert history.after(MAX_STEPS - 1)[0]["statuses"]["ok"] == 1000  # as `_busy_snapshot` counts per second


def test_an_idle_gateway_returns_the_memory_of_its_largest_requests() -> None:
    body = msgpack.packb({"calls": [{"code": "#" * 100_000}] * 250})
    with stubbed_server() as server:
        for _ in range(3):  # glibc maps the first block of a size, and takes later blocks of this size from the heap
            request = urllib.request.Request(f"{server.url}/v1/batch", body, {"Content-Type": "application/msgpack"})
            with urllib.request.urlopen(request, timeout=60) as response:
                assert len(msgpack.unpackb(response.read())["results"]) == 250
        idle_mb = 40  # a new gateway has 30 MB, and a gateway that keeps the memory of these requests has 54 MB
        deadline = time.monotonic() + 10
        while processes.pss_mb([server.pid]) > idle_mb and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes.pss_mb([server.pid]) < idle_mb
