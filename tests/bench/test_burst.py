"""Tests of bench.burst: which results count as correct, and when the requirements are met."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
from aiohttp import web

from bench import burst
from bench.burst import ACCEPTS, MeasuredLoad, Memory
from bench.harness.load import CallTally, CallTimes, encoded_batches
from bench.harness.requirements import unmet
from bench.probes.sampler import PeriodicSampler
from bench.servers.service import Service
from bench.workloads.checked_calls import numbered_calls
from tests.bench.conftest import RunBenchmark
from tests.executor.calling import OWN_PYTHON
from tests.http_server import HttpServer

COUNT = 20
USAGE = {"cpu_ms": 1.0}
Results = list[dict[str, Any]]


def _correct_result(call: dict[str, Any]) -> dict[str, Any]:
    process = subprocess.run([sys.executable, "-c", call["code"]], capture_output=True, text=True, check=True)
    return {"id": call["id"], "status": "ok", "stdout": process.stdout, "usage": USAGE, "attempts": 1}


@asynccontextmanager
async def _service(change: Callable[[Results], Results]) -> AsyncIterator[Service]:
    """A service that responds with `change(correct results)`."""

    async def respond(request: web.Request) -> web.Response:
        calls = msgpack.unpackb(await request.read())["calls"]
        results = change([{"index": n, **_correct_result(call)} for n, call in enumerate(calls)])
        if request.headers["Accept"] in ACCEPTS["whole"]:
            return web.Response(body=msgpack.packb({"results": results}))
        return web.Response(body=b"".join(map(msgpack.packb, results)))

    app = web.Application()
    app.router.add_post("/v1/batch", respond)
    async with HttpServer(app) as server:
        yield Service(str(server.make_url("")).rstrip("/"), os.getpid())


async def _tally(change: Callable[[Results], Results], form: str) -> CallTally:
    """Return the tally of `COUNT` calls in batches of five. `form` is a form of responses as for `--answers`."""
    async with _service(change) as service:
        calls = list(numbered_calls("print", COUNT, 7))
        load = MeasuredLoad()
        await load.run(service, encoded_batches(calls, 5, ACCEPTS[form]), COUNT, lambda: None)
    return load.tally


@pytest.mark.asyncio
@pytest.mark.parametrize("form", ACCEPTS)
async def test_correct_results_are_counted_as_correct(form: str) -> None:
    tally = await _tally(lambda results: results, form)
    assert (tally.correct, tally.lost, tally.doubled, tally.mismatched) == (COUNT, 0, 0, 0), tally.examples


@pytest.mark.asyncio
async def test_results_in_another_order_are_mismatched_in_a_whole_response() -> None:
    tally = await _tally(lambda results: results[::-1], "whole")
    assert tally.mismatched == COUNT // 5 * 4  # only the third of the five results of a batch keeps its place


@pytest.mark.asyncio
async def test_streamed_results_may_come_in_any_order_but_only_once() -> None:
    tally = await _tally(lambda results: [*results[::-1], results[0]], "stream")
    assert (tally.correct, tally.doubled) == (COUNT, COUNT // 5)  # one doubled result per batch


@pytest.mark.asyncio
@pytest.mark.parametrize("form", ["stream", "whole"])
async def test_missing_results_are_lost(form: str) -> None:
    tally = await _tally(lambda results: results[:-1], form)
    assert (tally.correct, tally.lost) == (COUNT - COUNT // 5, COUNT // 5)


def _load(calls_per_s: float, correct: int = 100) -> MeasuredLoad:
    """A load of 100 calls."""
    tally = CallTally(100, correct, times=[CallTimes("short", 1.0, 1.0)])
    return MeasuredLoad(tally, seconds=100 / calls_per_s)


IDLE = Memory(server_mb=100, gateway_mb=50)


def _sampler(memory_mb: float) -> PeriodicSampler[Memory]:
    """Samples in which the server always has this much memory."""
    with PeriodicSampler(lambda: Memory(memory_mb, gateway_mb=55.5)) as sampler:
        pass
    return sampler


@pytest.mark.asyncio
async def test_the_tally_of_a_load_that_runs_twice_has_the_calls_of_both_runs() -> None:
    async with _service(lambda results: results) as service:
        load, seconds = MeasuredLoad(), []
        for calls in (list(numbered_calls("print", COUNT, seed)) for seed in (7, 8)):
            await load.run(service, encoded_batches(calls, 5, ACCEPTS["whole"]), COUNT, lambda: None)
            seconds.append(load.seconds)
    assert (load.tally.calls, load.tally.correct, len(load.tally.times)) == (2 * COUNT, 2 * COUNT, 2 * COUNT)
    assert load.seconds > seconds[0] > 0
    assert load.calls_per_s == 2 * COUNT / load.seconds


def test_a_burst_is_compared_with_the_steady_load_around_it() -> None:
    result = burst.summarize(_load(90), _load(100), IDLE, _sampler(200))
    assert unmet(result) == []
    assert result["gateway_mb"] == {"idle": 50, "peak": 55.5}
    assert result["ratio"] == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    ("load", "memory_mb", "text"),
    [
        (_load(89), 200, "Not met: calls/s of the burst over those of the steady load is 0.89, expected ≥ 0.9."),
        (_load(100, 99), 200, "Not met: lost is 1, expected ≤ 0."),
        (_load(100), 1431, "Not met: MiB of memory at the peak is 1,431, expected ≤ 1430."),
    ],
)
def test_a_requirement_that_is_not_met_is_named(load: MeasuredLoad, memory_mb: float, text: str) -> None:
    assert unmet(burst.summarize(load, _load(100), IDLE, _sampler(memory_mb))) == [text]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("needs_isolation")
def test_a_small_burst_is_answered(run_benchmark: RunBenchmark) -> None:
    sizes = ["--calls", "120", "--loops", "0.02", "--batch", "7", "--steady", "64", "--stdlib-only"]
    exit_code, result = run_benchmark(burst.main, *sizes, "--python", OWN_PYTHON)
    assert (result["correct"], result["lost"], result["doubled"], result["mismatched"]) == (120, 0, 0, 0)
    assert result["requests"] == 18  # 120 calls in batches of 7
    # Every 50th call is a loop, counted from the first call of the steady load, which has 32 calls before the burst.
    assert result["statuses"] == {"ok": 117, "timeout": 3}
    options = result["command"].removeprefix("python -m bench.burst ").split()
    assert sorted(options) == sorted(sizes)
    assert result["memory_mb"]["peak"] > result["gateway_mb"]["peak"] > 0
    assert 0 < result["burst"]["executor_cpu_ms"] < result["burst"]["cpu_ms"]
    assert exit_code == (0 if result["holds"] else 1)
