"""Tests of `bench.harness.load.ask`, which sends one request and yields the results of its calls.

`/v1/execute` answers HTTP 503 in two cases. If the body is the result of a call with the status `unavailable`, `ask`
yields this result. Any other body is an error of the service, for which `ask` raises `Refused`.
"""

from __future__ import annotations

import asyncio
import json

import msgpack
import pytest
from aiohttp import web

from bench.harness.load import Refused, ask, http_session
from tests.http_server import HttpServer

RESULT = {"id": "a", "status": "unavailable", "error": {"type": "Poison"}}
"""The result of a call whose attempts were all lost (`Poison`)."""


def answers(body: bytes, content_type: str) -> list[tuple[int, dict[str, object]]]:
    """Return what `ask` yields for one call if the service answers 503 with this body."""

    async def handle(_: web.Request) -> web.Response:
        return web.Response(status=503, body=body, content_type=content_type)

    async def run() -> list[tuple[int, dict[str, object]]]:
        app = web.Application()
        app.router.add_post("/v1/execute", handle)
        async with HttpServer(app) as server, http_session() as http:
            url = str(server.make_url("")).rstrip("/")
            # `single` sends the call to `/v1/execute` and not as a batch.
            return [answer async for answer in ask(http, url, [{"code": ""}], "application/msgpack", single=True)]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "content_type"),
    [(msgpack.packb(RESULT), "application/msgpack"), (json.dumps(RESULT).encode(), "application/json")],
)
def test_a_503_with_the_result_of_an_unavailable_call_yields_this_result(body: bytes, content_type: str) -> None:
    assert answers(body, content_type) == [(0, RESULT)]


@pytest.mark.parametrize(
    ("body", "content_type"), [(b'{"error": "NotReady"}', "application/json"), (b"\x8e not text", "text/plain")]
)
def test_a_503_without_a_result_raises_refused(body: bytes, content_type: str) -> None:
    with pytest.raises(Refused, match="the service answered 503"):
        answers(body, content_type)
