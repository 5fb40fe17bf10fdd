"""Tests of both clients with a real gateway over fake executors, and with scripted servers that misbehave."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import random
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgpack
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from sandbox import verify
from sandbox.client import TIMEOUT_S, AsyncClient, Client
from sandbox.errors import InvalidCall, Overloaded, RequestRefused, ServiceError, Unreachable
from sandbox.gateway.http import codec
from sandbox.transport import RETRYABLE_ERRORS, STREAM, retry_delay_s
from sandbox.types import Call, Limits, Result, Status, invalid_result, unavailable_result
from tests.fakes import FakeFleet, ok_result
from tests.gateway.serving import serving, until

Respond = Callable[[web.Request, list[dict[str, Any]]], Awaitable[web.StreamResponse]]


def lines(calls: list[dict[str, Any]], indices: range | None = None) -> bytes:
    wanted = range(len(calls)) if indices is None else indices
    return b"".join(msgpack.packb({"index": index, **ok_result(calls[index])}) for index in wanted)


async def well(request: web.Request, calls: list[dict[str, Any]]) -> web.StreamResponse:
    return web.Response(body=lines(calls))


async def torn(request: web.Request, calls: list[dict[str, Any]]) -> web.StreamResponse:
    """Send the results of all calls except the last one, then abort the connection."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(lines(calls, range(len(calls) - 1)))
    assert request.transport is not None
    request.transport.abort()
    return response


async def garbage(request: web.Request, calls: list[dict[str, Any]]) -> web.StreamResponse:
    return web.Response(body=b"\xc1 no msgpack")


async def all_invalid(request: web.Request, calls: list[dict[str, Any]]) -> web.StreamResponse:
    results = [
        {"index": index, **invalid_result("", "no such field").encode(binary=True)} for index in range(len(calls))
    ]
    return web.Response(status=400, content_type=STREAM, body=b"".join(map(msgpack.packb, results)))


def refusing(status: int, **headers: str) -> Respond:
    async def respond(request: web.Request, calls: list[dict[str, Any]]) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({"error": {"type": "No", "message": "no"}}, status=status, headers=named)

    return respond


def failing(kind: str, which: str) -> Respond:
    """Return `unavailable` with error type `kind` for calls whose code is `which`, and ok for the others."""

    async def respond(request: web.Request, calls: list[dict[str, Any]]) -> web.StreamResponse:
        lost = unavailable_result("", kind, "try again").encode(binary=True)
        answers = [lost if call["code"] == which else ok_result(call) for call in calls]
        lines = [msgpack.packb({"index": index, **answer}) for index, answer in enumerate(answers)]
        return web.Response(body=b"".join(lines))

    return respond


class Scripted:
    """A server that handles each request by the next function of `script`, and all later ones by the last function."""

    def __init__(self, *script: Respond) -> None:
        self.script = list(script)
        self.requests: list[list[dict[str, Any]]] = []
        self.url = ""

    async def respond(self, request: web.Request) -> web.StreamResponse:
        calls = msgpack.unpackb(await request.read())["calls"]
        self.requests.append(calls)
        respond = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return await respond(request, calls)


@asynccontextmanager
async def scripted(*script: Respond) -> AsyncIterator[Scripted]:
    scripted_server = Scripted(*script)
    app = web.Application()
    app.router.add_post("/v1/batch", scripted_server.respond)
    async with TestServer(app) as server:
        scripted_server.url = str(server.make_url("/"))
        yield scripted_server


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.transport.MIN_RETRY_DELAY_S", 0.001)
    monkeypatch.setattr("sandbox.transport.MAX_RETRY_DELAY_S", 0.002)


