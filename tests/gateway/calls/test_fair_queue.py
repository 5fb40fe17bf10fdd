"""Tests of the order of waiting calls, by comparison with a slow implementation that is easy to check."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from sandbox.gateway.calls.fair_queue import FairQueue


@dataclass(eq=False)
class Item:
    tenant: str = ""
    priority: int = 0


class SlowQueue:
    """A queue with the order of `FairQueue` that searches lists.

    Among the tenants with the fewest running calls, the tenant with the oldest position is next. A tenant gets a new
    position when it starts to wait, and when the number of its running calls changes.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.requeued: list[Item] = []
        self.running: list[Item] = []
        self.positions: dict[tuple[int, str], int] = {}
        self.next_position = itertools.count()

    def push(self, item: Item) -> None:
        if not self.has_waiting(item):
            self.renew_position(item)
        self.items.append(item)

    def requeue(self, item: Item) -> None:
        self.finish(item)
        self.requeued.append(item)

    def finish(self, item: Item) -> None:
        self.running.remove(item)
        self.renew_position(item)

    def remove(self, item: Item) -> None:
        (self.requeued if item in self.requeued else self.items).remove(item)

    def pop(self) -> Item | None:
        if not self.items and not self.requeued:
            return None
        priority = min(item.priority for item in self.items + self.requeued)
        candidates = [item for item in self.requeued if item.priority == priority]
        if not candidates:
            candidates = sorted((item for item in self.items if item.priority == priority), key=self.sort_key)
        self.remove(candidates[0])
        self.running.append(candidates[0])
        self.renew_position(candidates[0])
        return candidates[0]

    def sort_key(self, item: Item) -> tuple[int, int]:
        key = (item.priority, item.tenant)
        running = sum((other.priority, other.tenant) == key for other in self.running)
        return running, self.positions[key]

    def has_waiting(self, item: Item) -> bool:
        """Return whether the item's tenant has waiting items of its priority. Requeued items have no position: they are
        next in any case."""
        return any((other.priority, other.tenant) == (item.priority, item.tenant) for other in self.items)

    def renew_position(self, item: Item) -> None:
        self.positions[item.priority, item.tenant] = next(self.next_position)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(-1, 1)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("requeue"), st.integers(0, 50)),
        st.tuples(st.just("finished"), st.integers(0, 50)),
        st.tuples(st.just("remove"), st.integers(0, 50)),
    ),
    max_size=80,
)


@given(STEPS)
def test_the_order_equals_that_of_the_slow_queue(steps: list[tuple[object, ...]]) -> None:
    fast: FairQueue[Item] = FairQueue()
    slow = SlowQueue()
    waiting: list[Item] = []
    running: list[Item] = []
    for kind, *arguments in steps:  # the integers select an item of `running` or `waiting`
        if kind == "push":
            item = Item(*arguments)  # type: ignore[arg-type]
            waiting.append(item)
            fast.push(item)
            slow.push(item)
        elif kind == "pop":
            popped = fast.pop()
            assert popped is slow.pop()
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


def test_a_tenant_with_few_calls_does_not_wait_for_one_with_many() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(1000):
        queue.push(Item("many"))
    queue.push(Item("few"))
    assert [item.tenant for item in (queue.pop(), queue.pop()) if item] == ["many", "few"]


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


def test_finished_calls_leave_no_entries_behind() -> None:
    queue: FairQueue[Item] = FairQueue()
    items = [Item(tenant, priority) for tenant in "abc" for priority in (1, 2)]
    for item in items:
        queue.push(item)
    queue.remove(items[3])
    while (popped := queue.pop()) is not None:
        queue.finished(popped)
    assert not queue._levels and not queue._waiting  # entries that stay there have no other symptom
