"""The slots of one zygote pool: which of them are free, which are long, and the cgroup of each.

A slot is a numbered set of resources for one call at a time: the number, a uid in the jail and, where available, a
cgroup. When a call has run for long, it becomes a long call, and its slot becomes a long slot.

    free --acquire--> short or reserved --try_mark_long--> long
      ^                 |                                    |
      |                 +------------- release --------------+
      |                             |
      +--- if its cgroup is empty --+--- otherwise the slot is parked until `release_when_empty` has waited for it

Invariants:
- A slot is used by at most one call at a time.
- The number of slots is the short quota plus the long quota. A call that becomes long keeps its slot; the slot then
  counts against the long quota.
- A reserved slot is one of the slots that the long quota leaves unused. It is for calls in reserved places, which the
  gateway sends beyond the executor's window. It counts neither against the short quota nor against the long quota.
  While all long slots are in use, there is no reserved slot.
- Each session has a slot beyond these, as long as it is open. Its cells use the resources of this slot. A cell that
  runs also takes a short slot, as a call does, but only to be counted.
- A slot is free only once the kernel counts no process in its cgroup. Processes that stay in the cgroup are killed.
- The executor keeps a descriptor of a long call's mount namespace, and closes it after the call. So the executor frees
  the namespace, and the call does not. To free a namespace, the kernel runs synchronize_rcu_expedited, for one process
  at a time. A long call may run at SCHED_IDLE, and would then block all other calls that exit.
"""

from __future__ import annotations

import logging
import os

import trio

from sandbox.jail import CgroupTree, CgroupUsage, IdleCgroup, SlotCgroup
from sandbox.settings.server import reserved_slots

log = logging.getLogger(__name__)

MIN_POLL_INTERVAL_S = 0.001
"""Seconds until the first check whether the cgroup of a parked slot is empty. The interval doubles with each check."""
MAX_POLL_INTERVAL_S = 1.0
"""Maximum seconds between two such checks."""
KILL_AFTER_S = 0.25
"""Seconds that a slot is parked before the processes left in it are killed."""


class Slots:
    """Slots from 0 to `count` - 1, and slots of sessions with the next numbers. A call may `acquire` a short slot while
    `free_short` > 0, and a reserved slot while `free_reserved` > 0; in both cases `free` must not be empty. `release`
    gives the slot back."""

    def __init__(self, short: int, long: int = 0, sessions: int = 0) -> None:
        self.count = short + long
        self.free = list(range(self.count - 1, -1, -1))
        """Free slots; `acquire` takes the last one."""
        self.free_of_sessions = list(range(self.count + sessions - 1, self.count - 1, -1))
        """Free slots of sessions."""
        self.long: set[int] = set()
        """Slots that count against the long quota."""
        self.reserved: set[int] = set()
        """Slots that are in use as reserved slots."""
        self._max_long = long
        self._max_reserved = reserved_slots(short)
        self.cgroups: CgroupTree | None = None
        """One cgroup per slot, if the machine grants any."""
        self.have_networks = False
        """Whether each slot has its own network namespace (`JailSpec.has_slot_networks`)."""
        self._mount_namespace_fds: dict[int, int] = {}

    @property
    def idle_cgroup(self) -> IdleCgroup | None:
        """The cgroup for demoted threads."""
        return self.cgroups.idle if self.cgroups else None

    @property
    def free_short(self) -> int:
        """Number of short slots that are free: all free slots, without the unused slots of the long quota."""
        return len(self.free) - (self._max_long - len(self.long) - len(self.reserved))

    @property
    def free_reserved(self) -> int:
        """Number of reserved slots that are free."""
        unused_long = self._max_long - len(self.long) - len(self.reserved)
        return min(unused_long, self._max_reserved - len(self.reserved))

    @property
    def used(self) -> int:
        """Number of slots in use. Parked slots count as used."""
        return self.count - len(self.free)

    def acquire(self, *, reserved: bool = False) -> int:
        """Take a free slot, and count it as a reserved slot if `reserved`, else as a short slot."""
        slot = self.free.pop()
        if reserved:
            self.reserved.add(slot)
        return slot

    def try_mark_long(self, slot: int) -> bool:
        """Count a slot against the long quota and return True; return False if the quota is used up."""
        if len(self.long) + len(self.reserved - {slot}) >= self._max_long:
            return False
        self.reserved.discard(slot)
        self.long.add(slot)
        return True

    def hold_mount_namespace(self, slot: int, pid: int) -> None:
        """Keep the mount namespace of a process until its slot is released. Do nothing if the process has the mount
        namespace of the executor."""
        try:
            own = os.stat("/proc/self/ns/mnt")
            fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
        except OSError as error:  # the process has ended, or this process has no right to open it
            log.debug("slot %d: cannot hold the mount namespace: %s", slot, error)
            return
        if slot in self._mount_namespace_fds or os.path.samestat(os.fstat(fd), own):
            os.close(fd)
        else:
            self._mount_namespace_fds[slot] = fd

    def cgroup(self, slot: int) -> SlotCgroup | None:
        """Return the slot's cgroup, or None if the machine grants no cgroups. Raises `OSError` if the cgroup cannot be
        created."""
        return self.cgroups.cgroup(slot) if self.cgroups else None

    def set_limits(self, slot: int, memory_bytes: int, tasks: int) -> None:
        """Set the limits of the next call in the slot. If it raises `OSError`, the caller has to park the slot."""
        if self.cgroups:
            self.cgroups.cgroup(slot).set_limits(memory_bytes, tasks)

    def read_usage(self, slot: int) -> CgroupUsage | None:
        """Return what the call in the slot has used, or None without a cgroup. Call this before `release`."""
        return self.cgroups.cgroup(slot).read_usage() if self.cgroups else None

    def release(self, slot: int) -> bool:
        """Free a slot and return True. If the slot still has processes or a mount namespace, return False; the caller
        then has to call `release_when_empty`."""
        if slot in self._mount_namespace_fds or (self.cgroups and not self.cgroups.cgroup(slot).is_empty):
            return False
        self._mark_free(slot)
        return True

    async def release_when_empty(self, slot: int) -> None:
        """Wait until the slot's cgroup is empty, close the mount namespace, and free the slot."""
        interval_s, waited_s = MIN_POLL_INTERVAL_S, 0.0
        while self.cgroups:
            await trio.sleep(interval_s)
            waited_s += interval_s
            interval_s = min(2 * interval_s, MAX_POLL_INTERVAL_S)
            try:
                cgroup = self.cgroups.cgroup(slot)
            except OSError as error:
                log.warning("slot %d: cgroup not available yet: %s", slot, error)
                continue
            if cgroup.is_empty:
                break
            if waited_s > KILL_AFTER_S:
                log.warning("slot %d: processes left %.1f s after the call; killing them", slot, waited_s)
                cgroup.kill()
        if (fd := self._mount_namespace_fds.pop(slot, None)) is not None:
            try:
                await trio.to_thread.run_sync(os.close, fd)
            except RuntimeError:  # no thread can be started: calls have taken all processes of the container
                os.close(fd)
        self._mark_free(slot)

    def _mark_free(self, slot: int) -> None:
        self.long.discard(slot)
        self.reserved.discard(slot)
        (self.free if slot < self.count else self.free_of_sessions).append(slot)
