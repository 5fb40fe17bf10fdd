"""What is served, where: the table `ROUTES` and one small function for each of its rows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from aiohttp import web

from sandbox import verify
from sandbox.config import ServeConfig
from sandbox.gateway import metrics
from sandbox.gateway.calls.call_table import Batch, size_of
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.http import codec, validation
from sandbox.gateway.http.auth import DOCS_ASSETS, guard
from sandbox.gateway.http.codec import JSON, MSGPACK, MSGPACK_STREAM, NDJSON
from sandbox.gateway.http.errors import Refusal, refusals_as_json
from sandbox.gateway.http.listener import IDLE_S
from sandbox.gateway.http.openapi import MOST, Route, document
from sandbox.gateway.stats import Stats
from sandbox.types import EncodedResult, Result, Status

DISPATCHER = web.AppKey("dispatcher", Dispatcher)
CONFIG = web.AppKey("config", ServeConfig)
BODIES = web.AppKey("bodies", codec.Bodies)
STATS = web.AppKey("stats", Stats)

BODY_TYPES = (JSON, MSGPACK)
BATCH_TYPES = (NDJSON, MSGPACK_STREAM, JSON, MSGPACK)
DOCS_ASSETS_DIR = Path(__file__).with_name("swagger_ui")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
}


def build_app(config: ServeConfig, dispatcher: Dispatcher) -> web.Application:
    """The application over a dispatcher that the caller starts and stops."""
    app = web.Application(
        middlewares=[refusals_as_json(dispatcher), guard(config)],
        handler_args={
            "handler_cancellation": True,
            "auto_decompress": False,
            "access_log": None,
            "keepalive_timeout": IDLE_S,
        },
    )
    app[DISPATCHER] = dispatcher
    app[CONFIG] = config
    app[BODIES] = codec.Bodies(config.queue_mb << 20, config.body_mb << 20, config.batch_calls, config.stall_s)
    app[STATS] = Stats(dispatcher)
    app.on_startup.append(_start_stats)
    app.on_cleanup.append(_stop_stats)
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.act)
    for path in DOCS_ASSETS:
        app.router.add_get(path, docs_asset)
    return app


async def run_call(request: web.Request) -> web.StreamResponse:
    async with _admitted(request, validation.read_call) as (batch, sent, _):
        kind = codec.answer_type(request, sent, BODY_TYPES)
        await _all_answered(batch)
        return await _respond(request, 200, codec.encode_answer(_all(batch)[0], kind), kind)


async def run_batch(request: web.Request) -> web.StreamResponse:
    async with _admitted(request, validation.read_batch) as (batch, sent, status):
        kind = codec.answer_type(request, sent, BATCH_TYPES)
        if kind in (NDJSON, MSGPACK_STREAM):
            return await _stream(request, status, batch, kind)
        await _all_answered(batch)
        return await _respond(request, status, await codec.encode_answers(_all(batch), kind), kind)


async def run_checks(request: web.Request) -> web.StreamResponse:
    async with _admitted(request, validation.read_pairs) as (batch, sent, status):
        kind = codec.answer_type(request, sent, BODY_TYPES)
        await _all_answered(batch)
        verdicts = []
        for index, answer in enumerate(_all(batch)):
            if index % codec.CHUNK == codec.CHUNK - 1:
                await asyncio.sleep(0)
            verdicts.append(verify.verdict_of(Result.decode(answer)).encode())
        return await _respond(request, status, await codec.encode_answers(verdicts, kind), kind)


async def health(request: web.Request) -> web.Response:
    if not request.app[DISPATCHER].is_alive:
        raise Refusal(503, "no executor has been up for minutes; the service's log says why")
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    dispatcher = request.app[DISPATCHER]
    if not dispatcher.is_ready:
        reason = "the service is stopping" if dispatcher.is_draining else "no executor is ready yet"
        raise Refusal(503, f"{reason}; try again in 1 s, or another one", {"Retry-After": "1"})
    return web.json_response({"status": "ready", **dispatcher.isolation})


async def scrape(request: web.Request) -> web.Response:
    text = metrics.render(iter(request.app[DISPATCHER].samples()))
    return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def stats(request: web.Request) -> web.Response:
    after = request.query.get("after", "0")
    if not (after.isascii() and after.isdigit() and len(after) <= len(str(MOST)) and int(after) <= MOST):
        raise Refusal(400, f"after: expected the number of a step, 0 for all of them, got {after!r:.80}")
    return web.json_response(request.app[STATS].build(int(after)), headers={"Cache-Control": "no-store"})


async def openapi(request: web.Request) -> web.Response:
    return web.json_response(document(ROUTES, request.app[CONFIG].token is not None))


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
async def _admitted(
    request: web.Request, read: Callable[[Any, ServeConfig], Awaitable[tuple[Batch, int]]]
) -> AsyncIterator[tuple[Batch, str, int]]:
    """The batch that `read` makes of the body, admitted, the body's type, and the HTTP status of the answer: 400 where
    every call is malformed. A client that goes away before the end takes its calls along. What is read counts until the
    queue does the counting."""
    dispatcher, bodies = request.app[DISPATCHER], request.app[BODIES]
    dispatcher.check_is_open()
    kind = codec.body_type(request)
    body = await bodies.read(request)
    size = len(body)
    dispatcher.counters.bytes_in += size
    try:
        raw = await bodies.decode(body, kind)
        del body
        batch, invalid = await read(raw, request.app[CONFIG])
        del raw
        dispatcher.submit(batch)
    finally:
        bodies.give_back(size)
    status = 400 if invalid == len(batch.answers) else 200
    if invalid:
        dispatcher.counters.by_status[Status.INVALID.value] += invalid
    if status == 400:
        dispatcher.counters.refused[status] += 1
    try:
        yield batch, kind, status
    finally:
        dispatcher.cancel(batch)


async def _all_answered(batch: Batch) -> None:
    """Wait for the last answer."""
    if batch.left:
        done = asyncio.Event()
        batch.on_done = done.set
        await done.wait()


async def _stream(request: web.Request, status: int, batch: Batch, kind: str) -> web.StreamResponse:
    """Results as they finish; while the client is slow to read, they gather into larger writes."""
    dispatcher = request.app[DISPATCHER]
    finished = deque(index for index, answer in enumerate(batch.answers) if answer is not None)
    wake = asyncio.Event()

    def note(index: int) -> None:
        finished.append(index)
        wake.set()

    batch.on_answer = note
    response = web.StreamResponse(status=status, headers={"Content-Type": kind, "X-Accel-Buffering": "no"})
    await response.prepare(request)
    left = len(batch.answers)
    while left:
        wake.clear()
        if not finished and not await _within(codec.QUIET_S, wake):
            await _send(request, response, codec.QUIET[kind])
            continue
        lines: list[bytes] = []
        size = length = 0
        while finished and len(lines) < codec.CHUNK and length < codec.PIECE:
            index = finished.popleft()
            answer = batch.take(index)
            size += size_of(answer)
            lines.append(codec.encode_line(index, answer, kind))
            length += len(lines[-1])
        left -= len(lines)
        await _send(request, response, b"".join(lines))
        dispatcher.ledger.release(batch, size)
    await response.write_eof()
    return response


async def _within(seconds: float, event: asyncio.Event) -> bool:
    """Whether `event` comes in time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _all(batch: Batch) -> list[EncodedResult]:
    return [batch.take(index) for index in range(len(batch.answers))]