@pytest.mark.asyncio
async def test_execute_accepts_source_or_a_call() -> None:
    async with serving() as served, AsyncClient(served.url) as client:
        first = await client.execute("one", stdin="in", limits=Limits(timeout_s=3))
        second = await client.execute(Call("two", id="mine"), stdin="other")
        calls = list(served.fleet.last.calls.values())
    assert (first.id, first.status, first.stdout, first.value) == ("", Status.OK, "one", "in")
    assert (second.id, second.value) == ("mine", "other")
    assert calls[0]["limits"] == {"timeout_s": 3}


@pytest.mark.asyncio
async def test_calls_submitted_together_share_requests() -> None:
    async with scripted(well) as server, AsyncClient(server.url) as client:
        results = await asyncio.gather(*(client.execute(f"{n}") for n in range(150)))
    assert [r.stdout for r in results] == [f"{n}" for n in range(150)]
    assert [len(calls) for calls in server.requests] == [64, 64, 22]


def held_back(respond: Respond, release: asyncio.Event) -> Respond:
    async def later(request: web.Request, calls: list[dict[str, Any]]) -> web.StreamResponse:
        await release.wait()
        return await respond(request, calls)

    return later


def held(release: asyncio.Event) -> Respond:
    return held_back(well, release)


@pytest.mark.asyncio
async def test_a_single_call_is_sent_at_once_and_later_calls_gather_until_its_request_ends() -> None:
    release = asyncio.Event()
    async with scripted(held(release), well) as server, AsyncClient(server.url, gather_s=3600) as client:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.execute("1"))
            await until(lambda: len(server.requests) == 1)
            for code in ("2", "3"):  # in separate iterations of the event loop
                tasks.create_task(client.execute(code))
                await asyncio.sleep(0)
            gone = tasks.create_task(client.execute("gone"))
            await asyncio.sleep(0)
            gone.cancel()
            release.set()
        await client.execute("4")
    assert [[call["code"] for call in calls] for calls in server.requests] == [["1"], ["2", "3"], ["4"]]


