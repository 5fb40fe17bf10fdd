"""Tests of the requests of the clients: calls share requests, results keep their order, cancelled calls end, and the
calls of a dead endpoint go to another endpoint."""

from __future__ import annotations

import asyncio
import re

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

import sandbox.client
from sandbox.client import AsyncClient, AsyncSession, Client, Session
from sandbox.client.clients import TIMEOUT_S
from sandbox.errors import (
    InvalidCall,
    Overloaded,
    RequestRefused,
    SandboxError,
    ServiceError,
    SessionGone,
    TooLarge,
    Unreachable,
)
from sandbox.gateway.http import codec
from sandbox.judging.programs import JudgedProgram, JudgeOutcome
from sandbox.types import Call, CellResult, Limits, Outcome, Result, Status, Verdict
from tests.client.servers import (
    EncodedCall,
    encode_results,
    refuse_with,
    respond_after,
    respond_all_invalid,
    respond_ok,
    scripted_server,
)
from tests.fakes import FakeFleet
from tests.gateway.serving import serving, until


@pytest.mark.asyncio
async def test_execute_accepts_source_or_a_call() -> None:
    async with serving() as served, AsyncClient(served.url) as client:
        first = await client.execute("one", stdin="in", limits=Limits(timeout_s=3))
        second = await client.execute(Call("two", id="mine"), stdin="other")
        calls = list(served.fleet.last_executor.calls.values())
    assert (first.id, first.status, first.stdout, first.value) == ("", Status.OK, "one", "in")
    assert (second.id, second.value) == ("mine", "other")
    assert calls[0]["limits"] == {"timeout_s": 3}


@pytest.mark.asyncio
async def test_bytes_variables_and_arguments_are_sent_as_they_are() -> None:
    async with serving() as served, AsyncClient(served.url) as client:
        await client.execute("one", stdin=b"\0\xff", env={"A": "1"}, argv=["-x"])
        await client.execute(Call("two", stdin=b"\0\xff"), figures=True)
        calls = list(served.fleet.last_executor.calls.values())
    sent = [{name: value for name, value in call.items() if name != "id"} for call in calls]
    assert sent == [
        {"code": "one", "stdin": b"\0\xff", "env": {"A": "1"}, "argv": ["-x"]},
        {"code": "two", "stdin": b"\0\xff", "figures": True},
    ]


@pytest.mark.asyncio
async def test_calls_submitted_together_share_requests() -> None:
    async with scripted_server(respond_ok) as server, AsyncClient(server.url) as client:
        results = await asyncio.gather(*(client.execute(f"{n}") for n in range(150)))
    assert [r.stdout for r in results] == [f"{n}" for n in range(150)]
    assert server.batch_sizes == [64, 64, 22]  # batches have 64 calls by default


@pytest.mark.asyncio
async def test_a_single_call_is_sent_at_once_and_later_calls_gather_until_its_request_ends() -> None:
    release = asyncio.Event()
    async with (
        scripted_server(respond_after(release, respond_ok), respond_ok) as server,
        AsyncClient(server.url, gather_s=3600) as client,  # longer than the test takes
    ):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.execute("1"))
            await until(lambda: len(server.requests) == 1)
            for code in ("2", "3"):  # in separate iterations of the event loop
                tasks.create_task(client.execute(code))
                await asyncio.sleep(0)
            cancelled = tasks.create_task(client.execute("cancelled"))
            await asyncio.sleep(0)
            cancelled.cancel()
            release.set()
        await client.execute("4")
    assert server.codes == [["1"], ["2", "3"], ["4"]]


