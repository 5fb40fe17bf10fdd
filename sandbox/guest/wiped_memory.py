"""Memory that no fork gets: what calls send and write passes through the zygote here, and nowhere else.

A fork copies all memory of its parent, freed or not, and code can read all of its own. So other calls' code, input and
output must never lie in what a fork copies. These pages do not: the kernel gives a child zeros in their place
(madvise(2), MADV_WIPEONFORK, Linux 4.14). Only `Inbox` is copied, and it holds what the very next call may see.
"""

from __future__ import annotations

import ctypes
import mmap

_WIPE_ON_FORK = 18
ROOM = 1 << 18
"""Bytes for what is usual; what needs more gets room of its own, for as long as it takes."""


def room(size: int) -> memoryview:
    """So many writable bytes, apart."""
    return memoryview(_private(size, apart=True))[:size]


class Inbox:
    """What the next call has been sent. Written whole before each fork: no trace of the call before is left."""

    def __init__(self) -> None:
        self._usual = _private(ROOM, apart=False)
        self._address = _address(self._usual)
        self._dirty = 0
        self.body = memoryview(b"")

    def put(self, body: memoryview) -> None:
        """Hold a copy of `body`, until the next `put` or `shrink`."""
        source, target, size, zeros = self.order(body)
        ctypes.memmove(target, source, size)
        ctypes.memset(target + size, 0, zeros)
        self.take(size)

    def order(self, body: memoryview) -> tuple[int, int, int, int]:
        """The same, for `burst` to do between two forks: from where, to where, how many bytes, and zeros behind them.
        What is larger than is usual has to go alone."""
        size = len(body)
        source = _address(body) if size else 0
        if size > ROOM:
            self._usual[: self._dirty] = bytes(self._dirty)
            self._dirty = 0
            self.body = memoryview(_private(size, apart=False))[:size]
            return source, _address(self.body), size, 0
        zeros, self._dirty = max(0, self._dirty - size), size
        return source, self._address, size, zeros

    def take(self, size: int) -> None:
        """In the call that was sent so many bytes: they are the body."""
        if size <= ROOM:
            self.body = memoryview(self._usual)[:size]

    def shrink(self) -> None:
        """After the fork: let go of room that was for one call alone."""
        if len(self.body) > ROOM:
            self.body = memoryview(b"")


def _address(pages: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def _private(size: int, *, apart: bool) -> mmap.mmap:
    pages = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if apart:
        pages.madvise(_WIPE_ON_FORK)
    return pages
