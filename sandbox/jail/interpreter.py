"""The guest's Python: which files make it up on this machine, and where each of them goes inside a jail.

Inside, Python lives in /python and finds its library by its own landmark search (bin/python3, then lib/pythonX.Y), so
it needs no PYTHONHOME and a call's own subprocess works with an empty environment. Packages go where the base
interpreter looks for them by itself; where it has no such folder to mount on, PYTHONPATH (`pythonpath`) names them.
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
from sandbox.jail import elf

PYTHON_DIR_IN_JAIL = "/python"
OLDEST = (3, 9)
PACKAGES = ("site-packages", "dist-packages")
# Tk and NIS: of no use without a display or a network, and the largest libraries of all.
SKIPPED_LIBRARIES = ("_tkinter.", "nis.")

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
    """A Python and everything it needs. Paths come in pairs: on the host, and inside the jail."""

    executable: str
    """The host's path as the operator gave it; what level `none` runs."""
    binary: str
    """The real binary behind it, outside any virtual environment."""
    version: tuple[int, int, int]
    mounts: tuple[tuple[str, str], ...]
    """Folders to mount, in order: the standard library, then packages (some inside it)."""
    masked_paths: tuple[str, ...]
    """Folders inside that must look empty: the base interpreter's own packages."""
    libraries: tuple[tuple[str, str], ...]
    """Shared libraries, the loader among them."""
    pythonpath: tuple[str, ...] = ()
    """Package folders inside that Python does not find by itself."""

    @classmethod
    def find(cls, python: str) -> Interpreter:
        """Ask `python` where its files are. Runs it once or twice, about 0.2 s. Raises `ConfigError`."""
        python = os.path.abspath(shutil.which(python) or python)
        said = _query(python)
        version = tuple(said["version"])
        if version < OLDEST:
            raise ConfigError(
                f"python={python!r}: expected Python {_dots(OLDEST)} or newer, got {_dots(version)}; "
                "make a virtual environment with a newer one, and name its bin/python"
            )
        binary = os.path.realpath(said["base"])
        base = said if said["prefix"] == said["base_prefix"] else _query(binary)
        mounts, masked_paths, pythonpath = _plan_mounts(said, base)
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
    def decode(cls, raw: dict[str, Any]) -> Interpreter:
        """The inverse of `dataclasses.asdict` after a trip through JSON."""
        pairs = {name: tuple(map(tuple, raw[name])) for name in ("mounts", "libraries")}
        plain = {name: tuple(raw[name]) for name in ("version", "masked_paths", "pythonpath")}
        return cls(**{**raw, **pairs, **plain})


def _query(python: str) -> dict[str, Any]:
    """Run `_ASK` in the interpreter, isolated from our environment, and read its answer."""
    try:
        run = subprocess.run(
            [python, "-I", "-c", _QUERY], env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as why:
        raise ConfigError(f"python={python!r}: expected a Python that starts, got {why}; check the path") from None
    try:
        said = json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = run.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {run.returncode}"]
        raise ConfigError(
            f"python={python!r}: expected Python {_dots(OLDEST)} or newer, but it failed with {last[0][:200]!r}"
        ) from None
    if not isinstance(said, dict):
        raise ConfigError(f"python={python!r}: expected a Python that answers -I -c, got {str(said)[:200]!r}")
    return said


def _plan_mounts(
    said: dict[str, Any], base: dict[str, Any]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...], tuple[str, ...]]:
    """Where the library and the packages go: (mounts, masked_paths, pythonpath)."""
    stdlib = os.path.realpath(base["stdlib"])
    library = _path_in_jail(base["stdlib"], base["base_prefix"])
    mounts = [(stdlib, library)]
    for dynload in base["dynload"]:
        if not os.path.realpath(dynload).startswith(stdlib + "/"):  # Debian and Fedora may keep it apart
            mounts.append((os.path.realpath(dynload), _path_in_jail(dynload, base["base_prefix"])))

    def can_mount(target: str) -> bool:
        under = os.path.relpath(target, library)
        return under.startswith("..") or os.path.isdir(os.path.join(stdlib, under))

    free = [target for path in base["sites"] if can_mount(target := _path_in_jail(path, base["base_prefix"]))]
    taken = set()
    pythonpath: list[str] = []
    for source in dict.fromkeys(os.path.realpath(path) for path in said["sites"] if os.path.isdir(path)):
        own = _path_in_jail(source, base["base_prefix"])
        if own in free:
            free.remove(own)
            target = own
        elif free:
            target = free.pop(0)
        else:
            target = f"{PYTHON_DIR_IN_JAIL}/packages{len(pythonpath)}"
            pythonpath.append(target)
        taken.add(target)
        if source != os.path.join(stdlib, os.path.relpath(target, library)):  # else it is there already
            mounts.append((source, target))
    packages = (f"{library}/{name}" for name in PACKAGES)
    masked_paths = tuple(path for path in packages if can_mount(path) and path not in taken)
    return tuple(mounts), masked_paths, tuple(pythonpath)


def _path_in_jail(path: str, prefix: str) -> str:
    """The jail's path for a host path under the interpreter's prefix."""
    relative = os.path.relpath(path, prefix)
    return (
        f"{PYTHON_DIR_IN_JAIL}/{relative}"
        if not relative.startswith("..")
        else f"{PYTHON_DIR_IN_JAIL}/lib/{os.path.basename(path)}"
    )


def _libraries(binary: str, mounts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Every shared library, flat in the folder where this machine's loader finds libc without being told."""
    packages = [path for tree in mounts for name in PACKAGES if os.path.isdir(path := os.path.join(tree, name))]
    modules = [path for tree in dict.fromkeys((*mounts, *packages)) for path in _shared_objects(tree)]
    loader, found = elf.library_closure([binary, *modules], mounts)
    libc = found.get("libc.so.6") or loader
    if loader is None or libc is None:
        return ()  # a static interpreter loads nothing
    home = os.path.dirname(libc)
    flat = {name: (source, f"{home}/{name}") for name, source in found.items() if name != os.path.basename(loader)}
    return ((os.path.realpath(loader), loader), *(flat[name] for name in sorted(flat)))


def _shared_objects(tree: str) -> Iterator[str]:
    for folder, below, names in os.walk(tree):
        below[:] = [name for name in below if name not in PACKAGES]  # they are trees of their own, or masked
        for name in names:
            if (name.endswith(".so") or ".so." in name) and not name.startswith(SKIPPED_LIBRARIES):
                yield os.path.join(folder, name)


def _dots(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
