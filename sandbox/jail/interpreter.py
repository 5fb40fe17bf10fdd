"""The guest's Python: its files on this machine, and the path of each of them in a jail.

In the jail, Python is in /python and finds its library by its own landmark search (bin/python3, then lib/pythonX.Y). It
needs no PYTHONHOME, and a Python that a call starts works with an empty environment. Packages are mounted where the
base interpreter looks for them. If there is no directory to mount on, PYTHONPATH names the packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.errors import ConfigError
from sandbox.jail.shared_libraries import library_closure

PYTHON_DIR_IN_JAIL = "/python"
MIN_VERSION = (3, 9)
PACKAGE_DIRS = ("site-packages", "dist-packages")
SKIPPED_MODULE_PREFIXES = ("_tkinter.", "nis.")
"""Extension modules whose libraries are left out: they are large, and need a display or a network."""

_QUERY = """
import json, os, site, sys, sysconfig
dynload = [p for p in sys.path if os.path.basename(p) == "lib-dynload"]
print(json.dumps({
    "version": sys.version_info[:3], "base": getattr(sys, "_base_executable", None) or sys.executable,
    "prefix": sys.prefix, "base_prefix": sys.base_prefix, "stdlib": os.path.dirname(os.__file__),
    "dynload": dynload[:1], "sites": site.getsitepackages(),
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python and all its files. Each pair of paths is (path on the host, path in the jail)."""

    executable: str
    """Path on the host as the operator gave it. Levels `landlock` and `none` run it."""
    binary: str
    """Path of the real binary, outside any virtual environment."""
    version: tuple[int, int, int]
    mounts: tuple[tuple[str, str], ...]
    """Directories to mount, in this order: the standard library, then packages. Some packages are mounted inside the
    standard library."""
    masked_paths: tuple[str, ...]
    """Directories in the jail that must be empty: the base interpreter's own packages."""
    libraries: tuple[tuple[str, str], ...]
    """Shared libraries, including the loader."""
    pythonpath: tuple[str, ...] = ()
    """Package directories in the jail that Python does not find by itself."""

    @classmethod
    def find(cls, python: str) -> Interpreter:
        """Locate the files of `python`, a path or a command, by running it (0.2 s). Raises `ConfigError`."""
        python = os.path.abspath(shutil.which(python) or python)
        paths = _query(python)
        version = tuple(paths["version"])
        if version < MIN_VERSION:
            raise ConfigError(
                f"python={python!r}: expected Python {_dotted(MIN_VERSION)} or newer, got {_dotted(version)}; "
                "create a virtual environment with a newer one, and name its bin/python"
            )
        binary = os.path.realpath(paths["base"])
        base = paths if paths["prefix"] == paths["base_prefix"] else _query(binary)
        mounts, masked_paths, pythonpath = _plan_mounts(paths, base)
        return cls(
            executable=python,
            binary=binary,
            version=(version[0], version[1], version[2]),
            mounts=mounts,
            masked_paths=masked_paths,
            libraries=_libraries(binary, [source for source, _ in mounts]),
            pythonpath=pythonpath,
        )

    @classmethod
    def decode(cls, fields: dict[str, Any]) -> Interpreter:
        """Restore an interpreter from the JSON of its `dataclasses.asdict`, in which tuples have become lists."""
        pairs = {name: tuple(map(tuple, fields[name])) for name in ("mounts", "libraries")}
        flat = {name: tuple(fields[name]) for name in ("version", "masked_paths", "pythonpath")}
        return cls(**{**fields, **pairs, **flat})


def _query(python: str) -> dict[str, Any]:
    """Run `_QUERY` in the interpreter, isolated from this process's environment, and return what it prints."""
    try:
        run = subprocess.run(
            [python, "-I", "-c", _QUERY], env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"python={python!r}: expected a Python that starts, got {error}; check the path") from None
    try:
        paths = json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = run.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {run.returncode}"]
        raise ConfigError(
            f"python={python!r}: expected Python {_dotted(MIN_VERSION)} or newer, but it failed with {last[0][:200]!r}"
        ) from None
    if not isinstance(paths, dict):
        raise ConfigError(f"python={python!r}: expected a Python that accepts -I -c, got {str(paths)[:200]!r}")
    return paths


def _plan_mounts(
    paths: dict[str, Any], base: dict[str, Any]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...], tuple[str, ...]]:
    """Return the fields (mounts, masked_paths, pythonpath).

    `paths` is the result of `_query` for the operator's Python, and `base` for its base interpreter. A directory of
    packages gets one of these places in the jail, the first that is free:

    1. the same place as on the host
    2. a place where the base interpreter looks for packages
    3. a directory of its own, which PYTHONPATH names
    """
    prefix = base["base_prefix"]
    stdlib = os.path.realpath(base["stdlib"])
    stdlib_in_jail = _path_in_jail(base["stdlib"], prefix)
    mounts = [(stdlib, stdlib_in_jail)]
    for dynload in base["dynload"]:
        if not os.path.realpath(dynload).startswith(stdlib + "/"):  # as on some Debian and Fedora systems
            mounts.append((os.path.realpath(dynload), _path_in_jail(dynload, prefix)))

    def can_mount(target: str) -> bool:
        # The standard library is read-only. A directory in it can be mounted on only if it exists.
        relative = os.path.relpath(target, stdlib_in_jail)
        return relative.startswith("..") or os.path.isdir(os.path.join(stdlib, relative))

    free_targets = [target for path in base["sites"] if can_mount(target := _path_in_jail(path, prefix))]
    used_targets = set()
    pythonpath: list[str] = []
    for source in dict.fromkeys(os.path.realpath(path) for path in paths["sites"] if os.path.isdir(path)):
        if (same_path := _path_in_jail(source, prefix)) in free_targets:
            free_targets.remove(same_path)
            target = same_path
        elif free_targets:
            target = free_targets.pop(0)
        else:
            target = f"{PYTHON_DIR_IN_JAIL}/packages{len(pythonpath)}"
            pythonpath.append(target)
        used_targets.add(target)
        path_in_stdlib = os.path.join(stdlib, os.path.relpath(target, stdlib_in_jail))
        if source != path_in_stdlib:  # the mount of the standard library contains the directory otherwise
            mounts.append((source, target))
    packages = (f"{stdlib_in_jail}/{name}" for name in PACKAGE_DIRS)
    masked_paths = tuple(path for path in packages if can_mount(path) and path not in used_targets)
    return tuple(mounts), masked_paths, tuple(pythonpath)


def _path_in_jail(path: str, prefix: str) -> str:
    """Return the path in the jail of a host path, which usually lies under the interpreter's prefix."""
    relative = os.path.relpath(path, prefix)
    if relative.startswith(".."):
        relative = f"lib/{os.path.basename(path)}"
    return f"{PYTHON_DIR_IN_JAIL}/{relative}"


def _libraries(binary: str, mounted_dirs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return all shared libraries. In the jail they lie in one directory, where the loader finds libc by default."""
    package_dirs = [os.path.join(directory, name) for directory in mounted_dirs for name in PACKAGE_DIRS]
    existing_dirs = [path for path in package_dirs if os.path.isdir(path)]
    directories = list(dict.fromkeys((*mounted_dirs, *existing_dirs)))  # each once
    modules = [path for directory in directories for path in _shared_objects(directory)]
    loader, libraries = library_closure(binary, modules, directories)
    libc = libraries.get("libc.so.6") or loader  # the loader of musl is also its libc
    if loader is None or libc is None:
        return ()  # a static interpreter loads no library
    libc_dir = os.path.dirname(libc)
    names = sorted(name for name in libraries if name != os.path.basename(loader))
    return ((os.path.realpath(loader), loader), *((libraries[name], f"{libc_dir}/{name}") for name in names))


def _shared_objects(searched_dir: str) -> Iterator[str]:
    for directory, subdirs, names in os.walk(searched_dir):
        subdirs[:] = [name for name in subdirs if name not in PACKAGE_DIRS]  # `_libraries` passes these separately
        for name in names:
            if (name.endswith(".so") or ".so." in name) and not name.startswith(SKIPPED_MODULE_PREFIXES):
                yield os.path.join(directory, name)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
