"""The route `/mcp`: the sandbox as an MCP server over streamable HTTP, with the official SDK.

- The SDK's transport is an ASGI application. `_AsgiRequest` passes it one aiohttp request and sends its response.
- The transport has no sessions: each request stands alone, so any server behind a load balancer can answer it.
- If the client disconnects, its call is cancelled.
- The SDK is imported by the first request, in a thread, because that takes a second. Without the extra `mcp` the route
  answers 501.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from aiohttp import web

from sandbox.gateway.http import exchange, validation
from sandbox.gateway.http.codec import JSON
from sandbox.gateway.http.errors import HttpError
from sandbox.gateway.http.exchange import BODY_READER, DISPATCHER
from sandbox.gateway.http.openapi import Route
from sandbox.types import Call, Result

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
START_TIMEOUT_S = 30.0
"""Seconds in which the transport must start."""
MAX_BODY_BYTES = 4 << 20
"""Maximum length of a message. The SDK has the same limit."""
MAX_STRUCTURE_BYTES = 64 << 10
"""Maximum bytes of a request outside of its JSON strings: brackets, commas, colons, numbers and white space. They bound
the number of values. The SDK decodes and checks a request on the event loop, and a million values would block it for a
second."""
_request: ContextVar[web.Request] = ContextVar("request")
"""The HTTP request of a tool call. The SDK runs a call in the context of the request that contains it."""


class McpTransport:
    """The SDK's transport, which the first request starts and `stop` stops. It serves one application."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._manager: Any = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request. Raises `HttpError` 501 if the SDK is not installed."""
        async with self._starting:
            manager = self._manager or await self._start()
        asgi = _AsgiRequest(request, await _read_body(request))
        token = _request.set(request)
        try:
            await manager.handle_request(asgi.scope, asgi.receive, asgi.send)
        finally:
            _request.reset(token)
        return await asgi.finish()

    async def stop(self) -> None:
        """End all requests that are being answered."""
        self._stop.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _start(self) -> Any:
        """Start a manager and return it. Raises `HttpError`."""
        try:
            server = await asyncio.to_thread(importlib.import_module, "sandbox.mcp.server")
            security = importlib.import_module("mcp.server.transport_security")
        except ModuleNotFoundError as error:
            raise HttpError(
                501, f"/mcp needs the package {error.name} on the server: pip install 'rstar-sandbox[mcp]'"
            ) from None
        logging.getLogger("mcp.server").setLevel(logging.WARNING)  # it logs a line for each request
        mcp_server = server.build_server(_run_call)
        # The middleware of `auth` has checked the headers Host and Origin.
        no_checks = security.TransportSecuritySettings(enable_dns_rebinding_protection=False)
        # Only for its side effect, which is `session_manager`. `_AsgiRequest` replaces the application.
        mcp_server.streamable_http_app(stateless_http=True, transport_security=no_checks)
        manager = mcp_server.session_manager
        has_started_or_ended = asyncio.Event()
        self._task = asyncio.create_task(self._run(manager, has_started_or_ended))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await has_started_or_ended.wait()
        except TimeoutError:
            log.error("the MCP transport has not started in %g s", START_TIMEOUT_S)
        finally:  # also if this task is cancelled while it waits
            if self._manager is not manager:
                self._task.cancel()
        if self._manager is not manager:
            raise HttpError(500, "the MCP transport did not start; the server's log has the reason")
        return manager

    async def _run(self, manager: Any, has_started_or_ended: asyncio.Event) -> None:
        """Keep the manager running until `stop`. The same task must enter and leave `manager.run()`."""
        try:
            async with manager.run():
                self._manager = manager
                has_started_or_ended.set()
                await self._stop.wait()
        except Exception:
            log.exception("the MCP transport has ended; the next request starts another")
        finally:
            if self._manager is manager:
                self._manager = None
            has_started_or_ended.set()


