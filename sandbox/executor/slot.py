"""The slots of one family: which are free, and what the kernel says of the calls in them.

Invariants:
- A slot (a number, a uid inside, and where the machine grants it a control group) belongs to one call at a time.
- It is free only when the kernel counts no process in its group any more. Until then it is parked, and looked at again
  ever less often; a process that is still there after a while is killed.
"""

from __future__ import annotations

import logging

import trio

from sandbox.jail import Group, Spent

log = logging.getLogger(__name__)

FIRST_LOOK_S, LONGEST_LOOK_S = 0.001, 1.0
KILL_AFTER_S = 0.25


class Slots:
    """`free` are those that may be taken from its end; each that was taken comes back by `give_back`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count - 1, -1, -1))
        self._groups: list[Group] = []

    def equip(self, groups: list[Group]) -> None:
        """With a group for each."""
        self._groups = groups

    def begin(self, number: int, memory: int, processes: int) -> None:
        """Bound the next call in a slot. Raises `OSError`; then the slot is not to be used now."""
        if self._groups:
            self._groups[number].begin(memory, processes)

    def end(self, number: int) -> Spent | None:
        """What the call used, if its slot has a group. Before `give_back`."""
        return self._groups[number].end() if self._groups else None

    def give_back(self, number: int) -> bool:
        """Whether the slot is free now; if not, `settle` it."""
        if self._groups and not self._groups[number].is_empty:
            return False
        self.free.append(number)
        return True

    async def settle(self, number: int) -> None:
        """Wait until the group is empty, and the slot free."""
        group, pause, waited = self._groups[number], FIRST_LOOK_S, 0.0
        while True:
            await trio.sleep(pause)
            if group.is_empty:
                break
            waited += pause
            pause = min(2 * pause, LONGEST_LOOK_S)
            if waited > KILL_AFTER_S:
                log.warning("slot %d still has processes %.1f s after its call; they are killed", number, waited)
                group.kill()
        self.free.append(number)
