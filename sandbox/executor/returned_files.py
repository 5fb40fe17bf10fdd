"""Reads the files that the process of a call returned. The process can return any bytes, so each name is checked.

`guest/protocol.py` has the layout: a list of entries, each for a path or a pattern of `return_files`, or for a figure.
A file is returned once only. So if each file that matches a pattern is already in an earlier entry, the pattern gets
one entry without content, with the path of one of these files. This entry shows that the pattern has a match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sandbox.errors import InvalidCall
from sandbox.fields import check_path
from sandbox.guest.protocol import ENTRY, FIGURE_INDEX, MAX_FIGURES, MAX_FILES, MAX_PATH_BYTES
from sandbox.path_patterns import is_pattern, matches

_MAX_ENTRIES = 2 * MAX_FILES + MAX_FIGURES
"""Maximum number of entries that are read. If the code has not changed the guest, the guest sends at most `MAX_FILES`
entries with a file, at most `MAX_FIGURES` with a figure, and one without content for each of at most `MAX_FILES`
patterns."""


class ReturnedFiles(NamedTuple):
    files: dict[str, bytes]
    """Contents by path."""
    missing: list[str]
    """The paths and patterns of `return_files` for which no file was returned."""


def parse(data: bytes, return_files: Sequence[str], *, figures: bool) -> ReturnedFiles:
    """Return the files in `data`, up to the first malformed entry. The entry of a pattern is ignored if its path does
    not match the pattern. Never raises."""
    if not return_files and not figures:
        return ReturnedFiles({}, [])
    files: dict[str, bytes] = {}
    images: list[bytes] = []
    found = set[str]()
    start = 0
    for _ in range(_MAX_ENTRIES):  # bounds the work, because `data` may consist of empty entries
        if len(data) - start < ENTRY.size:
            break
        index, size = ENTRY.unpack_from(data, start)
        start += ENTRY.size
        if size > len(data) - start:
            break
        end = start + size
        if index < len(return_files):
            _add(files, found, return_files[index], data, start, end)
        elif index == FIGURE_INDEX and figures:
            images.append(data[start:end])
        else:
            break
        start = end
    missing = [path for path in dict.fromkeys(return_files) if path not in found]  # each path once, in order
    return ReturnedFiles(files | _named(images[:MAX_FIGURES], {*files, *return_files}), missing)


def _add(files: dict[str, bytes], found: set[str], requested: str, data: bytes, start: int, end: int) -> None:
    """Add the entry `data[start:end]` for `requested`, a path or pattern of `return_files`. Ignore the entry if its
    path does not match."""
    path = requested
    if is_pattern(requested):
        name_end = data.find(b"\0", start, min(end, start + MAX_PATH_BYTES + 1))
        # Without a NUL `name_end` is -1, so the path is empty, which is not allowed.
        path = data[start : max(name_end, start)].decode("utf-8", "surrogateescape")
        if not _is_clean(path) or not matches(path, requested):
            return
        start = name_end + 1
    if path not in files:
        if len(files) == MAX_FILES:
            return
        files[path] = data[start:end]
    found.add(requested)


def _is_clean(path: str) -> bool:
    try:
        return bool(check_path(path, ""))
    except InvalidCall:
        return False


def _named(images: list[bytes], used_names: set[str]) -> dict[str, bytes]:
    """Return the images as figure-1.png, figure-2.png and so on. Names in `used_names` are skipped."""
    # At most `len(used_names)` names are skipped, so this many names are enough.
    names = (f"figure-{number}.png" for number in range(1, len(images) + len(used_names) + 1))
    return dict(zip((name for name in names if name not in used_names), images, strict=False))
