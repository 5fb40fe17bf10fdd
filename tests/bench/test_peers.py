"""Each peer gets requests in its own format, and every call is counted once, whatever the peer does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import peers
from bench.harness.command import BenchFailed
from bench.harness.requirements import hold
from bench.peers import FRESH, OURS, Answer, PeerCall, SystemRound, code_judge, sandbox_fusion
from bench.servers import service

PRINTS = {"print(6 * 7)\n": "42\n", "print(1 + 1)\n": "2\n"}
"""Programs that the fakes can run, with their output."""


async def long_batch(request: web.Request) -> web.Response:
    """As code-judge answers: 422 for a body of another shape."""
    body = await request.json()
    known = {"sub_id", "type", "solution", "input", "expected_output", "options"}
    if body.get("type") != "batch" or not body["submissions"]:
        return web.json_response({"detail": "malformed"}, status=422)
    if any(set(one) - known or one["type"] not in ("python", "cpp") for one in body["submissions"]):
        return web.json_response({"detail": "malformed"}, status=422)
    return web.json_response({"sub_id": "x", "results": [_judged(one) for one in body["submissions"]]})


def _judged(one: dict[str, Any]) -> dict[str, Any]:
    code = one["solution"]
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
        return {**result, "success": False, "run_success": False, "reason": code}
    if code == "raise":
        return {**result, "success": False, "run_success": False, "stderr": "Traceback"}
    return {**result, "stdout": PRINTS.get(code, one["input"] or "")}


async def run_code(request: web.Request) -> web.Response:
    """As SandboxFusion answers."""
    body = await request.json()
    if set(body) - {"code", "language", "run_timeout", "compile_timeout", "memory_limit_MB", "stdin", "files"}:
        return web.json_response({"detail": "malformed"}, status=422)
    run: dict[str, Any] | None = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stderr": ""}
    assert run is not None
    run["stdout"] = PRINTS.get(body["code"], body["stdin"])
    status = "Success"
    if body["code"] == "gateway timeout":
        return web.Response(status=504, text="upstream")
    if body["code"] == "raise":
        status, run = "Failed", {**run, "return_code": 1}
    if body["code"] == "loop":
        assert body["run_timeout"] == 1.5
        status, run = "Failed", {**run, "status": "TimeLimitExceeded", "return_code": None, "stdout": None}
    if body["code"] == "broken":
        status, run = "SandboxError", None
    answer = {"status": status, "message": "no disk", "compile_result": None, "run_result": run, "files": {}}
    return web.json_response({**answer, "executor_pod_name": None})


def application() -> web.Application:
    app = web.Application()
    app.router.add_post("/run/long-batch", long_batch)
    app.router.add_post("/run_code", run_code)
    return app


@asynccontextmanager
async def _served() -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    async with TestServer(application()) as server, aiohttp.ClientSession() as http:
        yield str(server.make_url("")).rstrip("/"), http


async def _answers(system: peers.System, calls: Sequence[Mapping[str, Any]]) -> list[Answer]:
    answers = [answer async for answer in system.run(calls)]
    assert [index for index, _ in answers] == list(range(len(calls)))
    return [answer for _, answer in answers]


@pytest.mark.asyncio
async def test_responses_of_code_judge_are_decoded() -> None:
    calls = [{"code": "print(1 + 1)\n"}, {"code": "cat", "stdin": "hi"}, {"code": "raise"}, {"code": "worker_timeout"}]
    async with _served() as (url, http):
        found = await _answers(
            code_judge(http, url, 8), [*calls, {"code": "queue_timeout"}, {"code": "internal_error"}]
        )
    assert found[:4] == [Answer("ok", "2\n"), Answer("ok", "hi"), Answer("error"), Answer("timeout")]
    assert found[4:] == [Answer("", reason="queue_timeout"), Answer("", reason="internal_error")]


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
    async with _served() as (url, http):
        found = await _answers(sandbox_fusion(http, url, 8), calls)
        with pytest.raises(ValueError, match="HTTP 504: upstream"):
            await _answers(sandbox_fusion(http, url, 8), [{"code": "gateway timeout"}])
    assert [answer.status for answer in found] == ["ok", "ok", "error", "timeout", ""]
    assert (found[1].stdout, found[4].reason) == ("hi", "SandboxError: no disk")


@pytest.mark.asyncio
async def test_every_call_is_counted_once_whatever_becomes_of_it() -> None:
    calls = [
        PeerCall({"code": "print(1 + 1)\n"}, "ok", "2\n"),
        PeerCall({"code": "print(1 + 1)\n"}, "ok", "3\n"),
        PeerCall({"code": "raise"}, "ok"),
        PeerCall({"code": "gateway timeout"}, "ok"),
        PeerCall({"code": "broken"}, "ok"),
    ]
    async with _served() as (url, http):
        tally = await peers.drive(sandbox_fusion(http, url, 5), calls, 0.3)
    assert tally.calls == tally.correct + tally.mismatched + tally.unanswered.total() >= 5
    assert (
        tally.correct
        and tally.mismatched
        and set(tally.unanswered) == {"ValueError: HTTP 504: upstream", "SandboxError: no disk"}
    )
    assert len(tally.latencies_ms) == tally.correct + tally.mismatched


@pytest.mark.asyncio
async def test_calls_to_an_unreachable_peer_are_unanswered() -> None:
    async with aiohttp.ClientSession() as http:
        system = code_judge(http, "http://127.0.0.1:1", 8)
        tally = await peers.drive(system, [PeerCall({"code": "1"}, "ok")], 0.05)
    assert tally.calls == tally.unanswered.total() > 0 and tally.correct == tally.mismatched == 0


def _tally(correct: int, mismatched: int = 0, lost: int = 0) -> SystemRound:
    tally = SystemRound(
        correct + mismatched + lost,
        correct,
        mismatched,
        seconds=2.0,
        cpu_s=1.0,
        latencies_ms=[1.0] * (correct + mismatched),
    )
    tally.unanswered["gone"] += lost
    return tally


def test_a_faster_peer_is_reported_and_our_own_failures_do_not_meet_the_requirements() -> None:
    rounds = {OURS: [_tally(100), _tally(20), _tally(60)], "other": [_tally(80, 2, 8)] * 3}
    result = peers.summarize({"print": rounds})
    assert result["kinds"]["print"][OURS]["calls_per_s"] == 30
    assert result["kinds"]["print"]["other"] | {"latency_ms": 0, "machine_cpu_ms": 0} == {
        "calls": 270, "calls_per_s": 41.0, "machine_cpu_ms": 0, "latency_ms": 0, "correct": 240, "mismatched": 6,
        "unanswered": 24, "reasons": {"gone": 24},
    }  # fmt: skip
    assert result["faster"] == [f"print: other runs 41 calls/s, {OURS} 30"]
    assert hold(result["requirements"])
    assert not hold(peers.summarize({"print": {OURS: [_tally(9, mismatched=1)]}})["requirements"])
    assert not hold(peers.summarize({"print": {OURS: [_tally(9, lost=1)]}})["requirements"])


@pytest.fixture
def running_fakes() -> Iterator[str]:
    """The fakes on a loop of their own, since the command has one itself."""
    loop = asyncio.new_event_loop()
    server = TestServer(application())
    loop.run_until_complete(server.start_server(loop=loop))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield str(server.make_url("")).rstrip("/")
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.runtime
def test_all_systems_answer_all_calls(
    guest_python: Path, running_fakes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--kinds", "print", "--seconds", "0.2", "--rounds", "1", "--in-flight", "8", "--python", str(guest_python)]
    theirs = ["--code-judge", running_fakes, "--sandbox-fusion", running_fakes]
    with service.running(str(guest_python), ["--profiles", "bare", "--zygote-pools", "1"]) as server:
        assert peers.main([*sizes, *theirs, "--url", server.url, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["systems"] == [OURS, "code-judge", "SandboxFusion", FRESH]
    for row in result["kinds"]["print"].values():
        assert row["correct"] == row["calls"] > 0 and row["calls_per_s"] > 0 and row["latency_ms"]["p50"] > 0


def test_a_peer_that_cannot_run_a_simple_call_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    async def check() -> None:
        async with aiohttp.ClientSession() as http:
            await peers.check(sandbox_fusion(http, "http://127.0.0.1:1", 8))

    with pytest.raises(BenchFailed, match="SandboxFusion: expected an answer, got ClientConnectorError"):
        asyncio.run(check())
