"""Closes all descriptors of this process from a number on, and moves a socket to a high number.

This module calls close_range(2) itself, because os.closerange does so only if Python was built with a C library that
has the function. Linux before 5.9 lacks this system call, and the filters of some containers refuse it. Then the
numbers are closed in turn, up to the size of the kernel's descriptor table: a jail has no /proc that lists open
descriptors.
"""

from __future__ import annotations

import os
import socket

import system_calls

_MAX_FD = 0x7FFFFFFF
_MIN_TABLE_SIZE = 64  # of a new process (NR_OPEN_DEFAULT)


def close_from(first: int) -> None:
    """Close every descriptor from `first` on."""
    if system_calls.syscall(system_calls.CLOSE_RANGE, first, _MAX_FD, 0) != 0:
        os.closerange(first, _table_size())


def move_up(sock: socket.socket, first: int) -> socket.socket:
    """Return the socket on a free descriptor from `first` on, in blocking mode."""
    import fcntl

    fd = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, first)
    sock.close()
    moved = socket.socket(fileno=fd)
    moved.setblocking(True)
    return moved


def _table_size() -> int:
    """Return a power of two that is at least the size of the kernel's descriptor table.

    select(2) fails on a closed descriptor inside the table (EBADF) and ignores a descriptor beyond it. A fork has the
    smallest table that holds its descriptors.
    """
    size, no_wait = _MIN_TABLE_SIZE, bytes(16)  # an empty struct timeval
    while size <= _MAX_FD:
        fd_set = bytearray(size // 8 + 8)
        fd_set[-8] = 1  # the bit of descriptor `size`
        if not _is_open(size) and system_calls.select(size + 1, bytes(fd_set), None, None, no_wait) == 0:
            break
        size *= 2
    return size


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
