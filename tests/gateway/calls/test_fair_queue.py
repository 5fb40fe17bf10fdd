"""Tests of `FairQueue`, which decides which tenant's waiting call is next.

They compare it with a slow implementation (`SlowQueue`) whose rules are easy to check.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from sandbox.gateway.calls.fair_queue import FairQueue
from sandbox.gateway.calls.request_queue import MAX_SMALL_CALLS, RequestQueue

BOUNDS = {"a": math.inf, "b": 2, "c": 1}
"""Running calls that each tenant may have."""


@dataclass(eq=False)
class Item:
    tenant: str = ""
    priority: int = 0
    request_number: int = 0


class SlowQueue:
    """A queue with the same order as `FairQueue`, which it finds by a search of lists.

    Among the tenants with the fewest running calls, the tenant with the oldest position is next. A tenant gets a new
    position when it starts to wait, and when the number of its running calls changes. `BOUNDS` and the caller of `pop`
    bound the number of running calls of a tenant. A tenant at its bound is not next.

    Within a tenant, `RequestQueue` decides which request is next. It has its own tests.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.requeued: list[Item] = []
        self.running: list[Item] = []
        self.positions: dict[tuple[int, str], int] = {}
        """The position of each tenant with waiting calls, by priority and tenant. The lowest one is the oldest."""
        self.requests: defaultdict[tuple[int, str], RequestQueue[Item]] = defaultdict(RequestQueue)
        self.next_position = itertools.count()

    def push(self, item: Item) -> None:
        if not self.has_waiting(item):
            self.positions[item.priority, item.tenant] = next(self.next_position)
        self.items.append(item)
        self.requests[item.priority, item.tenant].push(item)

    def requeue(self, item: Item) -> None:
        self.finish(item)
        self.requeued.append(item)

    def finish(self, item: Item) -> None:
        self.running.remove(item)
        self.requests[item.priority, item.tenant].finished(item)
        self.renew_positions(item)

    def remove(self, item: Item) -> None:
        if item in self.requeued:
            self.requeued.remove(item)
        else:
            self.items.remove(item)
            self.requests[item.priority, item.tenant].remove(item)

    def pop(self, max_per_tenant: float, reserved: bool) -> Item | None:
        allowed = [i for i in self.items if self.count_running(i) < min(max_per_tenant, BOUNDS[i.tenant])]
        requeued = [] if reserved else self.requeued
        for priority in sorted({item.priority for item in allowed + requeued}):
            first = next((item for item in requeued if item.priority == priority), None)
            if first is not None:
                self.requeued.remove(first)
                self.requests[priority, first.tenant].count_running(first)
            else:
                candidates = [item for item in allowed if item.priority == priority]
                requests = self.requests[priority, min(candidates, key=self.sort_key).tenant]
                if (first := requests.peek(first_calls_only=reserved)) is None:
                    continue
                requests.start(first)
                self.items.remove(first)
            self.running.append(first)
            self.renew_positions(first)
            return first
        return None

    def sort_key(self, item: Item) -> tuple[int, int]:
        return self.count_running(item), self.positions[item.priority, item.tenant]

    def count_running(self, item: Item) -> int:
        return sum(other.tenant == item.tenant for other in self.running)

    def has_waiting(self, item: Item) -> bool:
        """Return whether the tenant of the item has waiting items of the same priority. Requeued items do not count:
        they are next in any case, so they need no position."""
        return any((other.priority, other.tenant) == (item.priority, item.tenant) for other in self.items)

    def renew_positions(self, item: Item) -> None:
        for priority, tenant in self.positions:
            if tenant == item.tenant:
                self.positions[priority, tenant] = next(self.next_position)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(-1, 1), st.integers(0, 2)),
        st.tuples(st.just("pop"), st.sampled_from([1, 2, math.inf]), st.booleans()),
        st.tuples(st.just("requeue"), st.integers(0, 50)),
        st.tuples(st.just("finished"), st.integers(0, 50)),
        st.tuples(st.just("remove"), st.integers(0, 50)),
    ),
    max_size=80,
)


