"""Tests of retries by the clients: which failures of requests and calls are retried, after which delay, and how the
retries are logged."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from sandbox.client import AsyncClient
from sandbox.client.endpoints import Endpoints
from sandbox.errors import Overloaded, RequestRefused, ServiceError, Unreachable
from sandbox.judging import answers as verify
from sandbox.types import Call, Status, UnavailableReason
from tests.client.servers import (
    EncodedCall,
    Responder,
    abort_before_last_result,
    encode_result,
    encode_results,
    refuse_with,
    respond_after,
    respond_garbage,
    respond_ok,
    respond_unavailable,
    respond_verdicts,
    scripted_server,
    stopped_result,
)
from tests.gateway.serving import until


@pytest.mark.asyncio
async def test_after_a_broken_stream_only_unfinished_calls_are_sent_again() -> None:
    async with scripted_server(abort_before_last_result, respond_ok) as server, AsyncClient(server.url) as client:
        results = await client.run_batch(["a", "b", "c"])
    assert [r.stdout for r in results] == ["a", "b", "c"]
    assert server.codes == [["a", "b", "c"], ["c"]]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "failure", [refuse_with(429, Retry_After="0"), *map(refuse_with, (408, 425, 500, 503)), respond_garbage]
)
async def test_temporary_failures_are_retried(failure: Responder) -> None:
    async with scripted_server(failure, failure, respond_ok) as server, AsyncClient(server.url) as client:
        assert (await client.execute("1")).stdout == "1"
    assert len(server.requests) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (refuse_with(429), Overloaded),
        (refuse_with(503), Overloaded),
        (refuse_with(502), Unreachable),
        (respond_garbage, Unreachable),
    ],
)
async def test_a_call_without_retries_left_raises(failure: Responder, expected: type[ServiceError]) -> None:
    async with scripted_server(failure) as server, AsyncClient(server.url, retries=2) as client:
        with pytest.raises(expected):
            await client.execute("1")
    assert len(server.requests) == 3  # one attempt and two retries


@pytest.mark.asyncio
@pytest.mark.parametrize("error_type", [reason for reason in UnavailableReason if reason.is_retryable])
async def test_only_the_unavailable_call_of_a_batch_is_retried(error_type: str) -> None:
    async with (
        scripted_server(
            respond_unavailable(error_type, "b"), respond_unavailable(error_type, "b"), respond_ok
        ) as server,
        AsyncClient(server.url) as client,
    ):
        results = await client.run_batch(["a", "b", "c"])
    assert [(r.status, r.stdout, r.id) for r in results] == [
        (Status.OK, code, str(index)) for index, code in enumerate("abc")
    ]
    assert server.codes == [["a", "b", "c"], ["b"], ["b"]]


@pytest.mark.asyncio
async def test_an_unavailable_call_is_retried_at_another_endpoint() -> None:
    async with (
        scripted_server(respond_unavailable("Stopped", "1")) as stopping,
        scripted_server(respond_ok) as healthy,
        AsyncClient([stopping.url, healthy.url]) as client,
    ):
        assert (await client.execute("1")).stdout == "1"
    assert (len(stopping.requests), len(healthy.requests)) == (1, 1)


@pytest.mark.asyncio
async def test_the_back_off_of_an_endpoint_grows_with_its_failures_and_a_result_resets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    for module in ("transport", "endpoints"):
        monkeypatch.setattr(f"sandbox.client.{module}._now", lambda: now_s)
    monkeypatch.setattr("sandbox.client.endpoints.MIN_RETRY_DELAY_S", 0.1)
    monkeypatch.setattr("sandbox.client.endpoints.MAX_RETRY_DELAY_S", 5.0)
    async with (
        scripted_server(refuse_with(503)) as dead,
        scripted_server(respond_ok) as healthy,
        AsyncClient([dead.url, healthy.url]) as client,
    ):
        for _ in range(50):  # one call per second
            now_s += 1
            assert (await client.execute("1")).stdout == "1"
        assert len(dead.requests) <= 15  # the server is tried in the first seconds, and then every 5 s
        dead.responders = [respond_ok, refuse_with(503)]
        for _ in range(2):
            now_s += 10
            await client.execute("1")
        num_requests, now_s = len(dead.requests), now_s + 0.2
        await client.execute("1")
    assert len(dead.requests) == num_requests + 1, "one failure after a result: at most 0.15 s"


@pytest.mark.asyncio
async def test_an_endpoint_that_failed_gets_one_request_at_a_time_until_it_returns_a_result() -> None:
    release = asyncio.Event()
    async with (
        scripted_server(refuse_with(503), respond_after(release, respond_ok)) as failed,
        scripted_server(respond_ok, respond_after(release, respond_ok)) as healthy,
        AsyncClient([failed.url, healthy.url], batch_size=1) as client,
        asyncio.TaskGroup() as tasks,
    ):
        await client.execute("1")
        await asyncio.sleep(0.003)  # longer than the back-off
        for _ in range(6):
            tasks.create_task(client.execute("2"))
        await until(lambda: len(failed.requests) + len(healthy.requests) == 2 + 6)
        assert (len(failed.requests), len(healthy.requests)) == (2, 6)
        release.set()


@pytest.mark.asyncio
async def test_an_endpoint_gets_no_calls_for_as_long_as_its_failed_request_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    for module in ("transport", "endpoints"):
        monkeypatch.setattr(f"sandbox.client.{module}._now", lambda: now_s)
    monkeypatch.setattr("sandbox.client.endpoints.MAX_RETRY_DELAY_S", 5.0)

    async def fail_after_two_seconds(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
        nonlocal now_s
        now_s += 2
        return await refuse_with(503)(request, calls)

    async with (
        scripted_server(fail_after_two_seconds) as slow,
        scripted_server(respond_ok) as healthy,
        AsyncClient([slow.url, healthy.url]) as client,
    ):
        for call_at_s, num_requests in ((0, 1), (3.9, 1), (5.1, 2)):  # the pause is 2 to 3 s, from 2 s on
            now_s = call_at_s
            await client.execute("1")
            assert len(slow.requests) == num_requests


@pytest.mark.asyncio
async def test_requests_that_fail_together_count_as_one_failure_of_their_endpoint() -> None:
    release = asyncio.Event()
    async with (
        scripted_server(respond_after(release, refuse_with(503))) as server,
        AsyncClient(server.url, batch_size=1, retries=0) as client,
    ):
        calls = asyncio.gather(*(client.execute("1") for _ in range(10)), return_exceptions=True)
        await until(lambda: len(server.requests) == 10)
        release.set()
        assert {type(error) for error in await calls} == {Overloaded}
        assert [endpoint.failures for endpoint in client._transport.endpoints.all] == [1]


@pytest.mark.asyncio
async def test_the_retry_after_of_one_endpoint_delays_no_call_that_another_can_take() -> None:
    async with (
        scripted_server(refuse_with(503, Retry_After="0.01"), respond_ok) as first,
        scripted_server(refuse_with(503, Retry_After="3600")) as second,
        AsyncClient([first.url, second.url]) as client,
        asyncio.timeout(10),
    ):
        assert (await client.execute("1")).stdout == "1"
    assert (len(first.requests), len(second.requests)) == (2, 1)


@pytest.mark.asyncio
async def test_an_unavailable_call_is_retried_while_its_request_continues() -> None:
    release = asyncio.Event()

    async def respond_stopped_then_ok(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(encode_result(1, stopped_result()))
        await release.wait()
        await response.write(encode_results(calls, range(1)))
        return response

    async with scripted_server(respond_stopped_then_ok, respond_ok) as server, AsyncClient(server.url) as client:
        stream = client.stream(["slow", "stopped"])
        index, result = await anext(stream)
        assert (index, result.stdout) == (1, "stopped")
        release.set()
        assert [(index, result.stdout) async for index, result in stream] == [(0, "slow")]


@pytest.mark.asyncio
async def test_the_error_of_a_batch_has_the_results_that_had_arrived() -> None:
    server_goes_away = [abort_before_last_result, refuse_with(502)]
    async with scripted_server(*server_goes_away) as server, AsyncClient(server.url, retries=1) as client:
        with pytest.raises(Unreachable, match="answered 502") as raised:
            await client.run_batch(["a", "b", "c"])
        assert [result and result.stdout for result in raised.value.results] == ["a", "b", None]
        with pytest.raises(Unreachable) as raised:
            await client.execute("a")
        assert raised.value.results == ()


@pytest.mark.asyncio
async def test_the_error_of_answer_checks_has_the_verdicts_that_had_arrived() -> None:
    async with (
        scripted_server(respond_verdicts, refuse_with(502)) as server,
        AsyncClient(server.url, retries=0) as client,
    ):
        with pytest.raises(Unreachable) as raised:
            await client.verify([("1", "1"), ("1", "die"), ("1", "1")])
    assert [verdict and verdict.outcome.value for verdict in raised.value.results] == [
        "equivalent",
        "not_equivalent",
        None,
    ]


@pytest.mark.asyncio
async def test_batches_that_share_a_failed_request_each_have_their_own_results() -> None:
    async with scripted_server(refuse_with(401)) as server, AsyncClient(server.url) as client:
        errors = await asyncio.gather(client.run_batch(["a"]), client.run_batch(["b", "c"]), return_exceptions=True)
    assert server.batch_sizes == [3]
    assert [error.results for error in errors if isinstance(error, RequestRefused)] == [[None], [None, None]]


@pytest.mark.asyncio
async def test_a_call_that_stays_unavailable_does_not_affect_other_calls() -> None:
    async with (
        scripted_server(respond_unavailable("NodeError", "die")) as server,
        AsyncClient(server.url, retries=2) as client,
    ):
        results = await client.run_batch(["a", "die"])
    assert [result.status for result in results] == [Status.OK, Status.UNAVAILABLE]
    assert results[1].error is not None and results[1].error.type == "NodeError"
    assert server.batch_sizes == [2, 1, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "error_type", ["Poison", "QueueTimeout", "ResultsUnread", "ResultTooLarge", "Starved", "InvalidCall"]
)
async def test_permanent_failures_are_not_retried(error_type: str) -> None:
    async with scripted_server(respond_unavailable(error_type, "1")) as server, AsyncClient(server.url) as client:
        assert (await client.execute("1")).status is Status.UNAVAILABLE
    assert len(server.requests) == 1


@pytest.mark.asyncio
async def test_unavailable_checks_are_retried() -> None:
    async def respond_stopped(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
        return web.Response(body=encode_result(0, stopped_result()))

    async with scripted_server(respond_stopped, respond_verdicts) as server, AsyncClient(server.url) as client:
        assert [verdict.outcome for verdict in await client.verify([("1", "1")])] == ["equivalent"]


@pytest.mark.asyncio
async def test_failures_of_one_call_do_not_use_up_the_retries_of_another() -> None:
    """The second attempt of call "b" and the first attempt of call "late" share a request. This request fails."""
    release = asyncio.Event()
    responders = [respond_after(release, respond_unavailable("Stopped", "b")), refuse_with(502), respond_ok]
    async with (
        scripted_server(*responders) as server,
        AsyncClient(server.url, retries=2, max_connections=1) as client,
        asyncio.TaskGroup() as tasks,
    ):
        first = tasks.create_task(client.execute("b"))
        await until(lambda: len(server.requests) == 1)
        late = tasks.create_task(client.execute("late"))
        await asyncio.sleep(0)
        release.set()
    assert (first.result().stdout, late.result().stdout) == ("b", "late")


@pytest.mark.asyncio
async def test_each_retry_is_logged_once_and_the_error_counts_all_attempts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sandbox.client")
    url = f"http://127.0.0.1:{unused_port()}"
    async with AsyncClient(url, retries=2) as client:
        with pytest.raises(Unreachable) as raised:
            await client.run_batch(["1"] * 50)
    attempts_and_hint = r" \(3 tries in \d+\.\d s\); is `rstar-sandbox serve` running at "
    expected = re.escape(f"{url}: connection refused") + attempts_and_hint + re.escape(url) + r"\?"
    assert re.fullmatch(expected, str(raised.value))
    logged = [record.getMessage() for record in caplog.records if record.name == "sandbox.client"]
    assert logged == [f"{url}: connection refused; retry {n} of 2, with 50 calls, in 0.0 s" for n in (1, 2)]


@pytest.mark.asyncio
async def test_calls_that_are_retried_together_are_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sandbox.client")
    async with (
        scripted_server(respond_unavailable("Stopped", "1"), respond_ok) as server,
        AsyncClient(server.url) as client,
    ):
        await client.run_batch(["1"] * 50)
    logged = [record.getMessage() for record in caplog.records if record.name == "sandbox.client"]
    url = server.url.rstrip("/")
    assert logged == [f"{url} returned Stopped for 50 calls; retry 1 of 8, with 50 calls, in 0.0 s"]


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 415])
async def test_a_refused_request_is_not_repeated(status: int) -> None:
    async with scripted_server(refuse_with(status)) as server, AsyncClient(server.url) as client:
        with pytest.raises(RequestRefused, match=f"answered {status}"):
            await client.execute("1")
    assert len(server.requests) == 1


@pytest.mark.asyncio
async def test_checks_are_sent_and_retried_as_calls() -> None:
    async with scripted_server(respond_verdicts) as server, AsyncClient(server.url) as client:
        verdicts = await client.verify([("1", "1"), ("2", "die"), ("3", "3")], limits={"timeout_s": 2}, tenant="mine")
        assert await client.verify([]) == []
    assert [verdict.outcome for verdict in verdicts] == ["equivalent", "not_equivalent", "equivalent"]
    assert server.batch_sizes == [3, 1]
    shared = verify.check_template({"limits": {"timeout_s": 2}, "tenant": "mine"})
    assert Call.decode(server.requests[1][0]) == verify.build_check("3", "3", shared)


def test_the_retry_delay_grows_and_is_at_least_retry_after() -> None:
    """In the tests of the clients, the delay without Retry-After is 1 to 2 ms. Random jitter adds up to one half."""
    random_backoff_s = Endpoints([]).random_backoff_s
    assert 30 <= random_backoff_s(1, 30.0) <= 45
    assert random_backoff_s(1) <= random_backoff_s(2) * 1.5
    assert random_backoff_s(100) <= 0.003
