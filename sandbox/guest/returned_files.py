"""Returns files of a call's working directory, and its open figures, through descriptor 4.

`protocol` has the layout. A regular file is returned whole or not at all, and only once. If earlier entries have all
files that match a pattern, the pattern gets one entry with the path of one of these files and without content. This
entry shows that the pattern has a match. The rules for patterns are those of `sandbox/path_patterns.py`.

This module runs after the code of the call, in the same process, so the code can change it. The executor therefore
trusts no entry. The bounds in this module only save the call from useless work.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import stat
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import originals
import output_files
from protocol import (
    ANY_DIRECTORIES,
    ENTRY,
    FIGURE_INDEX,
    MAX_FIGURES,
    MAX_FILES,
    MAX_PATH_BYTES,
    PATTERN_CHARACTERS,
    SCRIPT,
)

originals.use_builtins(globals())  # the code of the call may have replaced builtins
_modules = sys.modules
FILES_FD = 4
"""Descriptor to which a call writes its returned files."""
MAX_SCANNED_ENTRIES = 20_000
"""Directory entries that the patterns of one call may visit together."""
_is_pattern = re.compile(f"[{PATTERN_CHARACTERS}]").search


class FileWriter:
    """Writes entries, at most `limit_bytes` together."""

    def __init__(self, working_dir: str, limit_bytes: int) -> None:
        self._working_dir = working_dir
        self._limit_bytes = limit_bytes
        self._images: list = []
        self._returned: set = set()
        self._scans_left = MAX_SCANNED_ENTRIES
        self._is_truncated = False
        self.script = b""
        """Content of `SCRIPT`, the file with the code of the call, when the runner wrote it. Empty if the runner wrote
        no such file. A pattern returns the file only if the code has changed it."""

    def render_figures(self) -> str:
        """Render the open figures of pyplot, and return the messages of those that failed. Do nothing if the code has
        not imported pyplot."""
        pyplot: Any = _modules.get("matplotlib.pyplot")
        numbers, failures = [], ""
        if pyplot is not None:
            try:
                numbers = list(pyplot.get_fignums())
            except Exception:  # the code may have replaced pyplot by anything
                numbers = []
        self._is_truncated = len(numbers) > MAX_FIGURES
        for number in numbers[:MAX_FIGURES]:
            try:
                self._images.append(originals.call(_render, pyplot.figure(number)))
            except BaseException as error:
                failures += f"figure {number} was not rendered: {type(error).__qualname__}: {error}\n"
        return failures

    def send(self, return_files: list) -> bool:
        """Write the files of all paths, then the files of all patterns, then the figures. Return whether a file or a
        figure was left out, for example because it is too large."""
        try:
            originals.call(self._send_all, return_files)
        except Exception:  # no memory is left, for example; the call's report is still sent
            self._is_truncated = True
        return self._is_truncated

    def _send_all(self, return_files: list) -> None:
        """Write all entries, from the start of the file on. `originals.call` runs this again after an exception."""
        os.lseek(FILES_FD, 0, os.SEEK_SET)
        self._returned, self._scans_left = set(), MAX_SCANNED_ENTRIES
        for index, path in enumerate(return_files):
            if not _is_pattern(path) and path not in self._returned:
                self._add_file(index, path, b"")
        for index, pattern in enumerate(return_files):
            if _is_pattern(pattern):
                self._add_matches(index, pattern)
        for image in self._images:
            self._add(FIGURE_INDEX, b"", image)

    def _add_matches(self, index: int, pattern: str) -> None:
        is_matched, returned_before = False, ""
        for path in self._find(pattern.split("/")):
            if path == SCRIPT and self._is_unchanged_script():
                continue
            if path in self._returned:
                returned_before = path
            elif len(self._returned) == MAX_FILES:
                self._is_truncated = True
                break
            elif self._add_file(index, path, os.fsencode(path) + b"\0"):
                is_matched = True
        if returned_before and not is_matched:
            self._add(index, os.fsencode(returned_before) + b"\0", b"")

    def _is_unchanged_script(self) -> bool:
        try:
            with open(os.path.join(self._working_dir, SCRIPT), "rb") as file:
                return bool(self.script) and file.read(len(self.script) + 1) == self.script
        except OSError:
            return False

    def _add_file(self, index: int, path: str, prefix: bytes) -> bool:
        """Write the entry of a file. Return False if it is not a regular file, cannot be read or does not fit."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(os.path.join(self._working_dir, path), flags)
        except OSError:
            return False
        status = os.fstat(fd)  # before `open`, which would raise an error for a directory
        if not stat.S_ISREG(status.st_mode) or not self._has_space(len(prefix) + status.st_size):
            os.close(fd)
            return False
        with open(fd, "rb") as file:
            self._add(index, prefix, file.read(status.st_size))
        self._returned.add(path)
        return True

    def _add(self, index: int, prefix: bytes, content: bytes) -> None:
        size = len(prefix) + len(content)
        if self._has_space(size):
            output_files.write_all(FILES_FD, ENTRY.pack(index, size) + prefix)
            output_files.write_all(FILES_FD, content)

    def _has_space(self, size: int) -> bool:
        has_space = size <= self._limit_bytes - os.lseek(FILES_FD, 0, os.SEEK_CUR) - ENTRY.size
        self._is_truncated |= not has_space
        return has_space

    def _find(self, parts: list) -> Iterator[str]:
        """Yield the paths that match, sorted within each directory. Links are not followed."""
        stack = [("", parts)]  # directories, each with the parts that a path in it has to match
        while stack:
            directory, (part, *rest) = stack.pop()
            if part == ANY_DIRECTORIES:
                subdirectories = self._children(directory, part, directories=True)
                deeper = [(path + "/", [ANY_DIRECTORIES, *rest]) for path in subdirectories]
                # The last item is popped first. `**` at the end of a pattern matches as `**/*` does.
                stack += [*reversed(deeper), (directory, rest or ["*"])]
            elif not rest:
                yield from self._children(directory, part, directories=False)
            else:
                paths = self._children(directory, part, directories=True)
                stack += [(path + "/", rest) for path in reversed(paths)]

    def _children(self, directory: str, part: str, *, directories: bool) -> list:
        """Return the paths of the directories, or else of the regular files, whose names match."""
        if not _is_pattern(part):  # one stat of this name; a scan would count all entries of its directory
            is_directory = self._is_directory(directory + part)
            return [directory + part] if is_directory or not directories else []
        children = []
        for entry in self._scan(directory):
            is_wanted = entry.is_dir(follow_symlinks=False) if directories else entry.is_file(follow_symlinks=False)
            if is_wanted and _matches(entry.name, part):
                children.append(directory + entry.name)
        # `sandbox.fields` has the same rules for the paths of a call's files.
        returnable = [path for path in children if path.isprintable() and len(os.fsencode(path)) <= MAX_PATH_BYTES]
        self._is_truncated |= len(returnable) < len(children)
        return returnable

    def _scan(self, directory: str) -> list:
        """Return the entries of a directory, sorted by name. Once `MAX_SCANNED_ENTRIES` have been visited, further
        entries are left out."""
        try:
            with os.scandir(os.path.join(self._working_dir, directory)) as scan:
                entries = list(itertools.islice(scan, self._scans_left + 1))
        except OSError:
            return []
        if len(entries) > self._scans_left:
            self._is_truncated = True
            entries.pop()
        self._scans_left -= len(entries)
        return sorted(entries, key=lambda entry: entry.name)

    def _is_directory(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(os.lstat(os.path.join(self._working_dir, path)).st_mode)
        except OSError:
            return False


def close_figures() -> None:
    """Close all figures of pyplot. Do nothing if the code has not imported it or has replaced it."""
    with contextlib.suppress(Exception):
        _modules["matplotlib.pyplot"].close("all")


def _render(figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _matches(name: str, part: str) -> bool:
    return (name[0] != "." or part[0] == ".") and fnmatchcase(name, part)