@pytest.mark.asyncio
@pytest.mark.parametrize(("gather_s", "batch_size"), [(0.001, 64), (3600, 2)])
async def test_gathering_calls_are_sent_after_gather_s_or_when_they_fill_a_request(
    gather_s: float, batch_size: int
) -> None:
    release = asyncio.Event()
    async with (
        scripted_server(respond_after(release, respond_ok), respond_ok) as server,
        AsyncClient(server.url, gather_s=gather_s, batch_size=batch_size) as client,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(client.execute("1"))
        await until(lambda: len(server.requests) == 1)
        gathered = [tasks.create_task(client.execute(code)) for code in ("2", "3")]
        assert [(await task).stdout for task in gathered] == ["2", "3"]
        release.set()
    assert server.batch_sizes == [1, 2]


@pytest.mark.asyncio
async def test_calls_that_exceed_the_batches_of_all_connections_are_sent_in_larger_batches() -> None:
    async with scripted_server(respond_ok) as server, AsyncClient(server.url, max_connections=2) as client:
        await client.run_batch(["1"] * 1000)
    assert server.batch_sizes == [500, 500]


@pytest.mark.asyncio
async def test_larger_batches_have_at_most_max_batch_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.client.transport.MAX_BATCH_CALLS", 300)
    async with scripted_server(respond_ok) as server, AsyncClient(server.url, max_connections=2) as client:
        await client.run_batch(["1"] * 1000)
        assert server.batch_sizes == [300, 300, 200, 200]
    async with (
        scripted_server(respond_ok) as server,
        AsyncClient(server.url, batch_size=400, max_connections=1) as client,
    ):
        await client.run_batch(["1"] * 1000)
    assert server.batch_sizes == [400, 400, 200]


@pytest.mark.asyncio
async def test_calls_of_a_request_that_is_too_large_are_sent_in_smaller_requests() -> None:
    async def refuse_more_than_three(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
        return await (refuse_with(413) if len(calls) > 3 else respond_ok)(request, calls)

    async with scripted_server(refuse_more_than_three) as server, AsyncClient(server.url) as client:
        results = await client.run_batch([f"{n}" for n in range(50)])
    assert [result.stdout for result in results] == [f"{n}" for n in range(50)]
    assert sorted(code for codes in server.codes if len(codes) <= 3 for code in codes) == sorted(map(str, range(50)))
    assert len(server.requests) < 50


@pytest.mark.asyncio
async def test_only_the_call_that_is_too_large_alone_is_refused() -> None:
    async def refuse_large(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
        is_large = any(call["code"] == "large" for call in calls)
        return await (refuse_with(413) if is_large else respond_ok)(request, calls)

    codes = ["a", "large", "b", "c"]
    async with scripted_server(refuse_large) as server, AsyncClient(server.url) as client:
        ended = await asyncio.gather(*map(client.execute, codes), return_exceptions=True)
    assert [isinstance(end, RequestRefused) or end.stdout for end in ended] == ["a", True, "b", "c"]  # type: ignore[union-attr]
    assert server.codes[0] == codes


@pytest.mark.asyncio
async def test_a_server_whose_queue_takes_fewer_calls_than_a_request_runs_all() -> None:
    async with (
        serving(FakeFleet(slots=8), queue_calls=20) as served,
        AsyncClient(served.url, max_connections=1) as client,
    ):
        results = await client.run_batch([f"{n}" for n in range(64)])
    assert [result.stdout for result in results] == [f"{n}" for n in range(64)]


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
        served.fleet.last_executor.finish(*served.fleet.last_executor.calls)
        assert [index async for index, _ in stream] == [0]


@pytest.mark.asyncio
async def test_leaving_a_stream_cancels_the_rest() -> None:
    async with serving() as served, AsyncClient(served.url) as client:
        stream = client.stream(["hang", "quick", "hang"])
        await anext(stream)
        await stream.aclose()
        await until(lambda: len(served.fleet.last_executor.cancelled) == 2)


@pytest.mark.asyncio
async def test_a_cancelled_execute_cancels_the_call_and_no_other() -> None:
    async with serving() as served, AsyncClient(served.url) as client:
        first = asyncio.create_task(client.execute("hang"))
        second = asyncio.create_task(client.execute("hang"))
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        first.cancel()
        await asyncio.wait([first])
        served.fleet.last_executor.finish(2)  # the gateway numbers the calls from 1
        assert (await second).status is Status.OK
        await until(lambda: served.fleet.last_executor.cancelled == [1])


@pytest.mark.asyncio
async def test_heartbeats_are_no_results() -> None:
    async def respond_with_heartbeats(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
        heartbeat = codec.HEARTBEAT[codec.MSGPACK_STREAM]
        first, second = encode_results(calls, range(1)), encode_results(calls, range(1, 2))
        return web.Response(body=heartbeat + first + 2 * heartbeat + second)

    async with scripted_server(respond_with_heartbeats) as server, AsyncClient(server.url) as client:
        assert [result.stdout for result in await client.run_batch(["1", "2"])] == ["1", "2"]
    assert len(server.requests) == 1
    assert TIMEOUT_S >= 4 * codec.HEARTBEAT_S  # a client waits on if three heartbeats are lost


@pytest.mark.asyncio
async def test_a_call_waits_for_a_slot_at_most_queue_timeout_s() -> None:
    async with (
        serving(FakeFleet(slots=1)) as served,
        AsyncClient(served.url, queue_timeout_s=0.01) as client,
        asyncio.TaskGroup() as tasks,
    ):
        window_filling = tasks.create_task(client.run_batch(["hang"] * 2))  # the window is twice the slots
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        late = await client.execute("late")
        served.fleet.last_executor.finish(1, 2)  # the gateway numbers the calls from 1
        assert [result.status for result in await window_filling] == [Status.OK] * 2
    assert late.status is Status.UNAVAILABLE and late.error is not None and late.error.type == "QueueTimeout"
    assert re.match(r"waited \S+ s for a slot, at most 0\.01 s; .*--queue-timeout-s", late.error.message)


@pytest.mark.asyncio
async def test_a_batch_whose_calls_are_all_malformed_has_one_result_per_call() -> None:
    async with scripted_server(respond_all_invalid) as server, AsyncClient(server.url) as client:
        results = await client.run_batch(["a", "b"])
    assert [(result.id, result.status) for result in results] == [("0", Status.INVALID), ("1", Status.INVALID)]
    assert len(server.requests) == 1


@pytest.mark.asyncio
async def test_verify_refuses_the_argument_code() -> None:
    async with AsyncClient(f"http://127.0.0.1:{unused_port()}") as client:
        with pytest.raises(InvalidCall, match="unknown field 'code'"):
            await client.verify([("1", "1")], code="print(1)")


@pytest.mark.asyncio
async def test_a_closed_port_is_the_same_error_in_every_method() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    programs = [{"code": "", "tests": [{"expected": ""}]}]
    async with AsyncClient(url, retries=1) as client:
        assert not await client.ready()
        lists = [client.run_batch(["1"]), client.judge(programs), client.rewards(programs), client.verify([("1", "1")])]
        streams = [anext(client.stream(["1"])), anext(client.stream_judged(programs))]
        attempts = [client.execute("1"), client.cancel("1"), *lists, *streams]
        errors = await asyncio.gather(*attempts, return_exceptions=True)
    expected = (
        rf"{url}: connection refused \((1 try|2 tries in \d+\.\d s)\); is `rstar-sandbox serve` running at {url}\?"
    )
    assert [type(error) for error in errors] == [Unreachable] * len(attempts)
    assert [str(error) for error in errors if not re.fullmatch(expected, str(error))] == []


def test_the_public_names_of_the_client_have_its_errors_and_the_types_of_its_results() -> None:
    expected = {InvalidCall, Overloaded, RequestRefused, SandboxError, ServiceError, TooLarge, Unreachable}
    expected |= {SessionGone, AsyncSession, Session, CellResult}
    expected |= {Call, Limits, Result, Status, Verdict, Outcome, JudgedProgram, JudgeOutcome, AsyncClient, Client}
    assert {getattr(sandbox.client, name) for name in sandbox.client.__all__} == expected


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
    async with (
        scripted_server(respond_ok) as first,
        scripted_server(respond_ok) as second,
        AsyncClient([first.url, second.url]) as client,
    ):
        for _ in range(6):
            await client.execute("1")
        assert (len(first.requests), len(second.requests)) == (3, 3)


@pytest.mark.asyncio
async def test_the_token_is_sent() -> None:
    async with serving(token="s3cret") as served:
        async with AsyncClient(served.url, token="s3cret") as client:
            assert (await client.execute("1")).status is Status.OK
        async with AsyncClient(served.url) as client:
            with pytest.raises(RequestRefused, match="401"):
                await client.execute("1")
