"""The HTTP routes: the table `ROUTES`, and one small handler for each of its rows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from sandbox import verify
from sandbox.config import ServeConfig
from sandbox.gateway.calls.batch import Batch, result_bytes
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.http import codec, validation
from sandbox.gateway.http.auth import DOCS_ASSETS, auth_middleware
from sandbox.gateway.http.codec import JSON, MSGPACK, MSGPACK_STREAM, NDJSON
from sandbox.gateway.http.errors import HttpError, errors_as_json
from sandbox.gateway.http.listener import KEEPALIVE_S
from sandbox.gateway.http.openapi import MAX_SAFE_INTEGER, Route, document
from sandbox.gateway.http.validation import ParsedBatch
from sandbox.gateway.metrics import PrometheusText
from sandbox.gateway.stats import Stats
from sandbox.types import EncodedResult, Result, Status

DISPATCHER = web.AppKey("dispatcher", Dispatcher)
BODIES = web.AppKey("bodies", codec.BodyReader)
STATS = web.AppKey("stats", Stats)
PROMETHEUS = web.AppKey("prometheus", PrometheusText)

BODY_TYPES = (JSON, MSGPACK)
BATCH_TYPES = (NDJSON, MSGPACK_STREAM, JSON, MSGPACK)
PAGES_DIR = Path(__file__).parent
DOCS_ASSETS_DIR = PAGES_DIR / "swagger_ui"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
}


def build_app(dispatcher: Dispatcher) -> web.Application:
    """Build the application. The caller starts and stops the dispatcher."""
    config = dispatcher.config
    app = web.Application(
        middlewares=[errors_as_json(dispatcher), auth_middleware(config)],
        handler_args={
            "handler_cancellation": True,
            "auto_decompress": False,
            "access_log": None,
            "keepalive_timeout": KEEPALIVE_S,
        },
    )
    app[DISPATCHER] = dispatcher
    app[BODIES] = codec.BodyReader(config.queue_mb << 20, config.body_mb << 20, config.batch_calls, config.stall_s)
    app[STATS] = Stats(dispatcher)
    app[PROMETHEUS] = PrometheusText(dispatcher.samples)
    app.on_startup.append(_start_stats)
    app.on_cleanup.append(_stop_stats)
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.handler)
    for path in DOCS_ASSETS:
        app.router.add_get(path, docs_asset)
    return app


async def run_call(request: web.Request) -> web.StreamResponse:
    async with _admitted_batch(request, validation.parse_call) as (batch, sent, _):
        content_type = codec.response_type(request, sent, BODY_TYPES)
        await _wait_for_results(batch)
        return await _respond(request, 200, codec.encode_result(_pop_results(batch)[0], content_type), content_type)


async def run_batch(request: web.Request) -> web.StreamResponse:
    async with _admitted_batch(request, validation.parse_batch) as (batch, sent, status):
        content_type = codec.response_type(request, sent, BATCH_TYPES)
        if content_type in (NDJSON, MSGPACK_STREAM):
            return await _stream(request, status, batch, content_type)
        await _wait_for_results(batch)
        body = await codec.encode_results(_pop_results(batch), content_type)
        return await _respond(request, status, body, content_type)


async def run_verify(request: web.Request) -> web.StreamResponse:
    async with _admitted_batch(request, validation.parse_pairs) as (batch, sent, status):
        content_type = codec.response_type(request, sent, BODY_TYPES)
        await _wait_for_results(batch)
        verdicts = []
        for index, result in enumerate(_pop_results(batch)):
            if index % codec.RESULTS_PER_YIELD == codec.RESULTS_PER_YIELD - 1:
                await asyncio.sleep(0)
            verdicts.append(verify.verdict_of(Result.decode(result)).encode())
        body = await codec.encode_results(verdicts, content_type)
        return await _respond(request, status, body, content_type)


async def health(request: web.Request) -> web.Response:
    if not request.app[DISPATCHER].is_alive:
        raise HttpError(503, "no executor has been ready for minutes; the server's log has the reason")
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    dispatcher = request.app[DISPATCHER]
    if not dispatcher.is_ready:
        reason = "the server is stopping" if dispatcher.is_draining else "no executor is ready yet"
        raise HttpError(503, f"{reason}; try again in 1 s, or use another server", {"Retry-After": "1"})
    return web.json_response({"status": "ready", **dispatcher.isolation})


async def prometheus(request: web.Request) -> web.Response:
    text = request.app[PROMETHEUS].render()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def stats(request: web.Request) -> web.Response:
    after = request.query.get("after", "0")
    is_number = after.isascii() and after.isdigit() and len(after) <= len(str(MAX_SAFE_INTEGER))
    if not is_number or int(after) > MAX_SAFE_INTEGER:
        raise HttpError(400, f"after: expected the number of a step, or 0 for all steps, got {after!r:.80}")
    return web.json_response(request.app[STATS].build(int(after)), headers={"Cache-Control": "no-store"})


async def openapi(request: web.Request) -> web.Response:
    return web.json_response(document(ROUTES, request.app[DISPATCHER].config.token is not None))


async def docs(request: web.Request) -> web.Response:
    return _page("docs.html")


async def docs_asset(request: web.Request) -> web.FileResponse:
    return web.FileResponse(DOCS_ASSETS_DIR / request.path.rpartition("/")[2])


async def dashboard(request: web.Request) -> web.Response:
    return _page("dashboard.html")


async def _start_stats(app: web.Application) -> None:
    app[STATS].start()


async def _stop_stats(app: web.Application) -> None:
    await app[STATS].stop()


@asynccontextmanager
async def _admitted_batch(
    request: web.Request, parse: Callable[[codec.Json, ServeConfig], Awaitable[ParsedBatch]]
) -> AsyncIterator[tuple[Batch, str, int]]:
    """Read, parse and admit a batch. Yields it with the body's content type and the HTTP status of the response: 400 if
    every call is malformed. At the end, and if the client disconnects, unfinished calls are cancelled.

    The body counts as buffered until its calls count in the call table.
    """
    dispatcher, bodies = request.app[DISPATCHER], request.app[BODIES]
    dispatcher.check_accepting()
    content_type = codec.body_type(request)
    body = await bodies.read(request)
    size = len(body)
    dispatcher.counters.bytes_in += size
    try:
        raw = await bodies.decode(body, content_type)
        del body  # frees the memory before the calls are validated; so does `del raw` before they wait
        batch, malformed = await parse(raw, dispatcher.config)
        del raw
        dispatcher.submit(batch)
    finally:
        bodies.release(size)
    status = 400 if malformed == len(batch.results) else 200
    if malformed:
        dispatcher.counters.by_status[Status.INVALID.value] += malformed
    if status == 400:
        dispatcher.counters.refused[status] += 1
    try:
        yield batch, content_type, status
    finally:
        dispatcher.cancel(batch)


async def _wait_for_results(batch: Batch) -> None:
    """Wait until the batch has all results."""
    if batch.unfinished:
        done = asyncio.Event()
        batch.on_done = done.set
        await done.wait()


async def _stream(request: web.Request, status: int, batch: Batch, content_type: str) -> web.StreamResponse:
    """Send results as they finish. Results that finish while the client reads are then sent together."""
    dispatcher = request.app[DISPATCHER]
    finished = deque(index for index, result in enumerate(batch.results) if result is not None)
    has_finished = asyncio.Event()

    def on_result(index: int) -> None:
        finished.append(index)
        has_finished.set()

    batch.on_result = on_result
    response = web.StreamResponse(status=status, headers={"Content-Type": content_type, "X-Accel-Buffering": "no"})
    await response.prepare(request)
    num_unsent = len(batch.results)
    while num_unsent:
        has_finished.clear()
        if not finished and not await _wait_for_event(has_finished, codec.HEARTBEAT_S):
            await _send(request, response, codec.HEARTBEAT[content_type])
            continue
        lines: list[bytes] = []
        result_size = encoded_size = 0
        while finished and len(lines) < codec.RESULTS_PER_YIELD and encoded_size < codec.CHUNK_BYTES:
            index = finished.popleft()
            result = batch.pop_result(index)
            result_size += result_bytes(result)
            lines.append(codec.encode_line(index, result, content_type))
            encoded_size += len(lines[-1])
        num_unsent -= len(lines)
        await _send(request, response, b"".join(lines))
        dispatcher.call_table.results_read(batch, result_size)
    await response.write_eof()
    return response


async def _wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event. Returns False on timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


def _pop_results(batch: Batch) -> list[EncodedResult]:
    return [batch.pop_result(index) for index in range(len(batch.results))]


async def _respond(request: web.Request, status: int, body: bytes, content_type: str) -> web.StreamResponse:
    """Send the whole body, in chunks of `CHUNK_BYTES`. Returns when all of it is in the kernel's socket buffer."""
    if len(body) <= codec.CHUNK_BYTES:
        response = web.Response(status=status, body=body, headers={"Content-Type": content_type})
        await _send(request, response, body)
        return response
    headers = {"Content-Type": content_type, "Content-Length": str(len(body))}
    stream = web.StreamResponse(status=status, headers=headers)
    await stream.prepare(request)
    for start in range(0, len(body), codec.CHUNK_BYTES):
        await _send(request, stream, body[start : start + codec.CHUNK_BYTES])
    await stream.write_eof()
    return stream


