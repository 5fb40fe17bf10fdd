"""Tests of request ids, the access log and traces."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sandbox import logs
from sandbox.gateway import build_app
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.observe.traces import MAX_TRACED_CALLS, Traces
from sandbox.settings.server import ServeConfig
from tests.fakes import FakeFleet
from tests.gateway.serving import serving, until
from tests.http_server import HttpServer

pytestmark = pytest.mark.asyncio

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"X-Request-Id": "job-7/3"}, "job-7/3"),
        ({"traceparent": TRACEPARENT}, TRACE_ID),
        ({"traceparent": TRACEPARENT, "X-Request-Id": "mine"}, "mine"),
        ({"traceparent": TRACEPARENT, "X-Request-Id": "not valid"}, TRACE_ID),
        ({"X-Request-Id": "x" * 129}, None),
        ({"X-Request-Id": 'a"b'}, None),
        ({"traceparent": f"00-{'0' * 32}-{PARENT_ID}-01"}, None),
        ({"traceparent": f"ff-{TRACE_ID}-{PARENT_ID}-01"}, None),
        ({}, None),
    ],
)
async def test_a_response_has_the_id_of_its_request_or_a_new_one(headers: dict[str, str], expected: str | None) -> None:
    async with serving() as served:
        received = []
        for path in ("/health", "/nowhere"):
            async with served.http.get(served.url + path, headers=headers) as response:
                received.append(response.headers["X-Request-Id"])
    if expected is not None:
        assert received == [expected, expected]
    else:
        assert received[0] != received[1] and all(len(request_id) == 32 for request_id in received)


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
async def test_whole_and_streamed_responses_have_the_id(accept: str) -> None:
    async with serving() as served:
        headers = {"X-Request-Id": "mine", "Accept": accept}
        body = {"calls": [{"code": "1"}]}
        async with served.http.post(served.url + "/v1/batch", json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "mine"
            assert "mine" not in await response.text()


async def test_a_log_line_of_a_request_has_its_id(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Dispatcher, "submit", broken)
    caplog.handler.setFormatter(logs.JsonFormatter())
    async with serving() as served:
        assert (await served.post("/v1/execute", {"code": "1"}, X_Request_Id="mine"))[0] == 500
    assert '"request_id": "mine"' in caplog.text


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\x00\r\n\r\n",
        b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret" + b"x" * 9000 + b"\r\n\r\n",
        b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nAuthorization Bearer s3cret\r\n\r\n",
    ],
)
async def test_the_log_shows_no_bytes_of_a_malformed_request(
    request_head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as served:
        with caplog.at_level(logging.INFO):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
            writer.write(request_head)
            answer = await reader.read()
            writer.close()
    (record,) = (record for record in caplog.records if record.name == "aiohttp.server")
    assert answer.startswith(b"HTTP/1.1 400") or answer.startswith(b"HTTP/1.0 400")
    assert record.levelname == "INFO" and record.getMessage().startswith("Error handling request from 127.0.0.1: ")
    assert "s3cret" not in caplog.text


def _access_fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == "sandbox.access"]  # type: ignore[attr-defined]


async def test_the_access_log_has_a_line_for_each_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.a]\ntoken = "s3cret"\n', encoding="utf-8")
    with caplog.at_level(logging.INFO):
        async with serving(access_log="on", tenants=str(file)) as served:
            batch = {"calls": [{"code": "1"}] * 3}
            _, results = await served.post("/v1/batch", batch, Authorization="Bearer s3cret")
            await served.post("/v1/execute%0aINFO", {}, Authorization="Bearer wrong")
    answered, refused = _access_fields(caplog)
    assert answered["bytes_in"] == len(json.dumps(batch)) and answered["ms"] > 0
    assert answered["bytes_out"] == len(json.dumps(results, separators=(",", ":")))
    expected = {"method": "POST", "path": "/v1/batch", "status": 200, "tenant": "a", "calls": 3}
    assert expected.items() <= answered.items()
    assert (refused["status"], refused["path"], refused["calls"]) == (401, "/v1/execute%0AINFO", 0)
    assert "s3cret" not in caplog.text and "wrong" not in caplog.text


async def test_the_access_log_has_the_calls_and_the_tenant_of_judged_programs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(access_log="on") as served:
            program = {"code": "1", "tests": [{"stdin": "", "expected": "1"}] * 2, "tenant": "a"}
            await served.post("/v1/judge", {"programs": [program, program]})
    (judged,) = _access_fields(caplog)
    assert {"path": "/v1/judge", "status": 200, "tenant": "a", "calls": 4}.items() <= judged.items()


async def test_a_client_that_hangs_up_is_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(access_log="on") as served:
            request = asyncio.create_task(served.post("/v1/execute", {"code": "hang"}))
            await until(lambda: served.dispatcher.dispatched == 1)
            request.cancel()
            await until(lambda: bool(_access_fields(caplog)))
    assert _access_fields(caplog)[0]["status"] == 499


async def test_without_access_log_requests_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with serving() as served:
            await served.get("/health")
    assert not _access_fields(caplog)


@asynccontextmanager
async def _traced() -> AsyncIterator[tuple[str, Any]]:
    """Run a gateway whose spans go into memory. Yields its URL and the exporter."""
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk (extra dev)")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with Dispatcher(ServeConfig(), FakeFleet().launch) as dispatcher:
        await dispatcher.started()
        async with HttpServer(build_app(dispatcher, Traces(provider))) as server:
            yield str(server.make_url("")).rstrip("/"), exporter


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
async def test_a_trace_has_spans_of_the_request_its_calls_and_the_response(accept: str) -> None:
    async with _traced() as (url, exporter), aiohttp.ClientSession() as http:
        body = {"calls": [{"code": "1", "id": "one"}, {"code": "2"}, {"code": 3}]}
        headers = {"traceparent": TRACEPARENT, "Accept": accept}
        async with http.post(url + "/v1/batch", json=body, headers=headers) as response:
            assert response.status == 200 and await response.read()
        await until(lambda: any(span.parent.span_id == int(PARENT_ID, 16) for span in exporter.get_finished_spans()))
        spans = exporter.get_finished_spans()
    request = spans[-1]
    assert request.name == "POST /v1/batch" and request.parent.span_id == int(PARENT_ID, 16)
    assert request.attributes["rstar.calls"] == 3 and request.attributes["http.response.status_code"] == 200
    children = [span for span in spans if span is not request]
    assert sorted(span.name for span in children) == ["queue", "queue", "response", "run", "run"]
    assert all(span.parent.span_id == request.context.span_id for span in children)
    assert {span.context.trace_id for span in spans} == {int(TRACE_ID, 16)}
    for queue, run in zip(children[0:4:2], children[1:4:2], strict=True):
        assert (queue.name, run.name) == ("queue", "run") and queue.end_time == run.start_time
        assert request.start_time <= queue.start_time <= queue.end_time < run.end_time


async def test_a_request_to_judge_programs_has_spans_of_their_calls() -> None:
    async with _traced() as (url, exporter), aiohttp.ClientSession() as http:
        program = {"code": "1", "tests": [{"stdin": "", "expected": "1"}] * 2, "tenant": "a"}
        async with http.post(url + "/v1/judge", json=program) as response:
            await response.read()
        await until(lambda: exporter.get_finished_spans()[-1].name.startswith("POST"))
        *calls, request = exporter.get_finished_spans()
        assert sorted(span.name for span in calls if span.name != "response") == ["queue", "queue", "run", "run"]
        assert (request.attributes["rstar.calls"], request.attributes["rstar.tenant"]) == (2, "a")


async def test_a_request_has_spans_of_a_limited_number_of_calls() -> None:
    async with _traced() as (url, exporter), aiohttp.ClientSession() as http:
        body = {"calls": [{"code": "1"}] * (MAX_TRACED_CALLS + 5)}
        async with http.post(url + "/v1/batch", json=body) as response:
            await response.read()
        await until(lambda: exporter.get_finished_spans()[-1].name.startswith("POST"))
        assert sum(span.name == "run" for span in exporter.get_finished_spans()) == MAX_TRACED_CALLS
