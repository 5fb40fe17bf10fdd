"""Memory that the kernel wipes in a fork. This is a security boundary between calls.

A fork copies all memory of its parent, freed memory included, and a call can read all of its own memory. So the code,
input and output of other calls must never be in memory that a fork copies. They pass through the zygote in buffers
that a child has as zeros (madvise(2), MADV_WIPEONFORK, Linux 4.14), or that a child does not have (MADV_DONTFORK,
`fork_batch.py`). There is one exception: a child inherits the buffer of `CallRecord`, which holds the record of this
child only.
"""

from __future__ import annotations

import ctypes
import mmap

_MADV_WIPEONFORK = 18
USUAL_BYTES = 1 << 18
"""Size of the buffers that are kept. Larger data gets a buffer of its own, which is freed after use."""


def wiped_buffer(size: int = USUAL_BYTES) -> memoryview:
    """Return `size` writable bytes that are zeros in a fork."""
    pages = private_pages(size)
    pages.madvise(_MADV_WIPEONFORK)
    return memoryview(pages)[:size]


class CallRecord:
    """The record of the next call (its header and body), in memory that its process inherits by the fork.

    Before each fork, the new record replaces the record of the previous call. If the previous record was longer, zeros
    replace the rest of it. So no byte of an earlier call is left in the buffer. All calls use the same buffer, because
    with one buffer per call, a child would also inherit the buffers of other calls. So each record is copied just
    before the fork of its call.
    """

    def __init__(self) -> None:
        self._pages = private_pages(USUAL_BYTES)
        self._address = address(self._pages)
        self._used_bytes = 0  # of the last record

    def prepare_copy(self, record: memoryview) -> tuple[int, int, int, int]:
        """Return what `ForkBatch` has to copy before the fork: source address, target address, number of bytes, and
        number of zero bytes to write behind them. `record` has at most `USUAL_BYTES`."""
        size = len(record)
        assert size <= USUAL_BYTES
        zeros, self._used_bytes = max(0, self._used_bytes - size), size
        return address(record) if size else 0, self._address, size, zeros

    def read(self, size: int) -> memoryview:
        """In the child: return its record of `size` bytes."""
        return memoryview(self._pages)[:size]


def address(pages: mmap.mmap | memoryview) -> int:
    """Return the address of the first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def private_pages(size: int) -> mmap.mmap:
    """Return at least `size` bytes of zeros. A fork gets a copy of them."""
    return mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
