"""Returns free memory of the C library's heap to the kernel while the gateway is idle.

After a large block has been freed, glibc keeps up to 64 MiB of free memory at the end of each arena, and all free
memory below the last used block (mallopt(3), M_MMAP_THRESHOLD). Without this module, an idle gateway keeps the memory
of its largest requests, and its size depends on the order of the requests.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

CHECK_INTERVAL_S = 1.0
"""Seconds between two checks. One malloc_trim(3) takes 1 to 10 ms."""
_M_ARENA_MAX = -8
"""Number of this option of mallopt(3)."""
_LIBC = ctypes.CDLL(None)


def use_one_arena() -> None:
    """Make all threads use the main arena (a heap of glibc), the only arena that malloc_trim(3) can shrink. Call this
    function before any thread starts."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    """Return free memory to the kernel. Does nothing if the C library is not glibc."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


async def trim_at_rest(is_at_rest: Callable[[], bool], bytes_in: Callable[[], int]) -> None:
    """Call malloc_trim(3) once after each busy period, until cancelled. Returns at once if the C library is not glibc.

    `bytes_in` returns the number of bytes received so far. If this number has grown, the gateway was busy.
    """
    bytes_in_at_trim = bytes_in()
    while hasattr(_LIBC, "malloc_trim"):
        await asyncio.sleep(CHECK_INTERVAL_S)
        if is_at_rest() and bytes_in() != bytes_in_at_trim:
            bytes_in_at_trim = bytes_in()
            trim()
