"""Arranges a zygote's memory so that a fork copies as little as possible.

This is an optimisation: where the kernel or the C library lacks a feature, forks are slower.

A fork copies each mapping of its parent (about 1 us, and as much again when the child exits) and a page table entry for
each 4 KiB page that the parent has written. For a heap of 50 MB these entries cost more than all else of a small call.

    use_one_heap, reexec_with_malloc   all memory comes from malloc's heap          at the start of a zygote
    colocate_bytecode                  hot bytecode lies side by side               after the first warm-up
    remap_code                         code in huge pages, two mappings a library   after a profile is loaded
    compact_heap                       the heap is collapsed into huge pages        after that; MADV_COLLAPSE, Linux 6.1
    trim_heap                          the free end of the heap is returned         last
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import types
from collections.abc import Iterator

import fork_refcounts

_HUGE = 2 << 20
_EMPTY = sys.getsizeof(b"")
_MADV_COLLAPSE = 25
_PROT_READ, _PROT_WRITE, _PROT_EXEC = 1, 2, 4
_MAP_PRIVATE_ANONYMOUS, _MAP_FIXED_NOREPLACE = 0x22, 0x100000
_MREMAP_MAYMOVE_FIXED = 3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_PT_LOAD, _PF_W = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.argtypes = (ctypes.c_void_p,)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value
# Only the GNU C library has these; another one keeps its own ways.
_mallopt, _malloc_trim = getattr(_libc, "mallopt", max), getattr(_libc, "malloc_trim", int)


class _Allocator(ctypes.Structure):
    """PyMemAllocatorEx, the functions for one kind of memory."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("context", "malloc", "calloc", "realloc", "free"))


