"""Tests of a server with a tenants file.

The file has a token and bounds (such as `max_timeout_s`) for each tenant. The token of a request decides which tenant's
bounds its calls get. The calls go to fake executors (tests/fakes.py), where the code "hang" never gets a result.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeFleet
from tests.gateway.http.test_openapi import SCHEMAS, assert_fits
from tests.gateway.serving import Served, serving, until

pytestmark = pytest.mark.asyncio

TENANTS = """
[tenants.a]
token = "token-a"
max_timeout_s = 3
max_running = 2
priority = 5
[tenants.b]
token = "token-b"
"""
BEARER_A = "Bearer token-a"
"""The `Authorization` header of tenant a."""
BEARER_B = "Bearer token-b"


@asynccontextmanager
async def serving_tenants(directory: Path, text: str = TENANTS, **settings: Any) -> AsyncIterator[Served]:
    file = directory / "tenants.toml"
    file.write_text(text, encoding="utf-8")
    async with serving(tenants=str(file), **settings) as served:
        yield served


async def test_a_request_needs_the_token_of_a_tenant_or_of_the_server(tmp_path: Path) -> None:
    async with serving_tenants(tmp_path, token="server") as served:
        for header, status in (
            (BEARER_A, 200),
            (BEARER_B, 200),
            ("Bearer server", 200),
            ("Bearer x", 401),
            ("Basic token-a", 401),
        ):
            assert (await served.post("/v1/execute", {"code": "1"}, Authorization=header))[0] == status
        assert (await served.post("/v1/execute", {"code": "1"}))[0] == 401
    # Without `--token`, a request from the loopback interface needs a tenant's token as well.
    async with serving_tenants(tmp_path) as served:
        assert (await served.post("/v1/execute", {"code": "1"}))[0] == 401


async def test_a_call_that_names_another_tenant_is_invalid_and_the_rest_of_its_batch_runs(tmp_path: Path) -> None:
    async with serving_tenants(tmp_path) as served:
        for tenant, status in (("a", "ok"), ("", "ok"), ("b", "invalid"), ("c", "invalid")):
            batch = {"calls": [{"code": "1"}, {"code": "1", "tenant": tenant}]}
            received, body = await served.post("/v1/batch", batch, Authorization=BEARER_A)
            assert (received, [result["status"] for result in body["results"]]) == (200, ["ok", status])
            if status == "invalid":
                message = body["results"][1]["error"]["message"]
                assert message.startswith("calls[1].tenant: the token is that of tenant 'a'")
        assert not served.dispatcher.call_table.outstanding.calls
        only_another = {"calls": [{"code": "1"}], "defaults": {"tenant": "b"}}
        assert (await served.post("/v1/batch", only_another, Authorization=BEARER_A))[0] == 400
        for path, body in (
            ("/v1/execute", {"code": "1", "tenant": "b"}),
            ("/v1/verify", {"pairs": [{"gold": "1", "answer": "1"}], "tenant": "b"}),
        ):
            received, refusal = await served.post(path, body, Authorization=BEARER_A)
            assert (received, "the token is that of tenant 'a'" in refusal["error"]["message"]) == (400, True)


async def test_a_program_that_names_another_tenant_is_invalid_and_the_rest_of_its_request_is_judged(
    tmp_path: Path,
) -> None:
    program = {"code": "1", "tests": [{"stdin": "", "expected": "1"}]}
    async with serving_tenants(tmp_path) as served:
        programs = {"programs": [program, {**program, "tenant": "b"}]}
        status, body = await served.post("/v1/judge", programs, Authorization=BEARER_A)
    assert (status, [result["outcome"] for result in body["results"]]) == (200, ["passed", "invalid"])
    assert body["results"][1]["message"].startswith("programs[1].tenant: the token is that of tenant 'a'")


@pytest.mark.parametrize("path", ["/v1/execute", "/v1/batch", "/v1/verify"])
async def test_a_call_an_answer_check_and_a_batch_get_the_limits_and_the_priority_of_the_tenant(
    tmp_path: Path, path: str
) -> None:
    limits = {"limits": {"timeout_s": 9}, "priority": -1}
    bodies = {
        "/v1/execute": {"code": "hang", **limits},
        "/v1/batch": {"calls": [{"code": "hang"}], "defaults": limits},
        "/v1/verify": {"pairs": [{"gold": "1", "answer": "hang"}], **limits},
    }
    async with serving_tenants(tmp_path) as served:
        request = asyncio.create_task(served.post(path, bodies[path], Authorization=BEARER_A))
        table = served.dispatcher.call_table
        await until(lambda: any(table._running.values()))
        (call,) = (call for calls in table._running.values() for call in calls.values())
        assert call.call is not None
        assert (call.tenant, call.priority, call.call["limits"]["timeout_s"]) == ("a", 5, 3)
        assert call.clamped == {"timeout_s": 3}
        request.cancel()


async def test_a_tenant_has_at_most_max_running_calls_at_executors(tmp_path: Path) -> None:
    async with serving_tenants(tmp_path, fleet=FakeFleet(slots=64)) as served:
        calls = {"calls": [{"code": "hang"}] * 5}
        requests = [
            asyncio.create_task(served.post("/v1/batch", calls, Authorization=token)) for token in (BEARER_A, BEARER_B)
        ]
        await until(lambda: served.dispatcher.call_table.outstanding.calls == 10)
        await until(lambda: served.dispatcher.dispatched == 2 + 5)  # `max_running` of a, and all calls of b
        for request in requests:
            request.cancel()


async def test_a_reloaded_file_applies_to_new_requests(tmp_path: Path) -> None:
    async with serving_tenants(tmp_path) as served:
        calls = {"calls": [{"code": "hang"}] * 5}
        request = asyncio.create_task(served.post("/v1/batch", calls, Authorization=BEARER_A))
        await until(lambda: served.dispatcher.dispatched == 2)
        (tmp_path / "tenants.toml").write_text('[tenants.c]\ntoken = "token-c"\n', encoding="utf-8")
        served.dispatcher.reload_tenants()
        assert served.dispatcher.dispatched == 2 and not request.done()
        for token, status in ((BEARER_A, 401), ("Bearer token-c", 200)):
            assert (await served.post("/v1/execute", {"code": "1"}, Authorization=token))[0] == status
        request.cancel()


async def test_a_wrong_file_changes_nothing_and_is_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_tenants(tmp_path) as served:
        (tmp_path / "tenants.toml").write_text('[tenants.a]\ntoken = "token-a"\nx = 1\n', encoding="utf-8")
        with caplog.at_level(logging.INFO):
            served.dispatcher.reload_tenants()
        (record,) = (record for record in caplog.records if record.name.startswith("sandbox"))
        assert record.levelname == "ERROR" and "tenant 'a': unknown field 'x'" in record.getMessage()
        assert "\n" not in record.getMessage() and "token-a" not in record.getMessage()
        for token in (BEARER_A, BEARER_B):
            assert (await served.post("/v1/execute", {"code": "1"}, Authorization=token))[0] == 200


async def test_a_tenant_fills_the_window_of_an_executor_alone_and_leaves_slots_free_beside_another_tenant() -> None:
    """A slot runs one call at a time. The window is the number of calls that an executor accepts at once."""
    async with serving(FakeFleet(slots=64)) as served:
        calls = {"calls": [{"code": "hang"}] * 200, "defaults": {"tenant": "greedy"}}
        alone = asyncio.create_task(served.post("/v1/batch", calls))
        await until(lambda: served.dispatcher.dispatched == 128)  # the window: twice the slots
        alone.cancel()
        await until(lambda: not served.dispatcher.call_table.outstanding.calls)
        modest = asyncio.create_task(served.post("/v1/execute", {"code": "hang", "tenant": "modest"}))
        await until(lambda: served.dispatcher.dispatched == 1)
        greedy = asyncio.create_task(served.post("/v1/batch", calls))
        await until(lambda: served.dispatcher.call_table.outstanding.calls == 201)
        # One call of "modest". While the executor is shared, 1/8 of the slots stay free of the other tenant's calls.
        await until(lambda: served.dispatcher.dispatched == 1 + 64 * 7 // 8)
        for request in (modest, greedy):
            request.cancel()


async def test_a_tenant_cancels_only_its_own_calls(tmp_path: Path) -> None:
    async with serving_tenants(tmp_path) as served:
        call = {"code": "hang", "id": "same"}
        requests = {
            token: asyncio.create_task(served.post("/v1/execute", call, Authorization=token))
            for token in (BEARER_A, BEARER_B)
        }
        await until(lambda: served.dispatcher.dispatched == 2)
        async with served.http.delete(served.url + "/v1/calls/same", headers={"Authorization": BEARER_B}) as response:
            assert response.status == 200
        _, result = await requests[BEARER_B]
        assert result["error"]["type"] == "Cancelled"
        assert served.dispatcher.dispatched == 1 and not requests[BEARER_A].done()
        requests[BEARER_A].cancel()


async def test_a_tenant_sees_its_own_calls_and_the_operator_those_of_all_tenants(tmp_path: Path) -> None:
    async with serving_tenants(tmp_path, token="server") as served:
        for header, codes in ((BEARER_A, ["1", "1"]), (BEARER_B, ["1"]), ("Bearer server", ["1"])):
            batch = {"calls": [{"code": code} for code in codes]}
            assert (await served.post("/v1/batch", batch, Authorization=header))[0] == 200
        malformed = {"calls": [{"code": "1"}, {"code": 1}]}
        assert (await served.post("/v1/batch", malformed, Authorization=BEARER_B))[0] == 200
        hanging = asyncio.create_task(
            served.post("/v1/batch", {"calls": [{"code": "hang"}] * 5}, Authorization=BEARER_A)
        )  # `max_running` is 2: two of these calls run, and three wait
        await until(lambda: served.dispatcher.call_table.waiting == 3)
        own = {"a": await _stats(served, BEARER_A), "b": await _stats(served, BEARER_B)}
        everything = await _stats(served, "Bearer server")
        metrics = {
            header: (await served.get("/metrics", Authorization=header))[1] for header in (BEARER_A, "Bearer server")
        }
        hanging.cancel()
        await asyncio.wait([hanging])
    rows = {row["name"]: row for row in everything["tenants"]}
    assert rows["a"]["statuses"] == {"ok": 2} and rows["b"]["statuses"] == {"ok": 2, "invalid": 1}
    assert (rows["a"]["waiting"], rows["a"]["dispatched"], rows["a"]["bytes"] > 0) == (3, 2, True)
    assert (rows["b"]["waiting"], rows["b"]["dispatched"], rows["b"]["bytes"]) == (0, 0, 0)
    assert rows["a"]["cpu_s"] == rows["a"]["run_s"] == 0.002  # each fake call runs for 1 ms
    assert everything["totals"]["statuses"] == {"ok": 5, "invalid": 1}
    for name, body in own.items():
        assert set(body) == {"service", "at_s", "tenants"} and body["tenants"] == [rows[name]]
    assert 'rstar_sandbox_tenant_calls_total{status="ok",tenant="b"} 2.0' in metrics["Bearer server"]
    lines = [line for line in metrics[BEARER_A].splitlines() if not line.startswith("#")]
    assert 'rstar_sandbox_tenant_calls_total{status="ok",tenant="a"} 2.0' in lines
    assert 'rstar_sandbox_tenant_calls_dispatched{tenant="a"} 2.0' in lines
    foreign = [line for line in lines if 'tenant="a"' not in line]
    assert sorted(line.partition("{")[0].partition(" ")[0] for line in foreign) == [
        "rstar_sandbox_build_info",
        "rstar_sandbox_executors_ready",
    ]


async def test_a_tenant_that_is_removed_from_the_file_keeps_its_counters(tmp_path: Path) -> None:
    async with serving_tenants(tmp_path, token="server") as served:
        await served.post("/v1/execute", {"code": "1"}, Authorization=BEARER_A)
        (tmp_path / "tenants.toml").write_text('[tenants.c]\ntoken = "token-c"\n', encoding="utf-8")
        served.dispatcher.reload_tenants()
        await served.post("/v1/execute", {"code": "1"}, Authorization="Bearer token-c")
        assert [row["name"] for row in (await _stats(served, "Bearer server"))["tenants"]] == ["a", "c"]


async def test_without_a_tenants_file_the_names_that_callers_send_are_not_counted() -> None:
    async with serving() as served:
        for number in range(3):
            await served.post("/v1/execute", {"code": "1", "tenant": f"name-{number}"})
        assert json.loads((await served.get("/v1/stats"))[1])["tenants"] == []
        assert "name-" not in (await served.get("/metrics"))[1] and not served.dispatcher.counters.by_tenant


async def _stats(served: Served, authorization: str) -> dict[str, Any]:
    status, text = await served.get("/v1/stats", Authorization=authorization)
    body: dict[str, Any] = json.loads(text)
    assert status == 200
    assert_fits(body, SCHEMAS["Stats"])
    return body
