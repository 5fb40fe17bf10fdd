"""Which shared libraries an ELF file needs, and where this machine's loader would find them.

`closure` is the whole of it: the host files without which the given binaries do not load. It reads only the dynamic
section, runs nothing, and leaves out what it cannot find: that module's import fails
inside as it does outside.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# The loader opens these by itself: libgcc_s when a thread exits or unwinds, nss_files for passwd before glibc 2.34.
OPENED_BY_LIBC = ("libgcc_s.so.1", "libnss_files.so.2")
DEFAULT_DIRS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 1, 5, 15, 29
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER, _CACHE_ENTRY = 48, struct.Struct("<iIIIQ")
_MACHINES = {"x86_64": 62, "aarch64": 183}


@dataclass(frozen=True, slots=True)
class Elf:
    """What the loader reads from a file: the libraries it names, where it says to look, and its interpreter."""

    needed: tuple[str, ...]
    search: tuple[str, ...]
    interpreter: str | None


def library_closure(roots: Iterable[str], visible: Iterable[str]) -> tuple[str | None, dict[str, str]]:
    """The loader's path, and library name -> host file for everything that `roots` need, recursively.

    Libraries that a file finds relative to itself ($ORIGIN) inside one of the `visible` folders are left out: these
    folders are mounted whole, so the file finds them there too.
    """
    cache = _loader_cache()
    folders = tuple(os.path.join(folder, "") for folder in visible)
    found: dict[str, str] = {}
    loader: str | None = None
    queue = list(roots)
    seen = set(queue)
    shared_search: tuple[str, ...] = ()
    while queue:
        path = queue.pop()
        elf = read(path)
        if elf is None:
            continue
        if elf.interpreter and loader is None:  # the program itself: its search path also serves what it loads
            loader, shared_search = elf.interpreter, elf.search
        for name in (*elf.needed, *(OPENED_BY_LIBC if elf.interpreter else ())):
            target, beside = _resolve(name, path, (*elf.search, *shared_search), cache)
            if target is None:
                continue
            if not (beside and target.startswith(folders)):
                found.setdefault(name, target)
            if target not in seen:
                seen.add(target)
                queue.append(target)
    return loader, found


def read(path: str) -> Elf | None:
    """The dynamic section of a 64-bit little-endian ELF file for this machine; None for any other file."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            return _parse(data)
    except (OSError, ValueError, struct.error, IndexError):  # unreadable, empty or cut short: not a library
        return None


def _parse(data: mmap.mmap) -> Elf | None:
    if data[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", data, 18)[0] != _MACHINES.get(os.uname().machine):
        return None
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    loads: list[tuple[int, int, int]] = []
    dynamic: dict[int, list[int]] = {}
    interpreter = None
    for index in range(count):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, table + index * size)
        if kind == _PT_LOAD:
            loads.append((address, offset, length))
        elif kind == _PT_INTERP:
            interpreter = os.fsdecode(data[offset : offset + length].rstrip(b"\0"))
        elif kind == _PT_DYNAMIC:
            for tag, value in struct.iter_unpack("<QQ", data[offset : offset + length // 16 * 16]):
                dynamic.setdefault(tag, []).append(value)
    if _DT_STRTAB not in dynamic:
        return Elf((), (), interpreter)
    table = dynamic[_DT_STRTAB][0]
    strings = next((table - a + o for a, o, n in loads if a <= table < a + n), len(data))

    def texts(tag: int) -> list[str]:
        return [_text(data, strings + value) for value in dynamic.get(tag, ())]

    search = texts(_DT_RUNPATH) or texts(_DT_RPATH)
    return Elf(tuple(texts(_DT_NEEDED)), tuple(search[0].split(":")) if search else (), interpreter)


def _text(data: mmap.mmap, start: int) -> str:
    return os.fsdecode(data[start : data.find(b"\0", start)])


def _resolve(name: str, needer: str, search: Iterable[str], cache: Mapping[str, list[str]]) -> tuple[str | None, bool]:
    """The host file for a library name, and whether it was found relative to the file that needs it."""
    if "/" in name:
        return (name if os.path.exists(name) else None), False
    origin = os.path.dirname(os.path.realpath(needer))
    for folder in search:
        own = "$ORIGIN" in folder or "${ORIGIN}" in folder
        path = os.path.join(folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin), name)
        if folder and os.path.isfile(path):
            return os.path.normpath(path), own
    places = (*cache.get(name, ()), *(os.path.join(folder, name) for folder in DEFAULT_DIRS))
    return next((path for path in places if read(path) is not None), None), False  # the cache also has other machines'


def _loader_cache() -> dict[str, list[str]]:
    """Library name -> paths from /etc/ld.so.cache, glibc's format 1.1; empty where there is none (musl)."""
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
    for _, key, value, _, hwcap in _CACHE_ENTRY.iter_unpack(data[_CACHE_HEADER : _CACHE_HEADER + count * 24]):
        name, path = (os.fsdecode(data[at : data.index(b"\0", at)]) for at in (key, value))
        if not hwcap:  # the others are faster twins of a plain one
            paths.setdefault(name, []).append(path)
    return paths
