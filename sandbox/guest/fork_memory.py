"""Arranges a zygote's memory so that a fork copies as little as possible.

This is an optimisation: where the kernel or the C library lacks a feature, forks are slower.

A fork copies each mapping of its parent. This takes about 1 us per mapping, and the exit of the child takes 1 us more.
A fork also copies a page table entry for each 4 KiB page that the parent has written. For a heap of 50 MB, this takes
longer than the rest of a small call.

    function       effect                                          when it is called
    use_one_heap   all memory comes from malloc's heap             when a zygote starts
    remap_code     code in huge pages, two mappings per library    after the zygote has loaded its profile
    compact_heap   the heap has no free memory, is in huge pages   after `remap_code`
                   (from Linux 6.1 on)
    inherited_kb   measures the memory that a fork shares          last
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os

import fork_refcounts

_HUGE_BYTES = 2 << 20
_ALIGNMENT_BYTES, _MAX_OBJECT_BYTES = 16, 512  # of the interpreter's allocator (CPython, Objects/obmalloc.c)
_MAX_FILLERS = 1 << 14
"""Maximum number of objects of one size that occupy free memory."""
_MADV_COLLAPSE = 25
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
# Other C libraries than GNU's have neither function. Then `max` and `int` are called instead, which have no effect.
_mallopt, _malloc_trim = getattr(_libc, "mallopt", max), getattr(_libc, "malloc_trim", int)


class _Allocator(ctypes.Structure):
    """PyMemAllocatorEx: the functions of one memory domain."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("context", "malloc", "calloc", "realloc", "free"))


class _ArenaAllocator(ctypes.Structure):
    """PyObjectArenaAllocator: allocates the arenas of small objects, 1 MiB each (256 KiB before Python 3.10)."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("context", "allocate", "free"))


class _Segment(ctypes.Structure):
    """Elf64_Phdr: one segment of a library."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("type", "flags")),
        *((name, ctypes.c_uint64) for name in ("offset", "address", "physical", "in_file", "size", "align")),
    )


