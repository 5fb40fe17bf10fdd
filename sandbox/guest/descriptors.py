"""Closes all descriptors of this process from a number on.

os.closerange makes one system call only if Python was built with a C library that has close_range(2), and otherwise
closes each number in turn. So this module makes the system call itself. Where the kernel lacks it (Linux before 5.9)
or a container's filter refuses it, the loop ends at the size of the kernel's descriptor table, because a jail has no
/proc that lists the open descriptors.
"""

from __future__ import annotations

import os

import system_calls

_MAX_FD = 0x7FFFFFFF
_MIN_TABLE_SIZE = 64


def close_from(first: int) -> None:
    """Close every descriptor from `first` on."""
    if system_calls.syscall(system_calls.CLOSE_RANGE, first, _MAX_FD, 0) != 0:
        os.closerange(first, _table_size())


def _table_size() -> int:
    """Return the size of the kernel's descriptor table, which is a power of two, or more.

    select(2) fails on a closed descriptor inside the table (EBADF) and ignores one beyond it. A fork has the smallest
    table that holds its descriptors.
    """
    size = _MIN_TABLE_SIZE
    while size <= _MAX_FD:
        fd_set = bytearray(size // 8 + 8)
        fd_set[-8] = 1  # the bit of descriptor `size`
        if not _is_open(size) and system_calls.select(size + 1, bytes(fd_set), None, None, bytes(16)) == 0:
            break
        size *= 2
    return size


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
