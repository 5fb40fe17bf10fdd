"""What counts as a right answer, and as a burst that keeps its promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import burst
from bench.burst import FORMS, Held, Run
from bench.probes.sampler import Watch
from bench.servers.service import Service
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from tests.executor.calling import OWN_PYTHON

COUNT = 20
USAGE = {"queue_ms": 1.0, "run_ms": 1.0, "cpu_ms": 1.0}
Answers = list[dict[str, Any]]


def _answer(call: dict[str, Any]) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, "-c", call["code"]], capture_output=True, text=True, check=True)
    return {"id": call["id"], "status": "ok", "stdout": ran.stdout, "usage": USAGE}


@asynccontextmanager
async def _service(change: Callable[[Answers], Answers]) -> AsyncIterator[Service]:
    """Speaks as the service does, with whatever `change` makes of the right answers, indices and all."""

    async def act(request: web.Request) -> web.Response:
        calls = msgpack.unpackb(await request.read())["calls"]
        answers = change([{"index": n, **_answer(call)} for n, call in enumerate(calls)])
        if request.headers["Accept"] in FORMS["whole"]:
            return web.Response(body=msgpack.packb({"results": answers}))
        return web.Response(body=b"".join(map(msgpack.packb, answers)))

    app = web.Application()
    app.router.add_post("/v1/batch", act)
    async with TestServer(app) as server:
        yield Service(str(server.make_url("")).rstrip("/"), os.getpid())


async def _asked(change: Callable[[Answers], Answers], form: str) -> Run:
    async with _service(change) as service:
        return await burst._run(service, list(burst.make("print", COUNT, 7)), 5, COUNT, FORMS[form], lambda: None)


@pytest.mark.asyncio
@pytest.mark.parametrize("form", FORMS)
async def test_right_answers_are_right(form: str) -> None:
    run = await _asked(lambda answers: answers, form)
    assert (run.right, run.lost, run.doubled, run.wrong) == (COUNT, 0, 0, 0), run.examples


@pytest.mark.asyncio
async def test_answers_in_another_order_are_wrong_in_a_whole_response() -> None:
    run = await _asked(lambda answers: answers[::-1], "whole")
    assert run.wrong == COUNT // 5 * 4  # of five, the one in the middle stays


@pytest.mark.asyncio
async def test_streamed_answers_may_come_in_any_order_but_once() -> None:
    run = await _asked(lambda answers: [*answers[::-1], answers[0]], "stream")
    assert (run.right, run.doubled) == (COUNT, COUNT // 5)


@pytest.mark.asyncio
@pytest.mark.parametrize("form", ["stream", "whole"])
async def test_answers_that_are_missing_are_lost(form: str) -> None:
    run = await _asked(lambda answers: answers[:-1], form)
    assert (run.right, run.lost) == (COUNT - COUNT // 5, COUNT // 5)


def test_no_two_calls_have_the_same_answer_and_a_status_counts_too() -> None:
    one, other = burst.make("mix", 2, 3)
    assert one.line != other.line
    right = {"id": one.call["id"], "status": one.status, "stdout": f"{one.line}\nmore\n"}
    assert one.is_answered_by(right)
    for change in ({"id": other.call["id"]}, {"status": "unavailable"}, {"stdout": f"{other.line}\n"}, {"stdout": ""}):
        assert not one.is_answered_by(right | change)


def _run(calls_per_s: float, right: int = 100) -> Run:
    return Run(100, right, seconds=100 / calls_per_s, latencies_ms=[1.0], queue_ms=[1.0], run_ms=[1.0])


IDLE = Held(100, 50, 9)


def _watched(memory_mb: float) -> Watch[Held]:
    with Watch(lambda: Held(memory_mb, 55.5, 9)) as watch:
        pass
    return watch


def test_a_share_of_calls_never_ends_and_only_a_timeout_is_right_for_it() -> None:
    asked = list(burst.make("print", 1000, 3, loops=0.01, loop_s=0.5))
    endless = [question for question in asked if not question.is_short]
    assert len(endless) == 10 and all(question.call["limits"] == {"timeout_s": 0.5} for question in endless)
    run = Run(2)
    answer = {"id": endless[0].call["id"], "stdout": f"{endless[0].line}\n", "usage": USAGE}
    run.take(endless[0], {**answer, "status": "ok"}, 9.0)
    run.take(endless[0], {**answer, "status": "timeout"}, 9.0)
    assert (run.wrong, run.right, run.short_ms, len(run.latencies_ms)) == (1, 1, [], 2)


def test_a_burst_is_held_against_the_steady_load_around_it() -> None:
    figures = burst.summarise(_run(90), [_run(80), _run(133)], IDLE, _watched(200))
    assert figures["steady"]["calls_per_s"] == pytest.approx(99.9, abs=0.1)
    assert figures["holds"], figures["missed"]
    assert figures["gateway_mb"] == {"idle": 50, "peak": 55.5}
    assert figures["ratio"] == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    ("run", "memory_mb", "missed"),
    [(_run(89), 200, "0.89 of"), (_run(100, 99), 200, "1 lost"), (_run(100), 1431, "1431 MiB")],
)
def test_a_promise_that_is_missed_is_named(run: Run, memory_mb: float, missed: str) -> None:
    figures = burst.summarise(run, [_run(100)], IDLE, _watched(memory_mb))
    assert [line.startswith(missed) for line in figures["missed"]] == [True]
    assert not figures["holds"]


def test_more_connections_than_descriptors_is_misuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert burst.too_many(45_000, 4, 20_000) == ""
    monkeypatch.setattr(burst, "_most_descriptors", lambda: 20_000)
    with pytest.raises(SystemExit) as leaving:
        burst.main(["--batch", "2"])
    assert leaving.value.code == 2
    assert "expected --batch 3 or more" in capsys.readouterr().err
    assert burst.too_many(45_000, 3, 20_000) == ""


@pytest.mark.timeout(300)
def test_a_small_burst_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        choose_level("auto")
    except IsolationError as why:
        pytest.skip(str(why))
    sizes = ["--calls", "120", "--loops", "0.02", "--loop-s", "0.3", "--batch", "7", "--steady", "64", "--lean"]
    code = burst.main([*sizes, "--python", OWN_PYTHON, "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    figures = json.loads(captured.out.splitlines()[-1])
    assert (figures["right"], figures["lost"], figures["doubled"], figures["wrong"]) == (120, 0, 0, 0), captured.err
    assert figures["requests"] == 18 and figures["gateway_descriptors"] > 0
    assert figures["statuses"] == {"ok": 117, "timeout": 3}
    assert figures["command"] == f"python -m bench.burst {' '.join(sizes)}"
    assert figures["memory_mb"]["peak"] > figures["gateway_mb"]["peak"] > 0
    cpu_ms = figures["burst"]["cpu_ms"]
    assert 0 < figures["burst"]["gateway_cpu_ms"] < cpu_ms and 0 < figures["burst"]["executor_cpu_ms"] < cpu_ms
    assert code == (0 if figures["holds"] else 1)
