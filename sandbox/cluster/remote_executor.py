"""The gateway's end of an executor on another machine: the `LaunchedExecutor` whose process an agent starts.

The executor itself serves the other end of the connection, so frames pass through no other process.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct

from sandbox.cluster import handshake
from sandbox.cluster.handshake import ExecutorStart
from sandbox.errors import NodeError, ProtocolError

EXIT_POLL_INTERVAL_S = 0.2
_OPEN_STATES = (1, 4, 5)
"""States of a TCP connection whose other end has not sent FIN or RST: ESTABLISHED, FIN_WAIT1, FIN_WAIT2 (see
include/net/tcp_states.h)."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with a time of 0 s: closing the socket resets the connection (socket(7))."""


class RemoteExecutor:
    """One start of an executor on a node. `launch` returns it."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._own_socket: socket.socket | None = sock.dup()
        """A second descriptor of the connection, which stays open when the event loop has closed `socket`. None after
        `kill`."""

    @classmethod
    async def launch(cls, host: str, port: int, secret: bytes, start: ExecutorStart) -> RemoteExecutor:
        """Connect to the agent of a node and have it start an executor. Raises `OSError` or `NodeError`."""
        loop = asyncio.get_running_loop()
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            handshake.set_tcp_options(sock)
            async with asyncio.timeout(handshake.TIMEOUT_S):
                await loop.sock_connect(sock, address)
                hello = await _receive(loop, sock, handshake.HELLO_BYTES)
                nonce = secrets.token_bytes(handshake.NONCE_BYTES)
                request = handshake.encode_request(secret, hello, nonce, start)
                await loop.sock_sendall(sock, request)
                reply = await _receive(loop, sock, handshake.REPLY_BYTES)
                handshake.check_reply(secret, hello, request, reply)
        except TimeoutError:
            sock.close()
            raise NodeError(f"no answer from {host}:{port} within {handshake.TIMEOUT_S:g} s") from None
        except ProtocolError as error:
            sock.close()
            raise NodeError(f"{host}:{port}: {error}") from None
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def kill(self) -> None:
        """Make the close of `socket` reset the connection; the agent then kills the executor at once. Without a reset,
        the agent would get the end of the stream only after all unsent data."""
        if self._own_socket is not None:
            self._own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._own_socket.close()
            self._own_socket = None

    async def wait(self) -> None:
        """Wait until the other end has closed the connection. The agent closes it when the process has exited."""
        while self._own_socket is not None:
            state = self._own_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            if state not in _OPEN_STATES:
                return
            await asyncio.sleep(EXIT_POLL_INTERVAL_S)


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(sock, size - len(data))
        if not part:
            raise ProtocolError("the agent closed the connection before the handshake was complete")
        data += part
    return data
