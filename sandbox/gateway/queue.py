"""The order in which waiting calls go: priority, then round robin between tenants, then first come.

Invariants:
- Every step is O(1) in the calls waiting; there are at most 201 priorities (`types.PRIORITY`).
- A call put back (its executor died) goes before all others of its priority: it had its turn already.
- Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What the queue needs to know of a call. Told apart by identity."""

    @property
    def priority(self) -> int: ...

    @property
    def tenant(self) -> str: ...


Item = TypeVar("Item", bound=Queued)

# Ordered dicts as linked lists: append, pop at the head and removal from the middle all in constant time.
Line = OrderedDict[Item, None]


class FairQueue(Generic[Item]):
    """Waiting calls in the order they are to go."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level[Item]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, item: Item) -> None:
        """Add `item` behind its tenant's other calls."""
        self._level(item.priority).push(item)
        self._count += 1

    def put_back(self, item: Item) -> None:
        """Add `item`, which was taken before, ahead of all new calls of its priority."""
        self._level(item.priority).returned[item] = None
        self._count += 1

    def pop(self) -> Item | None:
        """The call whose turn it is, removed; None when nobody waits."""
        if not self._count:
            return None
        priority = min(self._levels)
        level = self._levels[priority]
        item = level.pop()
        self._count -= 1
        if not level:
            del self._levels[priority]
        return item

    def remove(self, item: Item) -> None:
        """Take out `item`, which waits, from wherever it stands."""
        level = self._levels[item.priority]
        level.remove(item)
        self._count -= 1
        if not level:
            del self._levels[item.priority]

    def _level(self, priority: int) -> _Level[Item]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
        return level


class _Level(Generic[Item]):
    """One priority: the calls put back, then a line per tenant; the tenant at the head goes next."""

    def __init__(self) -> None:
        self.returned: Line[Item] = OrderedDict()
        self.tenants: OrderedDict[str, Line[Item]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.returned or self.tenants)

    def push(self, item: Item) -> None:
        line = self.tenants.get(item.tenant)
        if line is None:
            line = self.tenants[item.tenant] = OrderedDict()
        line[item] = None

    def pop(self) -> Item:
        if self.returned:
            return self.returned.popitem(last=False)[0]
        tenant = next(iter(self.tenants))
        line = self.tenants[tenant]
        item = line.popitem(last=False)[0]
        if line:
            self.tenants.move_to_end(tenant)
        else:
            del self.tenants[tenant]
        return item

    def remove(self, item: Item) -> None:
        if item in self.returned:
            del self.returned[item]
            return
        line = self.tenants[item.tenant]
        del line[item]
        if not line:
            del self.tenants[item.tenant]
