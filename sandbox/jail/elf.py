"""Finds the shared libraries that ELF files need, as this machine's loader would.

`library_closure` returns all host files without which the given binaries do not load. It reads only dynamic sections
and runs no code. It leaves out a library that it cannot find: the import of a module that needs it fails in the jail as
it does outside.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

OPENED_BY_LIBC = ("libgcc_s.so.1", "libnss_files.so.2")
"""Libraries that glibc opens by itself: libgcc_s when a thread exits, nss_files for passwd before glibc 2.34."""
DEFAULT_DIRS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")

# elf(5)
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 1, 5, 15, 29
_E_MACHINE = {"x86_64": 62, "aarch64": 183}
# glibc: sysdeps/generic/dl-cache.h
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER_BYTES, _CACHE_ENTRY = 48, struct.Struct("<iIIIQ")


@dataclass(frozen=True, slots=True)
class Elf:
    needed: tuple[str, ...]
    """Names of the libraries that the file needs (DT_NEEDED)."""
    search_dirs: tuple[str, ...]
    """Directories to search first (DT_RUNPATH or DT_RPATH)."""
    loader: str | None
    """Path of the loader (PT_INTERP), which only programs have."""


def library_closure(roots: Iterable[str], mounted_dirs: Iterable[str]) -> tuple[str | None, dict[str, str]]:
    """Return the loader's path, and name -> host file of all libraries that `roots` need, directly or indirectly.

    A library that is found by $ORIGIN in one of `mounted_dirs` is left out: the jail contains the whole directory, so
    the loader finds the library in it by the same $ORIGIN.
    """
    cache = _read_loader_cache()
    prefixes = tuple(os.path.join(directory, "") for directory in mounted_dirs)
    libraries: dict[str, str] = {}
    loader: str | None = None
    program_dirs: tuple[str, ...] = ()
    queue = list(roots)
    seen = set(queue)
    while queue:
        path = queue.pop()
        elf = read(path)
        if elf is None:
            continue
        if elf.loader and loader is None:  # this is the program: its search path also applies to its libraries
            loader, program_dirs = elf.loader, elf.search_dirs
        for name in (*elf.needed, *(OPENED_BY_LIBC if elf.loader else ())):
            target, is_by_origin = _resolve(name, path, (*elf.search_dirs, *program_dirs), cache)
            if target is None:
                continue
            if not (is_by_origin and target.startswith(prefixes)):
                libraries.setdefault(name, target)
            if target not in seen:
                seen.add(target)
                queue.append(target)
    return loader, libraries


def read(path: str) -> Elf | None:
    """Parse a 64-bit little-endian ELF file for this machine. Returns None for other files and damaged ones."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            return _parse(data)
    except (OSError, ValueError, struct.error, IndexError):  # unreadable, empty or truncated
        return None


def _parse(data: mmap.mmap) -> Elf | None:
    machine = _E_MACHINE.get(os.uname().machine)
    if data[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", data, 18)[0] != machine:  # e_ident, e_machine
        return None
    (headers,) = struct.unpack_from("<Q", data, 32)  # e_phoff
    header_bytes, count = struct.unpack_from("<HH", data, 54)  # e_phentsize, e_phnum
    segments: list[tuple[int, int, int]] = []  # address, offset in the file, length
    dynamic: dict[int, list[int]] = {}
    loader = None
    for index in range(count):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, headers + index * header_bytes)
        if kind == _PT_LOAD:
            segments.append((address, offset, length))
        elif kind == _PT_INTERP:
            loader = os.fsdecode(data[offset : offset + length].rstrip(b"\0"))
        elif kind == _PT_DYNAMIC:
            for tag, value in struct.iter_unpack("<QQ", data[offset : offset + length // 16 * 16]):  # Elf64_Dyn
                dynamic.setdefault(tag, []).append(value)
    if _DT_STRTAB not in dynamic:
        return Elf((), (), loader)
    table_address = dynamic[_DT_STRTAB][0]
    table_offset = next(
        (offset + table_address - start for start, offset, length in segments if 0 <= table_address - start < length),
        len(data),  # no segment contains the table: its strings are then empty
    )

    def strings_of(tag: int) -> list[str]:
        starts = [table_offset + value for value in dynamic.get(tag, ())]
        return [os.fsdecode(data[start : data.find(b"\0", start)]) for start in starts]

    search_dirs = strings_of(_DT_RUNPATH) or strings_of(_DT_RPATH)
    return Elf(tuple(strings_of(_DT_NEEDED)), tuple(search_dirs[0].split(":")) if search_dirs else (), loader)


def _resolve(name: str, needed_by: str, dirs: Iterable[str], cache: Mapping[str, list[str]]) -> tuple[str | None, bool]:
    """Return the host file of a library that the file `needed_by` needs, and whether it was found by $ORIGIN."""
    if "/" in name:
        return (name if os.path.exists(name) else None), False
    origin = os.path.dirname(os.path.realpath(needed_by))
    for directory in filter(None, dirs):
        path = os.path.join(directory.replace("${ORIGIN}", origin).replace("$ORIGIN", origin), name)
        if os.path.isfile(path):
            return os.path.normpath(path), "$ORIGIN" in directory or "${ORIGIN}" in directory
    paths = (*cache.get(name, ()), *(os.path.join(directory, name) for directory in DEFAULT_DIRS))
    # `read` skips the libraries of other architectures, which the cache also lists.
    return next((path for path in paths if read(path) is not None), None), False


def _read_loader_cache() -> dict[str, list[str]]:
    """Return library name -> paths from /etc/ld.so.cache (glibc's format 1.1). It is empty without the file (musl)."""
    try:
        with open("/etc/ld.so.cache", "rb") as file:
            data = file.read()
    except OSError:
        return {}
    start = data.find(_CACHE_MAGIC)
    if start < 0:
        return {}
    data = data[start:]  # string offsets count from the magic
    (count,) = struct.unpack_from("<I", data, len(_CACHE_MAGIC))
    paths: dict[str, list[str]] = {}
    entries = data[_CACHE_HEADER_BYTES : _CACHE_HEADER_BYTES + count * _CACHE_ENTRY.size]
    for _, key, value, _, hwcap in _CACHE_ENTRY.iter_unpack(entries):
        name, path = (os.fsdecode(data[start : data.index(b"\0", start)]) for start in (key, value))
        if not hwcap:  # entries with hwcap are variants of a library for newer CPUs
            paths.setdefault(name, []).append(path)
    return paths
