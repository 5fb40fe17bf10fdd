"""When calls are due, what they may end with, and what a storm must leave of short calls."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import msgpack
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import mixed
from bench.mixed import Arrival, Storm, Tally
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from tests.executor.calling import OWN_PYTHON

OK = {"status": "ok", "stdout": "", "usage": {"cpu_ms": 2.0}}


def _arrival(group: str = "short", family: str = "plain", at_s: float = 0.0) -> Arrival:
    return Arrival(at_s, group, family, {"code": "1"}, frozenset({"timeout" if group == "loop" else "ok"}))


def _tally(*latencies_ms: float) -> Tally:
    tally = Tally(asked=len(latencies_ms))
    for ms in latencies_ms:
        tally.take(_arrival(), OK, ms / 1e3)
    return tally


def test_arrivals_are_the_same_for_the_same_seed_and_come_at_their_rate() -> None:
    due = mixed.arrivals(50, 40, 1)
    assert due == mixed.arrivals(50, 40, 1) != mixed.arrivals(50, 40, 2)
    assert len(due) == pytest.approx(2000, rel=0.1)
    assert all(0 < one.at_s < 40 for one in due) and due == sorted(due, key=lambda one: one.at_s)


def test_one_call_in_a_hundred_is_endless_and_one_in_ten_an_error() -> None:
    due = mixed.arrivals(50, 40, 1)
    groups = Counter(one.group for one in due)
    assert groups["loop"] == pytest.approx(len(due) / 100, abs=1)
    assert groups["error"] == pytest.approx(len(due) / 10, abs=1)
    assert all(one.ends == {"error"} for one in due if one.group == "error")
    assert Counter(one.group for one in mixed.arrivals(1, 20, 1))["loop"] == 1


@pytest.mark.asyncio
async def test_nobody_waits_for_an_answer_before_the_next_call_is_sent() -> None:
    count, come, all_came = 5, 0, asyncio.Event()

    async def act(request: web.Request) -> web.Response:
        nonlocal come
        come += 1
        if come == count:
            all_came.set()
        await all_came.wait()
        return web.Response(body=msgpack.packb(OK))

    app = web.Application()
    app.router.add_post("/v1/execute", act)
    async with TestServer(app) as server, mixed._http() as http:
        url = str(server.make_url("")).rstrip("/")
        tally = await mixed.offer(http, url, [_arrival(at_s=n / 1000) for n in range(count)], lambda: None)
    assert (tally.asked, tally.answered, tally.wrong) == (count, count, 0), tally.examples


@pytest.mark.asyncio
async def test_what_is_refused_is_lost() -> None:
    async with TestServer(web.Application()) as server, mixed._http() as http:
        tally = await mixed.offer(http, str(server.make_url("")).rstrip("/"), [_arrival()], lambda: None)
    figures = mixed.summarise(tally, _tally(1))
    assert figures["lost"] == 1 and "1 lost, expected none" in figures["missed"]


def test_a_verdict_that_is_not_the_groups_is_wrong() -> None:
    tally = _tally(1.0)
    tally.asked += 1
    tally.take(_arrival("loop", "loop"), OK, 1.0)
    assert tally.wrong == 1
    assert "1 wrong, expected none" in mixed.summarise(_tally(1.0), tally)["missed"]


def test_short_calls_may_not_pay_for_endless_ones() -> None:
    assert mixed.summarise(_tally(*range(10, 20)), _tally(*range(10, 20)))["missed"] == []
    figures = mixed.summarise(_tally(*range(10, 20)), _tally(*range(20, 40, 2)))
    assert figures["ratio"]["p90"] == 2
    assert len(figures["missed"]) == 1


def test_endless_calls_are_no_part_of_the_latency() -> None:
    tally = _tally(1.0, 2.0)
    tally.take(_arrival("loop", "loop"), {**OK, "status": "timeout"}, 60.0)
    assert max(tally.short_ms()) == 2.0


def test_what_a_short_call_costs_is_its_own_cpu_and_a_share_of_the_services() -> None:
    tally = _tally(1.0, 2.0)
    tally.take(_arrival("bomb", "bomb"), {**OK, "usage": {"cpu_ms": 1000.0}}, 1.0)
    tally.server_cpu_ms, tally.body_bytes = 1004.0 + 3 * 0.5, 600.0
    figures = mixed.summarise(tally, tally)["without_loops"]
    assert (figures["cpu_ms"], figures["bytes"]) == (2.5, 200)
    assert set(figures["call_cpu_ms"]) == {2.0}


@pytest.mark.parametrize(
    ("storm", "missed"),
    [
        (Storm(40, 40, 0, [5.0], [24.0] * 10, [9.0] * 10), None),
        (Storm(40, 40, 0, [5.0], [9.0], [9.0] * 8 + [11.0] * 2), "p90 of a short call from 1 s after 40"),
        (Storm(40, 40, 0, [5.0], [9.0] * 8 + [26.0] * 2, [9.0]), "p90 of a short call just after 40"),
        (Storm(40, 39, 0, [5.0], [9.0], [9.0]), "39 of 40"),
        (Storm(40, 40, 1, [5.0], [9.0], [9.0]), "1 loops ended"),
        (Storm(40, 40, 0, [5.0], [9.0], [9.0], wrong=1), "1 short calls wrong"),
        (Storm(40, 40, 0, [5.0], [9.0], [9.0] * 98 + [20_000.0] * 2, in_vain=2), "2 short calls without an answer"),
    ],
)
def test_a_storm_holds_if_every_loop_runs_and_short_calls_do_not_notice(storm: Storm, missed: str | None) -> None:
    found = mixed.summarise_storm(storm)["missed"]
    assert [line.startswith(missed or "") for line in found] == [True] * bool(missed)


def test_bombs_are_not_run_without_isolation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        mixed.main(["--isolation", "none"])
    assert leaving.value.code == 2
    assert "--isolation none" in capsys.readouterr().err


@pytest.mark.timeout(400)
def test_a_little_traffic_and_a_small_storm_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        choose_level("auto")
    except IsolationError as why:
        pytest.skip(str(why))
    sizes = ["--seconds", "2", "--calibration", "20", "--rate", "8", "--loop-s", "0.5", "--loops", "1", "--short", "5"]
    code = mixed.main([*sizes, "--lean", "--python", OWN_PYTHON, "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    figures = json.loads(captured.out.splitlines()[-1])
    traffic, storm = figures["traffic"], figures["storm"]
    assert traffic["lost"] == 0, captured.err
    assert traffic["with_loops"]["loops"] >= 1 > traffic["without_loops"]["loops"]
    assert (storm["calls"], storm["wrong"]) == (5, 0), captured.err
    assert code == (0 if figures["holds"] else 1)
