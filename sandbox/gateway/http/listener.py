"""The way in: the listening socket, how many connections it takes, and how long one may keep us waiting.

Invariants:
- At most `most` connections are served at once. One more is told so, with 503, and closed; of those who are being told
  there are `MAX_TOLD` at most, and whoever comes then is closed without a word.
- A connection that has not sent a whole request head within `stall_s` of its beginning is closed; between requests,
  aiohttp's own keep-alive timer does the same (`IDLE_S`).

What is said on a connection is aiohttp's business (`web.Server`, a factory of protocols), which this file wraps.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import cast

from sandbox import machine
from sandbox.errors import ConfigError

IDLE_S = 75.0
"""A connection without a request is kept so long: longer than clients and proxies do (aiohttp 15 s, nginx 60 s)."""
BACKLOG = 1024
TOLD_S = 2.0
"""For a client to read why it is not served. Closed at once, it might see a reset instead."""
LAST_LOOK_S = 0.1
MAX_TOLD = 100
SPARE_FILES = 256 + MAX_TOLD
"""Descriptors for all else: sockets to executors, pipes, libraries."""
LEAST_CONNECTIONS = 256
"""As many as one client of ours opens (`client.MAX_CONNECTIONS`). With fewer it would be turned away all the time."""
HEAD_END = b"\r\n\r\n"

Handlers = Callable[[], asyncio.Protocol]


class Doors:
    """Use `open`, later `close`. `on_full` hears of each connection that is turned away."""

    def __init__(self, handlers: Handlers, most: int, stall_s: float, on_full: Callable[[], None]) -> None:
        self.handlers = handlers
        self.most = most
        self.stall_s = stall_s
        self.on_full = on_full
        self.connections = 0
        """Those that are served."""
        self.told = 0
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> str:
        """Listen; returns the URL, whose port is the real one even if 0 was asked for. Raises `ConfigError`."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._connection, host, port, backlog=BACKLOG, reuse_address=True)
        except OSError as why:
            raise cannot_listen(host, port, why) from None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Take no more connections; those that are there stay."""
        if self._server is not None:
            self._server.close()

    def _connection(self) -> asyncio.Protocol:
        return _Served(self) if self.connections < self.most else _Told(self)


class _Served(asyncio.Protocol):
    """A connection on which aiohttp speaks."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._handler = doors.handlers()
        self._tail = b""
        """The last bytes of what came, while the first head is not whole."""
        self._timer: asyncio.TimerHandle | None = None
        doors.connections += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._abort = cast(asyncio.Transport, transport).abort
        self._timer = asyncio.get_running_loop().call_later(self._doors.stall_s, self._stalled)
        self._handler.connection_made(transport)

    def _stalled(self) -> None:
        """If it was we who were held up, what it sent has not been read yet; it is before this is called."""
        self._timer = asyncio.get_running_loop().call_later(LAST_LOOK_S, self._abort)

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            if HEAD_END in self._tail + data:
                self._timer.cancel()
                self._timer = None
            else:
                self._tail = (self._tail + data[-3:])[-3:]
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._doors.connections -= 1
        if self._timer is not None:
            self._timer.cancel()
        self._handler.connection_lost(exc)


class _Told(asyncio.Protocol):
    """A connection too many: it hears why, and is closed."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        doors.told += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._doors.on_full()
        talk = cast(asyncio.Transport, transport)
        if self._doors.told > MAX_TOLD:
            talk.abort()
            return
        talk.write(_full(self._doors.most))
        talk.write_eof()
        asyncio.get_running_loop().call_later(TOLD_S, talk.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._doors.told -= 1


def _full(most: int) -> bytes:
    message = f"{most} connections are open, which is all; use fewer, keep them, or start with more --connections"
    body = json.dumps({"error": {"type": "NotReady", "message": message}}).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def cannot_listen(host: str, port: int, why: OSError) -> ConfigError:
    """What is said when an address is not to be had."""
    return ConfigError(
        f"cannot listen on {host} port {port} ({why.strerror or why}); "
        "is another server running there? Choose another with --port"
    )


def grant_files(connections: int) -> int:
    """Raise this process's bound on descriptors for so many connections; how many of them it has room for. Raises
    `ConfigError` where that is less than a single client needs."""
    wanted = connections + SPARE_FILES
    granted = machine.raise_fd_limit(wanted)
    least = min(connections, LEAST_CONNECTIONS)
    if granted < least + SPARE_FILES:
        raise ConfigError(
            f"the limit on open files (ulimit -Hn) is {granted}, but {least} connections need {least + SPARE_FILES}; "
            f"raise it, best to {wanted}, or ask for fewer --connections"
        )
    return min(connections, granted - SPARE_FILES)
