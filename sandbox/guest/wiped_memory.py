"""Memory that the kernel wipes in a fork. This is a security boundary between calls.

A fork copies all memory of its parent, freed memory included, and a call can read all of its own memory. So the code,
input and output of other calls must never be in memory that a fork copies. They pass through the zygote in the buffers
of this module only, which read as zeros in a child (madvise(2), MADV_WIPEONFORK, Linux 4.14). There is one exception: a
child inherits the buffer of `CallInput`, which holds the input of this child only.
"""

from __future__ import annotations

import ctypes
import mmap

_MADV_WIPEONFORK = 18
USUAL_BYTES = 1 << 18
"""Size of the buffers that are kept. Larger data gets a buffer of its own, which is freed after use."""


def wiped_buffer(size: int) -> memoryview:
    """Return `size` writable bytes that are zeros in a fork."""
    pages = _private_pages(size)
    pages.madvise(_MADV_WIPEONFORK)
    return memoryview(pages)[:size]


class CallInput:
    """The input of the next call, in memory that its process inherits by the fork.

    Before each fork, the new input replaces the input of the previous call. If the previous input was longer, zeros
    replace the rest of it. So no byte of an earlier call is left in the buffer.
    """

    def __init__(self) -> None:
        self._usual = _private_pages(USUAL_BYTES)
        self._usual_address = _address(self._usual)
        self._used_bytes = 0  # of the last body in the usual buffer
        self.body = memoryview(b"")

    def prepare_copy(self, body: memoryview) -> tuple[int, int, int, int]:
        """Return what `ForkBatch` has to copy before the fork: source address, target address, number of bytes, and
        number of zero bytes to write behind them.

        All calls of a batch use the same buffer, because with one buffer per call, a child would also inherit the
        buffers of other calls. So each body is copied just before the fork of its call. A body over `USUAL_BYTES` must
        be the only body of its batch.
        """
        size = len(body)
        source = _address(body) if size else 0
        if size > USUAL_BYTES:
            self._usual[: self._used_bytes] = bytes(self._used_bytes)
            self._used_bytes = 0
            self.body = memoryview(_private_pages(size))[:size]
            return source, _address(self.body), size, 0
        zeros, self._used_bytes = max(0, self._used_bytes - size), size
        return source, self._usual_address, size, zeros

    def expose(self, size: int) -> None:
        """In the child: set `body` to its input of `size` bytes. `prepare_copy` has already set a large one."""
        if size <= USUAL_BYTES:
            self.body = memoryview(self._usual)[:size]

    def free_large(self) -> None:
        """In the zygote, after the fork: free the buffer of a large body."""
        self.body = memoryview(b"")


def _address(pages: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def _private_pages(size: int) -> mmap.mmap:
    return mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
