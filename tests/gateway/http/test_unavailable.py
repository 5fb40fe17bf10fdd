"""Tests of responses to calls that are unavailable or take long.

If a single call is unavailable, its response is an HTTP 503 with the result. A JSON response that takes long begins
with heartbeats: empty lines, so that the connection does not look dead.
"""

from __future__ import annotations

import asyncio
import io
import json

import aiohttp
import msgpack
import pytest

from sandbox.gateway.http import codec
from tests.fakes import FakeFleet
from tests.gateway.serving import Served, serving, until

pytestmark = pytest.mark.asyncio

MSGPACK = "application/msgpack"


@pytest.mark.parametrize("content_type", ["application/json", MSGPACK])
async def test_an_unavailable_single_call_is_a_503_with_its_result(content_type: str) -> None:
    call = {"code": "hang", "deadline_s": 0.02, "id": "mine"}
    body = json.dumps(call).encode() if content_type != MSGPACK else msgpack.packb(call)
    headers = {"Content-Type": content_type}
    async with serving() as served, asyncio.timeout(10):
        async with served.http.post(served.url + "/v1/execute", data=io.BytesIO(body), headers=headers) as response:
            content = await response.read()
        assert (response.status, response.content_type) == (503, content_type)
        assert 1 <= int(response.headers["Retry-After"]) <= 60
        result = json.loads(content) if content_type != MSGPACK else msgpack.unpackb(content)
        assert (result["id"], result["status"], result["error"]["type"]) == ("mine", "unavailable", "Deadline")
        assert served.dispatcher.counters.refused[503] == 0  # the request was not rejected


async def test_a_poisonous_call_is_a_503_without_retry_after() -> None:
    async with serving() as served, asyncio.timeout(10):
        async with served.http.post(served.url + "/v1/execute", json={"code": "lose"}) as response:
            result = await response.json()
        assert (response.status, result["error"]["type"]) == (503, "Poison")
        assert "Retry-After" not in response.headers, "HTTP clients would send the call again"


def _begin_heartbeats_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "HEARTBEAT_S", 0.01)


async def _read_after_heartbeats(served: Served, response: aiohttp.ClientResponse, count: int) -> bytes:
    """Read `count` heartbeats, let the calls finish, and return the rest of the body."""
    assert await response.content.readexactly(count) == b"\n" * count
    for executor in served.fleet.executors:
        executor.finish(*executor.calls)
    return await response.content.read()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/execute", {"code": "hang"}),
        ("/v1/batch", {"calls": [{"code": "hang"}, {"code": 1}]}),
        ("/v1/batch", {"calls": [{"code": "hang", "files": {"f": "A" * 800_000}, "return_files": ["f"]}]}),
    ],
)
async def test_a_json_response_that_takes_long_begins_with_heartbeats(
    path: str, body: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last body is longer than one chunk."""
    _begin_heartbeats_early(monkeypatch)
    async with serving() as served, asyncio.timeout(10):
        async with served.http.post(served.url + path, json=body) as response:
            assert (response.status, response.content_type) == (200, "application/json")
            assert "Content-Length" not in response.headers
            decoded = json.loads(await _read_after_heartbeats(served, response, 3))
        results = decoded["results"] if path == "/v1/batch" else [decoded]
        assert results[0]["status"] == "ok"
        monkeypatch.undo()  # on a loaded machine, the next response takes longer than the interval of this test
        async with served.http.post(served.url + "/v1/execute", json={"code": "1"}) as response:
            assert not (await response.read()).startswith(b"\n")


async def test_a_single_call_that_becomes_unavailable_after_a_heartbeat_is_a_200(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _begin_heartbeats_early(monkeypatch)
    async with serving() as served, asyncio.timeout(10):
        status, result = await served.post("/v1/execute", {"code": "hang", "deadline_s": 0.2})
        assert (status, result["status"], result["error"]["type"]) == (200, "unavailable", "Deadline")


async def test_a_msgpack_body_has_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    _begin_heartbeats_early(monkeypatch)
    async with serving() as served, asyncio.timeout(10):
        body = msgpack.packb({"code": "hang", "deadline_s": 0.1})
        headers = {"Content-Type": MSGPACK}
        async with served.http.post(served.url + "/v1/execute", data=io.BytesIO(body), headers=headers) as response:
            assert response.status == 503
            assert msgpack.unpackb(await response.read())["status"] == "unavailable"


async def test_verdicts_begin_with_heartbeats_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _begin_heartbeats_early(monkeypatch)
    async with serving(FakeFleet(slots=1)) as served, asyncio.timeout(10):
        waiting = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang"}] * 2}))
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        body = {"pairs": [{"gold": "1", "answer": "1"}]}
        async with served.http.post(served.url + "/v1/verify", json=body) as response:
            rest = await _read_after_heartbeats(served, response, 2)
        assert json.loads(rest)["results"][0]["outcome"] == "unavailable"  # a fake executor compares nothing
        await waiting


async def test_calls_of_a_client_that_leaves_during_heartbeats_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    _begin_heartbeats_early(monkeypatch)
    async with serving() as served, asyncio.timeout(10):
        async with served.http.post(served.url + "/v1/execute", json={"code": "hang"}) as response:
            await response.content.readexactly(2)
            response.close()
        await until(lambda: served.fleet.last_executor.cancelled == [1])


async def test_judged_programs_begin_with_heartbeats_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _begin_heartbeats_early(monkeypatch)
    async with serving() as served, asyncio.timeout(10):
        program = {"code": "hang", "tests": [{"stdin": "", "expected": "hang"}]}
        async with served.http.post(served.url + "/v1/judge", json={"programs": [program]}) as response:
            assert await response.content.readexactly(2) == b"\n\n"
            response.close()
        await until(lambda: served.dispatcher.call_table.outstanding.calls == 0)
