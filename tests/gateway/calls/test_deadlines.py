"""Tests of deadlines with fake executors.

A deadline is the time after its admission at which a call is cancelled if it is not finished. The call then gets its
result at once, and its executor stops it.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import pytest

from sandbox.gateway.calls import executor_handle
from tests.fakes import FakeFleet
from tests.gateway.serving import Served, serving, until

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_handle, "MIN_BACKOFF_S", 0.0)


def error_types(body: Any) -> list[str | None]:
    return [result["error"] and result["error"]["type"] for result in body["results"]]


def assert_idle(served: Served) -> None:
    table = served.dispatcher.call_table
    assert (table.outstanding.calls, table.outstanding.bytes, table.waiting, served.dispatcher.dispatched) == (0,) * 4
    assert not served.dispatcher._expiry_timers


async def test_waiting_and_running_calls_end_at_the_deadline_of_their_batch() -> None:
    async with serving(FakeFleet(slots=1)) as served, asyncio.timeout(10):
        batch = {"calls": [{"code": "hang"}] * 4, "deadline_s": 0.02}
        status, body = await served.post("/v1/batch", batch)
        assert (status, error_types(body)) == (200, ["Deadline"] * 4)
        assert [result["attempts"] for result in body["results"]] == [1, 1, 0, 0]
        messages = [result["error"]["message"] for result in body["results"]]
        assert "it ran (attempt 1)" in messages[0] and "it waited for a slot" in messages[3]
        await until(lambda: sorted(served.fleet.last_executor.cancelled) == [1, 2])
        assert len(served.fleet.last_executor.calls) == 2
        assert served.dispatcher.counters.by_status["unavailable"] == 4
        assert_idle(served)


async def test_only_the_calls_of_a_batch_whose_deadline_passes_end() -> None:
    async with serving() as served, asyncio.timeout(10):
        calls = [{"code": "hang"}, {"code": "hang", "deadline_s": 0.02}, {"code": "1", "deadline_s": 0.02}]
        response = asyncio.create_task(served.post("/v1/batch", {"calls": calls, "defaults": {"deadline_s": 3600}}))
        await until(lambda: served.fleet.last_executor.cancelled == [2])
        served.fleet.last_executor.finish(1)
        _, body = await response
        assert error_types(body) == [None, "Deadline", None]
        assert_idle(served)


async def test_the_window_of_calls_that_end_at_their_deadline_is_free_for_waiting_calls() -> None:
    async with serving(FakeFleet(slots=1)) as served, asyncio.timeout(10):
        calls = [{"code": "hang", "deadline_s": 0.02}] * 2 + [{"code": "1"}]
        _, body = await served.post("/v1/batch", {"calls": calls})
        assert error_types(body) == ["Deadline", "Deadline", None]


async def test_a_late_result_is_dropped() -> None:
    async with serving() as served, asyncio.timeout(10):
        _, body = await served.post("/v1/batch", {"calls": [{"code": "hang", "deadline_s": 0.02}]})
        served.fleet.last_executor.finish(1)
        _, after = await served.post("/v1/batch", {"calls": [{"code": "1"}]})
        assert (error_types(body), error_types(after)) == (["Deadline"], [None])
        assert served.dispatcher.counters.by_status == {"unavailable": 1, "ok": 1}
        assert len(served.fleet.executors) == 1


async def test_the_deadline_of_a_requeued_call_counts_from_its_admission() -> None:
    """The call runs on a second executor when its deadline passes."""
    async with serving() as served, asyncio.timeout(10):
        response = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang", "deadline_s": 0.2}]}))
        await until(lambda: bool(served.fleet.last_executor.calls))
        admitted_at = asyncio.get_running_loop().time()
        served.fleet.last_executor.exit()
        await until(lambda: len(served.fleet.executors) == 2 and bool(served.fleet.last_executor.calls))
        _, body = await response
        # The call does not end at once. The bound is below `deadline_s`, because `admitted_at` may be late.
        assert asyncio.get_running_loop().time() - admitted_at >= 0.1
        assert (error_types(body), body["results"][0]["attempts"]) == (["Deadline"], 2)
        await until(lambda: len(served.fleet.last_executor.cancelled) == 1)
        assert_idle(served)


async def test_a_requeued_call_expires_in_the_queue_before_a_later_deadline() -> None:
    """While the call runs, the timer of its batch is set for the deadline of the call. When the call waits again, its
    queue timeout ends earlier, so the timer must be set anew."""
    async with serving(FakeFleet(slots=1, start_reactions=("ready", "silent"))) as served, asyncio.timeout(10):
        batch = {"calls": [{"code": "hang", "deadline_s": 3600}], "queue_timeout_s": 0.02}
        response = asyncio.create_task(served.post("/v1/batch", batch))
        await until(lambda: bool(served.dispatcher._expiry_timers))
        ((timed_for, _),) = served.dispatcher._expiry_timers.values()
        assert timed_for > monotonic() + 3000, "the timer is not set for the deadline"
        served.fleet.last_executor.exit()
        _, body = await response
        assert error_types(body) == ["QueueTimeout"]


async def test_a_drain_ends_when_the_deadline_of_the_last_call_has_passed() -> None:
    async with serving() as served, asyncio.timeout(10):
        response = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang", "deadline_s": 0.1}]}))
        await until(lambda: bool(served.fleet.last_executor.calls))
        await served.dispatcher.drain(3600)
        assert error_types((await response)[1]) == ["Deadline"]


async def test_checks_of_answers_have_a_deadline() -> None:
    async with serving(FakeFleet(slots=1)) as served, asyncio.timeout(10):
        waiting = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang"}] * 2}))
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        pairs = [{"gold": "1", "answer": "1"}]
        _, body = await served.post("/v1/verify", {"pairs": pairs, "deadline_s": 0.02})
        assert body["results"][0]["outcome"] == "unavailable"
        assert body["results"][0]["message"].startswith("Deadline: not finished 0.02 s after its admission")
        served.fleet.last_executor.finish(1, 2)
        await waiting


@pytest.mark.parametrize("deadline_s", [0, -1, 0.001, 1e10, "5", True, None])
async def test_a_deadline_out_of_range_is_invalid(deadline_s: Any) -> None:
    expected = r"deadline_s: expected a number from 0.01 to 1000000000, got "
    async with serving() as served:
        call = {"code": "1", "deadline_s": deadline_s}
        status, body = await served.post("/v1/batch", {"calls": [{"code": "1"}, call]})
        assert (status, [result["status"] for result in body["results"]]) == (200, ["ok", "invalid"])
        assert body["results"][1]["error"]["message"].startswith(f"calls[1].{expected}")
        status, body = await served.post("/v1/execute", call)
        assert status == 400 and body["error"]["message"].startswith(f"call.{expected}")
        status, body = await served.post("/v1/batch", {"calls": [{"code": "1"}], "deadline_s": deadline_s})
        assert status == 400 and body["error"]["message"].startswith(f"batch.{expected}")
