"""Reads and restores the files of a session's directory, for its keeper (`session.py`).

Each state of a session has the files that its cell left behind: regular files, directories and symbolic links. Sockets,
pipes and extended attributes are not kept. Files with the same content in successive states share one copy.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple


class Entry(NamedTuple):
    """A file, a directory or a symbolic link."""

    mode: int
    """Its type and permissions (inode(7))."""
    mtime_ns: int
    content: bytes
    """Content of a file, target of a link, empty for a directory."""


class SessionFiles:
    """The directory of a session. Its files are read and written with the uid of its owner, so that they belong to the
    owner, and because the keeper may have no right to files of other users."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._owner = os.stat(directory).st_uid

    def read(self, known: dict[str, Entry] | None = None) -> dict[str, Entry]:
        """Return all entries by path, a directory before its entries. Contents that equal those in `known` are not
        copied. Raises `OSError`."""
        entries: dict[str, Entry] = {}
        with self._as_owner():
            for path, status in _walk(self._directory):
                content = b""
                if stat.S_ISREG(status.st_mode):
                    content = _read(path, status.st_mode)
                elif stat.S_ISLNK(status.st_mode):
                    content = os.fsencode(os.readlink(path))
                elif not stat.S_ISDIR(status.st_mode):
                    continue
                before = known.get(path) if known else None
                if before is not None and before.content == content:
                    content = before.content
                entries[path] = Entry(status.st_mode, status.st_mtime_ns, content)
        return entries

    def restore(self, entries: dict[str, Entry]) -> None:
        """Make the directory contain `entries` and nothing else. A file whose content has changed keeps its inode, so
        that open descriptors still refer to it. Raises `OSError`."""
        with self._as_owner():
            for path, status in reversed(_walk(self._directory)):
                wanted = entries.get(path)
                if wanted is None or stat.S_IFMT(wanted.mode) != stat.S_IFMT(status.st_mode):
                    os.rmdir(path) if stat.S_ISDIR(status.st_mode) else os.unlink(path)
            for path, entry in entries.items():
                if stat.S_ISLNK(entry.mode):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                    os.symlink(entry.content, os.fsencode(path))
                elif stat.S_ISDIR(entry.mode):
                    os.makedirs(path, exist_ok=True)
                else:
                    _write(path, entry.content)
            for path, entry in reversed(entries.items()):  # a directory last, because its entries change its time
                os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)
                if not stat.S_ISLNK(entry.mode):
                    os.chmod(path, stat.S_IMODE(entry.mode))

    @contextlib.contextmanager
    def _as_owner(self) -> Iterator[None]:
        own = os.geteuid()
        if own == self._owner:
            yield
            return
        os.seteuid(self._owner)
        try:
            yield
        finally:
            os.seteuid(own)


def _walk(directory: str) -> list[tuple[str, os.stat_result]]:
    """Return path and status of each entry below a directory, a directory before its entries. Gives the owner all
    rights to directories that lack them, until the files are restored."""
    found = []
    with os.scandir(directory) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        status = entry.stat(follow_symlinks=False)
        found.append((entry.path, status))
        if stat.S_ISDIR(status.st_mode):
            if status.st_mode & 0o700 != 0o700:
                os.chmod(entry.path, status.st_mode & 0o777 | 0o700)
            found += _walk(entry.path)
    return found


def _read(path: str, mode: int) -> bytes:
    is_readable = mode & 0o400
    if not is_readable:
        os.chmod(path, 0o600)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        content = file.read()
    if not is_readable:
        os.chmod(path, stat.S_IMODE(mode))
    return content


def _write(path: str, content: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.chmod(path, 0o600)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b") as file:
        if file.read() != content:
            file.seek(0)
            file.truncate()
            file.write(content)
