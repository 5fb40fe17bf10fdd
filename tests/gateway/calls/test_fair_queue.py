"""The order of waiting calls, against a slow version that is plain to see."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sandbox.gateway.calls.fair_queue import FairQueue


@dataclass(eq=False)
class Item:
    tenant: str = ""
    priority: int = 0
    name: str = field(default="")


class SlowQueue:
    """The same order by searching lists. Of the tenants with fewest calls running, whose place is oldest goes next; a
    tenant takes a new place when it comes to wait, and whenever its running calls become more or fewer."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.returned: list[Item] = []
        self.running: list[Item] = []
        self.places: dict[tuple[int, str], int] = {}
        self.clock = itertools.count()

    def push(self, item: Item) -> None:
        if not self.waits(item):
            self.stand(item)
        self.items.append(item)

    def requeue(self, item: Item) -> None:
        self.end(item)
        self.returned.append(item)

    def end(self, item: Item) -> None:
        self.running.remove(item)
        self.stand(item)

    def remove(self, item: Item) -> None:
        (self.returned if item in self.returned else self.items).remove(item)

    def pop(self) -> Item | None:
        if not self.items and not self.returned:
            return None
        priority = min(item.priority for item in self.items + self.returned)
        line = [item for item in self.returned if item.priority == priority]
        if not line:
            line = sorted((item for item in self.items if item.priority == priority), key=self.turn)
        self.remove(line[0])
        self.running.append(line[0])
        self.stand(line[0])
        return line[0]

    def turn(self, item: Item) -> tuple[int, int]:
        of = (item.priority, item.tenant)
        return sum((one.priority, one.tenant) == of for one in self.running), self.places[of]

    def waits(self, item: Item) -> bool:
        return any((one.priority, one.tenant) == (item.priority, item.tenant) for one in self.items)

    def stand(self, item: Item) -> None:
        self.places[item.priority, item.tenant] = next(self.clock)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(-1, 1)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("requeue"), st.integers(0, 50)),
        st.tuples(st.just("end"), st.integers(0, 50)),
        st.tuples(st.just("remove"), st.integers(0, 50)),
    ),
    max_size=80,
)


@given(STEPS)
def test_order_equals_the_slow_version(steps: list[tuple[object, ...]]) -> None:
    fast: FairQueue[Item] = FairQueue()
    slow = SlowQueue()
    waiting: list[Item] = []
    taken: list[Item] = []
    for kind, *arguments in steps:
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
                taken.append(popped)
        elif kind == "requeue" and taken:
            item = taken.pop(int(arguments[0]) % len(taken))  # type: ignore[call-overload]
            waiting.append(item)
            fast.requeue(item)
            slow.requeue(item)
        elif kind == "end" and taken:
            item = taken.pop(int(arguments[0]) % len(taken))  # type: ignore[call-overload]
            fast.end(item)
            slow.end(item)
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


def test_lower_priority_goes_first() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(Item(priority=1))
    queue.push(Item(priority=-1))
    first = queue.pop()
    assert first is not None and first.priority == -1


def test_a_call_put_back_goes_before_all_others() -> None:
    queue: FairQueue[Item] = FairQueue()
    lost = Item("a")
    queue.push(lost)
    queue.pop()
    queue.push(Item("b"))
    queue.requeue(lost)
    assert queue.pop() is lost


def test_a_tenant_whose_calls_are_long_leaves_the_slots_to_others() -> None:
    """Four slots. The one's calls never end, the other's at once."""
    queue: FairQueue[Item] = FairQueue()
    for _ in range(100):
        queue.push(Item("long"))
        queue.push(Item("short"))
    held = [queue.pop() for _ in range(4)]
    started: list[str] = []
    for _ in range(20):
        done = next(item for item in held if item and item.tenant == "short")
        queue.finished(done)
        held.remove(done)
        held.append(queue.pop())
        started += [item.tenant for item in held[-1:] if item]
    assert started == ["short"] * 20


def test_nothing_is_left_of_what_has_ended() -> None:
    queue: FairQueue[Item] = FairQueue()
    items = [Item(tenant, priority) for tenant in "abc" for priority in (1, 2)]
    for item in items:
        queue.push(item)
    queue.remove(items[3])
    while (taken := queue.pop()) is not None:
        queue.finished(taken)
    assert not queue._levels and not queue._waiting
