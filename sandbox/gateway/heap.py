"""Returns memory that the C library keeps for later to the kernel while the gateway is at rest.

Once glibc has freed a large block it keeps up to 64 MiB of free memory at the end of each of its arenas, and whatever
is free before the last block in use (mallopt(3), M_MMAP_THRESHOLD). Without this a gateway at rest holds the memory of
its largest requests, and a measurement of its growth shows the order in which requests came.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

PERIOD_S = 1.0
"""Seconds between two checks. One malloc_trim(3) takes from 1 to 10 ms."""
_M_ARENA_MAX = -8
_LIBC = ctypes.CDLL(None)


def use_one_arena() -> None:
    """Have threads use the main arena, since malloc_trim(3) cannot shorten others. Call it before any thread starts."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_ARENA_MAX, 1)


async def trim_at_rest(is_at_rest: Callable[[], bool], bytes_in: Callable[[], int]) -> None:
    """Until cancelled: call malloc_trim(3) once after each time of work. Returns at once where there is no glibc."""
    malloc_trim = getattr(_LIBC, "malloc_trim", None)
    trimmed_at = bytes_in()
    while malloc_trim is not None:
        await asyncio.sleep(PERIOD_S)
        if is_at_rest() and bytes_in() != trimmed_at:
            trimmed_at = bytes_in()
            malloc_trim(0)
