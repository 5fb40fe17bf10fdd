"""Checks directories of the host that calls may read (`JailSpec.data`). It runs on the machine that runs the calls.

- Levels `nsjail` and `namespaces` mount these directories read-only (`root_fs`).
- Level `landlock` grants the right to read them (`landlock_rules`), and level `none` restricts nothing. At both levels
  a call sees the directories at their paths on the host.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from sandbox.errors import ConfigError
from sandbox.jail.python_access import closed_dirs
from sandbox.jail.spec import HOST_PATH_LEVELS, Level

_ALL_USERS_READ = stat.S_IROTH | stat.S_IXOTH


def check_mounts(mounts: Sequence[tuple[str, str]], level: Level, *, has_uids: bool) -> None:
    """Raise `ConfigError` if a directory cannot be offered to calls at this level.

    `has_uids` is whether calls have uids of their own. Then all users must be able to enter and to list the directory.
    """
    for path, source in mounts:
        where = f"mounts: {path} = {source}"
        if not os.path.isdir(source):
            found = "a file" if os.path.exists(source) else "nothing"
            raise ConfigError(f"{where}: expected a directory on this machine, found {found}")
        if has_uids and os.stat(source).st_mode & _ALL_USERS_READ != _ALL_USERS_READ:
            raise ConfigError(f"{where}: calls run as other users, who cannot read {source}; chmod o+rx {source}")
        if level not in HOST_PATH_LEVELS:
            continue
        if path != source:
            raise ConfigError(
                f"{where}: at isolation level {level} calls see the paths of the host, so both paths have to be equal; "
                f"move the directory to {path}, or use level namespaces"
            )
        if has_uids and (closed := closed_dirs([source])):
            raise ConfigError(f"{where}: calls run as other users, who cannot enter {closed[0]}; chmod o+x {closed[0]}")