@pytest.mark.asyncio
@pytest.mark.parametrize(("gather_s", "batch_size"), [(0.001, 64), (3600, 2)])
async def test_gathering_calls_are_sent_after_gather_s_or_when_they_fill_a_request(
    gather_s: float, batch_size: int
) -> None:
    release = asyncio.Event()
    async with (
        scripted(held(release), well) as server,
        AsyncClient(server.url, gather_s=gather_s, batch_size=batch_size) as client,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(client.execute("1"))
        await until(lambda: len(server.requests) == 1)
        both = [tasks.create_task(client.execute(code)) for code in ("2", "3")]
        assert [(await one).stdout for one in both] == ["2", "3"]
        release.set()
    assert [len(calls) for calls in server.requests] == [1, 2]


@pytest.mark.asyncio
async def test_calls_beyond_all_connections_are_sent_in_larger_batches() -> None:
    async with scripted(well) as server, AsyncClient(server.url, max_connections=2) as client:
        await client.run_batch(["1"] * 1000)
    assert [len(calls) for calls in server.requests] == [500, 500]


@pytest.mark.asyncio
async def test_batch_results_keep_their_order_and_ids() -> None:
    async with serving() as served, AsyncClient(served.url, batch_size=7) as client:
        results = await client.run_batch([*(f"{n}" for n in range(50)), Call("last", id="x")], {"stdin": "same"})
    assert [r.stdout for r in results] == [*(f"{n}" for n in range(50)), "last"]
    assert [r.id for r in results] == [*(f"{n}" for n in range(50)), "x"]
    assert {r.value for r in results} == {"same"}


@pytest.mark.asyncio
async def test_a_slow_call_does_not_delay_other_results() -> None:
    async with serving() as served, AsyncClient(served.url) as client:
        stream = client.stream(["hang", "quick"])
        index, result = await anext(stream)
        assert (index, result.stdout) == (1, "quick")
        served.fleet.last.finish(*served.fleet.last.calls)
        assert [index async for index, _ in stream] == [0]


@pytest.mark.asyncio
async def test_leaving_a_stream_cancels_the_rest() -> None:
    async with serving() as served, AsyncClient(served.url) as client:
        stream = client.stream(["hang", "quick", "hang"])
        await anext(stream)
        await stream.aclose()
        await until(lambda: len(served.fleet.last.cancelled) == 2)


@pytest.mark.asyncio
async def test_a_cancelled_execute_cancels_the_call_and_no_other() -> None:
    async with serving() as served, AsyncClient(served.url) as client:
        first = asyncio.create_task(client.execute("hang"))
        second = asyncio.create_task(client.execute("hang"))
        await until(lambda: len(served.fleet.last.calls) == 2)
        first.cancel()
        await asyncio.wait([first])
        served.fleet.last.finish(2)
        assert (await second).status is Status.OK
        await until(lambda: served.fleet.last.cancelled == [1])


@pytest.mark.asyncio
async def test_malformed_calls_are_refused_before_they_are_sent() -> None:
    async with scripted(well) as server, AsyncClient(server.url) as client:
        with pytest.raises(InvalidCall, match=r"call\.limits\.timeout_s: expected a number"):
            await client.execute("1", limits={"timeout_s": -1})
        with pytest.raises(InvalidCall, match="unknown field"):
            await client.run_batch(["1"], {"colour": "red"})
    assert server.requests == []


NOT_CALLS: list[tuple[Any, type[Exception], str]] = [
    ("print(1)", TypeError, r"calls: expected a list, each item Python source .*; got str"),
    (b"print(1)", TypeError, "calls: expected a list, .*; got bytes"),
    (5, TypeError, "calls: expected a list, .*; got int"),
    ({"code": "1"}, TypeError, "calls: expected a list, .*; got dict"),
    (["1", 5], TypeError, r"calls\[1\]: expected Python source \(str\), a Call, or a mapping .*, got int"),
    (["1", b"2"], TypeError, r"calls\[1\]: expected .*, got bytes"),
    (["1", {"codee": "2"}], ValueError, r"calls\[1\]: unknown field 'codee'; the fields are code, "),
    (["1", {"stdin": "2"}], ValueError, r"calls\[1\]\.code: expected .*, but the field is missing"),
    (["1", {"code": 5}], ValueError, r"calls\[1\]\.code: expected text, got 5"),
    (["1", {"code": "2", "limits": {"timeout_s": -1}}], ValueError, r"calls\[1\]\.limits\.timeout_s: expected a num"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("calls", "expected", "message"), NOT_CALLS)
async def test_malformed_lists_of_calls_are_refused_with_name_and_index(
    calls: Any, expected: type[Exception], message: str
) -> None:
    async with scripted(well) as server, AsyncClient(server.url) as client:
        with pytest.raises(expected, match=message):
            await client.run_batch(calls)
        with pytest.raises(expected, match=message):
            client.stream(calls)
    assert server.requests == []


@pytest.mark.asyncio
async def test_a_single_call_of_the_wrong_type_is_refused() -> None:
    async with AsyncClient() as client:
        with pytest.raises(TypeError, match=r"code: expected Python source \(str\), a Call, or a mapping .*, got int"):
            await client.execute(5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"code: expected .*, got list"):
            await client.execute(["1"], stdin="x")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"defaults: expected an object, got 'x'"):
            await client.run_batch(["1"], "x")  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_batches_accept_source_calls_and_mappings_as_in_http() -> None:
    calls: list[Any] = [
        "one",
        Call("two", stdin="own"),
        {"code": "three", "stdin": "in", "limits": {"timeout_s": 2}, "id": "mine"},
    ]
    async with scripted(well) as server, AsyncClient(server.url) as client:
        results = await client.run_batch(calls, {"stdin": "same"})
        assert (await client.execute({"code": "four", "stdin": "in"})).value == "in"
    assert [(r.stdout, r.value, r.id) for r in results] == [
        ("one", "same", "0"),
        ("two", "own", "1"),
        ("three", "in", "mine"),
    ]
    assert server.requests[0][2]["limits"] == {"timeout_s": 2}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("pairs", "expected", "message"),
    [
        ("ab", TypeError, r"pairs: expected a list, each item a pair \(gold, answer\).*; got str"),
        (["12"], TypeError, r"pairs\[0\]: expected a pair \(gold, answer\), or a mapping .*, got str"),
        ([("1", "1"), ("1",)], TypeError, r"pairs\[1\]: expected a pair .*, got tuple of 1"),
        ([("1", "1"), ("1", 5)], ValueError, r"pairs\[1\]\.answer: expected text of at most \d+ characters, got int"),
        ([{"gold": "1"}], ValueError, r"pairs\[0\]: expected an object of gold and answer, got the fields gold"),
    ],
)
async def test_malformed_lists_of_pairs_are_refused_with_name_and_index(
    pairs: Any, expected: type[Exception], message: str
) -> None:
    async with scripted(checked) as server, AsyncClient(server.url) as client:
        with pytest.raises(expected, match=message):
            await client.verify(pairs)
        assert server.requests == []
        assert [v.outcome for v in await client.verify([{"gold": "1", "answer": "1"}, ["1", "2"]])] == [  # type: ignore[list-item]
            "equivalent",
            "not_equivalent",
        ]