class _AsgiRequest:
    """One request and its response, as an ASGI application sees them."""

    def __init__(self, request: web.Request, body: bytes) -> None:
        self._request = request
        self._body: bytes | None = body
        self._response: web.StreamResponse | None = None
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": f"{request.version.major}.{request.version.minor}",
            "method": request.method,
            "scheme": request.scheme,
            "path": request.path,
            "raw_path": request.raw_path.encode(),
            "query_string": request.query_string.encode(),
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.raw_headers],
        }

    async def receive(self) -> dict[str, Any]:
        """Return the body. A second call waits for ever and returns no `http.disconnect`: if the client disconnects,
        aiohttp cancels the task that runs the application."""
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        """Send the status and the headers of the response, or a part of its body."""
        if message["type"] == "http.response.start":
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
            self._response = web.StreamResponse(status=message["status"])
            self._response.headers.extend(headers)
            await self._response.prepare(self._request)
        elif self._response is not None and message.get("body"):
            await exchange.send(self._request, self._response, message["body"])

    async def finish(self) -> web.StreamResponse:
        """End the response and return it."""
        if self._response is None:
            raise HttpError(500, "the MCP transport sent no response; the server's log has the reason")
        await self._response.write_eof()
        return self._response


async def _read_body(request: web.Request) -> bytes:
    reader = request.app[BODY_READER]
    with reader.reservation(request) as reservation:
        body = await reader.read(request, reservation, MAX_BODY_BYTES)
    if len(body) > MAX_STRUCTURE_BYTES and not _has_few_values(body):
        raise HttpError(413, f"expected at most {MAX_STRUCTURE_BYTES} bytes outside of texts, got more; send less")
    return body


def _has_few_values(body: bytes) -> bool:
    """Return whether a JSON body has at most `MAX_STRUCTURE_BYTES` outside of its strings."""
    # Escaped backslashes go first: in `\\"` the second backslash does not escape the quote.
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    # A string has two quotes, and at least one byte lies between two strings. So a body with more quotes is over the
    # limit, and `split` does not have to make millions of parts.
    if unescaped.count(b'"') > 2 * MAX_STRUCTURE_BYTES:
        return False
    # Every second part, from the first on, lies outside of the strings.
    return sum(map(len, unescaped.split(b'"')[::2])) <= MAX_STRUCTURE_BYTES


async def _run_call(call: Call) -> Result:
    """Run the call of a tool for the current request."""
    request = _request.get()
    dispatcher = request.app[DISPATCHER]
    # Encoded again, so that the form applies the limits of the server to it, as to a call of /v1/execute.
    batch, _ = await validation.parse(validation.CallForm(dispatcher.config), call.encode(binary=True))
    await exchange.submit(request, batch)
    try:
        await exchange.wait_for_results(batch)
        return Result.decode(batch.pop_result(0))
    finally:
        dispatcher.cancel(batch)


TRANSPORT = web.AppKey("mcp", McpTransport)
_REQUEST = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "run_python", "arguments": {"code": "print(6 * 7)"}},
}
_RESULT: Mapping[str, Any] = {
    "status": "ok",
    "stdout": "42\n",
    "stderr": "",
    "value": None,
    "error": None,
    "exit_code": 0,
    "run_ms": 6.3,
    "truncated": [],
}
_RESPONSE = {
    "jsonrpc": "2.0",
    "id": 1,
    "result": {"content": [{"text": "42", "type": "text"}], "isError": False, "structuredContent": _RESULT},
}


async def _mcp(request: web.Request) -> web.StreamResponse:
    return await request.app[TRANSPORT].handle(request)


async def on_startup(app: web.Application) -> None:
    """Create the transport of an application."""
    app[TRANSPORT] = McpTransport()


async def on_cleanup(app: web.Application) -> None:
    """Stop the transport of an application."""
    await app[TRANSPORT].stop()


ROUTES = (
    Route(
        "POST",
        "/mcp",
        _mcp,
        "The tool run_python as an MCP server (streamable HTTP)",
        {EVENT_STREAM: None, JSON: None},
        body_types=(JSON,),
        error_statuses=(400, 401, 403, 408, 413, 429, 501),
        request_example=_REQUEST,
        response_examples={EVENT_STREAM: f"event: message\ndata: {json.dumps(_RESPONSE)}\n\n", JSON: _RESPONSE},
    ),
)
