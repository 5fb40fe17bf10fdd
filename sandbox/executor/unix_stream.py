"""A non-blocking Unix stream socket under Trio that also carries file descriptors. If no descriptors are sent, the
socket may also be a TCP socket.

`write` never waits. It sends the bytes that the socket accepts at once, and keeps the rest in order. The task that runs
`flush_forever` sends the rest. So a cancelled writer never leaves half a frame.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque

import trio

from sandbox.errors import ProtocolError

MAX_FDS = 16
"""Maximum number of received descriptors that may wait in `received_fds`. If there are more, that is a protocol
error."""
_CHUNK_BYTES = 1 << 18
"""Largest number of bytes that one `read` returns."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * 4) + socket.CMSG_SPACE(3 * 4)
"""Space for `MAX_FDS` descriptors and for the pid, uid and gid of struct ucred, 4 bytes each."""


class UnixStream:
    """One end of a socket pair. Any socket error closes the stream. `read` then returns b"", and `write` does
    nothing."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.received_fds: list[int] = []
        """Descriptors in the order of arrival. The code that removes one closes it; `close` closes the rest."""
        self.peer_pid = self.peer_uid = 0
        self.is_open = True
        self._backlog: deque[tuple[memoryview, int | None]] = deque()
        """Unsent bytes, each with the descriptor to attach to its first byte."""
        self._has_backlog = trio.Event()
        self._flushed = trio.Event()

    def enable_credentials(self) -> None:
        """Make the kernel attach the sender's pid and uid to all data that is read from now on. The ids are those by
        which this process knows the sender. `read` stores them in `peer_pid` and `peer_uid`."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    async def read(self) -> bytes:
        """Wait for bytes and return them; return b"" when the stream has ended.

        Raises `ProtocolError` if more than `MAX_FDS` descriptors wait in `received_fds`.
        """
        while self.is_open:
            try:
                await trio.lowlevel.wait_readable(self.sock)
                data, ancillary, _flags, _address = self.sock.recvmsg(
                    _CHUNK_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                continue
            except (trio.ClosedResourceError, OSError):
                break
            if ancillary:
                self._read_ancillary(ancillary)
            return data
        return b""

    def _read_ancillary(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self.received_fds += fds
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                self.peer_pid, self.peer_uid = array.array("i", data[:8])  # struct ucred without the gid
        if len(self.received_fds) > MAX_FDS:
            raise ProtocolError(f"a peer sent {len(self.received_fds)} unexpected descriptors")

    def write(self, data: bytes, fd: int | None = None) -> None:
        """Send `data` now or keep it for `flush_forever`, with a copy of the descriptor `fd` attached."""
        if not self.is_open:
            return
        rest = memoryview(data)
        if not self._backlog:
            rest = self._send(rest, fd)
            if not rest:
                return
            if len(rest) < len(data):
                fd = None  # the descriptor went with the first byte
            self._flushed = trio.Event()
        self._backlog.append((rest, None if fd is None else os.dup(fd)))
        self._has_backlog.set()

    def _send(self, data: memoryview, fd: int | None) -> memoryview:
        """Send as much as the socket accepts and return the rest. On an error, close the stream and return nothing."""
        try:
            return data[self.sock.send(data) if fd is None else socket.send_fds(self.sock, [data], [fd]) :]
        except BlockingIOError:
            return data
        except OSError:
            self.close()
            return data[:0]

    async def flush_forever(self) -> None:
        """Send what `write` has kept, until cancelled or closed."""
        while self.is_open:
            await self._has_backlog.wait()
            self._has_backlog = trio.Event()
            while self._backlog:
                data, fd = self._backlog[0]
                rest = self._send(data, fd)
                if not self.is_open:
                    return
                if len(rest) == len(data):
                    try:
                        await trio.lowlevel.wait_writable(self.sock)
                    except trio.ClosedResourceError:
                        return
                    continue
                if fd is not None:
                    os.close(fd)
                self._backlog[0] = (rest, None)
                if not rest:
                    self._backlog.popleft()
            self._flushed.set()

    async def flushed(self) -> None:
        """Wait until everything written is sent, or the stream is closed."""
        if self._backlog:
            await self._flushed.wait()

    def close(self) -> None:
        """Close the socket and all descriptors that it still holds. Idempotent."""
        if self.is_open:
            self.is_open = False
            self._has_backlog.set()
            self._flushed.set()
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()
            for fd in (*self.received_fds, *(fd for _, fd in self._backlog if fd is not None)):
                os.close(fd)
            self.received_fds.clear()
            self._backlog.clear()