@pytest.mark.parametrize("kind", [AsyncClient, Client])
@pytest.mark.parametrize(
    ("endpoints", "expected", "message"),
    [
        ("127.0.0.1:8642", ValueError, r"endpoints: expected a URL such as http://127\.0\.0\.1:8642, got '127\.0\."),
        ("localhost:8642", ValueError, "endpoints: expected a URL such as"),
        ("ftp://127.0.0.1", ValueError, "endpoints: expected a URL such as"),
        ("http://", ValueError, "endpoints: expected a URL such as"),
        ("http://:8642", ValueError, "endpoints: expected a URL such as"),
        ("http://127.0.0.1:port", ValueError, "endpoints: expected a URL such as"),
        ("http://127.0.0.1:99999", ValueError, "endpoints: expected a URL such as"),
        ("http://127.0.0.1:8642 ", ValueError, "endpoints: expected a URL such as"),
        (["http://127.0.0.1:8642", "gpu1:8642"], ValueError, r"endpoints\[1\]: expected a URL such as .*, got 'gpu1"),
        ([5], TypeError, r"endpoints\[0\]: expected a URL as text, got int"),
        (5, TypeError, "endpoints: expected a list, each item a URL; got int"),
    ],
)
def test_malformed_urls_are_refused_by_the_constructor(
    kind: type, endpoints: Any, expected: type[Exception], message: str
) -> None:
    with pytest.raises(expected, match=message):
        kind(endpoints)


def test_valid_urls_are_accepted() -> None:
    AsyncClient(["http://127.0.0.1:8642/", "https://pool.example/sandbox", "http://[::1]:8642", "http://node_1:80"])


@pytest.mark.asyncio
async def test_heartbeats_are_no_results() -> None:
    async def quiet(request: web.Request, calls: list[dict[str, Any]]) -> web.StreamResponse:
        sign = codec.HEARTBEAT[codec.MSGPACK_STREAM]
        return web.Response(body=sign + lines(calls, range(1)) + sign * 2 + lines(calls, range(1, 2)))

    async with scripted(quiet) as server, AsyncClient(server.url) as client:
        assert [result.stdout for result in await client.run_batch(["1", "2"])] == ["1", "2"]
    assert len(server.requests) == 1
    assert TIMEOUT_S >= 4 * codec.HEARTBEAT_S


