"""A non-blocking Unix stream socket under Trio: reads with their ancillary data, writes that never wait.

`write` sends at once what the socket takes and keeps the rest, in order, for `flush_forever`; so whoever writes needs
no task and cannot be cancelled half-way through a frame.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque

import trio

from sandbox.errors import ProtocolError

_CHUNK = 1 << 18
MAX_FDS = 16
"""Descriptors that came and were not yet taken from `fds`; a peer that sends more is none of ours."""
_FDS_ROOM = socket.CMSG_SPACE(MAX_FDS * 4) + socket.CMSG_SPACE(12)


class Link:
    """One end of a socket pair. `close` is idempotent; reading or writing a closed or broken link ends it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fds: list[int] = []
        self.peer_pid = self.peer_uid = 0
        self.is_open = True
        self._backlog: deque[tuple[memoryview, int | None]] = deque()  # with what is attached to the first byte
        self._more = trio.Event()
        self._flushed = trio.Event()

    def want_credentials(self) -> None:
        """Have the kernel say who writes: `peer_pid` and `peer_uid` of what was last read, as seen from here."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    async def read(self) -> bytes:
        """Wait for bytes; b"" when the peer is gone. Descriptors that came along are appended to `fds`.

        Raises `ProtocolError` when there are too many of those.
        """
        while self.is_open:
            try:
                data, ancillary, _flags, _address = self.sock.recvmsg(_CHUNK, _FDS_ROOM, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                try:
                    await trio.lowlevel.wait_readable(self.sock)
                except trio.ClosedResourceError:
                    break
                continue
            except OSError:
                break
            if ancillary:
                self._take(ancillary)
            return data
        return b""

    def _take(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self.fds += fds
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                self.peer_pid, self.peer_uid = array.array("i", data[:8])
        if len(self.fds) > MAX_FDS:
            raise ProtocolError(f"{len(self.fds)} descriptors came, expected one for each lasting call")

    def write(self, data: bytes, fd: int | None = None) -> None:
        """Send now or keep for later, with a copy of `fd` attached. A link that breaks is closed; its reader sees."""
        if not self.is_open:
            return
        left = memoryview(data)
        if not self._backlog:
            left = self._send(left, fd)
            if not left:
                return
            if len(left) < len(data):
                fd = None  # it went with the first byte
            self._flushed = trio.Event()
        self._backlog.append((left, None if fd is None else os.dup(fd)))
        self._more.set()

    def _send(self, data: memoryview, fd: int | None) -> memoryview:
        """What the socket does not take of it now; nothing is left of what goes to a broken link."""
        try:
            return data[self.sock.send(data) if fd is None else socket.send_fds(self.sock, [data], [fd]) :]
        except BlockingIOError:
            return data
        except OSError:
            self.close()
            return data[:0]

    async def flush_forever(self) -> None:
        """Send what `write` kept, until cancelled or closed."""
        while self.is_open:
            await self._more.wait()
            self._more = trio.Event()
            while self._backlog:
                data, fd = self._backlog[0]
                left = self._send(data, fd)
                if not self.is_open:
                    return
                if len(left) == len(data):
                    try:
                        await trio.lowlevel.wait_writable(self.sock)
                    except trio.ClosedResourceError:
                        return
                    continue
                if fd is not None:
                    os.close(fd)
                self._backlog[0] = (left, None)
                if not left:
                    self._backlog.popleft()
            self._flushed.set()

    async def flushed(self) -> None:
        """Wait until all that was written is sent, or the link is closed."""
        if self._backlog:
            await self._flushed.wait()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._more.set()
            self._flushed.set()
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()
            for fd in (*self.fds, *(fd for _, fd in self._backlog if fd is not None)):
                os.close(fd)
            self.fds.clear()
            self._backlog.clear()
