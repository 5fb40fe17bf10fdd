"""Tests of `/mcp` with the official SDK's client, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from sandbox.gateway.http import mcp
from sandbox.gateway.http.mcp import MAX_BODY_BYTES
from tests.gateway.serving import Served, serving, until

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def client_of(served: Served, token: str | None = None) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(f"{served.url}/mcp", http_client=http)) as client,
    ):
        yield client


async def test_the_tool_returns_text_for_the_model_and_a_typed_result() -> None:
    async with serving() as served, client_of(served) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("run_python", {"code": "hello", "input": "typed", "timeout_s": 3})
        (call,) = served.fleet.executors[0].calls.values()
    assert tool.name == "run_python"
    assert set(tool.input_schema["properties"]) == {"code", "input", "timeout_s"}
    assert tool.output_schema is not None
    assert "status" in tool.output_schema["required"]
    assert (call["stdin"], call["limits"]["timeout_s"]) == ("typed", 3)
    assert not result.is_error
    assert result.content[0].text == "hello"  # type: ignore[union-attr]
    assert result.structured_content is not None
    assert (result.structured_content["status"], result.structured_content["stdout"]) == ("ok", "hello")


async def test_a_response_is_like_the_documented_example() -> None:
    (route,) = mcp.ROUTES
    accept = {"Accept": ", ".join(route.response_schemas)}
    async with (
        serving() as served,
        served.http.post(f"{served.url}/mcp", json=route.request_example, headers=accept) as response,
    ):
        content_type, text = response.content_type, await response.text()
    (documented, answered) = (
        json.loads(stream.partition("data: ")[2]) for stream in (route.response_examples[content_type], text)
    )
    assert set(answered) == set(documented)
    assert set(answered["result"]) == set(documented["result"])
    assert set(answered["result"]["structuredContent"]) == set(documented["result"]["structuredContent"])


async def test_many_calls_of_one_client_run_at_once() -> None:
    async with serving() as served, client_of(served) as client:
        results = await asyncio.gather(*(client.call_tool("run_python", {"code": f"{n}"}) for n in range(50)))
    assert [result.content[0].text for result in results] == [f"{n}" for n in range(50)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "field"), [({"code": 5}, "code"), ({}, "code"), ({"code": "1", "timeout_s": -1}, "timeout_s")]
)
async def test_wrong_arguments_are_an_error_that_the_model_reads(arguments: dict[str, object], field: str) -> None:
    async with serving() as served, client_of(served) as client:
        result = await client.call_tool("run_python", arguments)
    assert result.is_error
    assert field in result.content[0].text  # type: ignore[union-attr]


async def test_a_failure_of_the_service_is_no_tool_result() -> None:
    async with serving() as served, client_of(served) as client:
        with pytest.raises(MCPError, match="the sandbox did not run the code"):
            await client.call_tool("run_python", {"code": "die"})


async def test_a_client_that_disconnects_cancels_its_call() -> None:
    async with serving() as served:
        async with client_of(served) as client:
            calling = asyncio.create_task(client.call_tool("run_python", {"code": "hang"}))
            await until(lambda: served.dispatcher.call_table.outstanding.calls == 1)
            calling.cancel()
            await asyncio.wait({calling})
        await until(lambda: served.dispatcher.call_table.outstanding.calls == 0)
        assert served.fleet.executors[0].cancelled


async def test_the_route_needs_the_token() -> None:
    async with serving(token="secret") as served:
        async with client_of(served, "secret") as client:
            assert (await client.call_tool("run_python", {"code": "1"})).content
        status, _ = await served.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "ping"})
    assert status == 401


@pytest.mark.parametrize("values", ["[]", "{}", "0", '""', '"a":0'])
async def test_a_body_with_very_many_values_is_refused(values: str) -> None:
    many = ",".join([values] * (1 << 17))
    body = f'{{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {{"_meta": {{"x": [{many}]}}}}}}'
    async with serving() as served:
        headers = {"Content_Type": "application/json", "Accept": "application/json, text/event-stream"}
        status, answer = await served.post("/mcp", body.encode(), **headers)
    assert status == 413
    assert "expected at most 65536 bytes outside of texts" in answer["error"]["message"]


async def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    async with serving() as served:
        headers = {"Content_Type": "application/json", "Accept": "application/json, text/event-stream"}
        status, answer = await served.post("/mcp", b" " * (MAX_BODY_BYTES + 1), **headers)
    assert status == 413
    assert answer["error"]["message"].endswith(f"expected at most {MAX_BODY_BYTES}; send less")


async def test_long_code_may_have_any_characters() -> None:
    code = '[{"\\\\\\"\\",:0}]' * (1 << 15)
    async with serving() as served, client_of(served) as client:
        result = await client.call_tool("run_python", {"code": code})
    assert result.content[0].text.startswith(code[:1000])  # type: ignore[union-attr]


async def test_a_request_adds_no_line_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with serving() as served, client_of(served) as client:
            await client.call_tool("run_python", {"code": "1"})
    assert [record for record in caplog.records if record.name.startswith("mcp.server")] == []


async def test_headers_may_have_any_bytes() -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).encode()
    async with serving() as served:
        for value in ("☃".encode(), b"\xff\xed\xa0\x80"):
            head = f"POST /mcp HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
            types = "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
            writer.write((head + types).encode() + b"X-Name: " + value + b"\r\n\r\n" + body)
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200"), answer


async def test_a_body_that_is_no_message_is_refused() -> None:
    async with serving() as served:
        accept = "application/json, text/event-stream"
        for body in (b"", b"{", b"[]", b'{"jsonrpc": "2.0"}', b"\xff" * 100):
            status, _ = await served.post("/mcp", body, Accept=accept, Content_Type="application/json")
            assert 400 <= status < 500


async def test_without_the_sdk_the_route_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sandbox.mcp.server", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    async with serving() as served:
        status, body = await served.post("/mcp", {})
    assert status == 501
    assert "pip install 'rstar-sandbox[mcp]'" in body["error"]["message"]


class BrokenServer:
    """A server of the SDK whose manager does not start."""

    session_manager: BrokenServer

    def __init__(self, *, hangs: bool) -> None:
        self.session_manager = self
        self.hangs = hangs

    def streamable_http_app(self, **_settings: object) -> None: ...

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        if self.hangs:
            await asyncio.Event().wait()
        raise OSError("no thread can be started")
        yield


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_transport_that_does_not_start_is_an_error_and_the_next_request_starts_another(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mcp, "START_TIMEOUT_S", 0.01 if hangs else 1000)
    async with serving() as served:
        with monkeypatch.context() as patch:
            patch.setattr("sandbox.mcp.server.build_server", lambda _run_call: BrokenServer(hangs=hangs))
            status, body = await served.post("/mcp", {})
        assert (status, body["error"]["message"]) == (
            500,
            "the MCP transport did not start; the server's log has the reason",
        )
        monkeypatch.undo()
        async with client_of(served) as client:
            assert (await client.call_tool("run_python", {"code": "1"})).content[0].text == "1"  # type: ignore[union-attr]
    assert ("has not started in 0.01 s" if hangs else "no thread can be started") in caplog.text
