"""Tests of `AsyncClient.judge`: the order of the results, the checks of programs before they are sent, and the retries
of programs without a result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgpack
import pytest
from aiohttp import web

from sandbox.client import AsyncClient, Client, transport
from sandbox.client import clients as client_module
from sandbox.client.judge import JudgeRoute
from sandbox.errors import InvalidCall, Overloaded, RequestRefused, Unreachable
from sandbox.judging.programs import JudgedProgram, JudgedTest, JudgeOutcome
from sandbox.types import Limits, UnavailableReason
from tests.client.servers import gateway_in_a_thread
from tests.gateway.serving import serving
from tests.http_server import HttpServer

PASSING = {"code": "hi", "tests": [{"stdin": "", "expected": "hi"}]}
"""A program that passes, because a fake executor returns the code as standard output."""
FAILING = {"code": "ho", "tests": [{"stdin": "", "expected": "hi"}]}
Answer = Callable[[int, dict[str, Any]], dict[str, Any] | int | None]
"""Takes the number of the request and a program. Returns the result of the program, or an HTTP status for the request,
or None if the connection is to be lost."""


def result(outcome: JudgeOutcome, reason: UnavailableReason | None = None) -> dict[str, Any]:
    return JudgedProgram.of("", (JudgedTest(outcome, reason=reason),), {}).encode()


@asynccontextmanager
async def scripted(answer: Answer, retry_after: str = "") -> AsyncIterator[tuple[str, list[list[str]]]]:
    """Run a server of `/v1/judge` that gives these answers. Yield its URL, and the codes of the programs in each
    request. The responses with an HTTP error have the header Retry-After."""
    requests: list[list[str]] = []

    async def respond(request: web.Request) -> web.StreamResponse:
        programs = json.loads(await request.read())["programs"]
        requests.append([program["code"] for program in programs])
        response = web.StreamResponse(headers={"Content-Type": "application/x-msgpack-stream"})
        for index, program in enumerate(programs):
            answered = answer(len(requests), program)
            if isinstance(answered, int):
                error = {"error": {"type": "No", "message": "no"}}
                return web.json_response(error, status=answered, headers={"Retry-After": retry_after})
            if not response.prepared:
                await response.prepare(request)
                await response.write(b"\xc0")  # a heartbeat
            if answered is None:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(msgpack.packb({"index": index, **answered}))
        return response

    app = web.Application()
    app.router.add_post("/v1/judge", respond)
    async with HttpServer(app) as server:
        yield str(server.make_url("/")), requests


@pytest.mark.asyncio
async def test_results_are_in_the_order_of_the_programs() -> None:
    async with serving() as served, AsyncClient(served.url) as client:
        programs = [PASSING, FAILING, {**PASSING, "id": "mine", "limits": Limits(timeout_s=2)}]
        judged = await client.judge(programs)
        streamed = [item async for item in client.stream_judged(programs)]
    assert [program.outcome.value for program in judged] == ["passed", "wrong_answer", "passed"]
    assert [program.id for program in judged] == ["0", "1", "mine"]
    assert sorted(index for index, _ in streamed) == [0, 1, 2]
    assert judged[0].tests[0].stdout == "hi"


@pytest.mark.asyncio
async def test_groups_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_BATCH_BYTES", 10_000)
    large = {"code": "hi", "tests": [{"stdin": "#" * 4000, "expected": "hi"}]}
    async with scripted(lambda _, program: result(JudgeOutcome.PASSED)) as (url, requests), AsyncClient(url) as client:
        await client.judge([large] * 5)
    assert sorted(len(codes) for codes in requests) == [1, 2, 2]


@pytest.mark.asyncio
async def test_programs_in_several_requests_all_get_the_default_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JudgeRoute, "max_weight", 4)  # tests in one request: those of two programs
    defaults = {"tests": [{"expected": "hi"}] * 2}
    async with serving() as served, AsyncClient(served.url) as client:
        judged = await client.judge([{"code": "hi"}] * 7, defaults)
    assert [program.passed for program in judged] == [2] * 7


@pytest.mark.asyncio
async def test_malformed_programs_raise_before_anything_is_sent() -> None:
    async with AsyncClient("http://127.0.0.1:1") as client:
        with pytest.raises(InvalidCall, match=r"programs\[1\].tests\[0\].expected"):
            await client.judge([PASSING, {"code": "1", "tests": [{"stdin": ""}]}])
        with pytest.raises(InvalidCall, match=r"defaults\.code"):
            await client.judge([PASSING], {"code": "1"})
        with pytest.raises(TypeError, match="programs: expected a list"):
            await client.judge(PASSING)  # type: ignore[arg-type]
        assert await client.judge([]) == []


@pytest.mark.asyncio
async def test_programs_of_a_broken_response_are_sent_again() -> None:
    def answer(number: int, program: dict[str, Any]) -> dict[str, Any] | None:
        return None if number == 1 and program["code"] == "b" else result(JudgeOutcome.PASSED)

    async with scripted(answer) as (url, requests), AsyncClient(url) as client:
        judged = await client.judge([{**PASSING, "code": code} for code in "abc"])
    assert requests == [["a", "b", "c"], ["b", "c"]]
    assert [program.outcome for program in judged] == [JudgeOutcome.PASSED] * 3


@pytest.mark.asyncio
async def test_a_program_is_sent_again_after_stopped_but_not_after_queue_timeout() -> None:
    reasons = {"a": UnavailableReason.STOPPED, "b": UnavailableReason.QUEUE_TIMEOUT}

    def answer(number: int, program: dict[str, Any]) -> dict[str, Any]:
        if number == 1:
            return result(JudgeOutcome.UNAVAILABLE, reasons[program["code"]])
        return result(JudgeOutcome.PASSED)

    async with scripted(answer) as (url, requests), AsyncClient(url) as client:
        judged = await client.judge([{**PASSING, "code": code} for code in "ab"])
    assert requests == [["a", "b"], ["a"]]
    assert [program.outcome.value for program in judged] == ["passed", "unavailable"]


@pytest.mark.asyncio
async def test_a_program_without_retries_left_keeps_its_result() -> None:
    async with (
        scripted(lambda _number, _program: result(JudgeOutcome.UNAVAILABLE, UnavailableReason.STOPPED)) as (
            url,
            requests,
        ),
        AsyncClient(url, retries=2) as client,
    ):
        (judged,) = await client.judge([PASSING])
    assert (len(requests), judged.outcome, judged.is_scorable) == (3, JudgeOutcome.UNAVAILABLE, False)


@pytest.mark.parametrize(
    ("answered", "error", "attempts"), [(400, RequestRefused, 1), (429, Overloaded, 3), (None, Unreachable, 3)]
)
@pytest.mark.asyncio
async def test_a_failure_that_persists_raises(answered: int | None, error: type[Exception], attempts: int) -> None:
    async with scripted(lambda _number, _program: answered) as (url, requests), AsyncClient(url, retries=2) as client:
        with pytest.raises(error):
            await client.judge([PASSING])
    assert len(requests) == attempts


PASSED_ONE_OF_TWO = (JudgedTest(JudgeOutcome.PASSED), JudgedTest(JudgeOutcome.WRONG_ANSWER))
ANSWERS = {
    "a": JudgedProgram.of("", PASSED_ONE_OF_TWO, {}).encode(),
    "b": result(JudgeOutcome.UNJUDGED),
    "c": JudgedProgram("", JudgeOutcome.INVALID, message="malformed").encode(),
    "d": result(JudgeOutcome.UNAVAILABLE, UnavailableReason.QUEUE_TIMEOUT),
    "e": result(JudgeOutcome.PASSED),
    "f": result(JudgeOutcome.FAILED),
}
"""The results of programs by their code."""


@pytest.mark.asyncio
async def test_rewards_has_one_item_per_program_and_none_for_a_program_that_is_not_scorable() -> None:
    programs = [{**PASSING, "code": code} for code in ANSWERS]
    async with scripted(lambda _number, program: ANSWERS[program["code"]]) as (url, _), AsyncClient(url) as client:
        assert await client.rewards(programs, partial=True) == [0.5, None, None, None, 1.0, 0.0]
        assert await client.rewards(programs) == [0.0, None, None, None, 1.0, 0.0]


@pytest.mark.asyncio
async def test_a_request_that_fails_raises_an_error_with_the_results_so_far() -> None:
    def answer(_number: int, program: dict[str, Any]) -> dict[str, Any] | None:
        return None if program["code"] == "hang" else ANSWERS[program["code"]]

    programs = ({**PASSING, "code": code} for code in ("a", "hang", "e"))
    async with scripted(answer) as (url, _), AsyncClient(url, retries=0) as client:
        with pytest.raises(Unreachable) as raised:
            await client.judge(programs)  # type: ignore[arg-type]  # any iterable is accepted at run time
        assert [program and program.passed for program in raised.value.results] == [1, None, None]
        with pytest.raises(Unreachable) as raised:
            await client.rewards([{**PASSING, "code": code} for code in ("e", "a", "hang")], partial=True)
        assert raised.value.results == [1.0, 0.5, None]


@pytest.mark.asyncio
async def test_programs_of_a_request_that_is_too_large_are_sent_in_smaller_requests() -> None:
    def answer(number: int, program: dict[str, Any]) -> dict[str, Any] | int:
        return 413 if len(requests[number - 1]) > 2 else result(JudgeOutcome.PASSED)  # `requests` is set below

    async with scripted(answer) as (url, requests), AsyncClient(url) as client:
        judged = await client.judge([{**PASSING, "code": code} for code in "abcde"])
    assert requests[0] == list("abcde")
    # The request with 5 programs becomes requests with 3 and 2, and the one with 3 becomes requests with 2 and 1.
    assert sorted(requests[1:]) == [list("ab"), list("abc"), ["c"], list("de")]
    assert [program.outcome for program in judged] == [JudgeOutcome.PASSED] * 5


@pytest.mark.asyncio
async def test_every_endpoint_that_is_overloaded_gets_its_retry_after() -> None:
    started_at, sent_at = asyncio.get_running_loop().time(), list[float]()

    def refuse(number: int, program: dict[str, Any]) -> int:
        sent_at.append(asyncio.get_running_loop().time() - started_at)
        return 503

    async with (
        scripted(refuse, "0.2") as (first, to_first),
        scripted(refuse, "0.2") as (second, to_second),
        AsyncClient([first, second], retries=4) as client,
    ):
        with pytest.raises(Overloaded):
            await client.judge([PASSING])
    assert sorted((len(to_first), len(to_second))) == [2, 3]  # 1 + `retries` requests, in turns
    assert sent_at[2] >= 0.2, "an endpoint got its second request before its Retry-After"
    assert sent_at[4] >= 0.4, "an endpoint got its third request before its second Retry-After"


@pytest.mark.asyncio
async def test_a_response_that_is_no_result_is_an_error() -> None:
    async with scripted(lambda _number, _program: {"id": 1}) as (url, _), AsyncClient(url, retries=0) as client:
        with pytest.raises(Unreachable, match="no result"):
            await client.judge([PASSING])


@pytest.mark.asyncio
async def test_a_test_that_is_poisonous_is_not_run_again_although_another_was_stopped() -> None:
    reasons = (UnavailableReason.STOPPED, UnavailableReason.POISON)
    tests = tuple(JudgedTest(JudgeOutcome.UNAVAILABLE, reason=reason) for reason in reasons)
    unavailable = JudgedProgram.of("", tests, {}).encode()
    async with scripted(lambda _number, _program: unavailable) as (url, requests), AsyncClient(url) as client:
        (judged,) = await client.judge([PASSING])
    assert (len(requests), judged.outcome) == (1, JudgeOutcome.UNAVAILABLE)


@pytest.mark.asyncio
async def test_a_program_with_an_unknown_reason_is_not_sent_again() -> None:
    newer = result(JudgeOutcome.UNAVAILABLE)
    newer["tests"][0]["reason"] = "Later"
    async with scripted(lambda _number, _program: newer) as (url, requests), AsyncClient(url) as client:
        (judged,) = await client.judge([PASSING])
    assert (len(requests), judged.tests[0].reason) == (1, None)


@pytest.mark.asyncio
async def test_each_program_has_a_retry_budget_of_its_own() -> None:
    """Program "b" is unavailable in each of its requests and uses up its retries. Program "a", which is sent with a
    later one of these requests, must still get its first retry."""

    def answer(number: int, program: dict[str, Any]) -> dict[str, Any]:
        is_stopped = program["code"] == "b" or number <= 2
        return (
            result(JudgeOutcome.UNAVAILABLE, UnavailableReason.STOPPED) if is_stopped else result(JudgeOutcome.PASSED)
        )

    async with scripted(answer) as (url, requests), AsyncClient(url, retries=2) as client:
        judged = await client.judge([{**PASSING, "code": code} for code in "ab"])
    assert requests == [["a", "b"]] * 3
    assert [program.outcome.value for program in judged] == ["passed", "unavailable"]


@pytest.mark.asyncio
async def test_a_repeated_result_of_a_program_is_ignored() -> None:
    async def respond_twice(request: web.Request) -> web.StreamResponse:
        encoded = msgpack.packb({"index": 0, **result(JudgeOutcome.PASSED)})
        second = msgpack.packb({"index": 1, **result(JudgeOutcome.FAILED)})
        return web.Response(body=2 * encoded + second, content_type="application/x-msgpack-stream")

    app = web.Application()
    app.router.add_post("/v1/judge", respond_twice)
    async with HttpServer(app) as server, AsyncClient(str(server.make_url("/"))) as client:
        judged = await client.judge([PASSING, PASSING])
    assert [program.outcome.value for program in judged] == ["passed", "failed"]


@pytest.mark.asyncio
async def test_programs_use_no_more_connections_than_the_client_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JudgeRoute, "max_weight", 1)
    open_requests, most_open = 0, 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal open_requests, most_open
        open_requests += 1
        most_open = max(most_open, open_requests)
        await request.read()
        await asyncio.sleep(0)
        open_requests -= 1
        encoded = msgpack.packb({"index": 0, **result(JudgeOutcome.PASSED)})
        return web.Response(body=encoded, content_type="application/x-msgpack-stream")

    app = web.Application()
    app.router.add_post("/v1/judge", respond)
    async with HttpServer(app) as server, AsyncClient(str(server.make_url("/")), max_connections=2) as client:
        assert len(await client.judge([PASSING] * 20)) == 20
    assert most_open <= 2


@pytest.mark.asyncio
async def test_a_server_that_failed_gets_no_programs_for_as_long_as_the_failed_request_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    for module in ("transport", "endpoints"):
        monkeypatch.setattr(f"sandbox.client.{module}._now", lambda: now_s)
    monkeypatch.setattr("sandbox.client.endpoints.MAX_RETRY_DELAY_S", 5.0)

    def fail_after_two_seconds(number: int, program: dict[str, Any]) -> int:
        nonlocal now_s
        now_s += 2
        return 503

    async with (
        scripted(fail_after_two_seconds) as (slow, to_slow),
        scripted(lambda *_: result(JudgeOutcome.PASSED)) as (healthy, _),
        AsyncClient([slow, healthy]) as client,
    ):
        for judge_at_s, num_requests in ((0, 1), (3.9, 1), (5.1, 2)):  # the pause is 2 to 3 s, from 2 s on
            now_s = judge_at_s
            await client.judge([PASSING])
            assert len(to_slow) == num_requests


@pytest.mark.asyncio
async def test_the_tests_that_are_submitted_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_TESTS_AT_ONCE", 4)
    two_tests = {"code": "hi", "tests": PASSING["tests"] * 2}
    async with serving() as served, AsyncClient(served.url) as client:
        submitted_at_end = []
        async for _ in client.stream_judged([two_tests] * 9):
            requests = client._transport._requests
            submitted_at_end.append(sum(len(request.unfinished()) for request in requests))
    assert len(submitted_at_end) == 9 and max(submitted_at_end) <= 2, "two programs have four tests"


def test_the_client_without_an_event_loop_has_the_same_method() -> None:
    with gateway_in_a_thread() as url, Client(url) as client:
        assert [program.passed for program in client.judge([PASSING, FAILING])] == [1, 0]
        assert client.rewards([PASSING, FAILING]) == [1.0, 0.0]
        assert {index: program.passed for index, program in client.stream_judged([PASSING, FAILING])} == {0: 1, 1: 0}


@pytest.mark.asyncio
async def test_leaving_the_loop_cancels_the_request() -> None:
    hanging = {**PASSING, "code": "hang"}
    async with serving() as served, AsyncClient(served.url) as client:
        async with aclosing(client.stream_judged([hanging, PASSING])) as judged:
            assert (await anext(judged))[0] == 1
        async with asyncio.timeout(10):
            while served.dispatcher.call_table.outstanding.calls:  # noqa: ASYNC110  the server has no event for it
                await asyncio.sleep(0.01)
