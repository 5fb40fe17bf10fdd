"""The order of waiting calls, against a slow version that is plain to see."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sandbox.gateway.queue import FairQueue


@dataclass(eq=False)
class Item:
    tenant: str = ""
    priority: int = 0
    name: str = field(default="")


class SlowQueue:
    """The same order by searching lists: a priority's tenants stand in a ring, and whoever was served goes last."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.returned: list[Item] = []
        self.rings: dict[int, list[str]] = {}

    def push(self, item: Item) -> None:
        self.items.append(item)
        ring = self.rings.setdefault(item.priority, [])
        if item.tenant not in ring:
            ring.append(item.tenant)

    def put_back(self, item: Item) -> None:
        self.returned.append(item)

    def remove(self, item: Item) -> None:
        where = self.returned if item in self.returned else self.items
        where.remove(item)
        self.leave(item)

    def pop(self) -> Item | None:
        if not self.items and not self.returned:
            return None
        priority = min(item.priority for item in self.items + self.returned)
        for item in self.returned:
            if item.priority == priority:
                self.returned.remove(item)
                return item
        tenant = self.rings[priority][0]
        item = next(one for one in self.items if (one.priority, one.tenant) == (priority, tenant))
        self.items.remove(item)
        self.rings[priority].append(self.rings[priority].pop(0))
        self.leave(item)
        return item

    def leave(self, gone: Item) -> None:
        if not any((one.priority, one.tenant) == (gone.priority, gone.tenant) for one in self.items):
            ring = self.rings.get(gone.priority, [])
            if gone.tenant in ring:
                ring.remove(gone.tenant)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(-1, 1)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("put_back"), st.integers(0, 50)),
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
        elif kind == "put_back" and taken:
            item = taken.pop(int(arguments[0]) % len(taken))  # type: ignore[call-overload]
            waiting.append(item)
            fast.put_back(item)
            slow.put_back(item)
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
    queue.push(Item("b"))
    queue.put_back(lost)
    assert queue.pop() is lost
