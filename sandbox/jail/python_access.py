"""Makes a Python reachable for users who may not enter a directory above it, such as root's home.

In a new mount namespace, an empty file system that all users may enter is mounted over such a closed directory. The
files of the Python are bind-mounted below it at their old paths:

    /root                  tmpfs, mode 755
    /root/python/bin/...   bind mounts of the host's files

No other file of the directory is reachable. Nothing is copied, because the guest runtime has 413 MB, and root's runtime
is in root's home. Level `landlock` needs this, since its calls see the host's paths. Requires CAP_SYS_ADMIN.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from sandbox.jail import kernel
from sandbox.jail.interpreter import Interpreter


def paths_used_by(python: Interpreter) -> list[str]:
    """Return all paths that a process of this Python opens, including the symbolic links that lead to its binary."""
    environment = os.path.dirname(os.path.dirname(python.executable))
    files = [f"{environment}/pyvenv.cfg"] if os.path.isfile(f"{environment}/pyvenv.cfg") else []
    sources = (source for source, _ in (*python.mounts, *python.libraries))
    return list(dict.fromkeys((*_link_dirs(python.executable), python.binary, *files, *sources)))


def closed_dirs(paths: Iterable[str]) -> list[str]:
    """Return the topmost directories above `paths` that other users may not enter."""
    topmost = (next(_closed_parents(path), None) for path in _with_real_paths(paths))
    return list(dict.fromkeys(path for path in topmost if path is not None))


def make_reachable(python: Interpreter) -> None:
    """Cover the closed directories above this Python, for this process and its children. Raises `OSError`."""
    paths = paths_used_by(python)
    covered = closed_dirs(paths)
    if not covered:
        return
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)  # first: no mount may reach the host
    inside = [path for path in sorted(_with_real_paths(paths)) if any(path.startswith(f"{top}/") for top in covered)]
    sources = [(path, os.path.isdir(path), os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in inside]
    for top in covered:
        kernel.mount("shared", top, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    for path, is_dir, source in sources:
        if not os.path.exists(path):  # it exists if a directory above it has been mounted already
            os.makedirs(path if is_dir else os.path.dirname(path), mode=0o755, exist_ok=True)
            if not is_dir:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
            kernel.mount(f"/proc/self/fd/{source}", path, flags=kernel.MS_BIND)
        os.close(source)


def _with_real_paths(paths: Iterable[str]) -> dict[str, None]:
    """Return each path as it is and with its links resolved, in order and without repetition."""
    return dict.fromkeys(name for path in paths for name in (os.path.abspath(path), os.path.realpath(path)))


def _link_dirs(path: str) -> Iterator[str]:
    """Yield the directories of `path` and of each link between it and its final target."""
    while os.path.islink(path):
        yield os.path.dirname(path)
        path = os.path.abspath(os.path.join(os.path.dirname(path), os.readlink(path)))
    yield os.path.dirname(path)


def _closed_parents(path: str) -> Iterator[str]:
    """Yield the directories above `path` that other users may not enter, from the root down."""
    parents = reversed(Path(path).parents)
    return (str(parent) for parent in parents if parent.is_dir() and not parent.stat().st_mode & 0o001)
