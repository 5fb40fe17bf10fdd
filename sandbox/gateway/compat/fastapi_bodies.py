"""Checks bodies with the pydantic models of `compat.models`. A malformed body is answered with HTTP 422 and
`{"detail": [{"type", "loc", "msg", "input"}]}`, as FastAPI does: code-judge and SandboxFusion are written with FastAPI.

- The models are imported at the first request of these routes, in a thread, because this takes 0.2 s of CPU time.
- The response has at most `MAX_ERRORS` errors. It repeats an input only up to about `MAX_INPUT_CHARS` characters, and
  describes a larger one.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import math
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from sandbox.errors import InvalidCall
from sandbox.fields import shown
from sandbox.gateway.http import codec, exchange
from sandbox.gateway.http.codec import JSON, Json
from sandbox.gateway.http.errors import BodyError, HttpError
from sandbox.gateway.http.exchange import DISPATCHER
from sandbox.gateway.http.openapi import Route, Schema

if TYPE_CHECKING:
    from pydantic import BaseModel

    Model = TypeVar("Model", bound=BaseModel)

MAX_ERRORS = 100
"""Errors that the response to a malformed body lists."""
MAX_INPUT_CHARS = 1000
"""Characters of an input, and of a name in the path to it, that an error repeats."""
_CONTAINER_CHARS = 10
"""A list or an object counts as this many characters in addition to its items. So an input that is repeated has a
bounded depth."""

_MALFORMED_EXAMPLE = {"detail": [{"type": "missing", "loc": ["body", "code"], "msg": "Field required", "input": {}}]}

Error = dict[str, Any]
Location = tuple[str | int, ...]


class MalformedBody(BodyError):
    """A body that is refused with 422. `errors` describe it as FastAPI does."""

    def __init__(self, errors: list[Error]) -> None:
        super().__init__(errors)
        self.errors = errors


def validate(model: type[Model], raw: Json, location: Location = ()) -> Model:
    """Return the model of a decoded body, or of the part of it at `location`. Raises `MalformedBody`."""
    from pydantic import ValidationError

    try:
        return model.model_validate(raw, from_attributes=True)  # as FastAPI does
    except ValidationError as error:
        errors = error.errors(include_url=False)[:MAX_ERRORS]
    raise MalformedBody([_bounded({**error}, location) for error in errors])


def _bounded(error: Error, location: Location) -> Error:
    """Return an error with its path in the body, and with bounded texts."""
    path = [part[:MAX_INPUT_CHARS] if isinstance(part, str) else part for part in (*location, *error["loc"])]
    value = error["input"]
    return {
        **error,
        "loc": ["body", *path],
        "input": value if _chars_left(value, MAX_INPUT_CHARS) >= 0 else shown(value),
    }


def _chars_left(value: Json, chars: float) -> float:
    """Return `chars` minus the characters of a value. The result is negative if the value has more characters, or if
    JSON or msgpack may be unable to represent it. Reading ends when no characters are left."""
    if isinstance(value, str):
        return chars - len(value)
    if isinstance(value, (list, dict)):
        chars -= _CONTAINER_CHARS
        for item in chain(value, value.values()) if isinstance(value, dict) else value:
            if chars < 0:
                break
            chars = _chars_left(item, chars - 1)
        return chars
    is_float = isinstance(value, float) and math.isfinite(value)
    is_int = isinstance(value, int) and -(2**63) <= value < 2**63
    return chars if value is None or is_float or is_int else -1


def route(
    path: str,
    handler: Handler,
    summary: str,
    body: str,
    response: str,
    failure_statuses: tuple[int, ...],
    examples: Mapping[str, Any],
) -> Route:
    """Return a route whose handler raises `MalformedBody` for a malformed body. `body` and `response` are the names of
    models. `failure_statuses` are the HTTP statuses for failures of the service."""
    return Route(
        "POST",
        path,
        _as_fastapi(handler),
        summary,
        {JSON: response},
        body,
        (JSON,),
        (401, 403, 408, 413, 415, 422, *failure_statuses),
        error_schemas={422: "Malformed"},
        build_schemas=_schemas,
        examples={**examples, "Malformed": _MALFORMED_EXAMPLE},
    )


def ping_route(path: str, summary: str) -> Route:
    """Return a route that answers "pong"."""
    return Route("GET", path, _ping, summary, {JSON: None}, error_statuses=(401, 403), response_examples={JSON: "pong"})


async def _ping(request: web.Request) -> web.Response:
    return web.json_response("pong")


def _as_fastapi(handler: Handler) -> Handler:
    """Return a handler that answers a malformed body as FastAPI does."""
    has_models = False

    async def checked(request: web.Request) -> web.StreamResponse:
        nonlocal has_models
        if not has_models:
            await asyncio.to_thread(importlib.import_module, "sandbox.gateway.compat.models")
            has_models = True
        try:
            return await handler(request)
        except MalformedBody as error:
            errors = error.errors
        except InvalidCall as error:
            errors = [_error("value_error", f"Value error, {error}", {})]
        except HttpError as error:
            if error.status != 400:
                raise
            errors = [_error("json_invalid", "JSON decode error", error.message)]
        request.app[DISPATCHER].counters.refused[422] += 1
        return await exchange.respond(request, 422, [codec.encode({"detail": errors}, JSON)], JSON)

    return checked


def _error(kind: str, message: str, reason: Json) -> Error:
    """Return an error of the whole body, whose input FastAPI gives as an empty object."""
    return {"type": kind, "loc": ["body"], "msg": message, "input": {}, "ctx": {"error": reason}}


@functools.cache
def _schemas() -> Mapping[str, Schema]:
    """Return the schemas of all models by their name."""
    from sandbox.gateway.compat import models

    return models.schemas()