@pytest.mark.asyncio
async def test_a_call_waits_for_a_slot_at_most_queue_timeout_s() -> None:
    async with (
        serving(FakeFleet(slots=1)) as served,
        AsyncClient(served.url, queue_timeout_s=0.01) as client,
        asyncio.TaskGroup() as tasks,
    ):
        both = tasks.create_task(client.run_batch(["hang"] * 2))
        await until(lambda: len(served.fleet.last.calls) == 2)
        result = await client.execute("late")
        served.fleet.last.finish(1, 2)
        assert [one.status for one in await both] == [Status.OK] * 2
    assert result.status is Status.UNAVAILABLE and result.error is not None and result.error.type == "QueueTimeout"
    assert re.match(r"waited \S+ s for a slot, at most 0\.01 s; .*--queue-timeout-s", result.error.message)


@pytest.mark.asyncio
async def test_a_batch_of_malformed_calls_only_has_results() -> None:
    async with scripted(all_invalid) as server, AsyncClient(server.url) as client:
        results = await client.run_batch(["a", "b"])
    assert [(result.id, result.status) for result in results] == [("0", Status.INVALID), ("1", Status.INVALID)]
    assert len(server.requests) == 1


@pytest.mark.asyncio
async def test_after_a_broken_stream_only_unfinished_calls_are_sent_again() -> None:
    async with scripted(torn, well) as server, AsyncClient(server.url) as client:
        results = await client.run_batch(["a", "b", "c"])
    assert [r.stdout for r in results] == ["a", "b", "c"]
    assert [[call["code"] for call in calls] for calls in server.requests] == [["a", "b", "c"], ["c"]]


@pytest.mark.asyncio
@pytest.mark.parametrize("failure", [refusing(429, Retry_After="0"), refusing(503), refusing(500), garbage])
async def test_temporary_failures_are_retried(failure: Respond) -> None:
    async with scripted(failure, failure, well) as server, AsyncClient(server.url) as client:
        assert (await client.execute("1")).stdout == "1"
    assert len(server.requests) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("failure", "expected"),
    [(refusing(429), Overloaded), (refusing(503), Overloaded), (refusing(502), Unreachable), (garbage, Unreachable)],
)
async def test_a_call_without_retries_left_raises(failure: Respond, expected: type[ServiceError]) -> None:
    async with scripted(failure) as server, AsyncClient(server.url, retries=2) as client:
        with pytest.raises(expected):
            await client.execute("1")
    assert len(server.requests) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", sorted(RETRYABLE_ERRORS))
async def test_only_the_unavailable_call_of_a_batch_is_retried(kind: str) -> None:
    async with scripted(failing(kind, "b"), failing(kind, "b"), well) as server, AsyncClient(server.url) as client:
        results = await client.run_batch(["a", "b", "c"])
    assert [(r.status, r.stdout, r.id) for r in results] == [(Status.OK, x, str(n)) for n, x in enumerate("abc")]
    assert [[call["code"] for call in calls] for calls in server.requests] == [["a", "b", "c"], ["b"], ["b"]]


@pytest.mark.asyncio
async def test_an_unavailable_call_is_retried_at_another_endpoint() -> None:
    async with (
        scripted(failing("Stopped", "1")) as one,
        scripted(well) as two,
        AsyncClient([one.url, two.url]) as client,
    ):
        assert (await client.execute("1")).stdout == "1"
    assert (len(one.requests), len(two.requests)) == (1, 1)