async def _send(request: web.Request, response: web.StreamResponse, body: bytes) -> None:
    """Send a whole `Response`, or a part of a stream. Aborts the connection, and raises `ConnectionResetError`, if the
    client takes longer than `stall_s` per `CHUNK_BYTES`."""
    dispatcher = request.app[DISPATCHER]
    chunks = max(1, -(-len(body) // codec.CHUNK_BYTES))  # rounded up
    timeout_s = dispatcher.config.stall_s * chunks
    try:
        async with asyncio.timeout(timeout_s):
            if isinstance(response, web.Response):
                await response.prepare(request)
                await response.write_eof()
            else:
                await response.write(body)
    except TimeoutError:
        dispatcher.counters.stalled += 1
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client did not read {len(body)} bytes in {timeout_s:g} s") from None
    dispatcher.counters.bytes_out += len(body)


def _page(name: str) -> web.Response:
    text = (PAGES_DIR / name).read_bytes()
    return web.Response(body=text, content_type="text/html", charset="utf-8", headers=PAGE_HEADERS)


_CALL_ERROR_STATUSES = (400, 401, 403, 408, 413, 415, 429, 503)
_RESULT = dict.fromkeys(BODY_TYPES, "Result")
_RESULTS = {**dict.fromkeys(BODY_TYPES, "Results"), NDJSON: "Line", MSGPACK_STREAM: "Line"}
_VERDICTS = dict.fromkeys(BODY_TYPES, "Verdicts")

_AFTER = {"after": "only steps after this number"}

ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/execute", run_call, "Run one call", _RESULT, "Execute", BODY_TYPES, _CALL_ERROR_STATUSES),
    Route(
        "POST",
        "/v1/batch",
        run_batch,
        "Run many calls: results in order, or streamed as they finish",
        _RESULTS,
        "Batch",
        BODY_TYPES,
        _CALL_ERROR_STATUSES,
        invalid_schemas=_RESULTS,
    ),
    Route(
        "POST",
        "/v1/verify",
        run_verify,
        "Check math answers: verdicts in order",
        _VERDICTS,
        "Verify",
        BODY_TYPES,
        _CALL_ERROR_STATUSES,
        invalid_schemas=_VERDICTS,
    ),
    Route("GET", "/health", health, "Is the server alive?", {JSON: "State"}, error_statuses=(403, 503)),
    Route("GET", "/ready", ready, "Does the server accept calls?", {JSON: "Ready"}, error_statuses=(403, 503)),
    Route("GET", "/metrics", prometheus, "Metrics for Prometheus", {"text/plain": None}, error_statuses=(401, 403)),
    Route(
        "GET",
        "/v1/stats",
        stats,
        "The dashboard's data",
        {JSON: "Stats"},
        error_statuses=(400, 401, 403),
        query=_AFTER,
    ),
    Route("GET", "/openapi.json", openapi, "This description", {JSON: None}, error_statuses=(401, 403)),
    Route("GET", "/docs", docs, "This description as a page", {"text/html": None}, error_statuses=(403,)),
    Route("GET", "/", dashboard, "The dashboard", {"text/html": None}, error_statuses=(403,)),
)
