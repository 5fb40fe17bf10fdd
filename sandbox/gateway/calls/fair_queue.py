"""The order in which waiting calls go: priority, then the tenant with fewest running, then first come.

Invariants:
- A lower priority number goes first, whoever it is that waits: calls of one number can wait for ever behind those of a
  lower one, until their `queue_timeout_s`. Running calls are never interrupted for others.
- Within one priority the next call is one of the tenant that has fewest running there, and among such tenants they take
  turns. So a tenant whose calls are long does not get all slots, and one that is new need not wait for a queue to end.
- A call put back (its executor died) goes before all others of its priority: it had its turn already.
- No step depends on how many calls or tenants wait. `pop` looks for the least of the priorities in use (201 at most,
  `types.PRIORITY`), and of the different numbers of running calls that tenants have: with N running, about the root of
  2N at most.
- Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
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
    """Waiting calls in the order they are to go. Whatever is popped is `end`ed or `put_back` later."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level[Item]] = {}
        """Those with calls that wait or run."""
        self._waiting: dict[int, _Level[Item]] = {}
        """Those with calls that wait."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, *items: Item) -> None:
        """Add `items`, all of one priority and one tenant, behind that tenant's other calls."""
        self._level(items[0].priority).push(items)
        self._count += len(items)

    def put_back(self, item: Item) -> None:
        """Add `item`, which was popped and runs no longer, ahead of all new calls of its priority."""
        level = self._level(item.priority)
        level.end(item)
        level.returned[item] = None
        self._count += 1

    def pop(self) -> Item | None:
        """The call whose turn it is; None when nobody waits."""
        if not self._count:
            return None
        priority = min(self._waiting)
        level = self._waiting[priority]
        item = level.pop()
        self._count -= 1
        if not level.has_waiting:
            del self._waiting[priority]
        return item

    def remove(self, item: Item) -> None:
        """Take out `item`, which waits, from wherever it stands."""
        level = self._levels[item.priority]
        level.remove(item)
        self._count -= 1
        if not level.has_waiting:
            del self._waiting[item.priority]
            self._forget(item.priority, level)

    def end(self, item: Item) -> None:
        """`item`, which was popped, runs no longer."""
        level = self._levels[item.priority]
        level.end(item)
        self._forget(item.priority, level)

    def _level(self, priority: int) -> _Level[Item]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
        self._waiting[priority] = level
        return level

    def _forget(self, priority: int, level: _Level[Item]) -> None:
        if not level.tenants and not level.has_waiting:
            del self._levels[priority]


class _Tenant(Generic[Item]):
    """One tenant's calls of one priority."""

    __slots__ = ("line", "running")

    def __init__(self) -> None:
        self.line: Line[Item] = OrderedDict()
        self.running = 0


class _Level(Generic[Item]):
    """One priority: the calls put back, then a line per tenant. Waiting tenants stand in a ring for each number of
    running calls; whoever is at the head of the ring of the least number goes next."""

    def __init__(self) -> None:
        self.returned: Line[Item] = OrderedDict()
        self.tenants: dict[str, _Tenant[Item]] = {}
        """Those with calls that wait in their line, or run."""
        self._rings: dict[int, OrderedDict[str, _Tenant[Item]]] = {}

    @property
    def has_waiting(self) -> bool:
        return bool(self.returned or self._rings)

    def push(self, items: Sequence[Item]) -> None:
        name = items[0].tenant
        tenant = self._tenant(name)
        if not tenant.line:
            self._stand(name, tenant)
        tenant.line.update(dict.fromkeys(items))

    def pop(self) -> Item:
        if self.returned:
            item = self.returned.popitem(last=False)[0]
            self._run(item.tenant, self._tenant(item.tenant), 1)
            return item
        ring = self._rings[min(self._rings)]
        name, tenant = next(iter(ring.items()))
        item = tenant.line.popitem(last=False)[0]
        self._leave(name, tenant)
        tenant.running += 1
        if tenant.line:
            self._stand(name, tenant)
        return item

    def remove(self, item: Item) -> None:
        if item in self.returned:
            del self.returned[item]
            return
        tenant = self.tenants[item.tenant]
        del tenant.line[item]
        if not tenant.line:
            self._leave(item.tenant, tenant)
            self._forget(item.tenant, tenant)

    def end(self, item: Item) -> None:
        tenant = self.tenants[item.tenant]
        self._run(item.tenant, tenant, -1)
        self._forget(item.tenant, tenant)

    def _run(self, name: str, tenant: _Tenant[Item], more: int) -> None:
        """Count `more` as running, and have the tenant stand where it belongs then."""
        if tenant.line:
            self._leave(name, tenant)
        tenant.running += more
        if tenant.line:
            self._stand(name, tenant)

    def _tenant(self, name: str) -> _Tenant[Item]:
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = _Tenant()
        return tenant

    def _forget(self, name: str, tenant: _Tenant[Item]) -> None:
        if not tenant.line and not tenant.running:
            del self.tenants[name]

    def _stand(self, name: str, tenant: _Tenant[Item]) -> None:
        ring = self._rings.get(tenant.running)
        if ring is None:
            ring = self._rings[tenant.running] = OrderedDict()
        ring[name] = tenant

    def _leave(self, name: str, tenant: _Tenant[Item]) -> None:
        ring = self._rings[tenant.running]
        del ring[name]
        if not ring:
            del self._rings[tenant.running]
