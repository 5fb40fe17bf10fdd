"""The attack as a command, and what it counts."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import chaos
from bench.chaos import Load, Tally, Target
from bench.harness.command import BenchFailed
from bench.workloads import checked_calls
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from sandbox.types import Call, CallError, Result, Status
from tests.executor.calling import OWN_PYTHON

COUNT = 60
ANSWERS = {
    riddle.call.code + riddle.call.stdin + str(riddle.call.files): riddle for riddle in checked_calls.make(COUNT, 1)
}


def answer(call: dict[str, Any]) -> dict[str, Any]:
    known = Call.decode(call)
    said = ANSWERS[known.code + known.stdin + str(known.files)].answer
    error = CallError("Any", said.message) if said.status is not Status.OK else None
    result = Result(said.id, said.status, said.stdout, "", said.value, error, files=said.files)
    return result.encode(binary=True)


@asynccontextmanager
async def service_that(answers: Any) -> AsyncIterator[str]:
    """Speaks as the service does, and gives for each request whatever `answers` makes of the right lines."""
    import msgpack

    async def act(request: web.Request) -> web.StreamResponse:
        body = msgpack.unpackb(await request.read())
        lines = answers([{"index": n, **answer(call)} for n, call in enumerate(body["calls"])])
        response = web.StreamResponse()
        await response.prepare(request)
        for line in lines:
            await response.write(msgpack.packb(line))
        return response

    app = web.Application()
    app.router.add_post("/v1/batch", act)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


class _Nobody(Target):
    """A target of which only the address is known."""

    url = ""

    def __init__(self, url: str) -> None:
        self.url = url

    def check_is_alive(self) -> None: ...


async def _asked(monkeypatch: pytest.MonkeyPatch, answers: Any) -> Tally:
    monkeypatch.setattr(chaos, "BATCHES", (10,))
    monkeypatch.setattr(chaos, "BODIES", {})
    monkeypatch.setattr(
        chaos, "STREAMS", {"application/x-msgpack-stream": chaos.STREAMS["application/x-msgpack-stream"]}
    )
    monkeypatch.setattr(chaos, "GIVEN_UP", 0)
    async with service_that(answers) as url:
        tally = Tally(COUNT)
        asked = checked_calls.make(COUNT, 1)
        load = Load(cast(Target, _Nobody(url)), asked, tally, random.Random(1), lambda: None)
        await load.run(10)
    return tally


@pytest.mark.asyncio
async def test_right_answers_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = await _asked(monkeypatch, lambda lines: lines)
    assert (tally.answered, tally.lost, tally.doubled, tally.mixed_up) == (COUNT, 0, 0, 0)


@pytest.mark.asyncio
async def test_an_answer_that_comes_twice_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = await _asked(monkeypatch, lambda lines: [lines[0], *lines])
    assert (tally.answered, tally.doubled, tally.mixed_up) == (COUNT, COUNT // 10, 0)


@pytest.mark.asyncio
async def test_answers_that_are_swapped_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(lines: list[Any]) -> list[Any]:
        return [{**lines[1], "index": 0}, {**lines[0], "index": 1}, *lines[2:]]

    tally = await _asked(monkeypatch, swap)
    assert (tally.answered, tally.doubled, tally.mixed_up) == (COUNT, 0, 2 * COUNT // 10)


@pytest.mark.asyncio
async def test_an_answer_that_is_missing_from_a_whole_response_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        await _asked(monkeypatch, lambda lines: lines[:-1])
    assert raised.group_contains(BenchFailed, match="10 calls sent, 9 answered")


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon"])
@pytest.mark.parametrize("flag", ["--kill-every", "--kill-gateway", "--most-s"])
def test_a_span_that_is_none_is_misuse(flag: str, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        chaos.main([flag, given])
    assert leaving.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.timeout(400)
def test_a_small_attack_is_survived(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        choose_level("auto")
    except IsolationError as why:
        pytest.skip(str(why))
    sizes = ["--calls", "250", "--kill-every", "1", "--lean", "--python", OWN_PYTHON]
    code = chaos.main([*sizes, "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    figures = json.loads(captured.out.splitlines()[-1])
    assert (figures["lost"], figures["doubled"], figures["mixed_up"]) == (0, 0, 0), captured.err
    assert sum(figures["statuses"].values()) == 250
    assert code == (0 if figures["holds"] else 1)
