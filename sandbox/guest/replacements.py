"""Replacements for functions of `os` whose system calls a jail refuses, or answers in another way than a usual machine.

`Replacement` makes such a function behave like a built-in function: if it is assigned to a class, it does not become a
method.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from typing import Any


class Replacement:
    """A callable object in place of a built-in function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


def install() -> None:
    """Replace functions of `os`, once in the zygote."""
    os.unlink = os.remove = unlink
    os.supports_dir_fd.add(unlink)
    os.system = system
    os.sendfile = sendfile
    if hasattr(os, "memfd_create"):
        os.memfd_create = memfd_create


_unlink, _memfd_create = os.unlink, getattr(os, "memfd_create", None)
_system, _sendfile = os.system, os.sendfile
_MAX_COPIED_BYTES = 1 << 16
"""Bytes that `sendfile` copies at once."""
NO_PROGRAMS = "The sandbox has no shell, and no programs but Python."
"""What stderr says if a call starts another program. A shell would only help an attacker."""


@Replacement
def unlink(path: Any, *, dir_fd: int | None = None) -> None:
    """Remove a file. In a read-only directory the kernel refuses before it looks for the file; programs expect
    FileNotFoundError for a file that is not there."""
    try:
        _unlink(path, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.EROFS:
            os.lstat(path, dir_fd=dir_fd)  # raises FileNotFoundError
        raise


@Replacement
def system(command: Any) -> int:
    """Run a command in a shell. If there is none, stderr says so, as a shell does for a program that it cannot find."""
    status = _system(command)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 127 and not os.path.exists("/bin/sh"):
        os.write(2, f"{NO_PROGRAMS}\n".encode())
    return status


@Replacement
def sendfile(out_fd: int, in_fd: int, offset: int | None, count: int) -> int:
    """Copy bytes between descriptors. The filter refuses the system call, as it refuses splice."""
    try:
        return _sendfile(out_fd, in_fd, offset, count)
    except PermissionError:
        start = os.lseek(in_fd, 0, os.SEEK_CUR) if offset is None else offset
    written = os.write(out_fd, os.pread(in_fd, min(count, _MAX_COPIED_BYTES), start))
    if offset is None:
        os.lseek(in_fd, start + written, os.SEEK_SET)
    return written


@Replacement
def memfd_create(name: Any, flags: int = 1) -> int:
    """Create a file without a name. The filter refuses the system call, because no limit of a call bounds such memory,
    so the file is in the scratch directory, which `disk_mb` bounds. It cannot be sealed."""
    assert _memfd_create is not None
    try:
        return int(_memfd_create(name, flags))
    except PermissionError:
        if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
            raise
    fd = os.open(os.environ.get("TMPDIR", "/tmp"), os.O_TMPFILE | os.O_RDWR, 0o600)
    os.set_inheritable(fd, not flags & os.MFD_CLOEXEC)
    return fd
