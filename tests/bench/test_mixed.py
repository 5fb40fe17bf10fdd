"""Tests of bench.mixed, which runs short calls beside endless loops: arrival times, allowed statuses, and requirements
on the short calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgpack
import pytest
from aiohttp import web

from bench import mixed
from bench.harness.load import CallTally, http_session
from bench.harness.requirements import unmet
from bench.mixed import BackgroundRun, TrafficRun
from bench.workloads.checked_calls import CheckedCall, ExpectedResult
from tests.bench.conftest import RefusedArguments, RunBenchmark
from tests.executor.calling import OWN_PYTHON
from tests.http_server import HttpServer

OK_RESULT = {
    "id": "", "status": "ok", "stdout": "", "attempts": 1, "usage": {"cpu_ms": 2.0},
}  # fmt: skip


def _call(group: str = "short") -> CheckedCall:
    return CheckedCall({"code": "1"}, group, ExpectedResult(("timeout" if group == "loop" else "ok",), {}))


def _run(*latencies_ms: float) -> TrafficRun:
    """Return a run of short calls with these latencies."""
    run = TrafficRun(CallTally(calls=len(latencies_ms)))
    for ms in latencies_ms:
        run.tally.record(_call(), OK_RESULT, ms / 1e3)
    return run


def test_arrivals_are_the_same_for_the_same_seed_and_come_at_their_rate() -> None:
    due = mixed.arrivals(50, 40, 1)
    assert due == mixed.arrivals(50, 40, 1) != mixed.arrivals(50, 40, 2)
    assert len(due) == pytest.approx(2000, rel=0.1)
    assert all(0 < at_s < 40 for at_s, _ in due) and due == sorted(due, key=lambda arrival: arrival[0])


def test_one_call_in_a_hundred_is_endless_and_one_in_ten_an_error() -> None:
    due = mixed.arrivals(50, 40, 1)
    groups = Counter(call.group for _, call in due)
    assert groups["loop"] == pytest.approx(len(due) / 100, abs=1)
    assert groups["error"] == pytest.approx(len(due) / 10, abs=1)
    assert all(call.expected.statuses == ("error",) for _, call in due if call.group == "error")
    assert [call.group for _, call in mixed.arrivals(1, 20, 1)].count("loop") == 1


@pytest.mark.asyncio
async def test_a_call_is_sent_when_it_is_due_without_waiting_for_answers() -> None:
    count, num_arrived, all_arrived = 5, 0, asyncio.Event()

    async def respond_after_all_have_arrived(request: web.Request) -> web.Response:
        nonlocal num_arrived
        num_arrived += 1
        if num_arrived == count:
            all_arrived.set()
        await all_arrived.wait()
        return web.Response(body=msgpack.packb(OK_RESULT))

    app = web.Application()
    app.router.add_post("/v1/execute", respond_after_all_have_arrived)
    async with HttpServer(app) as server, http_session() as http:
        url = str(server.make_url("")).rstrip("/")
        tally = await mixed.offer(http, url, [(n / 1000, _call()) for n in range(count)], lambda: None)
    assert (tally.calls, tally.answered, tally.mismatched) == (count, count, 0), tally.examples


@pytest.mark.asyncio
async def test_a_call_whose_request_is_refused_counts_as_lost() -> None:
    async with HttpServer(web.Application()) as server, http_session() as http:
        tally = await mixed.offer(http, str(server.make_url("")).rstrip("/"), [(0.0, _call())], lambda: None)
    result = mixed.summarize_traffic(TrafficRun(tally), _run(1))
    assert result["lost"] == 1 and "lost is 1, expected ≤ 0" in unmet(result)[0]


def test_an_endless_loop_that_ends_as_ok_is_mismatched() -> None:
    run = _run(1.0)
    run.tally.calls += 1
    run.tally.record(_call("loop"), OK_RESULT, 1.0)
    assert run.tally.mismatched == 1
    assert unmet(mixed.summarize_traffic(_run(1.0), run)) == ["Not met: mismatched is 1, expected ≤ 0."]


def test_endless_loops_may_not_delay_short_calls() -> None:
    without_loops, same, delayed = _run(*range(10, 20)), _run(*range(10, 20)), _run(*range(20, 40, 2))
    assert unmet(mixed.summarize_traffic(without_loops, same)) == []
    result = mixed.summarize_traffic(without_loops, delayed)
    assert result["ratio"]["p90"] == 2
    assert len(unmet(result)) == 1


def test_the_latency_of_short_calls_excludes_endless_loops() -> None:
    run = _run(1.0, 2.0)
    run.tally.record(_call("loop"), {**OK_RESULT, "status": "timeout"}, 60.0)
    assert max(run.short_ms()) == 2.0


def test_the_cost_of_a_short_call_is_its_own_cpu_time_and_an_equal_share_of_the_service_itself() -> None:
    run = _run(1.0, 2.0)
    run.tally.record(_call("bomb"), {**OK_RESULT, "usage": {**OK_RESULT["usage"], "cpu_ms": 1000.0}}, 1.0)  # type: ignore[dict-item]
    run.server_cpu_ms = 2 * 2.0 + 1000.0 + 3 * 0.5  # two short calls, the bomb, and 0.5 ms of the service per call
    run.body_bytes = 3 * 200.0
    result = mixed.summarize_traffic(run, run)["without_loops"]
    assert (result["cpu_ms"], result["bytes"]) == (2.5, 200)


def _loops_run(**changes: Any) -> BackgroundRun:
    """Return a run beside 40 endless loops. It meets all requirements, apart from the effect of the changed fields."""
    fields = {"num_running": 40, "alone_ms": [5.0], "arriving_ms": [9.0], "beside_ms": [9.0]}
    return BackgroundRun(40, **{**fields, **changes})


@pytest.mark.parametrize(
    ("run", "unmet_requirement"),
    [
        (_loops_run(arriving_ms=[24.0] * 10, beside_ms=[9.0] * 10), None),
        (_loops_run(beside_ms=[9.0] * 8 + [11.0] * 2), "p90 of a short call from 1 s after 40"),
        (_loops_run(arriving_ms=[9.0] * 8 + [26.0] * 2), "p90 of a short call just after 40"),
        (_loops_run(num_running=39), "running endless loops is 39, expected ≥ 40"),
        (_loops_run(num_ended=1), "ended loops is 1"),
        (_loops_run(mismatched=1), "mismatched short calls is 1"),
        (
            _loops_run(beside_ms=[9.0] * 98 + [20_000.0] * 2, timed_out=2),
            "short calls without an answer after 20 s is 2",
        ),
    ],
)
def test_all_loops_must_run_and_short_calls_may_not_be_delayed(
    run: BackgroundRun, unmet_requirement: str | None
) -> None:
    lines = unmet(mixed.summarize_loops(run))
    if unmet_requirement is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"Not met: {unmet_requirement}")


@pytest.mark.parametrize(
    ("run", "unmet_requirement"),
    [
        (BackgroundRun(3, num_ok=3, alone_ms=[5.0], beside_ms=[54.0]), None),
        (BackgroundRun(3, num_ok=3, alone_ms=[5.0], beside_ms=[56.0]), "median delay of a short call in ms is 51"),
        (BackgroundRun(3, num_ok=2, alone_ms=[5.0], beside_ms=[5.0]), "calls that slept is 2, expected ≥ 3"),
        (
            BackgroundRun(3, num_ok=3, alone_ms=[5.0], beside_ms=[5.0], mismatched=1),
            "mismatched short calls is 1",
        ),
    ],
)
def test_the_calls_of_another_tenant_may_not_delay_short_calls(
    run: BackgroundRun, unmet_requirement: str | None
) -> None:
    lines = unmet(mixed.summarize_tenants(run))
    if unmet_requirement is None:
        assert lines == []
    else:
        assert lines[0].startswith(f"Not met: {unmet_requirement}")


@pytest.mark.usefixtures("needs_isolation")
def test_a_small_run_beside_another_tenant_has_a_complete_result(run_benchmark: RunBenchmark) -> None:
    sizes = ["--parts", "tenants", "--sleeping", "8", "--short", "4", "--python", OWN_PYTHON]
    exit_code, result = run_benchmark(mixed.main, *sizes)
    assert result["tenants"]["beside_ms"]["p50"] > 0
    assert {row["name"]: row["measured"] for row in result["requirements"]}["calls that slept"] == 8
    assert exit_code == (0 if result["holds"] else 1)


def test_resource_bombs_are_not_run_without_isolation(refused_arguments: RefusedArguments) -> None:
    assert "--isolation none" in refused_arguments(mixed.main, "--isolation", "none")


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("needs_isolation")
def test_a_small_run_of_both_parts_has_a_complete_result(run_benchmark: RunBenchmark) -> None:
    sizes = ["--seconds", "2", "--rate", "8", "--loop-s", "0.5", "--loops", "1", "--short", "5"]
    exit_code, result = run_benchmark(mixed.main, *sizes, "--stdlib-only", "--python", OWN_PYTHON)
    traffic, loops = result["traffic"], result["loops"]
    assert traffic["lost"] == 0
    assert traffic["with_loops"]["loops"] >= 1 > traffic["without_loops"]["loops"]
    assert loops["loops"] == 1 and loops["under_loops_ms"]["p50"] > 0
    assert exit_code == (0 if result["holds"] else 1)
