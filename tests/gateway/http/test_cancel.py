"""Tests of `DELETE /v1/calls/ID`: the unfinished calls and judged programs with this id end with `Cancelled`.

No other call is affected. The calls go to fake executors (tests/fakes.py), where the code "hang" gets no result until
the test calls `finish`, with the numbers of the received calls, counted from 1.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import ANY, AsyncMock
from urllib.parse import quote

import pytest
from yarl import URL

from sandbox.gateway import judging
from sandbox.gateway.calls import dispatcher
from tests.fakes import FakeFleet
from tests.gateway.serving import Served, serving, until

pytestmark = pytest.mark.asyncio


def path_of(call_id: str) -> str:
    # `quote` does not escape ".", and the path segments "." and ".." mean this and the parent directory.
    return "/v1/calls/" + quote(call_id, safe="").replace(".", "%2E")


async def cancel(served: Served, path: str, token: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with served.http.delete(URL(served.url + path, encoded=True), headers=headers) as response:
        return response.status, await response.json()


def endings(body: Any) -> list[str]:
    """Return the error type of each result, or its status if it has no error."""
    return [result["error"]["type"] if result["error"] else result["status"] for result in body["results"]]


@pytest.mark.parametrize("max_stopped_at_once", [1, 512])
async def test_waiting_and_running_calls_of_an_id_are_cancelled(
    max_stopped_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_STOPPED_AT_ONCE", max_stopped_at_once)
    async with serving(FakeFleet(slots=1)) as served, asyncio.timeout(10):
        calls = [{"code": "hang", "id": name} for name in ("a", "b", "a", "b")]
        response = asyncio.create_task(served.post("/v1/batch", {"calls": calls}))
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        assert await cancel(served, "/v1/calls/a") == (200, {"cancelled": 2})
        await until(lambda: len(served.fleet.last_executor.calls) == 3)
        assert served.fleet.last_executor.cancelled == [1]
        served.fleet.last_executor.finish(1, 2, 3)  # the result of a cancelled call is dropped
        status, body = await response
        assert (status, endings(body)) == (200, ["Cancelled", "ok", "Cancelled", "ok"])
        assert served.dispatcher.counters.by_status == {"unavailable": 2, "ok": 2}
        assert served.dispatcher.call_table.outstanding.calls == 0


async def test_an_id_without_an_unfinished_call_is_a_404() -> None:
    async with serving() as served, asyncio.timeout(10):
        await served.post("/v1/execute", {"code": "1", "id": "done"})
        response = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang"}]}))
        await until(lambda: bool(served.fleet.last_executor.calls))
        for name in ("done", "0"):  # the running call has the index 0 in its batch, but no id
            status, body = await cancel(served, f"/v1/calls/{name}")
            assert (status, body["error"]["type"]) == (404, "NotFound")
            assert body["error"]["message"].startswith(
                f"no unfinished call or program has the id '{name}': it has its result"
            )
        assert (await cancel(served, "/v1/calls/"))[0] == 404
        served.fleet.last_executor.finish(2)
        assert endings((await response)[1]) == ["ok"]


@pytest.mark.parametrize("call_id", ["a/b", "a%2Fb", "..", ".", "ä ö", "{x}", "a?b#c", "/", "+ ;=&", "//"])
async def test_an_id_may_have_any_characters(call_id: str) -> None:
    async with serving() as served, asyncio.timeout(10):
        response = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang", "id": call_id}]}))
        await until(lambda: bool(served.fleet.last_executor.calls))
        assert await cancel(served, path_of(call_id)) == (200, {"cancelled": 1})
        _, body = await response
        assert (endings(body), body["results"][0]["id"]) == (["Cancelled"], call_id)


async def test_a_tenant_cancels_only_its_own_calls(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.one]\ntoken = "token-of-one"\n[tenants.two]\ntoken = "token-of-two"\n')
    file.chmod(0o600)
    async with serving(tenants=str(file), token="token-of-server") as served, asyncio.timeout(10):
        batch = {"calls": [{"code": "hang", "id": "same"}]}
        first, second = (
            asyncio.create_task(served.post("/v1/batch", batch, Authorization=f"Bearer token-of-{name}"))
            for name in ("one", "two")
        )
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        assert await cancel(served, "/v1/calls/same", "token-of-one") == (200, {"cancelled": 1})
        assert endings((await first)[1]) == ["Cancelled"]
        assert (await cancel(served, "/v1/calls/same", "token-of-one"))[0] == 404
        assert (await cancel(served, "/v1/calls/same"))[0] == 401
        assert await cancel(served, "/v1/calls/same", "token-of-server") == (200, {"cancelled": 1})
        assert endings((await second)[1]) == ["Cancelled"]


async def test_calls_can_be_cancelled_while_the_server_drains() -> None:
    async with serving() as served, asyncio.timeout(10):
        response = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang", "id": "a"}]}))
        await until(lambda: bool(served.fleet.last_executor.calls))
        draining = asyncio.create_task(served.dispatcher.drain(3600))
        await until(lambda: served.dispatcher.is_draining)
        assert await cancel(served, "/v1/calls/a") == (200, {"cancelled": 1})
        await draining
        assert endings((await response)[1]) == ["Cancelled"]


def program(code: str, tests: int, **fields: Any) -> dict[str, Any]:
    return {"code": code, "tests": [{"stdin": "", "expected": code}] * tests, **fields}


def reasons(judged: dict[str, Any]) -> list[str]:
    """Return the reason of each test that is unavailable, and the outcome of each other test."""
    return [test.get("reason") or test["outcome"] for test in judged["tests"]]


async def test_running_waiting_and_unstarted_programs_of_an_id_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request has four programs. At the time of the cancellation:

    1. id "a": one test has passed, and two tests run;
    2. id "a": it waits for room in the queue;
    3. no id, so its id is its index, "2": it waits for room behind the second program;
    4. id "a": it has not begun, because at most three programs run at the same time.
    """
    # The check would refuse the request, because the queue has no room for all programs at once.
    monkeypatch.setattr(judging.Judge, "check_room", AsyncMock())
    monkeypatch.setattr(judging, "MAX_PROGRAMS_AT_ONCE", 3)
    monkeypatch.setattr(judging, "MIN_CALLS_TO_COMPILE", 99)  # no call that only compiles
    # The queue has room for the three calls of the first program.
    async with serving(FakeFleet(slots=8), queue_calls=3, tenant_share=1) as served, asyncio.timeout(10):
        executor, call_table = served.fleet.last_executor, served.dispatcher.call_table
        programs = [program("hang", 3, id="a"), program("1", 2, id="a"), program("hang", 1), program("1", 1, id="a")]
        response = asyncio.create_task(served.post("/v1/judge", {"programs": programs}))
        await until(lambda: len(executor.calls) == 3)
        executor.finish(1)
        await until(lambda: call_table.outstanding.calls == 2 and not call_table.unread_result_bytes)
        assert await cancel(served, "/v1/calls/2") == (404, ANY), "an index cancelled a program without an id"
        assert await cancel(served, "/v1/calls/a") == (200, {"cancelled": 2 + 2 + 1})
        assert (await cancel(served, "/v1/calls/a"))[0] == 404
        await until(lambda: sorted(executor.cancelled) == [2, 3] and len(executor.calls) == 4)
        executor.finish(4)
        status, body = await response
        judged = body["results"]
        assert status == 200 and [program["id"] for program in judged] == ["a", "a", "2", "a"]
        assert list(map(reasons, judged)) == [
            ["passed"] + ["Cancelled"] * 2,
            ["Cancelled"] * 2,
            ["passed"],
            ["Cancelled"],
        ]
        assert [program["is_scorable"] for program in judged] == [False, False, True, False]
        assert len(executor.calls) == 4, "a cancelled program has submitted a further wave of tests"


