"""How the gateway says no: one exception, one JSON body, for every reason.

{"error": {"type": ..., "message": what was expected, what came, what to do}}
"""

from __future__ import annotations

import json
import logging
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sandbox.errors import InvalidCall, Overloaded, RequestRefused
from sandbox.gateway.calls.dispatcher import Dispatcher

log = logging.getLogger(__name__)

KINDS = {
    400: "InvalidRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "TooSlow",
    413: "TooLarge",
    415: "UnsupportedMediaType",
    429: "Overloaded",
    500: "InternalError",
    503: "NotReady",
}


class Refusal(Exception):
    """A request that gets no result, with its HTTP status."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


def refusals_as_json(dispatcher: Dispatcher) -> Middleware:
    """The outermost middleware: whatever goes wrong below becomes a JSON body and a count."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as why:
            refusal = why.with_traceback(None)  # it has this frame, which has it: a cycle that keeps body and request
        except InvalidCall as why:
            refusal = Refusal(400, str(why))
        except Overloaded as why:
            after_s = str(int(why.retry_after_s or 1))
            refusal = Refusal(503 if dispatcher.is_draining else 429, str(why), {"Retry-After": after_s})
        except RequestRefused as why:
            refusal = Refusal(413, str(why))
        except web.HTTPException as why:
            refusal = _of_aiohttp(request, why)
            why.__traceback__ = None  # likewise: the request has it
        except ConnectionError:
            raise
        except Exception:  # the boundary between a bug of ours and the client, who gets no traceback
            log.exception("%s %s failed", request.method, request.path)
            refusal = Refusal(500, "a fault of the service, not of your request; its log has the details")
        dispatcher.counters.refused[refusal.status] += 1
        return _render(refusal)

    return middleware


def _of_aiohttp(request: web.Request, why: web.HTTPException) -> Refusal:
    shown = f"{request.method} {request.path!r:.200}"
    if isinstance(why, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(why.allowed_methods))
        return Refusal(405, f"{shown} does not exist; the path takes {allowed}", {"Allow": allowed})
    if why.status == 404:
        return Refusal(404, f"{shown} does not exist; /openapi.json lists what does")
    return Refusal(why.status, why.text or why.reason)


def _render(refusal: Refusal) -> web.Response:
    kind = KINDS.get(refusal.status) or HTTPStatus(refusal.status).phrase.replace(" ", "")
    body = json.dumps({"error": {"type": kind, "message": str(refusal)}}).encode()
    return web.Response(body=body, status=refusal.status, content_type="application/json", headers=refusal.headers)
