"""Makes the objects of a zygote immortal, so that a call does not write to an object when it uses the object.

This is an optimisation. Each use of a Python object changes its reference count, so in a fork the first use of an
object copies its page. Since Python 3.12 an object can be immortal, and then its count never changes (PEP 683). No
public function makes an existing object immortal, so this module writes the count. In Python 3.12 to 3.14 an object is
immortal if the lower 32 bits of its count are all ones. Objects that are created later, for example in calls, are not
affected.

On other Pythons this does nothing, and calls copy more pages.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import types

_IMMORTAL = 0xFFFFFFFF
_MIN_IMMORTAL = 0x80000000  # an object with bit 31 set is immortal
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
    """Return whether this interpreter is known to treat objects with the count `_IMMORTAL` as immortal."""
    return (
        sys.implementation.name == "cpython"
        and (3, 12) <= sys.version_info[:2] <= (3, 14)
        and sys.byteorder == "little"
        and getattr(sys, "_is_gil_enabled", lambda: True)()
        and ctypes.sizeof(ctypes.c_ssize_t) == 8
        and _works_here()
    )


def immortalize() -> int:
    """Make every object immortal that the garbage collector's objects lead to. Return how many changed.

    The counts of immortal objects are not written again, because most of them are in memory shared with a parent.
    """
    if not is_supported():
        return 0
    changed = 0
    for address in _addresses():
        count = ctypes.c_uint32.from_address(address)
        if count.value < _MIN_IMMORTAL:
            count.value = _IMMORTAL
            changed += 1
    return changed


def _addresses() -> list:
    """Return the addresses of all objects that the garbage collector's objects lead to, without this function's own."""
    objects = gc.get_objects()
    seen = set(map(id, objects))
    for subject in objects:  # the loop extends the list
        is_code = type(subject) is types.CodeType  # the collector does not follow references of code objects
        referents = [getattr(subject, name) for name in _CODE_PARTS] if is_code else gc.get_referents(subject)
        for referent in referents:
            if id(referent) not in seen:
                seen.add(id(referent))
                objects.append(referent)
    own = {id(objects), id(seen), id(sys._getframe())}
    return [id(subject) for subject in objects if id(subject) not in own]


def _works_here() -> bool:
    """Return whether the count of a test object no longer changes once it is immortal."""
    subject = object()
    ctypes.c_uint32.from_address(id(subject)).value = _IMMORTAL
    count = sys.getrefcount(subject)
    uses = [subject] * 3
    return len(uses) == 3 and sys.getrefcount(subject) == count
