"""Tests of the dispatcher, which sends the waiting calls of the gateway to its executors.

An executor accepts as many calls at once as its window says. The executors of the tests are fakes (tests/fakes.py),
where the code "hang" gets no result until the test calls `finish`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields

import pytest

from sandbox.errors import ConfigError
from sandbox.gateway.calls import dispatcher, executor_handle
from sandbox.settings.server import ExecutorConfig
from tests.fakes import FakeFleet
from tests.gateway.serving import serving, until

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_handle, "MIN_BACKOFF_S", 0.0)


def make_batch(*codes: str) -> dict[str, list[dict[str, str]]]:
    return {"calls": [{"code": code} for code in codes]}


async def test_an_executor_gets_at_most_twice_its_slots() -> None:
    async with serving(FakeFleet(slots=3)) as served:
        response = asyncio.create_task(served.post("/v1/batch", make_batch(*["hang"] * 10)))
        executor = served.fleet.last_executor
        await until(lambda: bool(executor.calls))
        assert (executor.frame_sizes, served.dispatcher.call_table.waiting) == ([6], 4)  # 6 is twice the 3 slots
        executor.finish(1, 2)
        await until(lambda: len(executor.calls) == 8)
        executor.finish(*range(3, 9))
        await until(lambda: len(executor.calls) == 10)
        executor.finish(9, 10)
        assert (await response)[0] == 200


async def test_a_frame_contains_at_most_64_calls() -> None:
    async with serving(FakeFleet(slots=100)) as served:
        await served.post("/v1/batch", make_batch(*["1"] * 150))
        assert served.fleet.last_executor.frame_sizes == [64, 64, 22]


async def test_calls_are_spread_evenly_over_executors() -> None:
    async with serving(FakeFleet(slots=2), executors=3) as served:
        response = asyncio.create_task(served.post("/v1/batch", make_batch(*["hang"] * 12)))
        await until(lambda: sum(len(executor.calls) for executor in served.fleet.executors) == 12)
        assert [len(executor.calls) for executor in served.fleet.executors] == [4, 4, 4]
        for executor in served.fleet.executors:
            executor.finish(*executor.calls)
        assert (await response)[0] == 200


@pytest.mark.parametrize("code", ["die", "garbage", "nonsense"])
async def test_a_call_that_breaks_executors_is_unavailable_and_other_calls_are_not(code: str) -> None:
    """The fake executor exits for "die", sends a malformed frame for "garbage", and a malformed result for
    "nonsense"."""
    async with serving() as served:
        response = asyncio.create_task(served.post("/v1/batch", make_batch("hang", code)))
        await until(lambda: len(served.fleet.executors) == 3 and bool(served.fleet.last_executor.calls))
        third = served.fleet.last_executor
        assert [call["code"] for call in third.calls.values()] == ["hang"]
        third.finish(*third.calls)
        _, body = await response
        assert [(r["status"], r["attempts"]) for r in body["results"]] == [("ok", 3), ("unavailable", 3)]
        assert body["results"][1]["error"]["type"] == "Poison"
        assert all(executor.exit_code.done() for executor in served.fleet.executors[:3])


@pytest.mark.parametrize(("code", "error_type"), [("lose", "Poison"), ("refuse", "NodeError")])
async def test_a_call_that_is_lost_each_time_is_started_once_per_attempt(code: str, error_type: str) -> None:
    """The executor reports each attempt as lost and keeps running. For "lose" the code of the call has started, for
    "refuse" it could not be started."""
    async with serving(attempts=2) as served:
        _, body = await served.post("/v1/batch", make_batch(code, "1"))
        lost, other = body["results"]
        assert (lost["status"], lost["error"]["type"], lost["attempts"]) == ("unavailable", error_type, 2)
        assert (other["status"], other["attempts"]) == ("ok", 1)
        assert [call["code"] for call in served.fleet.last_executor.calls.values()].count(code) == 2
        assert "rstar_sandbox_calls_retried_total 1" in (await served.get("/metrics"))[1]


@pytest.mark.parametrize("attempt", [[1], [1, "why", 1], ["1", "why", True], 1])
async def test_an_executor_that_reports_a_malformed_loss_is_replaced(attempt: object) -> None:
    async with serving() as served:
        served.fleet.last_executor.send("lost", [attempt])
        await until(lambda: len(served.fleet.executors) == 2)


async def test_calls_of_a_killed_executor_go_to_the_next_one() -> None:
    async with serving() as served:
        response = asyncio.create_task(served.post("/v1/batch", make_batch("hang", "hang")))
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        served.fleet.last_executor.exit(-9)
        await until(lambda: len(served.fleet.executors) == 2 and len(served.fleet.last_executor.calls) == 2)
        served.fleet.last_executor.finish(*served.fleet.last_executor.calls)
        _, body = await response
        assert [(r["status"], r["attempts"]) for r in body["results"]] == [("ok", 2)] * 2
        _, metrics_text = await served.get("/metrics")
        assert "rstar_sandbox_executor_restarts_total 1" in metrics_text
        assert "rstar_sandbox_calls_retried_total 2" in metrics_text


async def test_an_executor_runs_at_most_one_call_on_its_last_attempt() -> None:
    async with serving(executors=2, attempts=2) as served:
        response = asyncio.create_task(served.post("/v1/batch", make_batch("hang", "hang")))
        await until(lambda: any(len(executor.calls) == 2 for executor in served.fleet.executors))
        lost, other = sorted(served.fleet.executors, key=lambda executor: -len(executor.calls))
        other.send("window", 50)  # `other` could run both calls, and has the larger window
        await until(lambda: any(executor.window == 50 for executor in served.dispatcher.executors))
        lost.exit()
        await until(lambda: len(served.fleet.executors) == 3 and len(served.fleet.last_executor.calls) == 1)
        for executor in (other, served.fleet.last_executor):
            executor.finish(*executor.calls)
        _, body = await response
        assert [(r["status"], r["attempts"]) for r in body["results"]] == [("ok", 2)] * 2


async def test_a_restart_that_fails_is_retried() -> None:
    fleet = FakeFleet(start_reactions=("ready", "exit", "failed"))
    async with serving(fleet) as served:
        fleet.last_executor.exit()
        await until(lambda: len(fleet.executors) == 4)
        assert (await served.post("/v1/execute", {"code": "1"}))[0] == 200
        assert [executor.is_replacement for executor in fleet.executors] == [False, True, True, True]


@pytest.mark.parametrize(
    ("reaction", "expected"), [("failed", "no isolation here"), ("exit", "did not start: exited with code 3")]
)
async def test_a_first_start_that_fails_is_not_retried(reaction: str, expected: str) -> None:
    async with serving(FakeFleet(start_reactions=(reaction,)), wait=False) as served:
        with pytest.raises(ConfigError, match=expected):
            await served.dispatcher.started()


async def test_an_executor_that_is_not_ready_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_handle, "START_S", 0.01)
    async with serving(FakeFleet(start_reactions=("silent",)), wait=False) as served:
        with pytest.raises(ConfigError, match=r"not ready 0\.01 s after its start"):
            await served.dispatcher.started()


async def test_a_silent_executor_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_handle, "SILENCE_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(executor_handle, "SILENCE_TIMEOUT_S", 0.02)
    async with serving() as served:
        await until(lambda: len(served.fleet.executors) == 2)


async def test_results_of_unknown_calls_are_ignored() -> None:
    """For "forget", the fake executor sends a result of another call."""
    async with serving() as served:
        response = asyncio.create_task(served.post("/v1/execute", {"code": "forget"}))
        await until(lambda: bool(served.fleet.last_executor.calls))
        await served.post("/v1/execute", {"code": "1"})
        served.fleet.last_executor.finish(1)
        assert (await response)[1]["status"] == "ok"
        assert len(served.fleet.executors) == 1


async def test_calls_of_a_client_that_disconnects_are_cancelled() -> None:
    async with serving(FakeFleet(slots=1)) as served:
        response = asyncio.create_task(served.post("/v1/batch", make_batch(*["hang"] * 5)))
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        response.cancel()
        await until(lambda: sorted(served.fleet.last_executor.cancelled) == [1, 2])
        assert served.dispatcher.call_table.outstanding.calls == 0
        assert served.dispatcher.counters.cancelled == 5
        assert (await served.post("/v1/execute", {"code": "1"}))[1]["status"] == "ok"


async def test_calls_of_a_stream_that_is_closed_are_cancelled() -> None:
    async with serving() as served:
        headers = {"Accept": "application/x-ndjson"}
        async with served.http.post(
            served.url + "/v1/batch", json=make_batch("1", "hang"), headers=headers
        ) as response:
            await response.content.readline()
            response.close()
        await until(lambda: len(served.fleet.last_executor.cancelled) == 1)
        assert served.dispatcher.call_table.outstanding.calls == 0


async def test_a_call_that_waits_too_long_is_unavailable() -> None:
    async with serving(FakeFleet(slots=1)) as served:
        response = asyncio.create_task(served.post("/v1/batch", {**make_batch(*["hang"] * 3), "queue_timeout_s": 0.01}))
        await until(lambda: served.dispatcher.counters.by_status["unavailable"] == 1)
        served.fleet.last_executor.finish(1, 2)
        _, body = await response
        assert [r["status"] for r in body["results"]] == ["ok", "ok", "unavailable"]
        assert body["results"][2]["error"]["type"] == "QueueTimeout"


async def test_a_requeued_call_has_the_whole_queue_timeout_again() -> None:
    """The third call waits from the start, so the timer of the batch fires first for this call. The other two wait
    later, so a second timer must follow."""
    async with serving(FakeFleet(slots=1, start_reactions=("ready", "silent"))) as served:
        batch = {**make_batch(*["hang"] * 3), "queue_timeout_s": 0.05}
        response = asyncio.create_task(served.post("/v1/batch", batch))
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        served.fleet.last_executor.exit()
        _, body = await response
        assert [(result["error"]["type"], result["attempts"]) for result in body["results"]] == [
            ("QueueTimeout", 1), ("QueueTimeout", 1), ("QueueTimeout", 0),
        ]  # fmt: skip


async def test_a_batch_whose_calls_are_all_sent_has_no_timer() -> None:
    async with serving(FakeFleet(slots=1)) as served:
        response = asyncio.create_task(served.post("/v1/batch", make_batch("hang", "hang")))
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        assert not served.dispatcher._expiry_timers, "a timer is set although no call waits"
        served.fleet.last_executor.finish(1, 2)
        await response


async def test_running_calls_finish_during_the_drain() -> None:
    async with serving() as served:
        response = asyncio.create_task(served.post("/v1/execute", {"code": "hang"}))
        await until(lambda: bool(served.fleet.last_executor.calls))
        draining = asyncio.create_task(served.dispatcher.drain(10))
        await until(lambda: served.dispatcher.is_draining)
        served.fleet.last_executor.finish(1)
        await draining
        assert (await response)[1]["status"] == "ok"


async def test_calls_unfinished_after_the_drain_are_unavailable() -> None:
    async with serving() as served:
        response = asyncio.create_task(served.post("/v1/execute", {"code": "hang"}))
        await until(lambda: bool(served.fleet.last_executor.calls))
        await served.dispatcher.drain(0)
        _, result = await response
        assert (result["status"], result["error"]["type"]) == ("unavailable", "Stopped")


@pytest.mark.parametrize("max_at_once", [1, 512])
async def test_waiting_calls_are_unavailable_at_once_when_the_server_drains(
    max_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting calls are in a stream, a batch and a verify request. The two running calls continue."""
    monkeypatch.setattr(dispatcher, "MAX_STOPPED_AT_ONCE", max_at_once)
    async with serving(FakeFleet(slots=1)) as served:
        headers = {"Accept": "application/x-ndjson"}
        async with served.http.post(
            served.url + "/v1/batch", json=make_batch(*["hang"] * 5), headers=headers
        ) as stream:
            await until(lambda: served.dispatcher.call_table.waiting == 3)
            response = asyncio.create_task(served.post("/v1/batch", make_batch("late", "late")))
            checking = asyncio.create_task(served.post("/v1/verify", {"pairs": [{"gold": "1", "answer": "1"}]}))
            await until(lambda: served.dispatcher.call_table.waiting == 6)
            draining = asyncio.create_task(served.dispatcher.drain(10))
            stopped_lines = [json.loads(await stream.content.readline()) for _ in range(3)]
            _, late_batch = await response
            _, checks = await checking
            assert not draining.done() and served.dispatcher.call_table.running(0) == 2
            served.fleet.last_executor.finish(1, 2)
            finished_lines = [json.loads(await stream.content.readline()) for _ in range(2)]
            await draining
        for result in [*stopped_lines, *late_batch["results"]]:
            assert (result["status"], result["error"]["type"], result["attempts"]) == ("unavailable", "Stopped", 0)
        assert sorted(line["index"] for line in stopped_lines) == [2, 3, 4]
        assert checks["results"][0]["outcome"] == "unavailable"
        assert checks["results"][0]["message"].startswith("Stopped: the server stopped before")
        assert [line["status"] for line in finished_lines] == ["ok", "ok"]
        assert served.dispatcher.counters.by_status["unavailable"] == 6
        assert served.fleet.last_executor.frame_sizes == [2]


