"""Between call_table and executors: frames, credits, deaths, cancellation and the drain."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields

import pytest

from sandbox.config import ExecutorConfig
from sandbox.errors import ConfigError
from sandbox.gateway.calls import dispatcher
from sandbox.gateway.calls import executor_handle as node
from tests.fakes import FakeFleet
from tests.gateway.serving import serving, until

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "MIN_BACKOFF_S", 0.0)


def batch(*codes: str) -> dict[str, list[dict[str, str]]]:
    return {"calls": [{"code": code} for code in codes]}


async def test_no_more_calls_at_the_executor_than_twice_its_slots() -> None:
    async with serving(FakeFleet(slots=3)) as served:
        asking = asyncio.create_task(served.post("/v1/batch", batch(*["hang"] * 10)))
        executor = served.fleet.last
        await until(lambda: bool(executor.calls))
        assert (executor.frames, served.dispatcher.call_table.waiting) == ([6], 4)
        executor.finish(1, 2)
        await until(lambda: len(executor.calls) == 8)
        executor.finish(*range(3, 9))
        await until(lambda: len(executor.calls) == 10)
        executor.finish(9, 10)
        assert (await asking)[0] == 200


async def test_calls_travel_in_frames_of_up_to_64() -> None:
    async with serving(FakeFleet(slots=100)) as served:
        await served.post("/v1/batch", batch(*["1"] * 150))
        assert served.fleet.last.frames == [64, 64, 22]


async def test_calls_spread_over_executors() -> None:
    async with serving(FakeFleet(slots=2), executors=3) as served:
        asking = asyncio.create_task(served.post("/v1/batch", batch(*["hang"] * 12)))
        await until(lambda: sum(len(e.calls) for e in served.fleet.executors) == 12)
        assert [len(executor.calls) for executor in served.fleet.executors] == [4, 4, 4]
        for executor in served.fleet.executors:
            executor.finish(*executor.calls)
        assert (await asking)[0] == 200


@pytest.mark.parametrize("end", ["die", "garbage", "nonsense"])
async def test_a_call_that_breaks_executors_is_given_up_and_its_neighbour_is_not(end: str) -> None:
    async with serving() as served:
        asking = asyncio.create_task(served.post("/v1/batch", batch("hang", end)))
        await until(lambda: len(served.fleet.executors) == 3 and bool(served.fleet.last.calls))
        third = served.fleet.last
        assert [call["code"] for call in third.calls.values()] == ["hang"]
        third.finish(*third.calls)
        _, body = await asking
        assert [(r["status"], r["attempts"]) for r in body["results"]] == [("ok", 3), ("unavailable", 3)]
        assert body["results"][1]["error"]["type"] == "ExecutorLost"
        assert all(executor.exit_code.done() for executor in served.fleet.executors[:3])


async def test_a_killed_executor_gives_its_calls_to_the_next() -> None:
    async with serving() as served:
        asking = asyncio.create_task(served.post("/v1/batch", batch("hang", "hang")))
        await until(lambda: len(served.fleet.last.calls) == 2)
        served.fleet.last.exit(-9)
        await until(lambda: len(served.fleet.executors) == 2 and len(served.fleet.last.calls) == 2)
        served.fleet.last.finish(*served.fleet.last.calls)
        _, body = await asking
        assert [(r["status"], r["attempts"]) for r in body["results"]] == [("ok", 2)] * 2
        _, scraped = await served.get("/metrics")
        assert "rstar_sandbox_executor_restarts_total 1" in scraped
        assert "rstar_sandbox_calls_retried_total 2" in scraped


async def test_a_last_attempt_waits_for_no_node_that_has_one_already() -> None:
    async with serving(executors=2, attempts=2) as served:
        asking = asyncio.create_task(served.post("/v1/batch", batch("hang", "hang")))
        await until(lambda: any(len(executor.calls) == 2 for executor in served.fleet.executors))
        first, other = sorted(served.fleet.executors, key=lambda executor: -len(executor.calls))
        other.send("window", 50)
        await until(lambda: any(node.window == 50 for node in served.dispatcher.executors))
        first.exit()
        await until(lambda: len(served.fleet.executors) == 3 and len(served.fleet.last.calls) == 1)
        for executor in (other, served.fleet.last):
            executor.finish(*executor.calls)
        _, body = await asking
        assert [(r["status"], r["attempts"]) for r in body["results"]] == [("ok", 2)] * 2


async def test_a_start_that_fails_later_is_tried_again() -> None:
    fleet = FakeFleet(starts=("ready", "exit", "failed"))
    async with serving(fleet) as served:
        fleet.last.exit()
        await until(lambda: len(fleet.executors) == 4)
        assert (await served.post("/v1/execute", {"code": "1"}))[0] == 200
        assert [executor.is_replacement for executor in fleet.executors] == [False, True, True, True]


@pytest.mark.parametrize(
    ("start", "expected"), [("failed", "no isolation to be had"), ("exit", "did not start: exited with code 3")]
)
async def test_a_first_start_that_fails_ends_the_start(start: str, expected: str) -> None:
    async with serving(FakeFleet(starts=(start,)), wait=False) as served:
        with pytest.raises(ConfigError, match=expected):
            await served.dispatcher.started()


async def test_an_executor_that_never_gets_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "START_S", 0.01)
    async with serving(FakeFleet(starts=("silent",)), wait=False) as served:
        with pytest.raises(ConfigError, match=r"not ready 0\.01 s after its start"):
            await served.dispatcher.started()


async def test_a_silent_executor_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "SILENCE_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(node, "SILENCE_TIMEOUT_S", 0.02)
    async with serving() as served:
        await until(lambda: len(served.fleet.executors) == 2)


async def test_answers_to_unknown_calls_are_ignored() -> None:
    async with serving() as served:
        asking = asyncio.create_task(served.post("/v1/execute", {"code": "forget"}))
        await until(lambda: bool(served.fleet.last.calls))
        await served.post("/v1/execute", {"code": "1"})
        served.fleet.last.finish(1)
        assert (await asking)[1]["status"] == "ok"
        assert len(served.fleet.executors) == 1


async def test_a_client_that_leaves_takes_its_calls_along() -> None:
    async with serving(FakeFleet(slots=1)) as served:
        asking = asyncio.create_task(served.post("/v1/batch", batch(*["hang"] * 5)))
        await until(lambda: len(served.fleet.last.calls) == 2)
        asking.cancel()
        await until(lambda: sorted(served.fleet.last.cancelled) == [1, 2])
        assert served.dispatcher.call_table.outstanding.calls == 0
        assert served.dispatcher.counters.cancelled == 5
        assert (await served.post("/v1/execute", {"code": "1"}))[1]["status"] == "ok"


async def test_a_stream_that_is_left_takes_its_calls_along() -> None:
    async with serving() as served:
        headers = {"Accept": "application/x-ndjson"}
        async with served.http.post(served.url + "/v1/batch", json=batch("1", "hang"), headers=headers) as response:
            await response.content.readline()
            response.close()
        await until(lambda: len(served.fleet.last.cancelled) == 1)
        assert served.dispatcher.call_table.outstanding.calls == 0


async def test_waiting_too_long_is_unavailable() -> None:
    async with serving(FakeFleet(slots=1)) as served:
        asking = asyncio.create_task(served.post("/v1/batch", {**batch(*["hang"] * 3), "queue_timeout_s": 0.01}))
        await until(lambda: served.dispatcher.counters.by_status["unavailable"] == 1)
        served.fleet.last.finish(1, 2)
        _, body = await asking
        assert [r["status"] for r in body["results"]] == ["ok", "ok", "unavailable"]
        assert body["results"][2]["error"]["type"] == "QueueTimeout"


async def test_waiting_again_after_a_loss_has_its_own_time() -> None:
    """The first timer fires while the call waits for the second time: it is early then, and one more must follow."""
    async with serving(FakeFleet(slots=1, starts=("ready", "silent"))) as served:
        asking = asyncio.create_task(served.post("/v1/execute", {"code": "hang", "queue_timeout_s": 0.05}))
        await until(lambda: bool(served.fleet.last.calls))
        await asyncio.sleep(0.03)
        served.fleet.last.exit()
        _, result = await asking
        assert (result["error"]["type"], result["attempts"]) == ("QueueTimeout", 1)


async def test_the_drain_lets_admitted_calls_finish() -> None:
    async with serving() as served:
        asking = asyncio.create_task(served.post("/v1/execute", {"code": "hang"}))
        await until(lambda: bool(served.fleet.last.calls))
        draining = asyncio.create_task(served.dispatcher.drain(10))
        await until(lambda: served.dispatcher.is_draining)
        served.fleet.last.finish(1)
        await draining
        assert (await asking)[1]["status"] == "ok"


async def test_what_is_unfinished_after_the_drain_is_unavailable() -> None:
    async with serving() as served:
        asking = asyncio.create_task(served.post("/v1/execute", {"code": "hang"}))
        await until(lambda: bool(served.fleet.last.calls))
        await served.dispatcher.drain(0)
        _, result = await asking
        assert (result["status"], result["error"]["type"]) == ("unavailable", "Stopped")


@pytest.mark.parametrize("stop_calls", [1, 512])
async def test_what_waits_when_the_service_stops_is_answered_at_once(
    stop_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a stream, in a batch and in checks, while what the executor has goes on."""
    monkeypatch.setattr(dispatcher, "MAX_STOPPED_AT_ONCE", stop_calls)
    async with serving(FakeFleet(slots=1)) as served:
        headers = {"Accept": "application/x-ndjson"}
        async with served.http.post(served.url + "/v1/batch", json=batch(*["hang"] * 5), headers=headers) as stream:
            await until(lambda: served.dispatcher.call_table.waiting == 3)
            asking = asyncio.create_task(served.post("/v1/batch", batch("late", "late")))
            checking = asyncio.create_task(served.post("/v1/verify", {"pairs": [{"gold": "1", "answer": "1"}]}))
            await until(lambda: served.dispatcher.call_table.waiting == 6)
            draining = asyncio.create_task(served.dispatcher.drain(10))
            stopped = [json.loads(await stream.content.readline()) for _ in range(3)]
            _, late = await asking
            _, checks = await checking
            assert not draining.done() and served.dispatcher.call_table.running(0) == 2
            served.fleet.last.finish(1, 2)
            done = [json.loads(await stream.content.readline()) for _ in range(2)]
            await draining
        for result in [*stopped, *late["results"]]:
            assert (result["status"], result["error"]["type"], result["attempts"]) == ("unavailable", "Stopped", 0)
        assert sorted(line["index"] for line in stopped) == [2, 3, 4]
        assert checks["results"][0]["outcome"] == "unavailable"
        assert checks["results"][0]["message"].startswith("Stopped: the server stopped before")
        assert [line["status"] for line in done] == ["ok", "ok"]
        assert served.dispatcher.counters.by_status["unavailable"] == 6
        assert served.fleet.last.frames == [2]


