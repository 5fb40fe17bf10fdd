"""Which host uids a jail may use: a range of its own, far from any that belongs to someone, or of those that belong to
the server's user."""

from __future__ import annotations

import os
import secrets

from sandbox.jail import kernel, root_fs, userns
from sandbox.jail.interpreter import Interpreter
from sandbox.jail.spec import FIRST_SLOT_UID, UIDS_PER_SLOT, Level

RANGE_START = 1_381_171_200
"""Where ranges start: above every id that distributions, subuid files and systemd hand out."""
MIN_UID = 10_000
"""Ids below belong to users of the host or the container, even where ids are few."""
LANDLOCK_CAPABILITIES = frozenset(
    {kernel.CAP_CHOWN, kernel.CAP_KILL, kernel.CAP_SETGID, kernel.CAP_SETUID, kernel.CAP_SETPCAP}
)
"""At level `landlock`: to take a uid, to end what has it, to give it its folder. Docker grants them to root."""
_RANGE_SHIFT = secrets.randbelow(1 << 28)
"""This process's own beginning: executors of one machine number their jails from 0 each, and no two calls are to share
a uid. At level `landlock` no namespace keeps the signals of theirs apart, and elsewhere limits count by uid."""


def host_uids(
    jail: int, slots: int, level: Level = Level.NAMESPACES, python: Interpreter | None = None
) -> tuple[int | None, int]:
    """(`uid_base`, `uid_count`) for this node's jail number `jail`, counted from 0: ranges of different jails are
    disjoint. (None, 0) where this process may not map a range: it is neither privileged nor has subordinate ids, or
    has too few, or is an ordinary user's whose `python` others cannot read.
    """
    if level is Level.NONE:
        return None, 0
    if level is Level.LANDLOCK:
        if os.getresuid() != (0, 0, 0) or not kernel.effective_capabilities() >= LANDLOCK_CAPABILITIES:
            return None, 0
        return _own_range(jail, FIRST_SLOT_UID + UIDS_PER_SLOT * slots)
    capabilities, count = kernel.effective_capabilities(), FIRST_SLOT_UID + slots
    has_any = {kernel.CAP_SETUID, kernel.CAP_SETGID} <= capabilities
    if has_any and kernel.CAP_SYS_ADMIN in capabilities:
        return _own_range(jail, count)
    uids = _own_range(jail, count) if has_any else choose_range(jail, count, *userns.subordinate(), _RANGE_SHIFT)
    is_readable = python is None or root_fs.first_unreadable(python) is None
    return uids if uids[0] is not None and is_readable and userns.may_have(uids[0], count) else (None, 0)


def _own_range(jail: int, count: int) -> tuple[int | None, int]:
    uids, gids = _mapped("/proc/self/uid_map"), _mapped("/proc/self/gid_map")
    return choose_range(jail, count, max(uids[0], gids[0]), min(uids[1], gids[1]), _RANGE_SHIFT)


def choose_range(jail: int, count: int, first: int, end: int, shift: int = 0) -> tuple[int | None, int]:
    """The same as arithmetic, for a machine on which the ids from `first` up to `end` exist. `shift` moves all ranges;
    where ids are few, over half of them."""
    base = RANGE_START + shift + jail * count
    if base + count > end:  # a container's own user namespace: from its top downwards
        base = end - shift % max(1, (end - max(first, MIN_UID)) // 2) - (jail + 1) * count
    return (base, count) if base >= max(first, MIN_UID) else (None, 0)


def _mapped(path: str) -> tuple[int, int]:
    """The largest run of ids that exist in our user namespace: first, and one past the last."""
    with open(path, encoding="ascii") as file:
        extents = [tuple(map(int, line.split())) for line in file]
    first, _, count = max(extents, key=lambda extent: extent[2], default=(0, 0, 0))
    return first, first + count
