"""The order of waiting calls: by priority, then by tenant (fewest running calls first), then in turns of requests.

Invariants:
- A lower priority number always goes first. Calls of a higher number may wait until their `queue_timeout_s`; a running
  call is never interrupted for another one.
- Within one priority, the next call belongs to a tenant with the fewest running calls. If several tenants have the
  fewest, they take turns. So a tenant with long calls does not get all slots, and a new tenant does not wait for the
  queue to empty.
- Within one priority and tenant, requests take turns (`RequestQueue`), so a small request passes a large one.
- A tenant with `max_running` running calls gets no further call. Its waiting calls are skipped at no cost: the tenant
  is in no ring (`_PriorityLevel`) until one of its calls ends.
- A requeued call (its attempt was lost) goes before all new calls of its priority. The bounds of its tenant do not hold
  for it, because it was within them when it was first popped. It gets no reserved place, a place at an executor that
  only a first call gets (`request_queue`).
- The cost of a step does not depend on how many calls or tenants wait. `pop` searches the priorities in use (at most
  201, `types.PRIORITY_RULE`) and the distinct numbers of running calls per tenant. With N running calls there are about
  sqrt(2N) distinct numbers, because 1 + 2 + ... + k may not exceed N. A change of the number of a tenant's running
  calls visits the priorities in which the tenant has calls.
- No clock and no I/O.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from sandbox.gateway.calls.request_queue import RequestQueue


class Queued(Protocol):
    """The fields of a call that the queue reads. Calls are compared by identity."""

    @property
    def priority(self) -> int: ...

    @property
    def tenant(self) -> str: ...

    @property
    def request_number(self) -> int: ...


Item = TypeVar("Item", bound=Queued)


class FairQueue(Generic[Item]):
    """Waiting calls in order. Each popped call must later be passed to `finished` or `requeue`."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[Item]] = {}
        """Tenants with running calls, or with waiting calls that are not requeued."""
        self._levels: dict[int, _PriorityLevel[Item]] = {}
        """By priority: the levels that have a call which `pop` may return."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        """Yield the waiting calls, in no particular order."""
        for level in self._levels.values():
            yield from level.requeued
        for tenant in self._tenants.values():
            for requests in tenant.requests.values():
                yield from requests

    def push(self, *items: Item, max_running: float = math.inf) -> None:
        """Add calls, all of one priority, tenant and request, behind that request's other calls. From now on the tenant
        may have `max_running` running calls."""
        tenant, priority = self._tenant(items[0].tenant), items[0].priority
        if max_running != tenant.max_running:
            self._update(tenant, tenant.running, max_running)
        requests = tenant.requests_of(priority)
        had_waiting = len(requests)
        requests.push(*items)
        if not had_waiting:
            self._join_ring(priority, tenant)
        self._count += len(items)

    def requeue(self, item: Item) -> None:
        """Add a popped call again, before all new calls of its priority. It no longer counts as running."""
        self.finished(item)
        self._level(item.priority).requeued[item] = None
        self._count += 1

    def pop(self, max_per_tenant: float = math.inf, *, reserved: bool = False) -> Item | None:
        """Remove and return the next call, which counts as running from now on; None if no call may run. A call that is
        not requeued belongs to a tenant with fewer than `max_per_tenant` running calls. With `reserved`, the call is
        for a reserved place: it is a first call (`request_queue`) of the tenant whose turn it is."""
        for priority in sorted(self._levels):
            level = self._levels[priority]
            if level.requeued and not reserved:
                item = level.requeued.popitem(last=False)[0]
                self._remove_if_empty(priority, level)
                tenant = self._tenant(item.tenant)
                tenant.requests_of(priority).count_running(item)
            elif level.rings and (fewest := min(level.rings)) < max_per_tenant:
                tenant = next(iter(level.rings[fewest].values()))
                requests = tenant.requests[priority]
                next_item = requests.peek(first_calls_only=reserved)
                if next_item is None:
                    continue
                item = next_item
                requests.start(item)
                if not requests:
                    self._leave_ring(priority, tenant)
            else:
                continue
            self._count -= 1
            self._update(tenant, tenant.running + 1, tenant.max_running)
            return item
        return None

    def remove(self, item: Item) -> None:
        """Remove a waiting call."""
        level = self._levels.get(item.priority)
        if level is not None and item in level.requeued:
            del level.requeued[item]
            self._remove_if_empty(item.priority, level)
        else:
            tenant = self._tenants[item.tenant]
            requests = tenant.requests[item.priority]
            requests.remove(item)
            if not requests:
                self._leave_ring(item.priority, tenant)
            self._remove_if_unused(tenant, item.priority)
        self._count -= 1

    def finished(self, item: Item) -> None:
        """Stop counting a popped call as running."""
        tenant = self._tenants[item.tenant]
        tenant.requests[item.priority].finished(item)
        self._update(tenant, tenant.running - 1, tenant.max_running)
        self._remove_if_unused(tenant, item.priority)

    def running(self, tenant: str) -> int:
        """Return how many calls of a tenant are running."""
        return self._tenants[tenant].running if tenant in self._tenants else 0

    def lift_bounds(self) -> None:
        """From now on, let `pop` return the calls of a tenant whatever its number of running calls is."""
        for tenant in self._tenants.values():
            self._update(tenant, tenant.running, math.inf)

    def _update(self, tenant: _Tenant[Item], running: int, max_running: float) -> None:
        """Change the numbers of a tenant, and move it to the rings for them."""
        waiting = [priority for priority, requests in tenant.requests.items() if requests]
        for priority in waiting:
            self._leave_ring(priority, tenant)
        tenant.running, tenant.max_running = running, max_running
        for priority in waiting:
            self._join_ring(priority, tenant)

    def _join_ring(self, priority: int, tenant: _Tenant[Item]) -> None:
        if tenant.running < tenant.max_running:
            self._level(priority).rings.setdefault(tenant.running, OrderedDict())[tenant.name] = tenant

    def _leave_ring(self, priority: int, tenant: _Tenant[Item]) -> None:
        if tenant.running < tenant.max_running:
            level = self._levels[priority]
            ring = level.rings[tenant.running]
            del ring[tenant.name]
            if not ring:
                del level.rings[tenant.running]
                self._remove_if_empty(priority, level)

    def _tenant(self, name: str) -> _Tenant[Item]:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name)
        return tenant

    def _level(self, priority: int) -> _PriorityLevel[Item]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _PriorityLevel()
        return level

    def _remove_if_unused(self, tenant: _Tenant[Item], priority: int) -> None:
        if tenant.requests[priority].is_unused:
            del tenant.requests[priority]
            if not tenant.requests:
                del self._tenants[tenant.name]

    def _remove_if_empty(self, priority: int, level: _PriorityLevel[Item]) -> None:
        if not level.requeued and not level.rings:
            del self._levels[priority]


class _Tenant(Generic[Item]):
    """One tenant's calls."""

    __slots__ = ("max_running", "name", "requests", "running")

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: dict[int, RequestQueue[Item]] = {}
        """Calls by priority, without requeued ones. Each queue has waiting or running calls."""
        self.running = 0
        self.max_running = math.inf

    def requests_of(self, priority: int) -> RequestQueue[Item]:
        requests = self.requests.get(priority)
        if requests is None:
            requests = self.requests[priority] = RequestQueue()
        return requests


class _PriorityLevel(Generic[Item]):
    """One priority: its requeued calls, and the tenants that have waiting calls of this priority and may run one.

    The tenants are in rings, one ring per number of running calls. The next call belongs to the first tenant in the
    ring with the lowest number. The tenant then moves to the end of the ring for its new number.
    """

    __slots__ = ("requeued", "rings")

    def __init__(self) -> None:
        self.requeued: OrderedDict[Item, None] = OrderedDict()
        self.rings: dict[int, OrderedDict[str, _Tenant[Item]]] = {}
