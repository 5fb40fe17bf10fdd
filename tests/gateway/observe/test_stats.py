"""Tests of `/v1/stats`: growth of counters, percentiles within 7 % of the true value, a bounded history."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from sandbox.gateway.calls.executor_report import ExecutorStats, ReadyReport
from sandbox.gateway.metrics import BOUNDS_S, SCRAPED_BUCKETS, Histogram, quantiles_s
from sandbox.gateway.observe import stats as stats_module
from sandbox.gateway.observe.history import MAX_STEPS, RECENT_STEPS, History, Snapshot, interval
from sandbox.gateway.observe.stats import MAX_MISSED_MODULES, Stats
from sandbox.gateway.routes import STATS
from tests.fakes import FakeFleet
from tests.gateway.serving import Served, serving, until

NO_LATENCIES = (0,) * (len(BOUNDS_S) + 1)


def snapshot(at_s: float, ok: int = 0, waiting: int = 0, latencies: tuple[int, ...] = NO_LATENCIES) -> Snapshot:
    """Return a snapshot in which every tenth call was retried."""
    return Snapshot(at_s, {"ok": ok}, {"retried": ok // 10}, {"run_ms": latencies}, {"waiting": waiting})


def counts_of(*seconds: float) -> tuple[int, ...]:
    """Return the counts of the histogram that contains these durations."""
    return tuple(_histogram_of(*seconds).counts)


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_within_seven_percent(seed: int) -> None:
    rng = random.Random(seed)
    values = sorted(rng.lognormvariate(-3, 2) for _ in range(1000))  # seconds; the median is 50 ms
    shares = [0.01, 0.5, 0.9, 0.99, 1.0]
    for share, quantile in zip(shares, quantiles_s(counts_of(*values), shares), strict=True):
        true_quantile = min(max(values[round(share * 1000) - 1], BOUNDS_S[0]), BOUNDS_S[-1])
        assert quantile == pytest.approx(true_quantile, rel=0.07)


def test_values_outside_the_bounds_count_as_the_nearer_bound() -> None:
    assert quantiles_s(counts_of(0.0), [0.5]) == [BOUNDS_S[0]]
    assert quantiles_s(counts_of(1e9), [0.5]) == [BOUNDS_S[-1]]


def test_bounds_rise_and_prometheus_gets_cumulative_counts_of_some_of_them() -> None:
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))
    scraped_bounds = [BOUNDS_S[index] for index in SCRAPED_BUCKETS]
    assert scraped_bounds[:6] == [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05] and scraped_bounds[-1] == 500
    scraped = list(Histogram.samples(_histogram_of(0.002, 0.3, 1e6), "x"))
    assert ("x_bucket", {"le": "0.0025"}, 1) in scraped and ("x_bucket", {"le": "0.25"}, 1) in scraped
    assert ("x_bucket", {"le": "500.0"}, 2) in scraped and ("x_bucket", {"le": "+Inf"}, 3) in scraped


def test_an_interval_has_the_growth_between_its_snapshots() -> None:
    before = snapshot(1, ok=100, latencies=counts_of(9.0))
    after = snapshot(3.5, ok=130, waiting=7, latencies=counts_of(9.0, *[0.02] * 30))
    growth = interval(before, after)
    assert growth["seconds"] == 2.5 and growth["statuses"] == {"ok": 30} and growth["events"] == {"retried": 3}
    assert growth["waiting"] == 7
    assert growth["run_ms"]["p50"] == pytest.approx(20, rel=0.07)  # the call of 9 s is in both snapshots


def test_an_interval_without_calls_has_no_percentiles() -> None:
    growth = interval(snapshot(1, ok=5, latencies=counts_of(1)), snapshot(2, ok=5, latencies=counts_of(1)))
    assert growth["run_ms"] is None and growth["statuses"] == {} and growth["events"] == {}


def test_the_history_is_bounded_and_returns_only_new_steps() -> None:
    history = History(snapshot(0))
    assert history.after(0) == []
    for number in range(1, MAX_STEPS + 51):  # 50 steps more than the history keeps
        history.add(snapshot(number, ok=number))
    assert [step["number"] for step in history.after(0)] == list(range(51, MAX_STEPS + 51))
    assert [step["number"] for step in history.after(MAX_STEPS + 48)] == [MAX_STEPS + 49, MAX_STEPS + 50]
    assert history.after(MAX_STEPS + 50) == []
    # A number above the last one comes from a client of an earlier server process. It needs all steps of this process.
    assert len(history.after(10**9)) == MAX_STEPS
    assert history.last_interval(snapshot(MAX_STEPS + 51, ok=MAX_STEPS + 51))["statuses"] == {"ok": RECENT_STEPS}


@pytest.mark.asyncio
async def test_stats_count_finished_calls_and_rejected_requests() -> None:
    async with serving() as served:
        await served.post("/v1/batch", {"calls": [{"code": "1"}] * 3 + [{"code": 1}]})
        await served.post("/v1/batch", {})
        stats = await _stats(served)
    assert stats["totals"] == {"statuses": {"ok": 3, "invalid": 1}, "events": {"refused_400": 1}}
    assert stats["now"]["statuses"] == {"ok": 3, "invalid": 1}
    assert stats["now"]["run_ms"]["p50"] == pytest.approx(1.0, rel=0.07), "run_ms of the fake executor"
    assert stats["service"]["state"] == "ready" and stats["now"]["slots"] == 4


@pytest.mark.asyncio
async def test_stats_show_waiting_and_dispatched_calls() -> None:
    async with serving() as served:
        hanging = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang"}] * 20}))
        await until(lambda: served.dispatcher.call_table.waiting == 12)
        # A zygote is the process that forks the calls of one profile; "bare" and "numeric" are profiles.
        served.fleet.last_executor.send(
            "stats", {"running": 4, "running_long": 1, "zygotes": {"bare": 2, "numeric": 1}}
        )
        await until(lambda: bool(served.dispatcher.executors[0].stats.gauges))
        now = (await _stats(served))["now"]
        hanging.cancel()
        await asyncio.wait([hanging])
        await until(lambda: served.dispatcher.counters.cancelled == 20)
        after = await _stats(served)
    # 8 calls are dispatched because the window is twice the 4 slots.
    assert (now["waiting"], now["dispatched"], now["running"], now["running_long"], now["zygotes"]) == (12, 8, 4, 1, 3)
    assert (after["now"]["waiting"], after["totals"]["events"]) == (0, {"cancelled": 20})
    assert after["executors"][0]["zygotes"] == {"bare": 2, "numeric": 1}


@pytest.mark.asyncio
async def test_the_state_shows_the_reason_why_no_call_is_accepted() -> None:
    # An executor with the reaction "silent" never reports that it is ready.
    async with serving(FakeFleet(start_reactions=("silent",)), wait=False) as served:
        assert (await _stats(served))["service"]["state"] == "starting"
    async with serving(FakeFleet(start_reactions=("ready", "silent"))) as served:
        served.fleet.last_executor.exit(1)
        await until(lambda: not served.dispatcher.is_ready)
        assert (await _stats(served))["service"]["state"] == "no executor"
        await served.dispatcher.drain(0)
        assert (await _stats(served))["service"]["state"] == "draining"


@pytest.mark.asyncio
async def test_counters_do_not_fall_when_their_executor_restarts() -> None:
    async with serving() as served:
        stats, executor = Stats(served.dispatcher), served.dispatcher.executors[0]
        totals = []
        for raw in ({"zygote_restarts_total": 3}, {"zygote_restarts_total": 5}, {}, {"zygote_restarts_total": 1}):
            executor.stats = ExecutorStats.decode(raw)
            stats.tick()
            totals.append(stats.build(0)["totals"]["events"]["zygote_restarts"])
        steps = stats.build(0)["steps"]
    assert totals == [3, 5, 5, 6]
    assert [step["events"].get("zygote_restarts", 0) for step in steps] == [3, 2, 0, 1]


@pytest.mark.asyncio
async def test_malformed_stats_of_an_executor_do_not_break_the_response() -> None:
    async with serving() as served:
        stats, executor = Stats(served.dispatcher), served.dispatcher.executors[0]
        executor.ready_report = ReadyReport.decode({"slots": 4, "isolation": 7, "python": ["3"]})
        missed_imports = {
            "x" * 1000: 1,  # the name is cut to 60 characters
            5: 2,  # a name that is a number becomes ""
            "\ud800": "3",  # a count that is a text is left out
        }
        executor.stats = ExecutorStats.decode({
            "running": float("nan"), "zygotes": [1], "missed_imports": missed_imports, 9: 9,
            "restarts_total": "1", "queued": {},
        })  # fmt: skip
        stats.tick()
        reply = json.loads(json.dumps(stats.build(0), allow_nan=False))
    assert reply["missed_imports"] == {"x" * 60: 1, "": 2}
    assert reply["now"]["running"] == 0 and reply["service"]["python"] == reply["service"]["isolation"] == ""


@pytest.mark.asyncio
async def test_a_name_that_is_no_text_in_utf_8_does_not_break_the_metrics() -> None:
    async with serving() as served:
        executor = served.dispatcher.executors[0]
        executor.ready_report = ReadyReport.decode({"slots": 4, "isolation": "\ud800"})
        executor.stats = ExecutorStats.decode({"missed_imports": {"\ud800x": 3}, "zygotes": {"\udfff": 1}})
        status, text = await served.get("/metrics")
    assert status == 200
    assert 'name="?x"' in text


@pytest.mark.asyncio
async def test_only_the_most_frequent_missed_imports_are_listed() -> None:
    async with serving() as served:
        stats = Stats(served.dispatcher)
        served.dispatcher.executors[0].stats = ExecutorStats.decode(
            {"missed_imports": {f"m{n}": n for n in range(100)}}
        )
        assert list(stats.build(0)["missed_imports"]) == [f"m{n}" for n in range(99, 99 - MAX_MISSED_MODULES, -1)]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "after",
    [
        "x",
        "-1",
        "1.5",
        "",
        "9" * 16,  # above 2**53, the largest number that JSON clients read exactly
        "9" * 5000,  # `int` raises ValueError for so many digits
        "²",  # `str.isdigit` accepts it, `int` does not
    ],
)
async def test_a_malformed_step_number_is_rejected(after: str) -> None:
    async with serving() as served:
        status, text = await served.get(f"/v1/stats?after={after}")
    assert status == 400 and "expected the number of a step" in text


@pytest.mark.asyncio
async def test_the_history_grows_each_second_and_only_new_steps_are_sent() -> None:
    async with serving() as served:
        async with asyncio.timeout(30):
            while len(steps := (await _stats(served))["steps"]) < 2:  # noqa: ASYNC110  steps come by a timer
                await asyncio.sleep(0.1)
        newer = (await _stats(served, after=1))["steps"]
    assert [step["number"] for step in steps[:2]] == [1, 2]
    assert newer[0] == steps[1]
    assert steps[1]["at_s"] == pytest.approx(steps[0]["at_s"] + steps[1]["seconds"], abs=0.002)


def _histogram_of(*seconds: float) -> Histogram:
    histogram = Histogram()
    for value in seconds:
        histogram.observe(value)
    return histogram


async def _stats(served: Served, after: int = 0) -> Any:
    status, text = await served.get(f"/v1/stats?after={after}")
    assert status == 200
    return json.loads(text)


@pytest.mark.asyncio
async def test_a_step_that_fails_does_not_end_the_history(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(stats_module, "TICK_INTERVAL_S", 0.001)
    async with serving() as served:
        stats = served.app[STATS]
        with monkeypatch.context() as patch:
            patch.setattr(stats_module, "_rss_bytes", fail)
            await until(lambda: caplog.text.count("lacks a step") == 2)
        steps = len(stats._history.after(0))
        await until(lambda: len(stats._history.after(0)) > steps)
    assert "too many open files" in caplog.text
