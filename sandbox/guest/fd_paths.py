"""The paths of a process's own descriptors: `/dev/stdin`, `/dev/stdout`, `/dev/stderr`, `/dev/fd/N`, `/proc/self/fd/N`.

On Linux these paths are links into /proc, which a jail does not have. `install` makes `open` and `os.open` duplicate
the descriptor instead. So the new file shares the position of the descriptor, as it does for a pipe or a terminal.
`install` is called only for programs that name such a path, because it makes `open` slower. Other paths are opened as
usual.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
from collections.abc import Callable
from typing import Any

from replacements import Replacement

_STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}
_PATH = re.compile(r"/dev/(stdin|stdout|stderr)|(?:/dev|/proc/self)/fd/(\d{1,9})")
_NAMES = (b"/dev/std", b"/dev/fd", b"/proc/self/fd")
_open, _os_open = io.open, os.open


def are_in(*texts: bytes) -> bool:
    """Return whether the sources or arguments of a program may name such a path."""
    return any(name in text for text in texts for name in _NAMES)


def install() -> None:
    """Replace `open` and `os.open` in this process."""
    builtins.open = io.open = open
    os.open = os_open
    os.supports_dir_fd.add(os_open)


@Replacement
def open(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Callable[[str, int], int] | None = None,
) -> Any:
    """Open a file as the built-in function does."""
    if opener is None and _descriptor(file) is not None:
        opener = _duplicate
        if isinstance(mode, str):
            mode = mode.replace("a", "w")  # append mode moves to the end, where an output file is full
    return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)


@Replacement
def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    """Open a file as `os.open` does."""
    if _descriptor(path) is not None:
        return _duplicate(path, flags)
    return _os_open(path, flags, mode, dir_fd=dir_fd)


def _descriptor(path: Any) -> int | None:
    """Return the descriptor that a path names, or None."""
    if isinstance(path, int):
        return None
    try:
        match = _PATH.fullmatch(os.fsdecode(path))
    except TypeError:
        return None
    return None if match is None else _STREAMS[match[1]] if match[1] else int(match[2])


def _duplicate(path: Any, _flags: int) -> int:
    fd = _descriptor(path)
    assert fd is not None
    try:
        return os.dup(fd)
    except OSError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