async def test_a_program_that_is_cancelled_in_its_first_wave_of_tests_runs_no_further_wave() -> None:
    async with serving(FakeFleet(slots=8)) as served, asyncio.timeout(10):
        body = program("hang", 4, id="a", stop_at_first_failure=True)  # waves of 1, 2 and 1 tests
        response = asyncio.create_task(served.post("/v1/judge", body))
        await until(lambda: bool(served.fleet.last_executor.calls))
        assert await cancel(served, "/v1/calls/a") == (200, {"cancelled": 4})
        _, judged = await response
        assert reasons(judged) == ["Cancelled"] * 4
        assert len(served.fleet.last_executor.calls) == 1


async def test_a_tenant_cancels_only_its_own_programs(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.one]\ntoken = "token-of-one"\n[tenants.two]\ntoken = "token-of-two"\n')
    file.chmod(0o600)
    async with serving(tenants=str(file)) as served, asyncio.timeout(10):
        body = program("hang", 1, id="same")
        response = asyncio.create_task(served.post("/v1/judge", body, Authorization="Bearer token-of-one"))
        await until(lambda: bool(served.fleet.last_executor.calls))
        assert (await cancel(served, "/v1/calls/same", "token-of-two"))[0] == 404
        assert await cancel(served, "/v1/calls/same", "token-of-one") == (200, {"cancelled": 1})
        assert reasons((await response)[1]) == ["Cancelled"]
