"""Empties folders that hostile code has filled: `empty` in a zygote, or as a program, `scratch_cleanup.py FOLDER...`.

Nobody else can reach into such a folder by then, and whoever empties it is its owner and nobody more. Names are
resolved one at a time, relative to an open folder and without following links; depth costs neither stack nor
descriptors.
"""

from __future__ import annotations

import os
import sys

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def empty(folder: str, most: float = float("inf")) -> bool:
    """Remove all that is in `folder`, which stays. False if that were more than `most` steps. Raises OSError."""
    os.chmod(folder, 0o700)
    here = os.open(folder, _FOLDER)
    within: list = []  # the names of the folders that lead to `here`
    try:
        while True:
            below = None
            with os.scandir(here) as entries:
                for entry in entries:
                    most -= 1
                    if most < 0:
                        return False
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.name, dir_fd=here)
                    elif not is_removed(entry.name, here):
                        below = entry.name
                        break
            if below is not None:
                os.chmod(below, 0o700, dir_fd=here)
                within.append(below)
                here = _move(here, below)
            elif within:
                here = _move(here, "..")
                os.rmdir(within.pop(), dir_fd=here)
            else:
                return True
    finally:
        os.close(here)


def is_removed(folder: str, parent: int | None = None) -> bool:
    """Remove a folder if it is empty, and say whether."""
    try:
        os.rmdir(folder, dir_fd=parent)
    except OSError:
        return False
    return True


def _move(here: int, name: str) -> int:
    there = os.open(name, _FOLDER, dir_fd=here)
    os.close(here)
    return there


if __name__ == "__main__":
    for path in sys.argv[1:]:
        empty(path)