class _Arenas(ctypes.Structure):
    """PyObjectArenaAllocator: where the memory for small objects comes from, 1 MiB at a time."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("context", "allocate", "free"))


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
_default_arenas = _Arenas()
ctypes.pythonapi.PyObject_GetArenaAllocator(ctypes.byref(_default_arenas))

_RAW, _MEM, _OBJECTS = range(3)  # PyMemAllocatorDomain
_RESTARTED = "RSTAR_SMALL_OBJECTS"


def reexec_with_malloc() -> None:
    """First thing in a zygote, after `use_one_heap`: start anew, with what that itself takes in malloc's heap, too.

    Its own allocator (Objects/obmalloc.c) would have put that into mappings of 1 MiB here and there, which nothing can
    make huge: 1,000 pages to copy in each fork. PYTHONMALLOC=malloc does without that allocator for good. So its
    functions, which have no public name, are noted before, as distances from one that has, and put back here. Where
    that is not how it works, nothing happens, and forks cost more.
    """
    anchor = ctypes.cast(ctypes.pythonapi.PyMem_GetAllocator, ctypes.c_void_p).value or 0
    noted = os.environ.pop(_RESTARTED, None)
    usual, raw = _allocator(_OBJECTS), _allocator(_RAW)
    if noted is None:
        if usual.context is None and usual.malloc != raw.malloc and _heeds_environment():
            own_ways = [getattr(usual, field[0]) for field in _Allocator._fields_[1:]]
            distances = ",".join(str(function - anchor) for function in own_ways)
            os.environ.update({"PYTHONMALLOC": "malloc", _RESTARTED: distances})
            os.execv(sys.executable, sys.orig_argv)
        return
    del os.environ["PYTHONMALLOC"]  # calls may start interpreters
    if usual.malloc == raw.malloc:
        small = _Allocator(None, *(anchor + int(distance) for distance in noted.split(",")))
        for domain in (_MEM, _OBJECTS):
            ctypes.pythonapi.PyMem_SetAllocator(domain, ctypes.byref(small))


def _heeds_environment() -> bool:
    """Whether PYTHONMALLOC would do; without the interpreter lock there is one allocator only."""
    return hasattr(sys, "orig_argv") and "t" not in sys.abiflags and not sys.flags.ignore_environment


def _allocator(domain: int) -> _Allocator:
    found = _Allocator()
    ctypes.pythonapi.PyMem_GetAllocator(domain, ctypes.byref(found))
    return found


_kept_alive: list = []

_ONE_HEAP = 32 << 20
"""The most that malloc takes as the size from which on a block gets a mapping of its own."""
_LARGER = 16 << 20
"""No hole in it is that large."""
_OWN_MAPPING = 4 << 20
"""That size for calls. The library would begin with 128 KiB and learn; a call has no time to."""


def use_one_heap() -> None:
    """Until `compact_heap`, take memory of every kind from malloc's heap, where it fills huge pages.

    Else arenas and larger blocks get mappings of their own, here and there between libraries. The arenas that are there
    must not be freed as if malloc had made them, so something in each is kept.
    """
    _kept_alive.append(gc.get_objects())
    raw = _allocator(_RAW)  # malloc, which takes a context, too
    ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(_Arenas(raw.context, raw.malloc, raw.free)))
    _map_own(_ONE_HEAP)


def _restore_allocators() -> None:
    """From now on, what is taken can be given back."""
    ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(_default_arenas))
    _map_own(_OWN_MAPPING)


def _map_own(size: int) -> None:
    _mallopt(_M_MMAP_THRESHOLD, size)
    _mallopt(_M_TRIM_THRESHOLD, 2 * size)


def colocate_bytecode(folder: str) -> int:
    """Put the bytecode of the functions of `folder` that have run often side by side. Returns how many they are.

    From Python 3.12 on the interpreter notes in the bytecode which way each jump went. So a call copies every page with
    a function that it runs, and so does a zygote after each fork.
    """
    functions = [thing for thing in gc.get_objects() if type(thing) is types.FunctionType]
    ours = [function for function in functions if function.__code__.co_filename.startswith(folder)]
    warm = [function for function in ours if _is_warm(function.__code__)]
    sizes = sorted({sys.getsizeof(function.__code__) for function in warm}, reverse=True)
    fillers = [block for size in sizes for block in _holes(size)]
    usual, raw = _allocator(_OBJECTS), _allocator(_RAW)
    # New objects by malloc, whatever their size; the usual functions know how to let go of both kinds.
    mixed = _Allocator(raw.context, raw.malloc, raw.calloc, usual.realloc, usual.free)
    ctypes.pythonapi.PyMem_SetAllocator(_OBJECTS, ctypes.byref(mixed))
    replaced = [function.__code__ for function in warm]  # still there, so that nothing takes their places
    for function in warm:
        function.__code__ = function.__code__.replace()
    ctypes.pythonapi.PyMem_SetAllocator(_OBJECTS, ctypes.byref(usual))
    for filler in fillers:
        _libc.free(filler)
    return len(replaced)


def _is_warm(code: types.CodeType) -> bool:
    """Whether some of its instructions have been specialised (PEP 659)."""
    plain, adapted = code.co_code[::2], getattr(code, "_co_code_adaptive", code.co_code)[::2]
    return any(now != then for then, now in zip(plain, adapted) if then)  # 0 is a cache


def _holes(size: int) -> Iterator[int]:
    """Take every block that could hold so much, as far as malloc's heap has been used."""
    end = _libc.malloc(_LARGER)
    _libc.free(end)
    block = 0
    while block < end <= _libc.sbrk(0):
        block = _libc.malloc(size)
        yield block


