"""Two servers for the tests of the clients: a server with scripted responses, and a gateway in a thread of its own.

A responder (`Responder`) gets a request and its decoded calls, and returns the response.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgpack
from aiohttp import web

from sandbox.client.transport import STREAM
from sandbox.types import CallError, Result, Status, UnavailableReason, invalid_result, unavailable_result
from tests.fakes import FakeFleet, ok_result, pair_of_check
from tests.gateway.serving import serving
from tests.http_server import HttpServer

EncodedCall = dict[str, Any]
Responder = Callable[[web.Request, list[EncodedCall]], Awaitable[web.StreamResponse]]


def encode_results(calls: list[EncodedCall], indices: range | None = None) -> bytes:
    """Return the stream of the successful results of `calls`. With `indices`, only these calls have a result in it."""
    indices = range(len(calls)) if indices is None else indices
    return b"".join(encode_result(index, ok_result(calls[index])) for index in indices)


def encode_result(index: int, result: dict[str, Any]) -> bytes:
    encoded: bytes = msgpack.packb({"index": index, **result})
    return encoded


def stopped_result() -> dict[str, Any]:
    """Return an `unavailable` result that a client retries."""
    return unavailable_result("", UnavailableReason.STOPPED, "try again").encode(binary=True)


async def respond_ok(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
    return web.Response(body=encode_results(calls))


async def abort_before_last_result(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(encode_results(calls, range(len(calls) - 1)))
    abort_connection(request)
    return response


async def respond_garbage(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
    return web.Response(body=b"\xc1 no msgpack")  # msgpack never uses the byte c1


async def respond_all_invalid(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
    invalid = invalid_result("", "no such field").encode(binary=True)
    body = b"".join(encode_result(index, invalid) for index in range(len(calls)))
    return web.Response(status=400, content_type=STREAM, body=body)


async def respond_verdicts(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
    """Return the outcome `equivalent` for equal texts. In a batch of three, the answer "die" aborts the connection."""
    response = web.StreamResponse()
    await response.prepare(request)
    for index, call in enumerate(calls):
        gold, answer = pair_of_check(call)
        outcome = "equivalent" if gold == answer else "not_equivalent"
        result = Result("", Status.OK, value=json.dumps({"outcome": outcome}))
        await response.write(encode_result(index, result.encode(binary=True)))
        if answer == "die" and len(calls) == 3:
            abort_connection(request)
            break
    return response


def refuse_with(status: int, **headers: str) -> Responder:
    """Return a responder that answers with an HTTP error. Names of headers are written with "_" in place of "-"."""

    async def respond(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
        hyphenated = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({"error": {"type": "No", "message": "no"}}, status=status, headers=hyphenated)

    return respond


def respond_unavailable(error_type: str, code: str) -> Responder:
    """Return a responder that answers calls of `code` with `unavailable`, and all other calls with success."""

    async def respond(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
        unavailable = Result("", Status.UNAVAILABLE, error=CallError(error_type, "try again")).encode(binary=True)
        results = [unavailable if call["code"] == code else ok_result(call) for call in calls]
        return web.Response(body=b"".join(encode_result(index, result) for index, result in enumerate(results)))

    return respond


def respond_after(release: asyncio.Event, respond: Responder) -> Responder:
    async def respond_later(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
        await release.wait()
        return await respond(request, calls)

    return respond_later


def abort_connection(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


class ScriptedServer:
    """A server that answers each request with the next responder. The last responder answers all later requests."""

    def __init__(self, *responders: Responder) -> None:
        self.responders = list(responders)
        self.requests: list[list[EncodedCall]] = []
        """The calls of each request."""
        self.url = ""

    async def respond(self, request: web.Request) -> web.StreamResponse:
        calls = msgpack.unpackb(await request.read())["calls"]
        self.requests.append(calls)
        respond = self.responders.pop(0) if len(self.responders) > 1 else self.responders[0]
        return await respond(request, calls)

    @property
    def codes(self) -> list[list[str]]:
        """The codes of the calls of each request."""
        return [[call["code"] for call in calls] for calls in self.requests]

    @property
    def batch_sizes(self) -> list[int]:
        return [len(calls) for calls in self.requests]


@asynccontextmanager
async def scripted_server(*responders: Responder) -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer(*responders)
    app = web.Application()
    app.router.add_post("/v1/batch", scripted.respond)
    async with HttpServer(app) as server:
        scripted.url = str(server.make_url("/"))
        yield scripted


@contextmanager
def gateway_in_a_thread() -> Iterator[str]:
    """Run a gateway with fake executors in a thread of its own, and yield its URL."""
    url: list[str] = []
    opened = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with serving(FakeFleet(slots=8)) as served:
            url.append(served.url)
            opened.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    opened.wait(10)
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
