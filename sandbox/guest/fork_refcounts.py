"""Makes what a zygote holds immortal, so that using it in a call writes nothing.

Every use of a Python object counts it up and down, and a count is a write: in a fork, the first use of an object copies
its page. From Python 3.12 on, an object may be immortal (PEP 683), which was made for just this: its count stays as it
is. There is no public way to say so of an existing object, so the count is set here: its lower 32 bits, all ones, are
immortal in 3.12 to 3.14. Whatever is made later, in a call for instance, lives and dies as ever.

On other Pythons this does nothing, and calls copy more pages.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import types

_IMMORTAL, _LEAST_IMMORTAL = 0xFFFFFFFF, 0x80000000
_CODE_PARTS = (
    "co_consts",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_name",
    "co_qualname",
    "co_filename",
)


def is_supported() -> bool:
    """Whether this is an interpreter whose counts are known to work that way."""
    return (
        sys.implementation.name == "cpython"
        and (3, 12) <= sys.version_info[:2] <= (3, 14)
        and sys.byteorder == "little"
        and getattr(sys, "_is_gil_enabled", lambda: True)()
        and ctypes.sizeof(ctypes.c_ssize_t) == 8
        and _works_here()
    )


def immortalize() -> int:
    """Every object that can be reached from the collector's, for good. Returns how many became so.

    Those that are so already are left alone: most lie in memory that is shared with a parent.
    """
    if not is_supported():
        return 0
    changed = 0
    for address in _addresses():
        count = ctypes.c_uint32.from_address(address)
        if count.value < _LEAST_IMMORTAL:
            count.value = _IMMORTAL
            changed += 1
    return changed


def _addresses() -> list:
    found = gc.get_objects()
    seen = set(map(id, found))
    for thing in found:  # grows as it goes
        parts = (
            [getattr(thing, name) for name in _CODE_PARTS] if type(thing) is types.CodeType else gc.get_referents(thing)
        )
        for part in parts:
            if id(part) not in seen:
                seen.add(id(part))
                found.append(part)
    mine = {id(found), id(seen), id(sys._getframe())}
    return [id(thing) for thing in found if id(thing) not in mine]


def _works_here() -> bool:
    """Try it on an object of our own: its count must no longer move."""
    subject = object()
    ctypes.c_uint32.from_address(id(subject)).value = _IMMORTAL
    count = sys.getrefcount(subject)
    uses = [subject] * 3
    return len(uses) == 3 and sys.getrefcount(subject) == count
