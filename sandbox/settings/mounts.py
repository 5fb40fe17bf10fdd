"""The table `[mounts]` in the TOML file of `serve`: directories of the host that every call can read.

    [mounts]
    "/data" = "datasets"        path that calls see -> path on the host, relative to the TOML file

`jail.check_mounts` checks the directories on the machine that runs the calls.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sandbox.errors import ConfigError

_RESERVED_NAMES = "bin dev etc guest lib lib32 lib64 libx32 proc python run sbin sys tmp usr"
RESERVED = tuple(f"/{name}" for name in _RESERVED_NAMES.split())
"""Directories that a mount may not replace: the jail has them itself, or the kernel or the loader uses them."""
_PATH = re.compile(r"(/[\w.@+-]+)+", re.ASCII)


def read_mounts(table: Any, file: Path) -> tuple[tuple[str, str], ...]:
    """Return pairs of a path that calls see and an absolute path on the host. Raises `ConfigError`."""
    if not isinstance(table, dict):
        raise ConfigError(
            f'{file}: mounts: expected a table of paths, such as \'"/data" = "datasets"\', got {table!r:.80}'
        )
    for path, source in table.items():
        where = f"{file}: mounts.{path!r:.80}"
        if not _PATH.fullmatch(path) or os.path.normpath(path) != path:
            raise ConfigError(f"{where}: expected an absolute path of letters, digits and . _ @ + -, without . and ..")
        if f"/{path.split('/')[1]}" in RESERVED:
            raise ConfigError(f"{where}: expected a path outside {', '.join(RESERVED)}, which the jail needs")
        if outer := next((other for other in table if path.startswith(f"{other}/")), None):
            raise ConfigError(f"{where}: expected a path that is not below another mount, {outer}")
        if not isinstance(source, str) or not source or "\0" in source:
            raise ConfigError(f"{where}: expected the path of a directory on the host, got {source!r:.80}")
    return tuple((path, os.path.realpath(file.parent / source)) for path, source in table.items())
