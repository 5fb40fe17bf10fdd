"""Replaces functions of sockets that the seccomp filter of a call refuses: `sendmsg`, `listen` with a long queue, and
the fork server.

A call cannot send descriptors (SCM_RIGHTS). Descriptors that are sent and not yet received count for no limit of the
call, and the kernel adds up the descriptors of all calls with one uid.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import types
from typing import Any

from protocol import MAX_BACKLOG

_FORKSERVER = "multiprocessing.popen_forkserver"
_socket_listen = socket.socket.listen


def install() -> None:
    """Replace the methods and the start method, once in the zygote."""
    socket.socket.sendmsg = _sendmsg  # type: ignore[assignment]
    socket.socket.listen = _listen  # type: ignore[assignment]
    sys.modules[_FORKSERVER] = _ForkServer(_FORKSERVER)


def _sendmsg(sock: socket.socket, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
    """Send data only. asyncio sends data by this method since Python 3.12."""
    if ancdata or address is not None:
        raise PermissionError(errno.EPERM, "sendmsg cannot send descriptors or to an address here; use send for data")
    if flags or sock.gettimeout():  # only `send` waits on a socket with a timeout
        return sock.send(b"".join(buffers), flags)
    return os.writev(sock.fileno(), list(buffers))


def _listen(sock: socket.socket, backlog: int = MAX_BACKLOG) -> None:
    """Listen with a backlog of at most `MAX_BACKLOG`. On every system a larger backlog is only a hint."""
    _socket_listen(sock, min(backlog, MAX_BACKLOG))


class _ForkServer(types.ModuleType):
    """Replaces the module that starts processes by a fork server, which receives descriptors over a socket. A process
    is started as with "spawn": its code finds the same state, a new interpreter without the parent's variables."""

    def __getattr__(self, name: str) -> Any:
        if name != "Popen":
            raise AttributeError(name)
        from multiprocessing import popen_spawn_posix

        class Popen(popen_spawn_posix.Popen):
            method = "forkserver"

        self.Popen = Popen
        return Popen