async def test_what_an_executor_loses_while_the_service_stops_is_answered_at_once() -> None:
    async with serving(FakeFleet(starts=("ready", "silent"))) as served:
        asking = asyncio.create_task(served.post("/v1/batch", batch("hang", "hang")))
        await until(lambda: len(served.fleet.last.calls) == 2)
        draining = asyncio.create_task(served.dispatcher.drain(3600))
        await until(lambda: served.dispatcher.is_draining)
        served.fleet.last.exit(1)
        async with asyncio.timeout(10):
            await draining
        _, body = await asking
        assert [(r["error"]["type"], r["attempts"]) for r in body["results"]] == [("Stopped", 1)] * 2


async def test_executors_are_told_to_go_at_the_end() -> None:
    async with serving() as served:
        await served.post("/v1/execute", {"code": "1"})
    assert served.fleet.last.heard == ["configure", "calls", "drain"]
    assert served.fleet.last.exit_code.done()


async def test_health_fails_when_there_is_no_executor_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FakeFleet(starts=("ready", "silent"))) as served:
        served.fleet.last.exit()
        await until(lambda: len(served.fleet.executors) == 2)
        assert (await served.get("/health"))[0] == 200
        monkeypatch.setattr(dispatcher, "UNHEALTHY_AFTER_S", 0.0)
        assert (await served.get("/health"))[0] == 503
        assert (await served.get("/ready"))[0] == 503


