"""`DELETE /v1/calls/ID`: cancels calls and judged programs by the id that their caller gave them.

An id is a label that the caller chooses, so several calls and programs may have the same id. A request with the token
of a tenant cancels only calls and programs of this tenant. A request with the server's token, and each request to a
server without tenants, cancels those of all tenants.
"""

from __future__ import annotations

from aiohttp import web

from sandbox.fields import MAX_LABEL_CHARS, shown
from sandbox.gateway.http.auth import TENANT
from sandbox.gateway.http.codec import JSON
from sandbox.gateway.http.errors import HttpError
from sandbox.gateway.http.exchange import DISPATCHER
from sandbox.gateway.http.judge import JUDGE
from sandbox.gateway.http.openapi import Route
from sandbox.gateway.http.siblings import siblings_to_ask


async def cancel_calls(request: web.Request) -> web.Response:
    call_id = request.match_info["id"]
    owner = request[TENANT]
    count = request.app[JUDGE].cancel(call_id, owner)
    count += await request.app[DISPATCHER].cancel_calls(call_id, owner)
    if (siblings := siblings_to_ask(request)) is not None:
        answers = await siblings.ask_others(request.raw_path, "DELETE")
        count += sum(answer["cancelled"] for answer in answers.values())
    if not count:
        raise HttpError(
            404,
            f"no unfinished call or program has the id {shown(call_id)}: it has its result, it belongs to another "
            "tenant, or its caller gave it another id",
        )
    return web.json_response({"cancelled": count})


_COUNT = {"type": "integer", "minimum": 1, "description": "number of calls and of tests that were cancelled"}

ROUTES = (
    Route(
        "DELETE",
        "/v1/calls/{id}",
        cancel_calls,
        "Cancel all unfinished calls and programs with an id",
        {JSON: "Cancelled"},
        error_statuses=(401, 403, 404),
        path_parameters={
            "id": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_LABEL_CHARS,
                "description": "the id of the calls or programs",
            }
        },
        schemas={
            "Cancelled": {
                "type": "object",
                "description": "Calls, and tests of programs, that were cancelled. Each has the status unavailable, "
                "with Cancelled.",
                "properties": {"cancelled": _COUNT},
                "required": ["cancelled"],
            }
        },
        examples={"Cancelled": {"cancelled": 1}},
    ),
)
