"""Tests of the command bench.chaos, and of the errors that its load counts."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
from aiohttp import web

from bench import chaos
from bench.harness.command import BenchFailed
from bench.harness.load import MSGPACK_STREAM, CallTally
from bench.servers.server_under_test import CheckedLoad, ServerUnderTest
from bench.workloads.checked_calls import checked_calls
from tests.bench.conftest import RefusedArguments, RunBenchmark
from tests.bench.test_checked_calls import result_of
from tests.executor.calling import OWN_PYTHON
from tests.http_server import HttpServer

COUNT = 60
CALLS_BY_ID = {call.call["id"]: call for call in checked_calls(COUNT, 1)}
Lines = list[dict[str, Any]]
"""The lines of a streamed response: results with the index of their call."""


@asynccontextmanager
async def service_with(change: Callable[[Lines], Lines]) -> AsyncIterator[str]:
    """A service that streams `change(correct results)` for each batch."""

    async def respond(request: web.Request) -> web.StreamResponse:
        body = msgpack.unpackb(await request.read())
        response = web.StreamResponse()
        await response.prepare(request)
        for line in change(
            [{"index": n, **result_of(CALLS_BY_ID[call["id"]])} for n, call in enumerate(body["calls"])]
        ):
            await response.write(msgpack.packb(line))
        return response

    app = web.Application()
    app.router.add_post("/v1/batch", respond)
    async with HttpServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


class RemoteServer(ServerUnderTest):
    """A server of which only the address is known."""

    url = ""

    def __init__(self, url: str) -> None:
        self.url = url

    def check_is_alive(self) -> None: ...


async def _tally(change: Callable[[Lines], Lines]) -> CallTally:
    """Send all calls in batches of ten."""
    async with service_with(change) as url:
        tally = CallTally(COUNT)
        load = CheckedLoad(
            RemoteServer(url),
            checked_calls(COUNT, 1),
            tally,
            random.Random(1),
            batch_sizes=(10,),
            accepts=(MSGPACK_STREAM,),
            abandoned_share=0,
        )
        await load.run(10)
    return tally


@pytest.mark.asyncio
async def test_correct_results_are_counted_as_correct() -> None:
    tally = await _tally(lambda lines: lines)
    assert (tally.answered, tally.lost, tally.doubled, tally.mismatched) == (COUNT, 0, 0, 0)


@pytest.mark.asyncio
async def test_a_result_that_comes_twice_is_doubled() -> None:
    tally = await _tally(lambda lines: [lines[0], *lines])
    assert (tally.answered, tally.doubled, tally.mismatched) == (COUNT, COUNT // 10, 0)  # one in each batch


@pytest.mark.asyncio
async def test_swapped_results_are_mismatched() -> None:
    def swap(lines: list[Any]) -> list[Any]:
        return [{**lines[1], "index": 0}, {**lines[0], "index": 1}, *lines[2:]]

    tally = await _tally(swap)
    assert (tally.answered, tally.doubled, tally.mismatched) == (COUNT, 0, 2 * COUNT // 10)


@pytest.mark.asyncio
async def test_a_result_that_is_missing_from_a_complete_response_is_an_error() -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        await _tally(lambda lines: lines[:-1])
    assert raised.group_contains(BenchFailed, match="10 calls sent, 9 answered")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
@pytest.mark.parametrize("flag", ["--kill-every", "--kill-gateway"])
def test_a_duration_must_be_a_positive_number(flag: str, value: str, refused_arguments: RefusedArguments) -> None:
    assert flag in refused_arguments(chaos.main, flag, value)


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("needs_isolation")
def test_no_call_is_lost_while_processes_are_killed(run_benchmark: RunBenchmark) -> None:
    sizes = ["--calls", "100", "--kill-every", "1", "--stdlib-only", "--python", OWN_PYTHON]
    exit_code, result = run_benchmark(chaos.main, *sizes)
    assert (result["lost"], result["doubled"], result["mismatched"]) == (0, 0, 0)
    assert sum(result["statuses"].values()) == 100
    assert exit_code == (0 if result["holds"] else 1)
