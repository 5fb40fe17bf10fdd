"""Settles a zygote's memory, so that forking it copies as little as possible.

A fork copies the page tables of all that the parent has written to, an entry and its bookkeeping for each 4 KiB, which
for a heap of 50 MB costs more than everything else a small call does. Collapsing the heap into huge pages (madvise(2),
MADV_COLLAPSE, Linux 6.1) makes that one entry for each 2 MiB. A kernel that cannot just stays slower.

Code is another matter: it is mapped from files, whose pages a fork does not copy, so each call would fault them in
again, 16 at a time. What of the interpreter fills whole huge pages is copied into such: no fault at all in a call.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys

import immortal

_HUGE = 2 << 20
_EMPTY = sys.getsizeof(b"")
_MADV_COLLAPSE = 25
_PROT_READ, _PROT_WRITE, _PROT_EXEC = 1, 2, 4
_MAP_PRIVATE_ANONYMOUS = 0x22
_MREMAP_MAYMOVE_FIXED = 3
_PT_LOAD, _PF_W = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value


class _Segment(ctypes.Structure):
    """Elf64_Phdr."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("type", "flags")),
        *((name, ctypes.c_uint64) for name in ("offset", "address", "physical", "in_file", "size", "align")),
    )


class _Loaded(ctypes.Structure):
    """The beginning of struct dl_phdr_info."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_uint16),
    )


_Visit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.c_void_p)


def settle() -> int:
    """Give back what is free, freeze what is left, collapse it. Returns the number of huge pages."""
    gc.collect()
    immortal.immortalize()
    where = {id(thing) // _HUGE for thing in gc.get_objects()}
    gc.freeze()
    gc.disable()
    getattr(_libc, "malloc_trim", int)(0)
    collapsed = sum(_collapse(block) for block in where)
    block = _libc.sbrk(0) // _HUGE - 1  # the rest of malloc's heap, from its top down
    while block not in where and _collapse(block):
        collapsed += 1
        block -= 1
    _fill_pools()
    return collapsed


_filling: list = [None]
_POOL, _POOL_HEADER, _LARGEST, _STEP = 1 << 14, 48, 512, 16
_MOST_HOLES = 100_000


def _fill_pools() -> None:
    """Leave no free block in a pool that has others: what a call allocates then lies together, in pages of its own,
    and not in holes all over the heap, each of which would be a page to copy (CPython, Objects/obmalloc.c)."""
    for size in range(_STEP, _LARGEST + 1, _STEP):
        kind = {_STEP: object, 2 * _STEP: complex}.get(size, bytes)  # of exactly that size
        arguments = (size - _EMPTY,) if kind is bytes else ()
        for _ in range(_MOST_HOLES):
            _filling.append(kind(*arguments))
            before, last = map(id, _filling[-2:])
            if before % _POOL == _POOL_HEADER and last == before + size:  # a new pool begins: no other has room
                break


def _collapse(block: int) -> bool:
    return bool(_libc.madvise(block * _HUGE, _HUGE, _MADV_COLLAPSE) == 0)


_replaced: set = set()
_MOST_CODE = 16 << 20


def settle_code() -> int:
    """Copy what of the loaded programs' code and constants fills huge pages into such. Returns how many.

    Not what is done already, which a zygote shares with its parent, nor whole libraries of kernels for every processor,
    such as OpenBLAS: hardly anything of them runs.
    """
    blocks: list = []

    @_Visit
    def visit(loaded, _size, _data):  # type: ignore[no-untyped-def]
        about = loaded.contents
        spans: list = []
        for segment in about.segments[: about.count]:
            if segment.type == _PT_LOAD and not segment.flags & _PF_W:
                start = (about.base + segment.address) // mmap.PAGESIZE * mmap.PAGESIZE
                end = -(-(about.base + segment.address + segment.size) // mmap.PAGESIZE) * mmap.PAGESIZE
                if spans and spans[-1][1] == start:
                    start = spans.pop()[0]
                spans.append((start, end))
        for start, end in spans:
            if end - start <= _MOST_CODE:
                blocks.extend(range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE))
        return 0

    _libc.dl_iterate_phdr(visit, None)
    replaced = [block for block in blocks if block not in _replaced and _replace(block)]
    _replaced.update(replaced)
    return len(replaced)


def _replace(block: int) -> bool:
    """Put a huge page of the same content in the place of a block, in one step: what runs there just goes on."""
    spare = _libc.mmap(None, 2 * _HUGE, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
    if spare == _FAILED:
        return False
    copy = -(-spare // _HUGE) * _HUGE
    ctypes.memmove(copy, block, _HUGE)
    done = (
        _collapse(copy // _HUGE)
        and _libc.mprotect(copy, _HUGE, _PROT_READ | _PROT_EXEC) == 0
        and _libc.mremap(copy, _HUGE, _HUGE, _MREMAP_MAYMOVE_FIXED, block) == block
    )
    _libc.munmap(spare, copy - spare)
    _libc.munmap(copy + _HUGE if done else copy, spare + 2 * _HUGE - copy - (_HUGE if done else 0))
    return bool(done)