async def test_calls_of_an_executor_lost_during_the_drain_are_unavailable_at_once() -> None:
    async with serving(FakeFleet(start_reactions=("ready", "silent"))) as served:
        response = asyncio.create_task(served.post("/v1/batch", make_batch("hang", "hang")))
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        draining = asyncio.create_task(served.dispatcher.drain(3600))
        await until(lambda: served.dispatcher.is_draining)
        served.fleet.last_executor.exit(1)
        async with asyncio.timeout(10):
            await draining
        _, body = await response
        assert [(r["error"]["type"], r["attempts"]) for r in body["results"]] == [("Stopped", 1)] * 2


async def test_a_call_that_no_executor_could_receive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_FRAME_BYTES", 8000)
    monkeypatch.setattr(dispatcher, "MAX_CALL_BYTES", 7000)
    async with serving() as served:
        status, _ = await served.post("/v1/batch", make_batch("#" * 6000))
        assert status == 200
        for code in ("#" * 7000, "\N{GREEK SMALL LETTER ALPHA}" * 3500):
            status, refusal = await served.post("/v1/batch", make_batch("1", code))
            assert status == 413
            assert "which no executor can receive; send less in one call" in refusal["error"]["message"]


async def test_executors_get_a_drain_frame_at_the_end() -> None:
    async with serving() as served:
        await served.post("/v1/execute", {"code": "1"})
    assert served.fleet.last_executor.received_kinds == ["configure", "calls", "drain"]
    assert served.fleet.last_executor.exit_code.done()