async def test_the_settings_reach_the_executor() -> None:
    async with serving(isolation="landlock", executors=2, slots=5, zygote_pools=3, cores=4) as served:
        first, second = (executor.settings for executor in served.fleet.executors)
    parts = ("isolation", "cores", "slots", "zygote_pools")
    assert [first[name] for name in parts] == ["landlock", 2, 3, 2]
    assert [second[name] for name in parts] == ["landlock", 2, 2, 1]
    assert set(first) == {field.name for field in fields(ExecutorConfig)}


async def test_the_executor_says_how_many_calls_it_wants() -> None:
    async with serving(FakeFleet(slots=2)) as served:
        asking = asyncio.create_task(served.post("/v1/batch", batch(*["hang"] * 12)))
        executor = served.fleet.last
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
        assert (await asking)[0] == 200


async def test_a_window_that_comes_along_with_ready_holds() -> None:
    async with serving(FakeFleet(slots=2, window=3)) as served:
        assert served.dispatcher.executors[0].window == 3


@pytest.mark.parametrize("window", [1, -1, 1 << 40, "many"])
async def test_an_executor_that_wants_nonsense_is_replaced(window: object) -> None:
    async with serving(FakeFleet(slots=2)) as served:
        served.fleet.last.send("window", window)
        await until(lambda: len(served.fleet.executors) == 2)
        assert served.fleet.executors[0].exit_code.done()
