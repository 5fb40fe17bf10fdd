"""The order of waiting calls: by priority, then from the tenant with the fewest running calls, then oldest first.

Invariants:
- A lower priority number always goes first. Calls of a higher number may wait until their `queue_timeout_s`; a running
  call is never interrupted for another one.
- Within one priority, the next call belongs to a tenant with the fewest running calls of that priority; tenants with
  equally many take turns. So a tenant with long calls does not get all slots, and a new tenant does not wait for the
  queue to empty.
- A requeued call (its executor died) goes before all other calls of its priority.
- The cost of a step does not depend on how many calls or tenants wait. `pop` searches the priorities in use (at most
  201, `types.PRIORITY`) and the distinct numbers of running calls per tenant (with N running calls at most sqrt(2N)).
- No clock and no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """The fields of a call that the queue reads. Calls are compared by identity."""

    @property
    def priority(self) -> int: ...

    @property
    def tenant(self) -> str: ...


Item = TypeVar("Item", bound=Queued)

OrderedSet = OrderedDict[Item, None]
"""A linked list: append, pop from the head and remove from the middle take constant time."""


class FairQueue(Generic[Item]):
    """Waiting calls in order. Each popped call must later be passed to `finished` or `requeue`."""

    def __init__(self) -> None:
        self._levels: dict[int, _PriorityLevel[Item]] = {}
        """Levels with waiting or running calls, by priority."""
        self._waiting: dict[int, _PriorityLevel[Item]] = {}
        """Levels with waiting calls, by priority."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        """Yield the waiting calls, in no particular order."""
        for level in self._waiting.values():
            yield from level.requeued
            for tenant in level.tenants.values():
                yield from tenant.waiting

    def push(self, *items: Item) -> None:
        """Add calls, all of one priority and one tenant, behind that tenant's other calls."""
        self._level(items[0].priority).push(items)
        self._count += len(items)

    def requeue(self, item: Item) -> None:
        """Add a popped call again, before all new calls of its priority. It counts as running no longer."""
        level = self._level(item.priority)
        level.finished(item)
        level.requeued[item] = None
        self._count += 1

    def pop(self) -> Item | None:
        """Remove and return the next call, which counts as running from now on; None if no call waits."""
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
        """Remove a waiting call."""
        level = self._levels[item.priority]
        level.remove(item)
        self._count -= 1
        if not level.has_waiting:
            del self._waiting[item.priority]
            self._remove_if_unused(item.priority, level)

    def finished(self, item: Item) -> None:
        """Count a popped call as running no longer."""
        level = self._levels[item.priority]
        level.finished(item)
        self._remove_if_unused(item.priority, level)

    def _level(self, priority: int) -> _PriorityLevel[Item]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _PriorityLevel()
        self._waiting[priority] = level
        return level

    def _remove_if_unused(self, priority: int, level: _PriorityLevel[Item]) -> None:
        if not level.tenants and not level.has_waiting:
            del self._levels[priority]


class _TenantQueue(Generic[Item]):
    """One tenant's calls of one priority."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: OrderedSet[Item] = OrderedDict()
        self.running = 0


class _PriorityLevel(Generic[Item]):
    """One priority: the requeued calls, then a queue per tenant.

    Tenants with waiting calls are in rings, one ring per number of running calls. The next call is that of the first
    tenant in the ring with the lowest number; the tenant then moves to the end of the ring for its new number.
    """

    def __init__(self) -> None:
        self.requeued: OrderedSet[Item] = OrderedDict()
        self.tenants: dict[str, _TenantQueue[Item]] = {}
        """Tenants with running calls, or with waiting calls that are not requeued."""
        self._rings: dict[int, OrderedDict[str, _TenantQueue[Item]]] = {}

    @property
    def has_waiting(self) -> bool:
        return bool(self.requeued or self._rings)

    def push(self, items: Sequence[Item]) -> None:
        name = items[0].tenant
        tenant = self._tenant(name)
        if not tenant.waiting:
            self._join_ring(name, tenant)
        tenant.waiting.update(dict.fromkeys(items))

    def pop(self) -> Item:
        if self.requeued:
            item = self.requeued.popitem(last=False)[0]
            self._add_running(item.tenant, self._tenant(item.tenant), 1)
            return item
        ring = self._rings[min(self._rings)]
        name, tenant = next(iter(ring.items()))
        item = tenant.waiting.popitem(last=False)[0]
        self._leave_ring(name, tenant)
        tenant.running += 1
        if tenant.waiting:
            self._join_ring(name, tenant)
        return item

    def remove(self, item: Item) -> None:
        if item in self.requeued:
            del self.requeued[item]
            return
        tenant = self.tenants[item.tenant]
        del tenant.waiting[item]
        if not tenant.waiting:
            self._leave_ring(item.tenant, tenant)
            self._remove_if_unused(item.tenant, tenant)

    def finished(self, item: Item) -> None:
        tenant = self.tenants[item.tenant]
        self._add_running(item.tenant, tenant, -1)
        self._remove_if_unused(item.tenant, tenant)

    def _add_running(self, name: str, tenant: _TenantQueue[Item], count: int) -> None:
        """Change a tenant's number of running calls, and move it to the ring for the new number."""
        if tenant.waiting:
            self._leave_ring(name, tenant)
        tenant.running += count
        if tenant.waiting:
            self._join_ring(name, tenant)

    def _tenant(self, name: str) -> _TenantQueue[Item]:
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = _TenantQueue()
        return tenant

    def _remove_if_unused(self, name: str, tenant: _TenantQueue[Item]) -> None:
        if not tenant.waiting and not tenant.running:
            del self.tenants[name]

    def _join_ring(self, name: str, tenant: _TenantQueue[Item]) -> None:
        ring = self._rings.get(tenant.running)
        if ring is None:
            ring = self._rings[tenant.running] = OrderedDict()
        ring[name] = tenant

    def _leave_ring(self, name: str, tenant: _TenantQueue[Item]) -> None:
        ring = self._rings[tenant.running]
        del ring[name]
        if not ring:
            del self._rings[tenant.running]