async def _respond(request: web.Request, status: int, body: bytes, kind: str) -> web.StreamResponse:
    """Send `body`, and return once the client has read all but what the kernel holds for it."""
    if len(body) <= codec.PIECE:
        response = web.Response(status=status, body=body, headers={"Content-Type": kind})
        await _send(request, response, body)
        return response
    stream = web.StreamResponse(status=status, headers={"Content-Type": kind, "Content-Length": str(len(body))})
    await stream.prepare(request)
    for start in range(0, len(body), codec.PIECE):
        await _send(request, stream, body[start : start + codec.PIECE])
    await stream.write_eof()
    return stream


async def _send(request: web.Request, response: web.StreamResponse, body: bytes) -> None:
    """`body`, the whole of a `Response` or a part of a stream. A client that takes longer than `stall_s` for each
    `PIECE` of it is cut off."""
    dispatcher, stall_s = request.app[DISPATCHER], request.app[CONFIG].stall_s
    within_s = stall_s * max(1, -(-len(body) // codec.PIECE))
    try:
        async with asyncio.timeout(within_s):
            if isinstance(response, web.Response):
                await response.prepare(request)
                await response.write_eof()
            else:
                await response.write(body)
    except TimeoutError:
        dispatcher.counters.stalled += 1
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client did not read {len(body)} bytes in {within_s:g} s") from None
    dispatcher.counters.bytes_out += len(body)


def _page(name: str) -> web.Response:
    text = files("sandbox.gateway.http").joinpath(name).read_bytes()
    return web.Response(body=text, content_type="text/html", charset="utf-8", headers=PAGE_HEADERS)


_CALL_REFUSALS = (400, 401, 403, 408, 413, 415, 429, 503)
_RESULT = dict.fromkeys(BODY_TYPES, "Result")
_RESULTS = {**dict.fromkeys(BODY_TYPES, "Results"), NDJSON: "Line", MSGPACK_STREAM: "Line"}
_VERDICTS = dict.fromkeys(BODY_TYPES, "Verdicts")

_AFTER = {"after": "only steps after this number"}

ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/execute", run_call, "Run one call", _RESULT, "Execute", BODY_TYPES, _CALL_REFUSALS),
    Route(
        "POST",
        "/v1/batch",
        run_batch,
        "Run many calls: results in order, or streamed as they finish",
        _RESULTS,
        "Batch",
        BODY_TYPES,
        _CALL_REFUSALS,
        gives_if_invalid=_RESULTS,
    ),
    Route(
        "POST",
        "/v1/verify",
        run_checks,
        "Check answers of mathematics: verdicts in order",
        _VERDICTS,
        "Verify",
        BODY_TYPES,
        _CALL_REFUSALS,
        gives_if_invalid=_VERDICTS,
    ),
    Route("GET", "/health", health, "Is the service alive?", {JSON: "State"}, refuses=(403, 503)),
    Route("GET", "/ready", ready, "Does it take calls now?", {JSON: "Ready"}, refuses=(403, 503)),
    Route("GET", "/metrics", scrape, "Numbers for Prometheus", {"text/plain": None}, refuses=(401, 403)),
    Route(
        "GET", "/v1/stats", stats, "What the dashboard shows", {JSON: "Stats"}, refuses=(400, 401, 403), query=_AFTER
    ),
    Route("GET", "/openapi.json", openapi, "This description", {JSON: None}, refuses=(401, 403)),
    Route("GET", "/docs", docs, "This description, for people", {"text/html": None}, refuses=(403,)),
    Route("GET", "/", dashboard, "The dashboard", {"text/html": None}, refuses=(403,)),
)
