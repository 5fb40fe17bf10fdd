"""Empties directories whose content is hostile. Used by zygotes, and as a program: `scratch_cleanup.py DIRECTORY ...`.

No process of the call is alive when its directory is emptied. The process that empties the directory has only the
rights of the directory's owner. Names are resolved one at a time, relative to an open directory and without following
links. Deep trees need no more stack and no more descriptors than flat ones.
"""

from __future__ import annotations

import os
import sys
import time

_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def empty(directory: str, max_s: float = float("inf")) -> bool:
    """Remove the content of a directory and keep the directory. Raises OSError.

    Return False, with part of the content removed, if that takes longer than `max_s` seconds.
    """
    deadline = time.monotonic() + max_s
    os.chmod(directory, 0o700)
    fd = os.open(directory, _OPEN_FLAGS)
    path: list = []  # names of the directories that lead from `directory` to `fd`
    try:
        while True:
            subdirectory = None
            with os.scandir(fd) as entries:
                for entry in entries:
                    if time.monotonic() > deadline:
                        return False
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.name, dir_fd=fd)
                    elif not try_rmdir(entry.name, fd):
                        subdirectory = entry.name
                        break
            if subdirectory is not None:
                os.chmod(subdirectory, 0o700, dir_fd=fd)
                path.append(subdirectory)
                fd = _change_to(fd, subdirectory)
            elif path:
                fd = _change_to(fd, "..")
                os.rmdir(path.pop(), dir_fd=fd)
            else:
                return True
    finally:
        os.close(fd)


def try_rmdir(directory: str, parent_fd: int | None = None) -> bool:
    """Remove a directory if it is empty. Return whether it was."""
    try:
        os.rmdir(directory, dir_fd=parent_fd)
    except OSError:
        return False
    return True


def _change_to(fd: int, name: str) -> int:
    new_fd = os.open(name, _OPEN_FLAGS, dir_fd=fd)
    os.close(fd)
    return new_fd


if __name__ == "__main__":
    for path in sys.argv[1:]:
        empty(path)