@pytest.mark.asyncio
async def test_an_unavailable_call_is_retried_while_its_request_continues() -> None:
    release = asyncio.Event()

    async def lost_at_once(request: web.Request, calls: list[dict[str, Any]]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        lost = unavailable_result("", "Stopped", "try again").encode(binary=True)
        await response.write(msgpack.packb({"index": 1, **lost}))
        await release.wait()
        await response.write(lines(calls, range(1)))
        return response

    async with scripted(lost_at_once, well) as server, AsyncClient(server.url) as client:
        stream = client.stream(["slow", "lost"])
        index, result = await anext(stream)
        assert (index, result.stdout) == (1, "lost")
        release.set()
        assert [(index, result.stdout) async for index, result in stream] == [(0, "slow")]


@pytest.mark.asyncio
async def test_a_call_that_stays_unavailable_does_not_affect_other_calls() -> None:
    async with scripted(failing("ExecutorLost", "die")) as server, AsyncClient(server.url, retries=2) as client:
        results = await client.run_batch(["a", "die"])
    assert [result.status for result in results] == [Status.OK, Status.UNAVAILABLE]
    assert results[1].error is not None and results[1].error.type == "ExecutorLost"
    assert [len(calls) for calls in server.requests] == [2, 1, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["QueueTimeout", "ResultsUnread", "ResultTooLarge", "Starved", "InvalidCall"])
async def test_permanent_failures_are_not_retried(kind: str) -> None:
    async with scripted(failing(kind, "1")) as server, AsyncClient(server.url) as client:
        assert (await client.execute("1")).status is Status.UNAVAILABLE
    assert len(server.requests) == 1


@pytest.mark.asyncio
async def test_unavailable_checks_are_retried() -> None:
    async def stopped(request: web.Request, calls: list[dict[str, Any]]) -> web.StreamResponse:
        lost = unavailable_result("", "Stopped", "try again").encode(binary=True)
        return web.Response(body=b"".join(msgpack.packb({"index": n, **lost}) for n in range(len(calls))))

    async with scripted(stopped, checked) as server, AsyncClient(server.url) as client:
        assert [verdict.outcome for verdict in await client.verify([("1", "1")])] == ["equivalent"]


@pytest.mark.asyncio
async def test_failures_of_one_call_do_not_use_up_the_retries_of_another() -> None:
    """The second attempt of "b" and the first of "late" share a request, which fails."""
    release = asyncio.Event()
    script = [held_back(failing("Stopped", "b"), release), refusing(502), well]
    async with (
        scripted(*script) as server,
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
async def test_each_retry_is_logged_once_and_the_error_counts_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "sandbox.client")
    url = f"http://127.0.0.1:{unused_port()}"
    async with AsyncClient(url, retries=2) as client:
        with pytest.raises(Unreachable) as raised:
            await client.run_batch(["1"] * 50)
    response = r" \(3 tries in \d+\.\d s\); is `rstar-sandbox serve` running at "
    assert re.fullmatch(re.escape(f"{url}: connection refused") + response + re.escape(url) + r"\?", str(raised.value))
    logged = [record.getMessage() for record in caplog.records if record.name == "sandbox.client"]
    expected = [f"{url}: connection refused; retry {n} of 2, with 50 calls, in 0.0 s" for n in (1, 2)]
    assert logged == expected


@pytest.mark.asyncio
async def test_calls_that_are_retried_together_are_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sandbox.client")
    async with scripted(failing("Stopped", "1"), well) as server, AsyncClient(server.url) as client:
        await client.run_batch(["1"] * 50)
    logged = [record.getMessage() for record in caplog.records if record.name == "sandbox.client"]
    url = server.url.rstrip("/")
    assert logged == [f"{url} returned Stopped for 50 calls; retry 1 of 8, with 50 calls, in 0.0 s"]


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 415])
async def test_a_refused_request_is_not_repeated(status: int) -> None:
    async with scripted(refusing(status)) as server, AsyncClient(server.url) as client:
        with pytest.raises(RequestRefused, match=f"answered {status}"):
            await client.execute("1")
    assert len(server.requests) == 1


async def checked(request: web.Request, calls: list[dict[str, Any]]) -> web.StreamResponse:
    """Return equivalent for equal texts; abort the connection at the answer "die" in a batch of three."""
    response = web.StreamResponse()
    await response.prepare(request)
    for index, call in enumerate(calls):
        gold, answer = json.loads(call["stdin"])
        result = Result("", Status.OK, value=repr("equivalent" if gold == answer else "not_equivalent"))
        await response.write(msgpack.packb({"index": index, **result.encode(binary=True)}))
        if answer == "die" and len(calls) == 3:
            assert request.transport is not None
            request.transport.abort()
            break
    return response


