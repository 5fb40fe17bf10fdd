"""The record of each request: its id, its line in the access log, and its trace.

- The id is the request's `X-Request-Id`. Without this header, it is the trace id of the request's `traceparent` (W3C
  Trace Context). Without both headers, it is random.
- The response has the id as `X-Request-Id`, and every log line of the request contains it. Results do not contain it: a
  result belongs to exactly one response, and an id in each result would cost time for each call.
- Text from the client reaches a log line only if it is printable ASCII of bounded length.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from sandbox import logs
from sandbox.gateway.calls.batch import Batch
from sandbox.gateway.observe.traces import RequestTrace, Traces

access_log = logging.getLogger("sandbox.access")

REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""Form of the ids that the server accepts from a request. It replaces any other id by an id of its own."""
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
MAX_PATH_CHARS = 200
CLIENT_DISCONNECTED = 499
"""Status in the access log of a request whose client closed the connection. nginx logs the same number."""


@dataclass(slots=True)
class RequestRecord:
    """One request, from its head to the end of its response."""

    id: str
    started_at: float
    tenant: str = ""
    """The tenant of the token. If the token has no tenant, the tenant of the first call."""
    calls: int = 0
    trace: RequestTrace | None = None

    def add_batch(self, batch: Batch) -> None:
        """Count the calls of an admitted batch, and follow its results if the request is traced."""
        self.calls += len(batch.results)
        if batch.calls:
            self.tenant = batch.calls[0].tenant
        if self.trace is not None:
            self.trace.add_batch(batch)


RECORD = web.RequestKey("record", RequestRecord)


def request_id(headers: Mapping[str, str]) -> str:
    """Return the id of a request with these headers."""
    sent = headers.get(REQUEST_ID_HEADER)
    if sent is not None and REQUEST_ID.fullmatch(sent):
        return sent
    parent = headers.get("traceparent")
    if parent is not None and (match := TRACEPARENT.fullmatch(parent)):
        return match[1]
    return f"{random.getrandbits(128):032x}"  # no secret: it only has to differ from other ids


def shown_path(request: web.Request) -> str:
    """Return the path as the client sent it, shortened. The decoded path could contain line breaks."""
    return request.rel_url.raw_path[:MAX_PATH_CHARS]


def record_requests(traces: Traces | None, *, has_access_log: bool) -> Middleware:
    """Return the middleware that owns the record of each request. It must be the outermost one."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = request[RECORD] = RequestRecord(request_id(request.headers), time.monotonic())
        token = logs.request_id.set(record.id)
        if traces is not None:
            record.trace = traces.start(request.method, shown_path(request), request.headers, record.id)
        response: web.StreamResponse | None = None
        try:
            response = await handler(request)
            return response
        finally:
            status = CLIENT_DISCONNECTED if response is None else response.status
            if record.trace is not None:
                record.trace.end(status, record.tenant, record.calls)
            if has_access_log:
                _log_access(request, record, status, 0 if response is None else _size(response))
            logs.request_id.reset(token)

    return middleware


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Set the header `X-Request-Id` of a response."""
    response.headers[REQUEST_ID_HEADER] = request[RECORD].id


def shorten_malformed(record: logging.LogRecord) -> bool:
    """Filter of aiohttp's log: shorten the record of a request that is no HTTP. Its traceback contains bytes that the
    client has sent, perhaps the bytes of a token."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.exc_info = f"{record.msg}: {type(error).__name__}", None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


def _size(response: web.StreamResponse) -> int:
    """Return the size of a response's body in bytes, whether or not the body has been sent. The size of a stream
    includes the framing of its chunks."""
    length = response.content_length
    return response.body_length if length is None else length


def _log_access(request: web.Request, record: RequestRecord, status: int, bytes_out: int) -> None:
    fields: dict[str, object] = {
        "method": request.method,
        "path": shown_path(request),
        "status": status,
        "tenant": record.tenant,
        "calls": record.calls,
        "bytes_in": request.content.total_bytes,
        "bytes_out": bytes_out,
        "ms": round((time.monotonic() - record.started_at) * 1000, 1),
    }
    access_log.info("request", extra={"fields": fields})