def compact_heap() -> int:
    """Give back what is free, freeze what is left, collapse it. Returns the number of huge pages."""
    gc.collect()
    fork_refcounts.immortalize()
    blocks = {id(thing) // _HUGE for thing in gc.get_objects()}
    gc.freeze()
    gc.disable()
    gc.collect()  # nothing but what the interpreter keeps of freed objects, to use it again wherever it lies
    _fill_pools()
    _fill_heap()
    _malloc_trim(0)
    _restore_allocators()
    top = _libc.sbrk(0) // _HUGE  # a heap that fills it could not grow any more
    return sum(
        _collapse(block) or _map_rest_and_collapse(block) for block in blocks | _resident_below(top) if block != top
    )


def trim_heap() -> None:
    """Give back the free end of the heap, which each fork would copy. (malloc_trim would go for the holes as well.)"""
    _mallopt(_M_TRIM_THRESHOLD, 0)
    _libc.free(_libc.malloc(_CHUNK))
    _map_own(_OWN_MAPPING)


def _fill_heap() -> None:
    """Take what is left of the huge page that malloc's heap ends in: what calls take begins behind it."""
    last = 0
    while (following := _libc.malloc(_CHUNK)) // _HUGE == last // _HUGE or following < last:
        last = following


_CHUNK = 1 << 16
_FEW = 32


def _resident_below(top: int) -> set:
    """The blocks of malloc's heap, from its top down, of which more than a few pages are in memory."""
    resident = ctypes.create_string_buffer(_HUGE // mmap.PAGESIZE)
    found: set = set()
    for block in range(top - 1, 0, -1):
        if _libc.mincore(block * _HUGE, _HUGE, resident):
            return found | {block}  # the heap begins in it
        if resident.raw.count(1) > _FEW:
            found.add(block)
    return found


def _collapse(block: int) -> bool:
    return bool(_libc.madvise(block * _HUGE, _HUGE, _MADV_COLLAPSE) == 0)


def _map_rest_and_collapse(block: int) -> bool:
    """Collapse a block of which a part is not mapped, by mapping that as well."""
    flags = _MAP_PRIVATE_ANONYMOUS | _MAP_FIXED_NOREPLACE
    pages = range(block * _HUGE, (block + 1) * _HUGE, mmap.PAGESIZE)
    added = [p for p in pages if _libc.mmap(p, mmap.PAGESIZE, _PROT_READ | _PROT_WRITE, flags, -1, 0) == p]
    is_whole = _collapse(block)
    for page in added if not is_whole else ():
        _libc.munmap(page, mmap.PAGESIZE)
    return is_whole


_fillers: list = []
_POOL, _POOL_HEADER, _LARGEST, _STEP = 1 << 14, 48, 512, 16
_BATCH, _MOST_BATCHES, _NEAR = 16, 4096, 8


def _fill_pools() -> None:
    """Leave no free block in a pool that has others: what a call allocates then lies together, in pages of its own,
    and not in holes all over the heap, each of which would be a page to copy (CPython, Objects/obmalloc.c)."""
    for size in range(_STEP, _LARGEST + 1, _STEP):
        kind = {_STEP: object, 2 * _STEP: complex}.get(size, bytes)  # of exactly that size
        arguments = (size - _EMPTY,) if kind is bytes else ()
        places: list = []
        for _ in range(_MOST_BATCHES):
            batch: list = [None] * _BATCH
            for place in range(_BATCH):  # and nothing else is taken meanwhile
                batch[place] = kind(*arguments)
            _fillers.append(batch)
            places = places[-2:] + [id(thing) for thing in batch]
            if _starts_new_pool(places, size):
                break


def _starts_new_pool(places: list, size: int) -> bool:
    """Blocks come one after another from the start of a pool, so no other pool of that size had room. Some may be
    missing, which whoever fills has taken itself."""
    start, near = _POOL_HEADER + 3 * size, _NEAR * size
    return any(
        first % _POOL < start and first < second < third < first + near
        for first, second, third in zip(places, places[1:], places[2:])
    )


_settled: set = set()
_MOST_CODE = 16 << 20


def remap_code() -> int:
    """Have each loaded library take two mappings rather than five, since a fork copies those, too, and copy what of the
    programs' code and constants fills huge pages into such. Returns how many.

    Not what is done already, which a zygote shares with its parent, nor whole libraries of kernels for every processor,
    such as OpenBLAS: hardly anything of them runs.
    """
    spans: list = []

    @_Visit
    def visit(loaded, _size, _data):  # type: ignore[no-untyped-def]
        about = loaded.contents
        for segment in about.segments[: about.count]:
            if segment.type == _PT_LOAD:
                start = (about.base + segment.address) // mmap.PAGESIZE * mmap.PAGESIZE
                end = -(-(about.base + segment.address + segment.size) // mmap.PAGESIZE) * mmap.PAGESIZE
                rights = _PROT_READ | (_PROT_WRITE if segment.flags & _PF_W else _PROT_EXEC)
                if spans and spans[-1][1:] == (start, rights):
                    start = spans.pop()[0]
                spans.append((start, end, rights))
        return 0

    _libc.dl_iterate_phdr(visit, None)
    replaced = 0
    for start, end, rights in set(spans) - _settled:
        _libc.mprotect(start, end - start, rights)
        if rights & _PROT_EXEC and end - start <= _MOST_CODE:
            blocks = range(-(-start // _HUGE), end // _HUGE)
            replaced += sum(_replace_by_huge_page(block * _HUGE) for block in blocks)
    _settled.update(spans)
    return replaced


def _replace_by_huge_page(block: int) -> bool:
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