async def test_health_fails_after_a_long_time_without_an_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FakeFleet(start_reactions=("ready", "silent"))) as served:
        served.fleet.last_executor.exit()
        await until(lambda: len(served.fleet.executors) == 2)
        assert (await served.get("/health"))[0] == 200
        monkeypatch.setattr(dispatcher, "UNHEALTHY_AFTER_S", 0.0)
        assert (await served.get("/health"))[0] == 503
        assert (await served.get("/ready"))[0] == 503


async def test_each_executor_gets_its_share_of_the_settings() -> None:
    async with serving(isolation="landlock", executors=2, slots=5, zygote_pools=3, cores=4) as served:
        first, second = (executor.settings for executor in served.fleet.executors)
    names = ("isolation", "cores", "slots", "zygote_pools")
    assert [first[name] for name in names] == ["landlock", 2, 3, 2]
    assert [second[name] for name in names] == ["landlock", 2, 2, 1]
    assert set(first) == {field.name for field in fields(ExecutorConfig)}


async def test_the_window_of_an_executor_limits_its_calls() -> None:
    async with serving(FakeFleet(slots=2)) as served:
        response = asyncio.create_task(served.post("/v1/batch", make_batch(*["hang"] * 12)))
        executor = served.fleet.last_executor
        await until(lambda: len(executor.calls) == 4)
        executor.send("window", 7)
        await until(lambda: len(executor.calls) == 7)
        executor.send("window", 2)
        executor.finish(1, 2, 3, 4, 5)
        await until(lambda: served.dispatcher.call_table.running(0) == 2)
        assert len(executor.calls) == 7
        executor.finish(6)
        await until(lambda: len(executor.calls) == 8)
        executor.send("window", 100)
        await until(lambda: len(executor.calls) == 12)
        executor.finish(*range(7, 13))
        assert (await response)[0] == 200


