"""The HTTP routes: the table `ROUTES`, and one small handler for each of its rows."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from aiohttp import web

from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.compat import code_judge, sandbox_fusion
from sandbox.gateway.http import cancel, codec, exchange, judge, mcp, sessions, validation
from sandbox.gateway.http.auth import DOCS_ASSETS, TENANT, auth_middleware
from sandbox.gateway.http.body_parser import BodyParser
from sandbox.gateway.http.body_reader import BodyReader, ByteBudget
from sandbox.gateway.http.codec import JSON, MSGPACK_STREAM, NDJSON
from sandbox.gateway.http.errors import HttpError, errors_as_json
from sandbox.gateway.http.exchange import BATCH_TYPES, BODY_READER, BODY_TYPES, CALL_ERROR_STATUSES, DISPATCHER, PARSER
from sandbox.gateway.http.listener import KEEPALIVE_S
from sandbox.gateway.http.openapi import MAX_SAFE_INTEGER, Route, document
from sandbox.gateway.http.request_record import add_request_id, record_requests, shorten_malformed
from sandbox.gateway.http.siblings import SIBLINGS, Siblings, siblings_to_ask
from sandbox.gateway.metrics import PrometheusText, with_worker_label
from sandbox.gateway.observe.stats import Stats
from sandbox.gateway.observe.traces import Traces
from sandbox.judging import answers as verify
from sandbox.types import Result, Status, UnavailableReason

STATS = web.AppKey("stats", Stats)
PROMETHEUS = web.AppKey("prometheus", PrometheusText)

PAGES_DIR = Path(__file__).parent / "pages"
DOCS_ASSETS_DIR = PAGES_DIR / "swagger_ui"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
}


def build_app(dispatcher: Dispatcher, traces: Traces | None = None) -> web.Application:
    """Build the application. The caller starts and stops the dispatcher and the traces."""
    config = dispatcher.config
    logging.getLogger("aiohttp.server").addFilter(shorten_malformed)
    app = web.Application(
        middlewares=[
            record_requests(traces, has_access_log=config.access_log == "on"),
            errors_as_json(dispatcher),
            auth_middleware(dispatcher),
        ],
        handler_args={
            "handler_cancellation": True,
            "auto_decompress": False,
            "access_log": None,
            "keepalive_timeout": KEEPALIVE_S,
        },
    )
    app[DISPATCHER] = dispatcher
    app[BODY_READER] = BodyReader(ByteBudget(dispatcher), config.body_mb << 20, config.stall_s)
    app[PARSER] = BodyParser(config)
    app[STATS] = Stats(dispatcher)
    app[PROMETHEUS] = PrometheusText(dispatcher.samples)
    if config.worker is not None:
        app[SIBLINGS] = siblings = Siblings(config, config.worker)
        if siblings.number == 0:
            app[STATS].ask_others = partial(siblings.ask_others, "/v1/stats")
    app.on_response_prepare.append(add_request_id)
    app.on_startup.extend([_start_stats, judge.on_startup, mcp.on_startup])
    app.on_cleanup.extend([_stop_stats, mcp.on_cleanup, _stop_parser])
    for route in ROUTES:
        # The default pattern would exclude ids with a slash or a brace.
        app.router.add_route(route.method, route.path.replace("{id}", "{id:.+}"), route.handler)
    for path in DOCS_ASSETS:
        app.router.add_get(path, docs_asset)
    return app


async def run_call(request: web.Request) -> web.StreamResponse:
    form = validation.CallForm(request.app[DISPATCHER].config, request[TENANT])
    async with exchange.AdmittedBatch(request, form) as (batch, body_type, _):
        content_type = codec.response_type(request, body_type, BODY_TYPES)
        begun = await exchange.wait_with_heartbeats(request, batch, 200, content_type)
        result = batch.pop_result(0)
        body = await codec.encode_result(result, batch.unread_bytes, content_type)
        if result["status"] != Status.UNAVAILABLE:
            return await exchange.respond(request, 200, body, content_type, begun)
        headers = {"Retry-After": str(request.app[DISPATCHER].retry_after_s())}
        if result["error"] is not None and result["error"]["type"] == UnavailableReason.POISON:
            headers = {}  # no client may send this call again
        return await exchange.respond(request, 503, body, content_type, begun, headers)


async def run_batch(request: web.Request) -> web.StreamResponse:
    form = validation.BatchForm(request.app[DISPATCHER].config, request[TENANT])
    async with exchange.AdmittedBatch(request, form) as (batch, body_type, status):
        content_type = codec.response_type(request, body_type, BATCH_TYPES)
        return await exchange.respond_with_results(request, batch, status, content_type)


async def run_verify(request: web.Request) -> web.StreamResponse:
    form = validation.PairsForm(request.app[DISPATCHER].config, request[TENANT])
    async with exchange.AdmittedBatch(request, form) as (batch, body_type, status):
        content_type = codec.response_type(request, body_type, BODY_TYPES)
        begun = await exchange.wait_with_heartbeats(request, batch, status, content_type)
        results = map(Result.decode, exchange.pop_results(batch))
        verdicts = (verify.verdict_of(result).encode() for result in results)
        body = await codec.encode_results(verdicts, len(batch.results), content_type)
        return await exchange.respond(request, status, body, content_type, begun)


async def health(request: web.Request) -> web.Response:
    if not request.app[DISPATCHER].is_alive:
        raise HttpError(503, "no executor has been ready for minutes; the server's log has the reason")
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    dispatcher = request.app[DISPATCHER]
    if not dispatcher.is_ready:
        reason = "the server is stopping" if dispatcher.is_draining else "no executor is ready yet"
        raise HttpError(503, f"{reason}; try again in 1 s, or use another server", {"Retry-After": "1"})
    counts = {"executors_ready": dispatcher.executors_ready, "executors": len(dispatcher.executors)}
    return web.json_response({"status": "ready", **counts, **dispatcher.isolation})


async def prometheus(request: web.Request) -> web.Response:
    dispatcher, owner = request.app[DISPATCHER], request[TENANT]
    prometheus = request.app[PROMETHEUS] if owner is None else PrometheusText(partial(dispatcher.samples, owner))
    if (siblings := siblings_to_ask(request)) is not None:
        by_worker = {siblings.number: dispatcher.samples(), **await siblings.ask_others("/metrics")}
        prometheus = PrometheusText(partial(with_worker_label, by_worker))
    elif SIBLINGS in request.app:
        return web.json_response(dispatcher.samples())
    text = prometheus.render()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def stats(request: web.Request) -> web.Response:
    after = request.query.get("after", "0")
    is_number = after.isascii() and after.isdigit() and len(after) <= len(str(MAX_SAFE_INTEGER))
    if not is_number or int(after) > MAX_SAFE_INTEGER:
        raise HttpError(400, f"after: expected the number of a step, or 0 for all steps, got {after!r:.80}")
    siblings = request.app.get(SIBLINGS)
    if siblings is None or siblings.number == 0:
        body = request.app[STATS].build(int(after), request[TENANT])
    elif siblings_to_ask(request) is None:
        body = request.app[STATS].build_for_worker_0()
    elif (body := await siblings.ask(0, request.raw_path)) is None:
        raise HttpError(503, "worker 0, which has all statistics, starts again; try in 1 s", {"Retry-After": "1"})
    return web.json_response(body, headers={"Cache-Control": "no-store"})


async def openapi(request: web.Request) -> web.Response:
    config = request.app[DISPATCHER].config
    own_profiles = [profile.name for profile in config.own_profiles]
    # The schemas of some routes import pydantic, which takes 0.2 s of CPU the first time.
    return web.json_response(await asyncio.to_thread(document, ROUTES, config.needs_token, own_profiles))


async def docs(request: web.Request) -> web.Response:
    return _page("docs.html")


async def docs_asset(request: web.Request) -> web.FileResponse:
    return web.FileResponse(DOCS_ASSETS_DIR / request.path.rpartition("/")[2])


async def dashboard(request: web.Request) -> web.Response:
    return _page("dashboard.html")


async def _start_stats(app: web.Application) -> None:
    app[STATS].start()


async def _stop_parser(app: web.Application) -> None:
    await app[PARSER].stop()


async def _stop_stats(app: web.Application) -> None:
    await app[STATS].stop()


def _page(name: str) -> web.Response:
    text = (PAGES_DIR / name).read_bytes()
    return web.Response(body=text, content_type="text/html", charset="utf-8", headers=PAGE_HEADERS)


_RESULT = dict.fromkeys(BODY_TYPES, "Result")
_RESULTS = {**dict.fromkeys(BODY_TYPES, "Results"), NDJSON: "Line", MSGPACK_STREAM: "Line"}
_VERDICTS = dict.fromkeys(BODY_TYPES, "Verdicts")

_AFTER = {"after": "only steps after this number"}
_METRICS_EXAMPLE = PrometheusText(lambda: [("calls_waiting", {}, 0.0)]).render().decode()
_OPENAPI_EXAMPLE = {"openapi": "3.1.0", "paths": {"/health": {"get": {"summary": "Is the server alive?"}}}}
"""A part of the document. The whole document cannot contain itself."""

ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/execute",
        run_call,
        "Run one call",
        _RESULT,
        "Execute",
        BODY_TYPES,
        CALL_ERROR_STATUSES,
        unavailable_schemas=_RESULT,
    ),
    Route(
        "POST",
        "/v1/batch",
        run_batch,
        "Run many calls: results in order, or streamed as they finish",
        _RESULTS,
        "Batch",
        BODY_TYPES,
        CALL_ERROR_STATUSES,
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
        CALL_ERROR_STATUSES,
        invalid_schemas=_VERDICTS,
    ),
    *cancel.ROUTES,
    *(replace(route, group="Sessions") for route in sessions.ROUTES),
    *judge.ROUTES,
    *(replace(route, group="Model Context Protocol") for route in mcp.ROUTES),
    *(replace(route, group="code-judge") for route in code_judge.ROUTES),
    *(replace(route, group="SandboxFusion") for route in sandbox_fusion.ROUTES),
    Route("GET", "/health", health, "Is the server alive?", {JSON: "State"}, error_statuses=(403, 503)),
    Route("GET", "/ready", ready, "Does the server accept calls?", {JSON: "Ready"}, error_statuses=(403, 503)),
    Route(
        "GET",
        "/metrics",
        prometheus,
        "Metrics for Prometheus",
        {"text/plain": None},
        error_statuses=(401, 403),
        response_examples={"text/plain": _METRICS_EXAMPLE},
    ),
    Route(
        "GET",
        "/v1/stats",
        stats,
        "The dashboard's data",
        {JSON: "Stats"},
        error_statuses=(400, 401, 403, 503),
        query=_AFTER,
    ),
    Route(
        "GET",
        "/openapi.json",
        openapi,
        "This description",
        {JSON: None},
        error_statuses=(401, 403),
        response_examples={JSON: _OPENAPI_EXAMPLE},
    ),
    Route("GET", "/docs", docs, "This description as a page", {"text/html": None}, error_statuses=(403,)),
    Route("GET", "/", dashboard, "The dashboard", {"text/html": None}, error_statuses=(403,)),
)
