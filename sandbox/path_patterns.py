"""Patterns of relative paths: `*`, `?` and `[...]` within a name. One `**` stands for any number of nested directories.

The rules are those of Python's `glob`: no wildcard matches a "/", or a "." at the start of a name. The guest finds the
files of a pattern by the same rules (`guest/returned_files.py`); `matches` checks the names that come back.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from sandbox.guest.protocol import ANY_DIRECTORIES, PATTERN_CHARACTERS

MAX_PATTERN_BYTES = 255
"""Maximum bytes of a pattern. A name has at most 255 bytes too, so one match takes at most about 255 x 255 steps."""
is_pattern = re.compile(f"[{PATTERN_CHARACTERS}]").search


def matches(path: str, pattern: str) -> bool:
    """Return whether a relative path without empty, `.` or `..` parts matches a pattern."""
    names, parts = path.split("/"), pattern.split("/")
    if ANY_DIRECTORIES in parts:  # replace `**` by one `*` for each directory that it stands for
        at = parts.index(ANY_DIRECTORIES)
        last = parts[at + 1 :] or ["*"]
        parts = [*parts[:at], *["*"] * (len(names) - at - len(last)), *last]
    return len(names) == len(parts) and all(map(_matches_part, names, parts))


def _matches_part(name: str, part: str) -> bool:
    return (name[0] != "." or part[0] == ".") and fnmatchcase(name, part)
