"""Finds the shared libraries that a Python and its extension modules need, by the Python's own loader (ld.so(8), musl).

The loader maps the files and prints the libraries that it has found. It runs no code of these files. If it does not
find a library, the library is left out. The import of a module that needs this library then fails in the jail as it
fails outside.

The loader runs once for each package. A single run does not suffice, because a run finds only one library for each
name, and two packages may have different libraries of the same name. A run takes 2 to 5 ms of CPU time, so one run for
each file would take 0.5 s for the guest runtime.
"""

from __future__ import annotations

import logging
import os
import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from sandbox.errors import ConfigError

log = logging.getLogger(__name__)

OPENED_BY_LIBC = ("libgcc_s.so.1", "libnss_files.so.2")
"""Libraries that glibc opens by itself: libgcc_s when a thread exits, nss_files for passwd before glibc 2.34."""
_WORKING_DIR = "/proc/self/cwd"
"""The loader gets the files of a package by this path. The path that it prints for a library begins with this path if,
and only if, the loader has found the library by $ORIGIN."""
_PT_INTERP = 3


def library_closure(
    program: str, modules: Iterable[str], mounted_dirs: Sequence[str]
) -> tuple[str | None, dict[str, str]]:
    """Return the path of the loader, and name -> host file of all libraries that a program and its extension modules
    need, directly or indirectly. A static program has no loader and no libraries.

    A library that is found by $ORIGIN in one of `mounted_dirs` is left out: the jail contains the whole directory, so
    the loader finds the library in it by the same $ORIGIN. Raises `ConfigError`.
    """
    loader = loader_of(program)
    if loader is None:
        return None, {}
    libraries = _list_libraries(loader, program, "/", OPENED_BY_LIBC)
    prefixes = tuple(os.path.join(directory, "") for directory in mounted_dirs)
    for (mounted_dir, _package), names in _by_package(modules, mounted_dirs).items():
        for name, path in _list_of_modules(loader, program, mounted_dir, names):
            if path.startswith(f"{_WORKING_DIR}/"):
                directory, file = os.path.split(mounted_dir + path.removeprefix(_WORKING_DIR))
                path = os.path.join(os.path.realpath(directory), file)
                if path.startswith(prefixes):
                    continue
            libraries.setdefault(name, path)
    return loader, libraries


def loader_of(program: str) -> str | None:
    """Return the loader that a 64-bit little-endian ELF program names (elf(5), PT_INTERP), or None if it is static."""
    with open(program, "rb") as file:
        header = file.read(64)
        (offset,) = struct.unpack_from("<Q", header, 32)  # e_phoff
        size, count = struct.unpack_from("<HH", header, 54)  # e_phentsize, e_phnum
        file.seek(offset)
        segments = file.read(size * count)
        for start in range(0, len(segments), size):
            kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", segments, start)
            if kind == _PT_INTERP:
                file.seek(offset)
                return os.fsdecode(file.read(length).rstrip(b"\0"))
    return None


def _by_package(modules: Iterable[str], mounted_dirs: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return (mounted directory, package in it) -> paths of the modules, relative to the directory. The package is
    empty for modules that are not in one."""
    packages: dict[tuple[str, str], list[str]] = {}
    for path in modules:
        mounted_dir = max((each for each in mounted_dirs if path.startswith(f"{each}/")), key=len)
        name = path[len(mounted_dir) + 1 :]
        packages.setdefault((mounted_dir, name.rpartition("/")[0].partition("/")[0]), []).append(name)
    return packages


def _list_of_modules(loader: str, program: str, mounted_dir: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, path) of each library that the modules `names` of `mounted_dir` need."""
    files = [f"{_WORKING_DIR}/{name}" for name in names]
    try:
        yield from _list_libraries(loader, program, mounted_dir, files).items()
        return
    except ConfigError as error:  # for example because a file is truncated
        log.info("%s: the loader failed, and is run for each file: %s", mounted_dir, error)
    for name, file in zip(names, files, strict=True):
        try:
            yield from _list_libraries(loader, file, mounted_dir).items()
        except ConfigError as error:
            log.info("%s/%s is left out: %s", mounted_dir, name, error)


def _list_libraries(loader: str, file: str, working_dir: str, preloaded: Sequence[str] = ()) -> dict[str, str]:
    """Return name -> path of all libraries of a file and of the files that are loaded with it, which are paths or names
    of libraries. Raises `ConfigError` if the loader fails."""
    # The variable is glibc's. With its option --list, a library that is not found would be an error.
    command = [loader, *(["--list"] if "musl" in loader else []), file]
    env, null = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_PRELOAD": ":".join(preloaded)}, subprocess.DEVNULL
    try:
        run = subprocess.run(
            command, cwd=working_dir, env=env, stdin=null, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(command)}: expected a list of libraries, got {error}") from None
    if not run.stdout:  # the exit status also tells of a missing library or version, after which there is a list
        problem = os.fsdecode(run.stderr).strip()[:200] or f"exit status {run.returncode}"
        raise ConfigError(f"{' '.join(command)}: expected a list of libraries, got {problem!r}")
    libraries = {}
    for line in os.fsdecode(run.stdout).splitlines():  # NAME => PATH (ADDRESS), or NAME => not found
        name, _, found = line.strip().partition(" => ")
        path = found.rpartition(" (")[0]
        if path and "/" not in name:
            libraries[name] = path
    return libraries
