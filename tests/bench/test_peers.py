"""Tests of bench.peers, which compares the service with other sandbox services (peers).

Each peer gets requests in its own format. Every call is counted once, whatever the peer answers. The fakes here answer
as code-judge and SandboxFusion do. The code of a call selects the answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench import peers
from bench.harness.command import BenchFailed
from bench.harness.requirements import hold
from bench.peers import FRESH, OURS, Answer, PeerCall, SystemRound, code_judge, sandbox_fusion
from bench.servers import service
from tests.bench.conftest import RunBenchmark
from tests.http_server import HttpServer

PRINTS = {"print(6 * 7)\n": "42\n", "print(1 + 1)\n": "2\n"}
"""Programs that the fakes can run, with their output. The output of any other code is its input."""


async def answer_long_batch(request: web.Request) -> web.Response:
    """Answer as code-judge does, with 422 for a body that it would not accept."""
    body = await request.json()
    known_fields = {"sub_id", "type", "solution", "input", "expected_output", "options"}
    if body.get("type") != "batch" or not body["submissions"]:
        return web.json_response({"detail": "malformed"}, status=422)
    submissions = body["submissions"]
    if any(set(submission) - known_fields or submission["type"] != "python" for submission in submissions):
        return web.json_response({"detail": "malformed"}, status=422)
    return web.json_response({"sub_id": "x", "results": [_code_judge_result(submission) for submission in submissions]})


def _code_judge_result(submission: dict[str, Any]) -> dict[str, Any]:
    code, has_failed = submission["solution"], {"success": False, "run_success": False}
    result = {
        "sub_id": "x",
        "success": True,
        "run_success": True,
        "cost": 0.1,
        "stdout": "",
        "stderr": "",
        "reason": "",
    }
    if code in ("queue_timeout", "internal_error", "worker_timeout"):
        return {**result, **has_failed, "reason": code}
    if code == "raise":
        return {**result, **has_failed, "stderr": "Traceback"}
    return {**result, "stdout": PRINTS.get(code, submission["input"] or "")}


async def answer_run_code(request: web.Request) -> web.Response:
    """Answer as SandboxFusion does, with 422 for unknown fields."""
    body = await request.json()
    if set(body) - {"code", "language", "run_timeout", "compile_timeout", "memory_limit_MB", "stdin", "files"}:
        return web.json_response({"detail": "malformed"}, status=422)
    stdout = PRINTS.get(body["code"], body["stdin"])
    finished = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stderr": "", "stdout": stdout}
    match body["code"]:
        case "gateway timeout":
            return web.Response(status=504, text="upstream")
        case "raise":
            status, run = "Failed", {**finished, "return_code": 1}
        case "loop":
            assert body["run_timeout"] == 1.5
            status, run = "Failed", {**finished, "status": "TimeLimitExceeded", "return_code": None, "stdout": None}
        case "broken":
            status, run = "SandboxError", {}
        case _:
            status, run = "Success", finished
    answer = {"status": status, "message": "no disk", "compile_result": None, "run_result": run or None, "files": {}}
    return web.json_response({**answer, "executor_pod_name": None})


def application() -> web.Application:
    app = web.Application()
    app.router.add_post("/run/long-batch", answer_long_batch)
    app.router.add_post("/run_code", answer_run_code)
    return app


@asynccontextmanager
async def _fakes() -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    async with HttpServer(application()) as server, aiohttp.ClientSession() as http:
        yield str(server.make_url("")).rstrip("/"), http


async def _answers(system: peers.System, calls: Sequence[Mapping[str, Any]]) -> list[Answer]:
    indexed = [pair async for pair in system.run(calls)]
    assert [index for index, _ in indexed] == list(range(len(calls)))
    return [answer for _, answer in indexed]


@pytest.mark.asyncio
async def test_responses_of_code_judge_are_decoded() -> None:
    calls = [{"code": "print(1 + 1)\n"}, {"code": "cat", "stdin": "hi"}, {"code": "raise"}, {"code": "worker_timeout"}]
    async with _fakes() as (url, http):
        unanswered_calls = [{"code": "queue_timeout"}, {"code": "internal_error"}]
        answers = await _answers(code_judge(http, url, 8), [*calls, *unanswered_calls])
    assert answers[:4] == [Answer("ok", "2\n"), Answer("ok", "hi"), Answer("error"), Answer("timeout")]
    assert answers[4:] == [Answer("", reason="queue_timeout"), Answer("", reason="internal_error")]


@pytest.mark.asyncio
async def test_responses_of_sandbox_fusion_are_decoded() -> None:
    loop: dict[str, Any] = {"code": "loop", "limits": {"timeout_s": 1.5}}
    calls: list[dict[str, Any]] = [
        {"code": "print(1 + 1)\n"},
        {"code": "cat", "stdin": "hi"},
        {"code": "raise"},
        loop,
        {"code": "broken"},
    ]
    async with _fakes() as (url, http):
        answers = await _answers(sandbox_fusion(http, url, 8), calls)
        with pytest.raises(ValueError, match="HTTP 504: upstream"):
            await _answers(sandbox_fusion(http, url, 8), [{"code": "gateway timeout"}])
    assert [answer.status for answer in answers] == ["ok", "ok", "error", "timeout", ""]
    assert (answers[1].stdout, answers[4].reason) == ("hi", "SandboxError: no disk")


@pytest.mark.asyncio
async def test_every_call_is_counted_once_as_correct_mismatched_or_unanswered() -> None:
    calls = [
        PeerCall({"code": "print(1 + 1)\n"}, "ok", "2\n"),
        PeerCall({"code": "print(1 + 1)\n"}, "ok", "3\n"),
        PeerCall({"code": "raise"}, "ok"),
        PeerCall({"code": "gateway timeout"}, "ok"),
        PeerCall({"code": "broken"}, "ok"),
    ]
    async with _fakes() as (url, http):
        row = await peers.drive(sandbox_fusion(http, url, 5), calls, seconds=0.3)
    assert row.calls == row.correct + row.mismatched + row.unanswered.total() >= 5
    assert row.correct > 0 and row.mismatched > 0
    assert set(row.unanswered) == {"ValueError: HTTP 504: upstream", "SandboxError: no disk"}
    assert len(row.latencies_ms) == row.correct + row.mismatched


@pytest.mark.asyncio
async def test_a_load_sends_exactly_its_calls_with_its_limits() -> None:
    load = peers.Load("print", 10, 4, {"timeout_s": 1.5}, "ten")
    async with _fakes() as (url, http):
        row = await peers.run_load(sandbox_fusion(http, url, load.in_flight), PeerCall({"code": "loop"}, "ok"), load)
    assert (row.calls, row.correct, row.mismatched, row.unanswered.total()) == (10, 0, 10, 0)


@pytest.mark.asyncio
async def test_calls_to_an_unreachable_peer_are_unanswered() -> None:
    async with aiohttp.ClientSession() as http:
        system = code_judge(http, "http://127.0.0.1:1", 8)
        row = await peers.drive(system, [PeerCall({"code": "1"}, "ok")], seconds=0.05)
    assert row.calls == row.unanswered.total() > 0 and row.correct == row.mismatched == 0


def _row(correct: int, mismatched: int = 0, unanswered: int = 0) -> SystemRound:
    """A round that took 2 s, with these numbers of calls."""
    answered = correct + mismatched
    row = SystemRound(answered + unanswered, correct, mismatched, 2.0, latencies_ms=[1.0] * answered)
    row.unanswered["gone"] += unanswered
    return row


def test_a_faster_peer_meets_the_requirements_but_our_own_failures_do_not_meet_the_requirements() -> None:
    rounds = {OURS: [_row(100), _row(20), _row(60)], "other": [_row(80, 2, 8)] * 3}
    result = peers.summarize({"print": rounds}, {})
    assert result["kinds"]["print"][OURS]["calls_per_s"] == 30  # the median of 50, 10 and 30
    # The other system answers 82 calls in each round of 2 s. Unanswered calls do not count for its rate.
    sums = {"calls": 270, "correct": 240, "mismatched": 6, "unanswered": 24, "reasons": {"gone": 24}}
    assert result["kinds"]["print"]["other"].items() >= {"calls_per_s": 41.0, **sums}.items()
    assert hold(result["requirements"])
    assert not hold(peers.summarize({"print": {OURS: [_row(9, mismatched=1)]}}, {})["requirements"])
    assert not hold(
        peers.summarize({"print": {OURS: [_row(9)]}}, {"burst": {OURS: _row(9, unanswered=1)}})["requirements"]
    )


@pytest.fixture
def url_of_fakes() -> Iterator[str]:
    """The address of the fakes. They run on an event loop of their own, since the benchmark runs one itself."""
    loop = asyncio.new_event_loop()
    server = HttpServer(application())
    loop.run_until_complete(server.start_server(loop=loop))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield str(server.make_url("")).rstrip("/")
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.runtime
def test_all_systems_answer_all_calls(guest_python: Path, url_of_fakes: str, run_benchmark: RunBenchmark) -> None:
    sizes = [
        "--kinds",
        "print",
        "--loads",
        "burst",
        "--seconds",
        "0.2",
        "--rounds",
        "1",
        "--in-flight",
        "8",
        "--python",
        str(guest_python),
    ]
    peer_urls = ["--code-judge", url_of_fakes, "--sandbox-fusion", url_of_fakes]
    with service.running(str(guest_python), ["--profiles", "bare", "--zygote-pools", "1"]) as server:
        exit_code, result = run_benchmark(peers.main, *sizes, *peer_urls, "--url", server.url)
    assert exit_code == 0
    assert result["systems"] == [OURS, "code-judge", "SandboxFusion", FRESH]
    for row in result["kinds"]["print"].values():
        assert row["correct"] == row["calls"] > 0 and row["calls_per_s"] > 0 and row["latency_ms"]["p50"] > 0
    assert {name: row["correct"] for name, row in result["loads"]["burst"].items()} == dict.fromkeys(
        [OURS, "code-judge", "SandboxFusion"], 1000
    )


@pytest.mark.asyncio
async def test_a_peer_that_cannot_run_a_simple_call_ends_the_benchmark() -> None:
    async with aiohttp.ClientSession() as http:
        system = sandbox_fusion(http, "http://127.0.0.1:1", 8)
        with pytest.raises(BenchFailed, match="SandboxFusion: expected an answer, got ClientConnectorError"):
            await peers.check(system)
