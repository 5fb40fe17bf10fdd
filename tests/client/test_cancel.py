"""Tests of `cancel` of the clients: calls that wait, are sent or run end with `Cancelled`, and are not sent again."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from aiohttp.test_utils import unused_port

from sandbox.client import AsyncClient, Client
from sandbox.errors import InvalidCall, Unreachable
from sandbox.types import Call, Result, Status
from tests.client.servers import gateway_in_a_thread, refuse_with, respond_unavailable, scripted_server
from tests.fakes import FakeFleet
from tests.gateway.serving import serving, until


def error_type(result: Result) -> str:
    assert result.status is Status.UNAVAILABLE and result.error is not None
    return result.error.type


@pytest.mark.asyncio
async def test_cancel_ends_calls_at_all_endpoints() -> None:
    async with serving() as first, serving() as second, asyncio.timeout(10):
        async with AsyncClient([first.url, second.url], batch_size=1) as client, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(client.run_batch([Call("hang", id="a/b"), Call("hang", id="a/b")]))
            other = tasks.create_task(client.execute("hang", id="b"))
            executors = [first.fleet.last_executor, second.fleet.last_executor]
            await until(lambda: sum(len(executor.calls) for executor in executors) == 3)
            assert await client.cancel("a/b") == 2
            assert list(map(error_type, await running)) == ["Cancelled"] * 2
            assert await client.cancel("a/b") == 0
            assert await client.cancel("b") == 1
            assert error_type(await other) == "Cancelled"
        assert sum(len(executor.calls) for executor in executors) == 3  # no call was sent again


@pytest.mark.asyncio
async def test_calls_that_are_not_sent_yet_or_are_on_their_way_are_cancelled() -> None:
    async with serving() as served, AsyncClient(served.url, max_connections=1, batch_size=1) as client:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            first = tasks.create_task(client.execute("hang", id="a"))  # its request is sent while `cancel` runs
            second = tasks.create_task(client.execute("hang", id="a"))  # this call waits for a connection
            await asyncio.sleep(0)
            assert await client.cancel("a") == 2
            assert [error_type(await call) for call in (first, second)] == ["Cancelled"] * 2
        assert served.dispatcher.call_table.outstanding.calls == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("failure", [refuse_with(503, Retry_After="3600"), respond_unavailable("Stopped", "1")])
async def test_calls_that_wait_for_their_next_attempt_are_cancelled(failure: object) -> None:
    async with scripted_server(failure) as server, AsyncClient(server.url) as client:  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            running = asyncio.create_task(client.execute("1", id="a"))
            await until(lambda: len(server.requests) == 1)
            assert await client.cancel("a") == 1
            assert error_type(await running) == "Cancelled"


@pytest.mark.asyncio
@pytest.mark.parametrize("error", ["Deadline", "Cancelled"])
async def test_a_call_that_was_ended_is_not_sent_again(error: str) -> None:
    async with scripted_server(respond_unavailable(error, "1")) as server, AsyncClient(server.url) as client:
        assert error_type(await client.execute("1")) == error
    assert len(server.requests) == 1


@pytest.mark.asyncio
async def test_cancel_refuses_an_empty_id_and_raises_without_a_server() -> None:
    async with AsyncClient(f"http://127.0.0.1:{unused_port()}") as client:
        with pytest.raises(InvalidCall, match="call_id: expected the id of a call, got an empty text"):
            await client.cancel("")
        with pytest.raises(Unreachable, match="connection refused"):
            await client.cancel("a")


@pytest.mark.asyncio
async def test_a_deadline_of_the_client_reaches_the_server() -> None:
    async with serving(FakeFleet(slots=1)) as served, AsyncClient(served.url) as client, asyncio.timeout(10):
        results = await client.run_batch(["hang", Call("hang", deadline_s=0.02)], {"deadline_s": 0.05})
    assert list(map(error_type, results)) == ["Deadline"] * 2
    assert served.dispatcher.counters.by_status["unavailable"] == 2


def test_the_client_without_an_event_loop_cancels_from_another_thread() -> None:
    with gateway_in_a_thread() as url, Client(url) as client:
        results: list[Result] = []
        thread = threading.Thread(target=lambda: results.append(client.execute("hang", id="a")))
        thread.start()
        stop_at = time.monotonic() + 10
        while not (cancelled := client.cancel("a")) and time.monotonic() < stop_at:
            pass
        thread.join()
    assert cancelled == 1 and error_type(results[0]) == "Cancelled"
