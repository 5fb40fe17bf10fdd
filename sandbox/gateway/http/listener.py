"""The listening socket: limits the number of connections, the time to send a request head, and the time to read.

Invariants:
- At most `max_connections` are served at once. A further connection gets 503 and is closed. While `MAX_REJECTED` such
  connections are still open, the next one is closed without a response.
- A new connection that has not sent a whole request head within `stall_s` is closed. Between requests aiohttp's
  keep-alive timer (`KEEPALIVE_S`) applies instead.
- A connection is closed if its client does not read for `stall_s`: if so long there are too many unsent bytes for more
  to be written. Routes write at most `codec.CHUNK_BYTES` at once, so a client has this time for these bytes.

The HTTP protocol itself is aiohttp's (`protocol_factory`, a `web.Server`), which this module wraps.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import cast

from sandbox import machine
from sandbox.errors import ConfigError

KEEPALIVE_S = 75.0
"""Seconds that a connection is kept without a request. Clients and proxies keep it for a shorter time (aiohttp 15 s,
nginx 60 s), so that they close it first."""
BACKLOG = 1024
"""Connections that the kernel keeps until the event loop accepts them."""
REJECT_LINGER_S = 2.0
"""Seconds that a rejected connection stays open. If it were closed at once, the client might get a connection reset
instead of the response 503."""
READ_GRACE_S = 0.1
"""Seconds between the end of `stall_s` and the abort. Bytes that arrived while the event loop was blocked are read in
this time, before the abort."""
MAX_REJECTED = 100
"""Rejected connections that are open at a time."""
RESERVED_FDS = 256 + MAX_REJECTED
"""File descriptors for everything but served connections: sockets to executors, pipes, libraries."""
MIN_CONNECTIONS = 256
"""Connections that one client may open (`client.MAX_CONNECTIONS`). With a lower limit, the server would reject some of
the connections of a single client all the time."""
HEAD_END = b"\r\n\r\n"

ProtocolFactory = Callable[[], asyncio.Protocol]


class Listener:
    """Call `open`, later `close`. `on_rejected` is called for each connection over the limit, `on_stalled` for each one
    that is closed because its client does not read."""

    def __init__(
        self,
        protocol_factory: ProtocolFactory,
        max_connections: int,
        stall_s: float,
        on_rejected: Callable[[], None],
        on_stalled: Callable[[], None],
        *,
        shares_port: bool = False,
    ) -> None:
        self.protocol_factory = protocol_factory
        self.max_connections = max_connections
        self.send_timeout_s = self.read_timeout_s = stall_s
        self.on_rejected = on_rejected
        self.on_stalled = on_stalled
        self.shares_port = shares_port
        """Whether other workers listen on the same port (SO_REUSEPORT)."""
        self.connections = 0
        """Served connections that are open."""
        self.rejected = 0
        """Rejected connections that are still open."""
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> str:
        """Listen, and return the URL. If `port` is 0, the kernel chooses one. Raises `ConfigError`."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._new_connection, host, port, backlog=BACKLOG, reuse_address=True, reuse_port=self.shares_port
            )
        except OSError as error:
            raise cannot_listen(host, port, error) from None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Stop listening. Open connections stay open."""
        if self._server is not None:
            self._server.close()

    def _new_connection(self) -> asyncio.Protocol:
        return _Connection(self) if self.connections < self.max_connections else _RejectedConnection(self)


class _Connection(asyncio.Protocol):
    """A served connection: passes everything to aiohttp's protocol, and times the client."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._protocol = listener.protocol_factory()
        self._head_tail = b""
        """The last three bytes received, while the first request head is incomplete."""
        self._head_timer: asyncio.TimerHandle | None = None
        """Ends the connection if the first request head stays incomplete. None once the head is complete."""
        self._read_timer: asyncio.TimerHandle | None = None
        """Set while too many bytes are unsent."""
        listener.connections += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._abort = cast(asyncio.Transport, transport).abort
        self._head_timer = self._loop.call_later(self._listener.send_timeout_s, self._on_head_late)
        self._protocol.connection_made(transport)

    def _on_head_late(self) -> None:
        self._head_timer = self._loop.call_later(READ_GRACE_S, self._abort)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            if HEAD_END in self._head_tail + data:
                self._head_timer.cancel()
                self._head_timer = None
            else:
                self._head_tail = (self._head_tail + data[-3:])[-3:]
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._read_timer = self._loop.call_later(self._listener.read_timeout_s, self._on_stalled)
        self._protocol.pause_writing()

    def _on_stalled(self) -> None:
        self._listener.on_stalled()
        self._abort()

    def resume_writing(self) -> None:
        self._stop_read_timer()
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.connections -= 1
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._stop_read_timer()
        self._protocol.connection_lost(exc)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


class _RejectedConnection(asyncio.Protocol):
    """A connection over the limit: gets 503 and is closed."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        listener.rejected += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._listener.on_rejected()
        connection = cast(asyncio.Transport, transport)
        if self._listener.rejected > MAX_REJECTED:
            connection.abort()
            return
        connection.write(_rejection(self._listener.max_connections))
        connection.write_eof()
        asyncio.get_running_loop().call_later(REJECT_LINGER_S, connection.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.rejected -= 1


def _rejection(max_connections: int) -> bytes:
    message = (
        f"{max_connections} connections are open, which is the limit; use fewer and keep them open, or start the "
        "server with a larger --connections"
    )
    body = json.dumps({"error": {"type": "NotReady", "message": message}}).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host} port {port} ({error.strerror or error}); "
        "is another server running there? Choose another port with --port"
    )


def raise_connection_limit(connections: int) -> int:
    """Raise the limit on file descriptors to what `connections` need, and return how many connections are possible.

    Raises `ConfigError` if fewer than `MIN_CONNECTIONS` and fewer than `connections` are possible.
    """
    wanted = connections + RESERVED_FDS
    granted = machine.raise_fd_limit(wanted)
    needed = min(connections, MIN_CONNECTIONS)
    if granted < needed + RESERVED_FDS:
        raise ConfigError(
            f"the limit on open files (ulimit -Hn) is {granted}, but {needed} connections need "
            f"{needed + RESERVED_FDS}; raise it, best to {wanted}, or lower --connections"
        )
    return min(connections, granted - RESERVED_FDS)