class _Library(ctypes.Structure):
    """The first fields of struct dl_phdr_info: one loaded library."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_uint16),
    )


# Callback of dl_iterate_phdr(3)
_Visit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
_default_arenas = _ArenaAllocator()
ctypes.pythonapi.PyObject_GetArenaAllocator(ctypes.byref(_default_arenas))

_PYMEM_DOMAIN_RAW = 0
_HEAP_THRESHOLD_BYTES = 32 << 20
"""Maximum of M_MMAP_THRESHOLD: malloc takes smaller blocks from its heap, and maps larger ones."""
_CALL_THRESHOLD_BYTES = 4 << 20
"""M_MMAP_THRESHOLD for calls. By default malloc starts with 128 KiB and adapts the threshold, but a call is too short
for this."""
_CHUNK_BYTES = 1 << 16
_kept_alive: list = []  # all objects of the interpreter's first arenas (`use_one_heap`)
_fillers: list = []  # objects that occupy free memory (`_fill_free_memory`)
_remapped: set = set()  # (start, end, rights) of the mappings that `remap_code` has changed


def use_one_heap() -> None:
    """Allocate memory of every kind from malloc's heap, until `compact_heap`.

    Otherwise arenas and large blocks would get mappings of their own, between the mappings of libraries. The arenas
    that exist already do not come from malloc, so malloc must not free them. To keep them in use, all their objects are
    kept alive.
    """
    _kept_alive.append(gc.get_objects())
    raw = _Allocator()  # malloc with a context argument
    ctypes.pythonapi.PyMem_GetAllocator(_PYMEM_DOMAIN_RAW, ctypes.byref(raw))
    arenas = _ArenaAllocator(raw.context, raw.malloc, raw.free)
    ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(arenas))
    _map_blocks_from(_HEAP_THRESHOLD_BYTES)


def _restore_allocators() -> None:
    """Use separate mappings for arenas and large blocks again. A call can return them to the kernel."""
    ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(_default_arenas))
    _map_blocks_from(_CALL_THRESHOLD_BYTES)


def _map_blocks_from(size: int) -> None:
    """Make malloc give each block of at least `size` bytes a mapping of its own."""
    _mallopt(_M_MMAP_THRESHOLD, size)
    _mallopt(_M_TRIM_THRESHOLD, 2 * size)


def compact_heap() -> int:
    """Free unused objects, exclude all other objects from garbage collection, and move the heap to huge pages. Return
    the number of huge pages."""
    gc.collect()
    fork_refcounts.immortalize()
    gc.collect()  # empties the interpreter's free lists, whose objects are scattered
    _fill_free_memory()  # what is allocated from here on, and freed again, lies behind the heap's end
    blocks = {id(subject) // _HUGE_BYTES for subject in gc.get_objects()}  # addresses in units of 2 MiB
    gc.freeze()
    gc.disable()
    _fill_last_block()
    _malloc_trim(0)  # returns the free pages inside the heap to the kernel
    _restore_allocators()
    top = _libc.sbrk(0) // _HUGE_BYTES  # the block in which the heap ends. It stays small pages, so the heap can grow
    blocks |= _resident_blocks_below(top)
    return sum(_collapse(block) for block in blocks if block != top)


def _fill_free_memory() -> None:
    """Allocate the free memory below the end of the heap, so that calls allocate memory behind it.

    Otherwise the objects of a call would lie in all parts of the heap. The call would then copy the page of each object
    and split many huge pages.
    """
    end = _libc.sbrk(0)
    for size in (*(1 << power for power in range(20, 10, -1)), *range(1024, 0, -_ALIGNMENT_BYTES)):
        while (block := _libc.malloc(size)) and block < end:
            pass
        _libc.free(block)  # it is behind the end
    fillers: list = []
    _fillers.append(fillers)
    for size in range(_MAX_OBJECT_BYTES, 0, -_ALIGNMENT_BYTES):
        kind = {16: object, 32: complex}.get(size, bytes)  # a type whose objects have exactly this size
        arguments = (size - bytes.__basicsize__,) if kind is bytes else ()
        for _ in range(_MAX_FILLERS):
            fillers.append(kind(*arguments))
            if end <= id(fillers[-1]) < _libc.sbrk(0):
                break


def _fill_last_block() -> None:
    """Allocate the rest of the last huge page of the heap, so that calls allocate memory behind it."""
    last = 0
    while (block := _libc.malloc(_CHUNK_BYTES)) // _HUGE_BYTES == last // _HUGE_BYTES or block < last:
        last = block


_MIN_RESIDENT_PAGES = 33
"""A block of 512 pages becomes a huge page if at least this many of its pages are in memory."""


def _resident_blocks_below(top: int) -> set:
    """Return the blocks of malloc's heap, in units of 2 MiB, that have `_MIN_RESIDENT_PAGES` or more in memory."""
    resident = ctypes.create_string_buffer(_HUGE_BYTES // mmap.PAGESIZE)
    blocks: set = set()
    for block in range(top - 1, 0, -1):
        if _libc.mincore(block * _HUGE_BYTES, _HUGE_BYTES, resident):
            return blocks | {block}  # mincore fails for unmapped memory, so the heap starts in this block
        if resident.raw.count(1) >= _MIN_RESIDENT_PAGES:
            blocks.add(block)
    return blocks


def _collapse(block: int) -> bool:
    """Collapse block number `block` of 2 MiB into a huge page (madvise(2)). Return whether the kernel did."""
    return bool(_libc.madvise(block * _HUGE_BYTES, _HUGE_BYTES, _MADV_COLLAPSE) == 0)


_MAX_HUGE_CODE_BYTES = 16 << 20
"""Largest code of a library, in bytes, that is copied into huge pages. A library with more code has variants for every
processor, as OpenBLAS does, and little of its code is executed."""


def remap_code() -> int:
    """Reduce each library to two mappings instead of five. Copy its code into huge pages, and return their number.

    A fork copies no page table entries of files. So a call would have a page fault for every 16 pages of library code
    that it executes. For huge pages it has none. A child zygote inherits the huge pages of its parent, so they are not
    created again.
    """
    spans: list = []

    @_Visit
    def visit(library_pointer, _size, _data):  # type: ignore[no-untyped-def]
        library = library_pointer.contents
        for segment in library.segments[: library.count]:
            if segment.type == _PT_LOAD:  # start is rounded down to a page, and end up
                start = (library.base + segment.address) // mmap.PAGESIZE * mmap.PAGESIZE
                end = -(-(library.base + segment.address + segment.size) // mmap.PAGESIZE) * mmap.PAGESIZE
                rights = mmap.PROT_READ | (mmap.PROT_WRITE if segment.flags & _PF_W else mmap.PROT_EXEC)
                if spans and spans[-1][1:] == (start, rights):  # the segment continues the span before it
                    start = spans.pop()[0]
                spans.append((start, end, rights))
        return 0

    _libc.dl_iterate_phdr(visit, None)
    replaced = 0
    for start, end, rights in set(spans) - _remapped:
        _libc.mprotect(start, end - start, rights)
        if rights & mmap.PROT_EXEC and end - start <= _MAX_HUGE_CODE_BYTES:
            blocks = range(-(-start // _HUGE_BYTES), end // _HUGE_BYTES)
            replaced += sum(_replace_by_huge_page(block * _HUGE_BYTES) for block in blocks)
    _remapped.update(spans)
    return replaced


def _replace_by_huge_page(address: int) -> bool:
    """Replace 2 MiB of code by a huge page with the same content, atomically, since the code may be running."""
    rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    spare = _libc.mmap(None, 2 * _HUGE_BYTES, rights, flags, -1, 0)
    if spare == _FAILED:
        return False
    copy = -(-spare // _HUGE_BYTES) * _HUGE_BYTES  # the first aligned address
    ctypes.memmove(copy, address, _HUGE_BYTES)
    done = (
        _collapse(copy // _HUGE_BYTES)
        and _libc.mprotect(copy, _HUGE_BYTES, mmap.PROT_READ | mmap.PROT_EXEC) == 0
        and _libc.mremap(copy, _HUGE_BYTES, _HUGE_BYTES, _MREMAP_MAYMOVE_FIXED, address) == address
    )
    moved = _HUGE_BYTES if done else 0
    _libc.munmap(spare, copy - spare)
    _libc.munmap(copy + moved, spare + 2 * _HUGE_BYTES - copy - moved)
    return bool(done)


def inherited_kb() -> int:
    """Return the peak memory of a child that exits at once: the memory that it shares with this process, in KiB."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return int(os.wait4(pid, 0)[2].ru_maxrss)
