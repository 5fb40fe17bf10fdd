"""Chooses the host uids of a jail: a range of uids that no user and no other jail has.

host_uids(jail_number=2, slots=64)  ->  (first uid, number of uids), or (None, 0) if this process cannot map a range
"""

from __future__ import annotations

import os
import secrets

from sandbox.jail import kernel, root_fs, userns
from sandbox.jail.interpreter import Interpreter
from sandbox.jail.spec import FIRST_SLOT_UID, UIDS_PER_SLOT, Level

RANGE_START = 1_381_171_200
"""First uid of the ranges (0x52530000). It is above all ids that distributions and subuid files
allocate. systemd-nspawn picks ids at random from a range around it, so a collision is possible, but unlikely."""
MIN_UID = 10_000
"""First uid that may be chosen. Lower ids belong to users of the host or the container."""
LANDLOCK_CAPABILITIES = frozenset(
    {kernel.CAP_CHOWN, kernel.CAP_KILL, kernel.CAP_SETGID, kernel.CAP_SETUID, kernel.CAP_SETPCAP}
)
"""Capabilities that level `landlock` needs for a uid per slot: to change to the uid, to kill its processes, and to give
it a directory. Docker grants them to root."""
_RANGE_SHIFT = secrets.randbelow(1 << 28)
"""Random offset that this process adds to its ranges. Each executor of a machine counts its jails from 0, but executors
must not share uids: at level `landlock` no namespace separates their signals, and all levels have limits per uid."""


def host_uids(
    jail_number: int, slots: int, level: Level = Level.NAMESPACES, python: Interpreter | None = None
) -> tuple[int | None, int]:
    """Return (`uid_base`, `uid_count`) for a jail of this process. Jails with different numbers, from 0, have disjoint
    ranges.

    Returns (None, 0) if this process may not use a range. There are two reasons: it has neither the privilege nor
    enough subordinate ids; or it belongs to an ordinary user, and other users cannot read this user's `python`.
    """
    if level is Level.NONE:
        return None, 0
    if level is Level.LANDLOCK:
        if os.getresuid() != (0, 0, 0) or not kernel.effective_capabilities() >= LANDLOCK_CAPABILITIES:
            return None, 0
        return _own_range(jail_number, FIRST_SLOT_UID + UIDS_PER_SLOT * slots)
    capabilities, count = kernel.effective_capabilities(), FIRST_SLOT_UID + slots
    can_set_ids = {kernel.CAP_SETUID, kernel.CAP_SETGID} <= capabilities
    if can_set_ids and kernel.CAP_SYS_ADMIN in capabilities:
        return _own_range(jail_number, count)
    if can_set_ids:
        uids = _own_range(jail_number, count)
    else:
        uids = choose_range(jail_number, count, *userns.subordinate_ids(), _RANGE_SHIFT)
    is_readable = python is None or root_fs.first_unreadable(python) is None
    return uids if uids[0] is not None and is_readable and userns.can_map_range(uids[0], count) else (None, 0)


def _own_range(jail_number: int, count: int) -> tuple[int | None, int]:
    uids, gids = _largest_extent("/proc/self/uid_map"), _largest_extent("/proc/self/gid_map")
    return choose_range(jail_number, count, max(uids[0], gids[0]), min(uids[1], gids[1]), _RANGE_SHIFT)


def choose_range(jail_number: int, count: int, first: int, end: int, shift: int = 0) -> tuple[int | None, int]:
    """Choose `count` ids for a jail, from `first` to `end - 1`.

    `shift` moves all ranges. If there are too few ids, the ranges lie in their upper half, and the shift wraps around.
    """
    base = RANGE_START + shift + jail_number * count
    if base + count > end:  # too few ids, as in the user namespace of a container: count down from the last id
        base = end - shift % max(1, (end - max(first, MIN_UID)) // 2) - (jail_number + 1) * count
    return (base, count) if base >= max(first, MIN_UID) else (None, 0)


def _largest_extent(path: str) -> tuple[int, int]:
    """Return (first id, last id + 1) of the largest run of ids in this user namespace."""
    with open(path, encoding="ascii") as file:
        extents = [tuple(map(int, line.split())) for line in file]
    first, _, count = max(extents, key=lambda extent: extent[2], default=(0, 0, 0))
    return first, first + count
