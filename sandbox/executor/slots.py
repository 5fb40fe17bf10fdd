"""The slots of one family: which are free, and what the kernel says of the calls in them.

Invariants:
- A slot (a number, a uid inside, and where the machine grants it a control group) belongs to one call at a time.
- There are as many as there are places, short and long ones. A call begins in a short place; the slot of one that moves
  to a long place stays the same, so moving it is counting.
- It is free only when the kernel counts no process in its group any more. Until then it is parked, and looked at again
  ever less often; a process that is still there after a while is killed.
- The mount namespace of a long call outlives it, and is ended here. Who ends one holds a lock that all the machine
  shares (synchronize_rcu_expedited). Did those who give way to all others, whoever ends would wait for them.
"""

from __future__ import annotations

import logging
import os

import trio

from sandbox.jail import CgroupTree, CgroupUsage, IdleCgroup, SlotCgroup

log = logging.getLogger(__name__)

FIRST_LOOK_S, LONGEST_LOOK_S = 0.001, 1.0
KILL_AFTER_S = 0.25


class Slots:
    """`free` are those that may be taken from its end, while there is `room`; each comes back by `give_back`."""

    def __init__(self, short: int, long: int = 0) -> None:
        self.count = short + long
        self.free = list(range(self.count - 1, -1, -1))
        self.long: set[int] = set()
        """Those of calls in long places."""
        self._most_long = long
        self._tree: CgroupTree | None = None
        self._namespaces: dict[int, int] = {}  # of mounts, by slot

    def equip(self, tree: CgroupTree) -> None:
        """With a group for each."""
        self._tree = tree

    @property
    def idle(self) -> IdleCgroup | None:
        """The group for what shall give way."""
        return self._tree.idle if self._tree else None

    @property
    def room(self) -> int:
        """Short places that nobody has."""
        return len(self.free) - (self._most_long - len(self.long))

    @property
    def taken(self) -> int:
        return self.count - len(self.free)

    def lengthen(self, number: int) -> bool:
        """Move a call to a long place, if there is one."""
        if len(self.long) >= self._most_long:
            return False
        self.long.add(number)
        return True

    def outlive(self, number: int, pid: int) -> None:
        """Have the mount namespace of a call end with its slot, not with its last process, if it has one of its own."""
        try:
            ours = os.stat("/proc/self/ns/mnt")
            fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
        except OSError as why:  # it is gone, or we have no right to
            log.debug("slot %d: its namespace ends with its call: %s", number, why)
            return
        if number in self._namespaces or os.path.samestat(os.fstat(fd), ours):
            os.close(fd)
        else:
            self._namespaces[number] = fd

    def group(self, number: int) -> SlotCgroup | None:
        """What counts the call in a slot, if anything does."""
        return self._tree.cgroup(number) if self._tree else None

    def begin(self, number: int, memory: int, processes: int) -> None:
        """Bound the next call in a slot. Raises `OSError`; then the slot is not to be used now."""
        if self._tree:
            self._tree.cgroup(number).set_limits(memory, processes)

    def end(self, number: int) -> CgroupUsage | None:
        """What the call used, if its slot has a group. Before `give_back`."""
        return self._tree.cgroup(number).read_usage() if self._tree else None

    def give_back(self, number: int) -> bool:
        """Whether the slot is free now; if not, `settle` it."""
        if number in self._namespaces or (self._tree and not self._tree.cgroup(number).is_empty):
            return False
        self._free(number)
        return True

    async def settle(self, number: int) -> None:
        """Wait until the group is empty, and the slot free."""
        pause, waited = FIRST_LOOK_S, 0.0
        while self._tree:
            await trio.sleep(pause)
            waited += pause
            pause = min(2 * pause, LONGEST_LOOK_S)
            try:
                group = self._tree.cgroup(number)
            except OSError as why:
                log.warning("slot %d has no group yet: %s", number, why)
                continue
            if group.is_empty:
                break
            if waited > KILL_AFTER_S:
                log.warning("slot %d still has processes %.1f s after its call; they are killed", number, waited)
                group.kill()
        if (namespace := self._namespaces.pop(number, None)) is not None:
            await trio.to_thread.run_sync(os.close, namespace)
        self._free(number)

    def _free(self, number: int) -> None:
        self.long.discard(number)
        self.free.append(number)
