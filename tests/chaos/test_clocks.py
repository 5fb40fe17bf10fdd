"""Tests with clocks that jump. The service uses no wall clock, and survives jumps of the monotonic clock."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from bench.servers.server_under_test import ServerUnderTest
from sandbox.errors import IsolationError
from sandbox.executor import executor
from sandbox.gateway.calls import dispatcher
from sandbox.gateway.calls.call_table import AnswerRate
from sandbox.jail import choose_level
from sandbox.types import Status
from tests.chaos.test_kills import FLAGS, run_calls
from tests.executor.calling import OWN_PYTHON
from tests.executor.fake_zygotes import driven_executor
from tests.gateway.serving import serving, until

JUMP_S = 1e8
"""Seconds of a jump, about three years."""
RANDOM_CLOCK = """
import os, random, time
time.time = lambda: random.uniform(-1e9, 1e10)
time.time_ns = lambda: int(1e9 * time.time())
open(os.path.join({marks!r}, str(os.getpid())), "w").close()
"""
"""A `sitecustomize` module. It makes the wall clock of its process random, and creates a file whose name is the pid."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerUnderTest]:
    """A server whose processes all have a random wall clock. Each creates a file in `tmp_path/marks`."""
    try:
        choose_level("auto")
    except IsolationError as error:
        pytest.skip(str(error))
    (tmp_path / "marks").mkdir()
    (tmp_path / "sitecustomize.py").write_text(RANDOM_CLOCK.format(marks=str(tmp_path / "marks")))
    with ServerUnderTest(OWN_PYTHON, FLAGS, {"PYTHONPATH": str(tmp_path)}) as server:
        yield server


@pytest.mark.timeout(400)
def test_a_wall_clock_that_jumps_by_years_changes_nothing(server: ServerUnderTest, tmp_path: Path) -> None:
    gateway, *executors = server.processes()[:3]
    with_random_clock = {int(path.name) for path in (tmp_path / "marks").iterdir()}
    assert {gateway, executors[0]} <= with_random_clock
    tally = run_calls(server, 100)
    assert "unavailable" not in tally.statuses


@pytest.mark.parametrize("jump_s", [JUMP_S, -JUMP_S])
@pytest.mark.asyncio
async def test_a_gateway_whose_monotonic_clock_jumps_answers_each_call_once(
    jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = 0.0
    monkeypatch.setattr(dispatcher, "monotonic", lambda: time.monotonic() + offset)
    async with serving() as served:
        await served.post("/v1/execute", {"code": "1"})
        body = {"calls": [{"code": "hang"}] * 4 + [{"code": str(n)} for n in range(40)]}
        response = asyncio.create_task(served.post("/v1/batch", body))
        fake = served.fleet.last_executor
        await until(lambda: sum(call["code"] == "hang" for call in fake.calls.values()) == 4)
        offset = jump_s
        await served.post("/v1/execute", {"code": "2"})
        fake.finish(*[seq for seq, call in fake.calls.items() if call["code"] == "hang"])
        _, answer = await response
        assert [result["stdout"] for result in answer["results"]] == [call["code"] for call in body["calls"]]
        assert all(result["usage"]["queue_ms"] >= 0 for result in answer["results"])
        assert "calls_waiting 0" in (await served.get("/metrics"))[1]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e12, 1e12)), max_size=20))
def test_the_answer_rate_is_valid_for_any_clock(counts: list[tuple[int, float]]) -> None:
    """`counts` are pairs: a number of answers, and the time at which they are counted."""
    rate = AnswerRate()
    for answers, now in counts:
        rate_before = rate.per_s(now)
        rate.count(answers, now)
        assert rate_before <= rate.per_s(now) <= sum(answers for answers, _ in counts)
        other_time = random.Random(answers).uniform(-1e12, 1e12)
        assert 0 <= rate.per_s(other_time) <= rate.per_s(now)


@pytest.mark.parametrize("jump_s", [JUMP_S, -JUMP_S])
@pytest.mark.trio
async def test_an_executor_whose_monotonic_clock_jumps_answers_each_call_once(
    jump_s: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    offset = 0.0
    async with driven_executor(monkeypatch) as driver:
        monkeypatch.setattr(executor, "time", SimpleNamespace(monotonic=lambda: trio.current_time() + offset))
        seqs = driver.submit(*(f"slow 99 {n}" for n in range(30)))
        offset = jump_s
        seqs += driver.submit(*(f"slow 99 {n}" for n in range(30, 60)))
        await driver.wait_for(seqs)
        assert [driver.results[seq].stdout for seq in seqs] == [f"slow 99 {n}" for n in range(60)]
        assert {driver.results[seq].status for seq in seqs} == {Status.OK}
        driver.check_idle()
