"""Makes a Python that lies in a private folder, such as root's home, reachable by users who may not enter that folder.

In a mount namespace of its own, an empty file system that all may enter covers the private folder, and on it what makes
up the Python is mounted where it was. Nothing is copied, and nothing else of the folder is there any more. It takes
CAP_SYS_ADMIN.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from sandbox.jail import kernel
from sandbox.jail.interpreter import Interpreter


def used_paths(python: Interpreter) -> list[str]:
    """All that a process of this Python opens, links on the way to its binary included."""
    around = os.path.dirname(os.path.dirname(python.executable))
    files = [f"{around}/pyvenv.cfg"] if os.path.isfile(f"{around}/pyvenv.cfg") else []
    sources = (source for source, _ in (*python.mounts, *python.libraries))
    return list(dict.fromkeys((*_links(python.executable), python.binary, *files, *sources)))


def private_folders(paths: Iterable[str]) -> list[str]:
    """The topmost folders on the way to `paths` that only some users may pass."""
    ways = dict.fromkeys(way for path in paths for way in (os.path.abspath(path), os.path.realpath(path)))
    tops = (next(_closed(way), None) for way in ways)
    return list(dict.fromkeys(top for top in tops if top is not None))


def share(python: Interpreter) -> None:
    """Do it, for this process and its children; nothing where no folder is private. Raises `OSError`."""
    paths = used_paths(python)
    covered = private_folders(paths)
    if not covered:
        return
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)  # first of all: the host is to see none of it
    ways = {way for path in paths for way in (os.path.abspath(path), os.path.realpath(path))}
    inside = [way for way in sorted(ways) if any(way.startswith(f"{folder}/") for folder in covered)]
    sources = [(way, os.path.isdir(way), os.open(way, os.O_PATH | os.O_CLOEXEC)) for way in inside]
    for folder in covered:
        kernel.mount("shared", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    for way, is_folder, source in sources:
        if not os.path.exists(way):  # else it is in a folder that is there by now
            os.makedirs(way if is_folder else os.path.dirname(way), mode=0o755, exist_ok=True)
            if not is_folder:
                os.close(os.open(way, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
            kernel.mount(f"/proc/self/fd/{source}", way, flags=kernel.MS_BIND)
        os.close(source)


def _links(path: str) -> Iterator[str]:
    """The folders of `path` and of every link on the way to what it names."""
    while os.path.islink(path):
        yield os.path.dirname(path)
        path = os.path.abspath(os.path.join(os.path.dirname(path), os.readlink(path)))
    yield os.path.dirname(path)


def _closed(path: str) -> Iterator[str]:
    """From the root down, the folders above `path` that only some users may pass."""
    return (str(way) for way in reversed(Path(path).parents) if way.is_dir() and not way.stat().st_mode & 0o001)
