"""`fcntl.flock`, `fcntl.lockf` and record locks by `fcntl.fcntl`, under a filter that refuses the kernel's locks.

The seccomp filter of a call refuses flock(2), and record locks only seem to be set (`sandbox/jail/seccomp.py` has the
reason). No process outside the call can open the call's files. So if a call has only one process, a lock only has to
exclude other open files of this process, and `flock` does this. If the call has another process, a lock raises
`OSError` (ENOLCK), because a lock that excludes nobody would be worse than no lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from typing import Any

from replacements import Replacement

RETRY_S = 0.001
"""Seconds between two attempts to get a lock that another open file of this process has."""
_CLOSED_FD = 0x7FFFFFFF
"""A number that no descriptor has."""
_NO_LOCKS = "no file locks between the processes of a call; use multiprocessing.Lock"
_flock, _lockf, _fcntl = fcntl.flock, fcntl.lockf, fcntl.fcntl
_held: dict[int, tuple[tuple[int, int], bool]] = {}
"""Locks by descriptor: device and inode, and whether the lock is exclusive."""
_first_process = 0


def install() -> None:
    """Replace the functions of `fcntl`, once in the zygote."""
    fcntl.flock, fcntl.lockf, fcntl.fcntl = flock, lockf, fcntl_


def set_first_process() -> None:
    """Note that this process is the first one of its call."""
    global _first_process
    _first_process = os.getpid()


@Replacement
def flock(fd: Any, operation: int) -> None:
    """Lock or unlock an open file as a whole."""
    try:
        _flock(fd, operation)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    else:
        return
    number = fd if isinstance(fd, int) else fd.fileno()
    inode = _inode(number)  # raises OSError if the descriptor is closed
    kind = operation & ~fcntl.LOCK_NB
    if kind == fcntl.LOCK_UN:
        for other in [other for other in _held if other == number or _is_same_file(other, number)]:
            del _held[other]
        return
    if kind not in (fcntl.LOCK_SH, fcntl.LOCK_EX):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    is_exclusive = kind == fcntl.LOCK_EX
    _require_alone()
    while _conflicts(number, inode, is_exclusive):
        if operation & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        time.sleep(RETRY_S)
    _held[number] = inode, is_exclusive


@Replacement
def lockf(fd: Any, cmd: int, *args: Any) -> None:
    """Lock or unlock a part of a file. The locks of one process never conflict."""
    if cmd & ~fcntl.LOCK_NB != fcntl.LOCK_UN and _is_filtered():
        _require_alone()
    _lockf(fd, cmd, *args)


@Replacement
def fcntl_(fd: Any, cmd: int, arg: Any = 0) -> Any:
    """Perform fcntl(2)."""
    if cmd in (fcntl.F_SETLK, fcntl.F_SETLKW) and _is_filtered():
        _require_alone()
    return _fcntl(fd, cmd, arg)


fcntl_.__name__ = "fcntl"  # type: ignore[attr-defined]


def _is_filtered() -> bool:
    try:
        _flock(_CLOSED_FD, fcntl.LOCK_UN)
    except OSError as error:
        return error.errno == errno.ENOSYS
    return False


def _require_alone() -> None:
    """Raise `OSError` (ENOLCK) if this call may have another process. It may have one if this process is not the first
    process of the call, or has a child for which it has not waited."""
    if os.getpid() == _first_process:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
    raise OSError(errno.ENOLCK, _NO_LOCKS)


def _conflicts(fd: int, inode: tuple[int, int], is_exclusive: bool) -> bool:
    """Return whether another open file of this process has a lock that excludes the wanted one."""
    for other, (locked, is_other_exclusive) in list(_held.items()):
        if other == fd or locked != inode or not (is_exclusive or is_other_exclusive):
            continue
        try:
            is_open = _inode(other) == inode
        except OSError:
            is_open = False
        if not is_open:
            _held.pop(other, None)  # closing the file has released its lock
        elif not _is_same_file(other, fd):
            return True
    return False


def _inode(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _is_same_file(fd: int, other: int) -> bool:
    """Return whether two descriptors share one open file, and so one lock. If a change of a flag by one descriptor is
    visible by the other descriptor, they share the file."""
    try:
        flags, other_flags = _fcntl(fd, fcntl.F_GETFL), _fcntl(other, fcntl.F_GETFL)
        _fcntl(fd, fcntl.F_SETFL, flags ^ os.O_NONBLOCK)  # has no effect on a regular file
        try:
            return bool(_fcntl(other, fcntl.F_GETFL) != other_flags)
        finally:
            _fcntl(fd, fcntl.F_SETFL, flags)
    except OSError:
        return False