@given(STEPS)
def test_the_fair_queue_has_the_same_order_as_the_slow_queue(steps: list[tuple[object, ...]]) -> None:
    fast: FairQueue[Item] = FairQueue()
    slow = SlowQueue()
    waiting: list[Item] = []
    running: list[Item] = []
    for kind, *arguments in steps:  # the integers select an item of `running` or `waiting`
        if kind == "push":
            item = Item(*arguments)  # type: ignore[arg-type]
            waiting.append(item)
            fast.push(item, max_running=BOUNDS[item.tenant])
            slow.push(item)
        elif kind == "pop":
            max_per_tenant, reserved = arguments
            popped = fast.pop(max_per_tenant, reserved=reserved)  # type: ignore[arg-type]
            assert popped is slow.pop(max_per_tenant, reserved)  # type: ignore[arg-type]
            if popped is not None:
                waiting.remove(popped)
                running.append(popped)
        elif kind == "requeue" and running:
            item = running.pop(int(arguments[0]) % len(running))  # type: ignore[call-overload]
            waiting.append(item)
            fast.requeue(item)
            slow.requeue(item)
        elif kind == "finished" and running:
            item = running.pop(int(arguments[0]) % len(running))  # type: ignore[call-overload]
            fast.finished(item)
            slow.finish(item)
        elif kind == "remove" and waiting:
            item = waiting.pop(int(arguments[0]) % len(waiting))  # type: ignore[call-overload]
            fast.remove(item)
            slow.remove(item)
        assert len(fast) == len(waiting)


def test_a_tenant_with_one_call_does_not_wait_for_all_calls_of_another_tenant() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(1000):
        queue.push(Item("many"))
    queue.push(Item("few"))
    assert [item.tenant for item in (queue.pop(), queue.pop()) if item] == ["many", "few"]


def test_a_small_request_is_next_before_a_large_request_of_the_same_tenant() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(*(Item(request_number=1) for _ in range(1000)))
    running = [queue.pop(), queue.pop()]
    queue.push(Item(request_number=2))
    running += [queue.pop(), queue.pop()]
    assert [item.request_number for item in running if item] == [1, 1, 2, 1]


def test_a_reserved_place_is_for_the_first_running_call_of_a_small_request() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(*(Item(request_number=1) for _ in range(MAX_SMALL_CALLS + 1)))
    assert queue.pop(reserved=True) is None, "the request is large"
    queue.push(first := Item(request_number=2), second := Item(request_number=2))
    assert queue.pop(reserved=True) is first and queue.pop(reserved=True) is None
    queue.finished(first)
    assert queue.pop(reserved=True) is second


def test_calls_with_a_lower_priority_number_go_first() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(Item(priority=1))
    queue.push(Item(priority=-1))
    first = queue.pop()
    assert first is not None and first.priority == -1


def test_a_requeued_call_goes_before_all_others() -> None:
    queue: FairQueue[Item] = FairQueue()
    lost = Item("a")
    queue.push(lost)
    queue.pop()
    queue.push(Item("b"))
    queue.requeue(lost)
    assert queue.pop() is lost


def test_a_tenant_with_long_calls_does_not_get_the_slots_of_others() -> None:
    """There are four slots. The calls of one tenant never end, and the calls of the other tenant end at once."""
    queue: FairQueue[Item] = FairQueue()
    for _ in range(100):
        queue.push(Item("long"))
        queue.push(Item("short"))
    running = [queue.pop() for _ in range(4)]
    for _ in range(20):
        finished = next(item for item in running if item and item.tenant == "short")
        queue.finished(finished)
        running.remove(finished)
        running.append(started := queue.pop())
        assert started is not None and started.tenant == "short"


def test_a_tenant_at_its_bound_gets_no_call_until_one_of_its_calls_ends() -> None:
    queue: FairQueue[Item] = FairQueue()
    bounded = [Item("a", priority) for priority in (0, 0, -1)]
    for item in bounded:
        queue.push(item, max_running=1)
    assert queue.pop() is bounded[2] and queue.pop() is None
    queue.push(other := Item("b", 1))
    assert queue.pop() is other
    queue.finished(bounded[2])
    assert queue.pop() is bounded[0] and queue.pop() is None


def test_a_raised_bound_applies_to_calls_that_wait_already() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(Item("a"), Item("a"), max_running=1)
    assert queue.pop() and queue.pop() is None
    queue.push(Item("a"), max_running=3)
    assert queue.pop() and queue.pop() and not len(queue)


def test_all_waiting_calls_can_be_popped_after_the_bounds_are_lifted() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(*(Item("a") for _ in range(3)), max_running=1)
    queue.pop()
    queue.lift_bounds()
    assert queue.pop() and queue.pop() and not len(queue)


def test_finished_calls_leave_no_entries_behind() -> None:
    queue: FairQueue[Item] = FairQueue()
    items = [Item(tenant, priority) for tenant in "abc" for priority in (1, 2)]
    for item in items:
        queue.push(item)
    queue.remove(items[3])
    while (popped := queue.pop()) is not None:
        queue.finished(popped)
    assert not queue._levels and not queue._tenants  # private, because leaked entries have no visible effect