@pytest.mark.asyncio
async def test_checks_are_calls_and_retried_like_calls() -> None:
    async with scripted(checked) as server, AsyncClient(server.url) as client:
        verdicts = await client.verify([("1", "1"), ("2", "die"), ("3", "3")], limits={"timeout_s": 2}, tenant="mine")
        assert await client.verify([]) == []
    assert [verdict.outcome for verdict in verdicts] == ["equivalent", "not_equivalent", "equivalent"]
    assert [len(calls) for calls in server.requests] == [3, 1]
    shared = verify.shared_fields({"limits": {"timeout_s": 2}, "tenant": "mine"})
    assert Call.decode(server.requests[1][0]) == verify.check_call("3", "3", shared)


@pytest.mark.asyncio
async def test_checks_raise_if_no_server_responds() -> None:
    async with AsyncClient(f"http://127.0.0.1:{unused_port()}", retries=0) as client:
        with pytest.raises(Unreachable):
            await client.verify([("1", "1")])
        with pytest.raises(InvalidCall, match="unknown field 'code'"):
            await client.verify([("1", "1")], code="print(1)")


@pytest.mark.asyncio
async def test_a_closed_port_is_unreachable() -> None:
    async with AsyncClient(f"http://127.0.0.1:{unused_port()}", retries=1) as client:
        assert not await client.ready()
        with pytest.raises(Unreachable):
            await client.execute("1")


@pytest.mark.asyncio
async def test_calls_go_to_another_endpoint_if_one_is_down() -> None:
    async with serving() as served:
        dead = f"http://127.0.0.1:{unused_port()}"
        async with AsyncClient([dead, served.url], retries=1) as client:
            assert await client.ready()
            for _ in range(3):
                assert (await client.execute("1")).status is Status.OK


@pytest.mark.asyncio
async def test_an_idle_client_alternates_between_endpoints() -> None:
    async with scripted(well) as one, scripted(well) as two, AsyncClient([one.url, two.url]) as client:
        for _ in range(6):
            await client.execute("1")
        assert (len(one.requests), len(two.requests)) == (3, 3)


@pytest.mark.asyncio
async def test_the_token_is_sent() -> None:
    async with serving(token="s3cret") as served:
        async with AsyncClient(served.url, token="s3cret") as client:
            assert (await client.execute("1")).status is Status.OK
        async with AsyncClient(served.url) as client:
            with pytest.raises(RequestRefused, match="401"):
                await client.execute("1")


@pytest.mark.asyncio
async def test_closing_ends_running_calls() -> None:
    async with serving() as served:
        async with AsyncClient(served.url) as client:
            asking = asyncio.create_task(client.execute("hang"))
            await until(lambda: bool(served.fleet.last.calls))
        with pytest.raises(ServiceError, match="the client was closed"):
            await asking


@pytest.mark.asyncio
async def test_closing_ends_calls_that_wait_for_their_request_or_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as served:
        client = await AsyncClient(served.url).open()
        asking = asyncio.create_task(client.execute("1"))
        await until(lambda: bool(client._transport._requests))  # the request's task exists and has not started
        await client.close()
        with pytest.raises(ServiceError, match="the client was closed"):
            await asking
    monkeypatch.setattr("sandbox.transport.MIN_RETRY_DELAY_S", 3600)
    monkeypatch.setattr("sandbox.transport.MAX_RETRY_DELAY_S", 3600)
    async with scripted(failing("Stopped", "1")) as server:
        client = await AsyncClient(server.url).open()
        asking = asyncio.create_task(client.execute("1"))
        await until(lambda: bool(client._transport._pausing))
        await client.close()
        with pytest.raises(ServiceError, match="the client was closed"):
            await asking


