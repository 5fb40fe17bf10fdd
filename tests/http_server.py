"""HTTP servers for tests. They run in the event loop of the test, and lose no connection when they close."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer


class HttpServer(TestServer):
    """aiohttp's server for tests, closed by `close_runner`."""

    async def close(self) -> None:
        if self.runner is not None:
            await stop_accepting(*_servers(self.runner))
        await super().close()


async def close_runner(runner: web.BaseRunner) -> None:
    """Stop accepting connections, and close the open ones."""
    await stop_accepting(*_servers(runner))
    await runner.cleanup()


async def stop_accepting(*servers: asyncio.Server) -> None:
    """Stop accepting connections. Return when each accepted connection is known to its protocol. The servers are not
    closed yet.

    `asyncio.Server.close` leaves a connection open that was accepted in the same iteration of the event loop
    (https://github.com/python/cpython/issues/109564). The open connection would be reported as a warning in some later
    test.
    """
    loop = asyncio.get_running_loop()
    for server in servers:
        for listening in server.sockets:
            loop.remove_reader(listening)
    for _ in range(3):  # the loop accepts, makes the transport, and calls connection_made
        await asyncio.sleep(0)


def _servers(runner: web.BaseRunner) -> list[asyncio.Server]:
    return [site._server for site in runner.sites if site._server is not None]