async def test_a_window_frame_right_after_ready_takes_effect() -> None:
    async with serving(FakeFleet(slots=2, window=3)) as served:
        assert served.dispatcher.executors[0].window == 3


@pytest.mark.parametrize("window", [1, -1, 1 << 40, "many"])
async def test_an_executor_that_sends_a_malformed_window_is_replaced(window: object) -> None:
    async with serving(FakeFleet(slots=2)) as served:
        served.fleet.last_executor.send("window", window)
        await until(lambda: len(served.fleet.executors) == 2)
        assert served.fleet.executors[0].exit_code.done()


async def test_a_small_request_is_sent_at_once_although_a_large_one_fills_the_window() -> None:
    async with serving(FakeFleet(slots=8)) as served:  # one reserved place for 8 slots, beyond the window of 16
        executor = served.fleet.last_executor
        large = asyncio.create_task(served.post("/v1/batch", make_batch(*["hang"] * 40)))
        await until(lambda: len(executor.calls) == 16)
        assert (await served.post("/v1/execute", {"code": "1"}))[1]["status"] == "ok"
        small = asyncio.create_task(served.post("/v1/batch", make_batch("hang", "hang")))
        await until(lambda: len(executor.calls) == 18)
        assert (
            served.dispatcher.call_table.waiting == 25
        )  # 24 calls of the large request, and one call of the small request
        executor.finish(18)
        await until(lambda: len(executor.calls) == 19)
        executor.finish(19)
        assert [result["status"] for result in (await small)[1]["results"]] == ["ok", "ok"]
        executor.finish(*range(1, 17))
        await until(lambda: len(executor.calls) == 19 + 16)
        executor.finish(*range(20, 36))
        await until(lambda: len(executor.calls) == 19 + 24)
        executor.finish(*range(36, 44))
        assert (await large)[0] == 200


async def test_calls_in_reserved_places_do_not_take_the_places_of_the_window() -> None:
    async with serving(FakeFleet(slots=8)) as served:
        executor = served.fleet.last_executor
        large = asyncio.create_task(served.post("/v1/batch", make_batch(*["hang"] * 20)))
        await until(lambda: len(executor.calls) == 16)
        small = asyncio.create_task(served.post("/v1/execute", {"code": "hang"}))
        await until(lambda: len(executor.calls) == 17)
        executor.finish(1)
        await until(lambda: len(executor.calls) == 18)
        assert executor.reserved == [17], "the window has had 17 calls of the large request"
        executor.exit()
        await until(lambda: len(served.fleet.executors) == 2 and len(served.fleet.last_executor.calls) == 16)
        assert served.dispatcher.call_table.running_reserved(0) == 0
        replacement = served.fleet.last_executor
        replacement.finish(*replacement.calls)
        await until(
            lambda: len(replacement.calls) == 20
        )  # 19 calls of the large request, and the call of the small request
        replacement.finish(*list(replacement.calls)[16:])
        assert ((await small)[0], (await large)[0]) == (200, 200)
