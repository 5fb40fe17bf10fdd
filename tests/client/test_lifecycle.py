"""Tests of opening and closing clients, and of the synchronous client.

The executor is a fake (`tests/fakes.py`). A call with the code "hang" gets no result. Each other call in this file
returns its code as stdout and its stdin as value.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from concurrent.futures import Future

import pytest
from aiohttp.test_utils import unused_port

from sandbox.client import AsyncClient, Client
from sandbox.errors import ServiceError
from sandbox.types import Result, Status
from tests.client.servers import gateway_in_a_thread, respond_unavailable, scripted_server
from tests.gateway.serving import serving, until


@pytest.mark.asyncio
async def test_closing_ends_running_calls() -> None:
    async with serving() as served:
        async with AsyncClient(served.url) as client:
            running = asyncio.create_task(client.execute("hang"))
            await until(lambda: bool(served.fleet.last_executor.calls))
        with pytest.raises(ServiceError, match="the client was closed"):
            await running


@pytest.mark.asyncio
async def test_closing_ends_calls_that_wait_for_their_request_or_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as served:
        client = await AsyncClient(served.url).open()
        running = asyncio.create_task(client.execute("1"))
        await until(lambda: bool(client._transport._requests))  # the request's task exists and has not started
        await client.close()
        with pytest.raises(ServiceError, match="the client was closed"):
            await running
    monkeypatch.setattr("sandbox.client.endpoints.MIN_RETRY_DELAY_S", 3600)
    monkeypatch.setattr("sandbox.client.endpoints.MAX_RETRY_DELAY_S", 3600)
    async with scripted_server(respond_unavailable("Stopped", "1")) as server:
        client = await AsyncClient(server.url).open()
        running = asyncio.create_task(client.execute("1"))
        await until(lambda: bool(client._transport._pausing))  # the call waits for its retry
        await client.close()
        with pytest.raises(ServiceError, match="the client was closed"):
            await running


@pytest.mark.asyncio
async def test_closing_ends_programs_that_are_judged_or_wait_for_their_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    program = {"code": "hang", "tests": [{"stdin": "", "expected": ""}]}
    async with serving() as served:
        client = await AsyncClient(served.url).open()
        running = asyncio.create_task(client.judge([program]))
        await until(lambda: bool(served.dispatcher.call_table.outstanding.calls))
        await client.close()
        with pytest.raises(ServiceError, match="the client was closed"):
            await asyncio.wait_for(running, 10)
    monkeypatch.setattr("sandbox.client.endpoints.MIN_RETRY_DELAY_S", 3600)
    monkeypatch.setattr("sandbox.client.endpoints.MAX_RETRY_DELAY_S", 3600)
    client = await AsyncClient(f"http://127.0.0.1:{unused_port()}").open()
    running = asyncio.create_task(client.judge([program]))
    await until(lambda: client._transport.endpoints.all[0].failures > 0)
    await client.close()
    with pytest.raises(ServiceError, match="the client was closed"):
        await asyncio.wait_for(running, 10)


@pytest.mark.asyncio
async def test_cancelling_by_id_and_judging_raise_if_the_client_is_closed_meanwhile() -> None:
    async with serving() as served:
        client = await AsyncClient(served.url).open()
        programs = client.stream_judged([{"code": "1", "tests": [{"stdin": "", "expected": ""}]}])
        running = asyncio.create_task(client.execute("hang", id="mine"))
        await until(lambda: bool(served.fleet.last_executor.calls))
        await client.close()
        for unfinished in (anext(programs), client._transport.cancel("mine")):
            with pytest.raises(ServiceError, match="the client was closed"):
                await unfinished
        with pytest.raises(ServiceError, match="the client was closed"):
            await running


def test_closing_the_synchronous_client_ends_programs_that_another_thread_waits_for() -> None:
    errors: list[BaseException] = []

    def judge() -> None:
        try:
            client.judge([{"code": "hang", "tests": [{"stdin": "", "expected": ""}]}])
        except BaseException as error:
            errors.append(error)

    with gateway_in_a_thread() as url, Client(url) as client:
        thread = threading.Thread(target=judge)
        thread.start()
        while not client._client._transport._running and thread.is_alive():
            client.ready()
        client.close()
        thread.join(10)
        assert [type(error) for error in errors] == [ServiceError]


@pytest.mark.asyncio
async def test_a_client_can_be_opened_and_closed_by_hand() -> None:
    async with serving() as served:
        client = AsyncClient(served.url)
        await client.close()
        for _ in range(2):
            assert await client.open() is client
            async with client:  # already open
                assert (await client.execute("1")).status is Status.OK
            await asyncio.create_task(client.close())  # the client is already closed, and another task closes it again
            with pytest.raises(RuntimeError, match="not open"):
                await client.execute("1")


def test_a_synchronous_client_can_be_opened_and_closed_by_hand() -> None:
    with gateway_in_a_thread() as url:
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
    with pytest.raises(RuntimeError, match="    with Client"):  # the spaces exclude `async with Client`
        Client().execute("1")


def test_the_synchronous_client_has_the_same_methods() -> None:
    with gateway_in_a_thread() as url, Client(url) as client:
        assert client.ready()
        assert client.execute("one", stdin="x").value == "x"
        verdicts = client.verify([("1", "1")])
        assert [verdict.outcome for verdict in verdicts] == ["unavailable"]  # the fake executor returns no verdict
        assert [r.stdout for r in client.run_batch(["a", "b"])] == ["a", "b"]
        assert sorted((index, r.stdout) for index, r in client.stream(["a", "b"])) == [(0, "a"), (1, "b")]
        for _ in client.stream(["a", "hang"]):
            break  # the client must close although one call of the stream hangs


@pytest.mark.parametrize("stream", ["stream", "stream_judged"])
def test_a_stream_that_is_collected_in_the_clients_own_thread_does_not_stop_the_client(stream: str) -> None:
    items = {
        "stream": ["a", "hang"],
        "stream_judged": [{"code": code, "tests": [{"expected": ""}]} for code in ("a", "hang")],
    }
    with gateway_in_a_thread() as url:
        client = Client(url).open()
        streams = [getattr(client, stream)(items[stream])]
        next(streams[0])
        assert client._loop is not None
        client._loop.call_soon_threadsafe(streams.clear)  # the last reference to the generator
        assert client.submit("1").result(timeout=10).stdout == "1"
        while client._client._transport._requests:  # until the request of the other calls is cancelled
            assert client.submit("1").result(timeout=10).stdout == "1"
        client.close()


def test_a_callback_in_the_clients_own_thread_is_told_that_it_would_wait_for_itself() -> None:
    errors: Future[BaseException | None] = Future()

    def execute(_ended: Future[Result]) -> None:
        try:
            client.execute("2")
        except RuntimeError as error:
            errors.set_result(error)

    with gateway_in_a_thread() as url:
        client = Client(url).open()
        # The client's thread waits, so that the call cannot end before it has its callback. Python would then run the
        # callback in this thread.
        has_callback = threading.Event()
        assert client._loop is not None
        client._loop.call_soon_threadsafe(has_callback.wait)
        client.submit("1").add_done_callback(execute)
        has_callback.set()
        assert "would wait for itself" in str(errors.result(timeout=10))
        client.close()


def test_a_submitted_call_can_be_awaited_in_another_event_loop_and_cancelled() -> None:
    async def main(client: Client) -> str:
        hanging = asyncio.wrap_future(client.submit("hang"))
        result = await asyncio.wrap_future(client.submit("one"))
        hanging.cancel()
        return result.stdout

    with gateway_in_a_thread() as url, Client(url) as client:
        assert asyncio.run(main(client)) == "one"


def test_the_synchronous_client_works_from_many_threads() -> None:
    outputs: list[str] = []
    with gateway_in_a_thread() as url, Client(url) as client:
        threads = [
            threading.Thread(target=lambda n=n: outputs.append(client.execute(f"{n}").stdout)) for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(outputs, key=int) == [f"{n}" for n in range(20)]


@pytest.mark.parametrize("failing_function", ["asyncio.events.new_event_loop", "aiohttp.TCPConnector"])
def test_a_synchronous_client_that_cannot_open_raises_the_reason(
    failing_function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    client = Client()
    errors: list[OSError] = []

    def open_client() -> None:
        try:
            client.__enter__()
        except OSError as error:
            errors.append(error)

    with monkeypatch.context() as patched:
        patched.setattr(failing_function, fail)
        opening = threading.Thread(target=open_client, daemon=True)
        opening.start()
        opening.join(30)
    assert [error.errno for error in errors] == [errno.EMFILE]
    with pytest.raises(RuntimeError, match="is not open"):
        client.ready()


def test_both_clients_have_the_same_public_names_and_only_the_synchronous_one_needs_submit() -> None:
    def public_names(client_class: type) -> set[str]:
        return {name for name in vars(client_class) if not name.startswith("_")}

    assert public_names(AsyncClient) | {"submit"} == public_names(Client)
