"""Tests of the turns of requests, by comparison with a slow implementation that is easy to check."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from sandbox.request_queue import RequestQueue


@dataclass(eq=False)
class Item:
    request_number: int = 0


class SlowQueue:
    """A queue with the order of `RequestQueue` that searches lists.

    The next request is the one with the oldest position in its group: those with running calls, or those without. The
    groups take turns. A request gets a new position when it starts to wait, when its group changes, and after a start.
    """

    def __init__(self) -> None:
        self.waiting: list[Item] = []
        self.running: list[Item] = []
        self.positions: dict[int, int] = {}
        self.groups: dict[int, bool] = {}
        self.next_position = itertools.count()
        self.is_running_next = False

    def push(self, item: Item, *, first: bool = False) -> None:
        self.waiting.insert(0 if first else len(self.waiting), item)
        self.update()

    def peek(self, resting_only: bool) -> Item | None:
        ring = {group: [n for n in self.positions if self.groups[n] is group] for group in (False, True)}
        group = not resting_only and bool(ring[True]) and (self.is_running_next or not ring[False])
        number = min(ring[group], key=self.positions.__getitem__, default=None)
        return next((item for item in self.waiting if item.request_number == number), None)

    def start(self, item: Item) -> None:
        self.is_running_next = not self.groups[item.request_number]
        self.waiting.remove(item)
        self.running.append(item)
        self.positions.pop(item.request_number)
        self.update()

    def remove(self, item: Item) -> None:
        self.waiting.remove(item)
        self.update()

    def finished(self, item: Item) -> None:
        self.running.remove(item)
        self.update()

    def update(self) -> None:
        running = {item.request_number for item in self.running}
        waiting = {item.request_number for item in self.waiting}
        self.positions = {
            n: at for n, at in self.positions.items() if n in waiting and self.groups[n] is (n in running)
        }
        for number in waiting - set(self.positions):
            self.positions[number] = next(self.next_position)
        self.groups = {number: number in running for number in waiting}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["push", "push_first"]), st.integers(0, 3)),
        st.tuples(st.just("start"), st.integers(0, 1)),
        st.tuples(st.sampled_from(["finished", "remove"]), st.integers(0, 50)),
    ),
    max_size=80,
)


@given(STEPS)
def test_the_order_equals_that_of_the_slow_queue_and_no_call_is_lost(steps: list[tuple[str, int]]) -> None:
    fast: RequestQueue[Item] = RequestQueue()
    slow = SlowQueue()
    for kind, number in steps:
        if kind.startswith("push"):
            item = Item(number)
            slow.push(item, first=kind == "push_first")
            (fast.push_first if kind == "push_first" else fast.push)(item)
        elif kind == "start":
            next_item = fast.peek(resting_only=bool(number))
            assert next_item is slow.peek(bool(number))
            if next_item is not None:
                fast.start(next_item)
                slow.start(next_item)
        elif items := slow.running if kind == "finished" else slow.waiting:
            item = items[number % len(items)]
            getattr(fast, kind)(item)
            getattr(slow, kind)(item)
        assert sorted(map(id, fast)) == sorted(map(id, slow.waiting)) and len(fast) == len(slow.waiting)
        assert fast.is_unused is not bool(slow.waiting or slow.running)


@given(st.integers(1, 5), st.lists(st.integers(0, 20), min_size=60, max_size=60))
def test_no_request_starves_beside_new_small_ones(large: int, ended: list[int]) -> None:
    """One new request with a single call arrives before each start, so there is always one without running calls."""
    queue: RequestQueue[Item] = RequestQueue()
    for number in range(large):
        queue.push(*(Item(number) for _ in range(100)))
    running: list[Item] = []
    last_start = dict.fromkeys(range(large), 0)
    for step, index in enumerate(ended, start=1):
        queue.push(Item(1000 + step))
        item = queue.peek()
        assert item is not None
        queue.start(item)
        running.append(item)
        if item.request_number < large:
            last_start[item.request_number] = step
        if len(running) > 4:  # slots
            queue.finished(running.pop(index % len(running)))
        waiting = len({other.request_number for other in queue})
        assert all(step - at <= 4 * waiting for at in last_start.values()), "a large request starved"
