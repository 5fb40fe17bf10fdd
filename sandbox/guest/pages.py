"""Settles a zygote's memory, so that forking it copies as little as possible.

A fork copies the page tables of all that the parent has written to, an entry and its bookkeeping for each 4 KiB, which
for a heap of 50 MB costs more than everything else a small call does. Collapsing the heap into huge pages (madvise(2),
MADV_COLLAPSE, Linux 6.1) makes that one entry for each 2 MiB. A kernel that cannot just stays slower.
"""

from __future__ import annotations

import ctypes
import gc

import immortal

_HUGE = 2 << 20
_MADV_COLLAPSE = 25
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def settle() -> int:
    """Give back what is free, freeze what is left, collapse it. Returns the number of huge pages."""
    gc.collect()
    immortal.immortalize()
    where = {id(thing) // _HUGE for thing in gc.get_objects()}
    gc.freeze()
    gc.disable()
    getattr(_libc, "malloc_trim", int)(0)
    collapsed = sum(_collapse(block) for block in where)
    block = _libc.sbrk(0) // _HUGE - 1  # the rest of malloc's heap, from its top down
    while block not in where and _collapse(block):
        collapsed += 1
        block -= 1
    return collapsed


def _collapse(block: int) -> bool:
    return bool(_libc.madvise(block * _HUGE, _HUGE, _MADV_COLLAPSE) == 0)
