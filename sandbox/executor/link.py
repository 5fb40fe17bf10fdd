"""A non-blocking Unix stream socket under Trio: reads with their ancillary data, writes that never wait.

`write` sends at once what the socket takes and keeps the rest, in order, for `flush_forever`; so whoever writes needs no
task and cannot be cancelled half-way through a frame.
"""

from __future__ import annotations

import array
import os
import socket

import trio

_CHUNK = 1 << 18
_FDS_ROOM = socket.CMSG_SPACE(16 * 4) + socket.CMSG_SPACE(12)


class Link:
    """One end of a socket pair. `close` is idempotent; reading or writing a closed or broken link ends it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fds: list[int] = []
        self.peer_pid = 0
        self._backlog = bytearray()
        self._more = trio.Event()
        self.is_open = True

    def want_credentials(self) -> None:
        """Have the kernel say who writes: `peer_pid` is the sender of what was last read, as seen from here."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    async def read(self) -> bytes:
        """Wait for bytes; b"" when the peer is gone. Descriptors that came along are appended to `fds`."""
        while self.is_open:
            try:
                data, ancillary, _flags, _address = self.sock.recvmsg(_CHUNK, _FDS_ROOM)
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
                self.peer_pid = array.array("i", data[:4])[0]

    def write(self, data: bytes) -> None:
        """Send now or keep for later. A link that breaks is closed; its reader sees the end."""
        if not self.is_open:
            return
        if not self._backlog:
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.close()
                return
            if sent == len(data):
                return
            data = data[sent:]
        self._backlog += data
        self._more.set()

    async def write_with(self, data: bytes, fd: int) -> None:
        """Send a small frame with a descriptor attached to its first byte, after all that was written before."""
        while self.is_open:
            try:
                if not self._backlog:
                    self.write(data[socket.send_fds(self.sock, [data], [fd]) :])
                    return
                await trio.sleep(0.001)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.sock)
            except OSError:
                self.close()

    async def flush_forever(self) -> None:
        """Send what `write` kept, until cancelled or closed."""
        while self.is_open:
            await self._more.wait()
            self._more = trio.Event()
            while self._backlog and self.is_open:
                try:
                    del self._backlog[: self.sock.send(self._backlog)]
                except BlockingIOError:
                    try:
                        await trio.lowlevel.wait_writable(self.sock)
                    except trio.ClosedResourceError:
                        return
                except OSError:
                    self.close()

    @property
    def backlog(self) -> int:
        return len(self._backlog)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._more.set()
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()
            for fd in self.fds:
                os.close(fd)
            self.fds.clear()
