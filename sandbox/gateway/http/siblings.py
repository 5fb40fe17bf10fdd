"""The other workers of a server with several (`--workers`).

Each worker is a complete server. In addition to the port, which the kernel shares among all workers, it listens on a
socket of its own in a private directory. A request of another worker has the header `HEADER`, and is answered for this
worker alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any

import aiohttp
from aiohttp import web

from sandbox.settings.server import ServeConfig, Worker

log = logging.getLogger(__name__)

HEADER = "X-Rstar-Worker"
TIMEOUT_S = 5.0
"""Seconds that another worker may take to answer."""


class Siblings:
    """Asks the other workers. `number` is that of this worker."""

    def __init__(self, config: ServeConfig, worker: Worker) -> None:
        self.number = worker.number
        self._directory = worker.directory
        self._others = [number for number in range(config.workers) if number != worker.number]
        self._headers = {HEADER: "1", **({"Authorization": f"Bearer {config.token}"} if config.token else {})}

    async def listen(self, server: web.Server) -> None:
        """Answer the other workers."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(self.number))  # of a worker that was killed
        await asyncio.get_running_loop().create_unix_server(server, self._path(self.number))

    async def ask_others(self, path: str, method: str = "GET") -> dict[int, Any]:
        """Send a request to all other workers, and return the decoded answers of those that answer with 200."""
        answers = await asyncio.gather(*(self.ask(number, path, method) for number in self._others))
        return {number: answer for number, answer in zip(self._others, answers, strict=True) if answer is not None}

    async def ask(self, number: int, path: str, method: str = "GET") -> Any:
        """Return the decoded answer of one worker, or None if it does not answer with 200."""
        connector, timeout = aiohttp.UnixConnector(self._path(number)), aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers) as http,
                http.request(method, f"http://localhost{path}") as response,
            ):
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("worker %d does not answer %s: %s", number, path, error)
            return None

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, f"{number}.sock")


SIBLINGS = web.AppKey("siblings", Siblings)
"""The key is missing if the server has one worker."""


def siblings_to_ask(request: web.Request) -> Siblings | None:
    """Return the other workers, if there are any and this is not a request of one of them."""
    return None if HEADER in request.headers else request.app.get(SIBLINGS)