@pytest.mark.asyncio
async def test_a_client_can_be_opened_and_closed_by_hand() -> None:
    async with serving() as served:
        client = AsyncClient(served.url)
        await client.close()
        for _ in range(2):
            assert await client.open() is client
            async with client:  # already open
                assert (await client.execute("1")).status is Status.OK
            await asyncio.create_task(client.close())  # already closed; from another task
            with pytest.raises(RuntimeError, match="not open"):
                await client.execute("1")


def test_a_synchronous_client_can_be_opened_and_closed_by_hand() -> None:
    with serving_in_a_thread() as url:
        client = Client(url)
        client.close()
        for _ in range(2):
            assert client.open() is client.open() is client
            assert client.execute("1").stdout == "1"
            with pytest.raises(TypeError, match="calls: expected a list"):
                client.stream("print(1)")
            client.close()
            client.close()
            with pytest.raises(RuntimeError, match="not open"):
                client.execute("1")


@pytest.mark.asyncio
async def test_the_error_of_a_closed_client_shows_how_to_open_it() -> None:
    with pytest.raises(RuntimeError, match="async with AsyncClient"):
        await AsyncClient().execute("1")
    with pytest.raises(RuntimeError, match="    with Client"):
        Client().execute("1")


def test_out_of_range_arguments_of_a_client_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"endpoints": []}, {"batch_size": 0}, {"max_connections": 0}, {"retries": -1}]
    for settings in wrong:
        with pytest.raises(ValueError, match="expected"):
            AsyncClient(**settings)


def test_the_retry_delay_grows_and_is_at_least_retry_after() -> None:
    rng = random.Random(0)
    assert 30 <= retry_delay_s(1, 30.0, rng) <= 45
    assert retry_delay_s(1, None, rng) <= retry_delay_s(2, None, rng) * 1.5
    assert retry_delay_s(100, None, rng) <= 0.003


@contextmanager
def serving_in_a_thread() -> Iterator[str]:
    """Run a gateway in a thread of its own, and yield its URL."""
    address: list[str] = []
    opened = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def live() -> None:
        async with serving(FakeFleet(slots=8)) as served:
            address.append(served.url)
            opened.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(live()))
    thread.start()
    opened.wait(10)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_the_synchronous_client_has_the_same_methods() -> None:
    with serving_in_a_thread() as url, Client(url) as client:
        assert client.ready()
        assert client.execute("one", stdin="x").value == "x"
        assert [verdict.outcome for verdict in client.verify([("1", "1")])] == ["unavailable"], "fakes check nothing"
        assert [r.stdout for r in client.run_batch(["a", "b"])] == ["a", "b"]
        assert sorted((index, r.stdout) for index, r in client.stream(["a", "b"])) == [(0, "a"), (1, "b")]
        for _ in client.stream(["a", "hang"]):
            break


def test_the_synchronous_client_works_from_many_threads() -> None:
    answers: list[str] = []
    with serving_in_a_thread() as url, Client(url) as client:
        threads = [
            threading.Thread(target=lambda n=n: answers.append(client.execute(f"{n}").stdout)) for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers, key=int) == [f"{n}" for n in range(20)]


@pytest.mark.parametrize("lacking", ["asyncio.events.new_event_loop", "aiohttp.TCPConnector"])
def test_a_synchronous_client_that_cannot_open_raises_the_reason(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    client, errors = Client(), list[OSError]()

    def open_it() -> None:
        try:
            client.__enter__()
        except OSError as error:
            errors.append(error)

    with monkeypatch.context() as patched:
        patched.setattr(lacking, fail)
        opening = threading.Thread(target=open_it, daemon=True)
        opening.start()
        opening.join(30)
    assert [error.errno for error in errors] == [errno.EMFILE]
    with pytest.raises(RuntimeError, match="is not open"):
        client.ready()


def test_both_clients_have_the_same_public_names() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(AsyncClient) == public(Client)
