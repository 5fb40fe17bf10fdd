"""Memory files for a call's output and input, sealed so that the kernel enforces their limits (memfd_create(2)).

- Output goes to a file of fixed size. The call writes through an ordinary descriptor. When the call has ended, in any
  way, the zygote reads the file. So no pipe is polled, and a killed call loses no output. A write beyond the end of the
  file fails (EPERM), so output cannot use more memory.
- Input comes from a file that can be neither written nor executed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

import originals

originals.use_builtins(globals())
_write = os.write
PAGE_BYTES = mmap.PAGESIZE
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of a file whose size cannot change. No other seal can be added."""
_MFD_NOEXEC_SEAL = 0x8
_flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL


def bounded_file(limit_bytes: int) -> int:
    """Return the descriptor of an empty file with room for `limit_bytes`, and at most two pages more.

    The kernel writes the pages that fit into the file, and refuses the first page that does not. The file ends a page
    beyond the limit. So output that exceeds the limit writes at least one byte beyond it, which `written_bytes`
    detects.
    """
    fd = _memory_file("output")
    os.ftruncate(fd, bounded_size(limit_bytes))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    return fd


def bounded_size(limit_bytes: int) -> int:
    """Return the size of a bounded file."""
    return (limit_bytes + 2 * PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES


def written_bytes(fd: int, limit_bytes: int) -> tuple[int, bool]:
    """Return the length of the output in a bounded file, at most the limit, and whether more was written.

    The length is the file offset, which the zygote shares with the call. A call that moves the offset back discards its
    own output behind the offset. A call can also move the offset beyond the limit without a write. So if the offset is
    beyond the limit, the length is the end of the written data instead.
    """
    end = os.lseek(fd, 0, os.SEEK_CUR)
    if end > limit_bytes:
        end = _written_end(fd, limit_bytes)
    return min(end, limit_bytes), end > limit_bytes


def _written_end(fd: int, limit_bytes: int) -> int:
    """Return the end of the written data. Within the last page, zero bytes at the end do not count as written."""
    end = 0
    with contextlib.suppress(OSError):  # ENXIO: there is no data behind `end`
        while True:
            end = os.lseek(fd, os.lseek(fd, end, os.SEEK_DATA), os.SEEK_HOLE)
    start = end - PAGE_BYTES
    if end == 0 or start >= limit_bytes:  # nothing was written, or a whole page beyond the limit
        return end
    # The page is compared in place, because a copy in the zygote's memory would be visible to later calls.
    with mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ, offset=start) as mapped, memoryview(mapped) as page:
        low, high = 0, PAGE_BYTES
        while low < high:
            middle = (low + high) // 2
            with page[middle:] as rest:
                is_zero = rest == bytes(PAGE_BYTES - middle)
            low, high = (low, middle) if is_zero else (middle + 1, high)
    return start + low


def input_file(content: memoryview) -> int:
    """Return a descriptor that reads `content` from its start; the file can be neither written nor executed."""
    fd = _memory_file("input")
    write_all(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE | fcntl.F_SEAL_WRITE)
    return fd


def write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[_write(fd, view) :]


def _memory_file(name: str) -> int:
    """Return the descriptor of an empty memory file without execute permission."""
    global _flags
    try:
        fd = os.memfd_create(name, _flags)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _flags &= ~_MFD_NOEXEC_SEAL  # Linux before 6.3
        fd = os.memfd_create(name, _flags)
    if not _flags & _MFD_NOEXEC_SEAL:
        os.fchmod(fd, 0o600)
    return fd
