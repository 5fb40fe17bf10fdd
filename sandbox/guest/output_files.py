"""Where a call's output goes: memory files of a fixed size, sealed so that they can neither grow nor shrink,
and where its input comes from: one that is sealed against writes.

The call writes through an ordinary descriptor; the zygote reads what is there once the call has ended, however it
ended. Nobody polls a pipe, a time-out loses nothing that was written, and a flood stops at the end of the file (EPERM)
without costing more memory. The kernel enforces the seal (memfd_create(2)), whatever the code does to the file.
"""

from __future__ import annotations

import errno
import fcntl
import os

PAGE = 4096
_F_ADD_SEALS = 1033
_SEAL, _SHRINK, _GROW, _WRITE = 0x1, 0x2, 0x4, 0x8
_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _MFD_NOEXEC_SEAL = 0x1, 0x2, 0x8
_flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL


def bounded_file(limit: int) -> int:
    """A descriptor of an empty file that takes at least `limit` bytes and at most two pages more.

    The kernel refuses a write page by page, so the file ends a page beyond the limit: whoever goes over it gets past
    `limit` by at least a byte, and `overflowed` needs no trace of the refusal.
    """
    fd = _memory_file("output")
    os.ftruncate(fd, bounded_size(limit))
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL | _SHRINK | _GROW)
    return fd


def bounded_size(limit: int) -> int:
    """The size of a bounded file."""
    return (limit + 2 * PAGE - 1) // PAGE * PAGE


def written(fd: int, limit: int) -> tuple[int, bool]:
    """How many bytes of a bounded file count, `limit` at most, and whether there were more.

    The length is where the shared file offset stands. Code can move the offset of its own output, and so garble it;
    it cannot make this count more than the limit.
    """
    end = os.lseek(fd, 0, os.SEEK_CUR)
    return min(end, limit), end > limit


def readable(content: memoryview) -> int:
    """A descriptor that reads `content` from its start, and by which nobody can write or execute."""
    fd = _memory_file("input")
    while content:
        content = content[os.write(fd, content) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL | _SHRINK | _GROW | _WRITE)
    return fd


def _memory_file(name: str) -> int:
    """An empty memory file that is no program."""
    global _flags
    try:
        fd = os.memfd_create(name, _flags)
    except OSError as why:
        if why.errno != errno.EINVAL:
            raise
        _flags &= ~_MFD_NOEXEC_SEAL  # Linux before 6.3
        fd = os.memfd_create(name, _flags)
    if not _flags & _MFD_NOEXEC_SEAL:
        os.fchmod(fd, 0o600)
    return fd
