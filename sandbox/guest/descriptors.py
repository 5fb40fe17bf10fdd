"""Closes all descriptors of this process from a number on.

os.closerange does it in one system call only if Python was built with a C library that has close_range(2); else it
calls close(2) for each number. So the system call is made here. Where the kernel has none (Linux before 5.9) or a
container's filter refuses it, the loop ends where the kernel's table of descriptors does: a jail has no /proc to list
them.
"""

from __future__ import annotations

import ctypes
import os

# With the interpreter lock held, as in `confine`: a zygote and a call have one thread.
_libc = ctypes.PyDLL(None)
_syscall, _select = _libc.syscall, _libc.select
_SYS_CLOSE_RANGE = 436  # on every architecture
_LAST = 0x7FFFFFFF
_SMALLEST_TABLE = 64


def close_from(first: int) -> None:
    """Close every descriptor from `first` on."""
    if _syscall(_SYS_CLOSE_RANGE, first, _LAST, 0) != 0:
        os.closerange(first, _table_size())


def _table_size() -> int:
    """A number that no open descriptor reaches: select(2) fails on a closed descriptor in the kernel's table (EBADF)
    and ignores one beyond it. The table's size is a power of two, and a fork has the smallest that it can do with."""
    size = _SMALLEST_TABLE
    while size <= _LAST:
        asked = bytearray(size // 8 + 8)
        asked[-8] = 1  # the bit of `size`, which is a power of two
        if not _is_open(size) and _select(size + 1, bytes(asked), None, None, bytes(16)) == 0:
            break
        size *= 2
    return size


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
