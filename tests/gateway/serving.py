"""A gateway with fake executors, on a real port of the loopback interface."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from sandbox.gateway import build_app
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.settings.server import ServeConfig
from tests.fakes import FakeFleet
from tests.http_server import HttpServer


@dataclass
class Served:
    """A running gateway: its URL, a client session, the fake executors and the application."""

    url: str
    http: aiohttp.ClientSession
    fleet: FakeFleet
    dispatcher: Dispatcher
    app: web.Application

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Send a POST, and return the status and the decoded JSON. `body` is sent as JSON unless it is bytes. Names of
        headers have "_" in place of "-"."""
        http_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        content = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(self.url + path, headers=http_headers, **content) as response:
            return response.status, await response.json()

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Send a GET, and return the status and the text."""
        async with self.http.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()


@asynccontextmanager
async def serving(fleet: FakeFleet | None = None, *, wait: bool = True, **settings: Any) -> AsyncIterator[Served]:
    """Run a gateway with these settings. Without `wait`, its executors may not be ready yet."""
    fleet = fleet or FakeFleet()
    async with Dispatcher(ServeConfig(**settings), fleet.launch) as dispatcher:
        if wait:
            await dispatcher.started()
        app = build_app(dispatcher)
        server = HttpServer(app)
        await server.start_server()
        async with server, aiohttp.ClientSession() as http:
            yield Served(str(server.make_url("")).rstrip("/"), http, fleet, dispatcher, app)


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the event loop until `condition` holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  the fakes have no event to wait for
            await asyncio.sleep(0)
