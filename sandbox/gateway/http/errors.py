"""HTTP errors: one exception and one JSON body for every request that is rejected.

{"error": {"type": "InvalidRequest", "message": "<expected, received, what to do>"}}
"""

from __future__ import annotations

import json
import logging
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sandbox.errors import InvalidCall, Overloaded, RequestRefused
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.http.request_record import shown_path

log = logging.getLogger(__name__)

ERROR_TYPES = {
    400: "InvalidRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "TooSlow",
    409: "Conflict",
    410: "SessionGone",
    413: "TooLarge",
    415: "UnsupportedMediaType",
    422: "MalformedBody",
    429: "Overloaded",
    500: "InternalError",
    501: "NotImplemented",
    503: "NotReady",
    504: "TryAgain",
}


class BodyError(Exception):
    """A reason to refuse a body. It may be raised in another process, which sends its `args` to the gateway. So `args`
    must be the arguments of the constructor, and plain data."""


class HttpError(BodyError):
    """A request that is answered with an error: its HTTP status, message and headers."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.status = status
        self.message = message
        self.headers = headers or {}

    def __str__(self) -> str:
        return self.message


def errors_as_json(dispatcher: Dispatcher) -> Middleware:
    """Return the middleware that turns each exception into a JSON body and counts it."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except HttpError as exception:
            # The traceback refers to this frame, which refers to `error`: a cycle that would keep the body in memory.
            error = exception.with_traceback(None)
        except InvalidCall as exception:
            error = HttpError(400, str(exception))
        except Overloaded as exception:
            after_s = str(int(exception.retry_after_s or 1))
            error = HttpError(503 if dispatcher.is_draining else 429, str(exception), {"Retry-After": after_s})
        except RequestRefused as exception:
            error = HttpError(413, str(exception))
        except web.HTTPException as exception:
            error = _from_aiohttp(request, exception)
            exception.__traceback__ = None  # it would be part of the same cycle: it refers to the request
        except ConnectionError:
            raise
        except Exception:  # a bug of the server: its traceback goes to the log, not to the client
            log.exception("%s %s failed", request.method, shown_path(request))
            error = HttpError(500, "internal error of the server, not caused by the request; the server's log has it")
        dispatcher.counters.refused[error.status] += 1
        return _to_response(error)

    return middleware


def _from_aiohttp(request: web.Request, exception: web.HTTPException) -> HttpError:
    shown = f"{request.method} {request.path!r:.200}"
    if isinstance(exception, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(exception.allowed_methods))
        return HttpError(405, f"{shown} does not exist; this path accepts {allowed}", {"Allow": allowed})
    if exception.status == 404:
        return HttpError(404, f"{shown} does not exist; /openapi.json lists all routes")
    return HttpError(exception.status, exception.text or exception.reason)


def _to_response(error: HttpError) -> web.Response:
    error_type = ERROR_TYPES.get(error.status) or HTTPStatus(error.status).phrase.replace(" ", "")
    body = json.dumps({"error": {"type": error_type, "message": str(error)}}).encode()
    return web.Response(body=body, status=error.status, content_type="application/json", headers=error.headers)
