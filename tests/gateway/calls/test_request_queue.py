"""Tests of `RequestQueue`, which decides which request of a tenant is next.

They compare it with a slow implementation (`SlowQueue`) whose rules are easy to check. A first call is a call whose
request has at most 16 calls, none of which runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from sandbox.gateway.calls.request_queue import MAX_SMALL_CALLS, RequestQueue


@dataclass(eq=False)
class Item:
    request_number: int = 0


class SlowQueue:
    """A queue with the same order as `RequestQueue`, which it finds by a search of lists.

    The waiting requests form two groups: the requests whose next call is a first call, and the other requests. The two
    groups take turns. Within a group, the request with the oldest position is next. A request gets a new position when
    it starts to wait, when its group changes, and when one of its calls starts.
    """

    def __init__(self) -> None:
        self.waiting: list[Item] = []
        self.running: list[Item] = []
        self.calls: Counter[int] = Counter()
        """By request: the number of its calls, ended ones included. The entry ends with the last unfinished call."""
        self.positions: dict[int, int] = {}
        self.groups: dict[int, bool] = {}
        """By waiting request: False if its next call is a first call, True for the other group."""
        self.next_position = itertools.count()
        self.is_other_next = False

    def push(self, *items: Item) -> None:
        self.waiting += items
        self.calls[items[0].request_number] += len(items)
        self.update()

    def peek(self, first_calls_only: bool) -> Item | None:
        ring = {group: [n for n in self.positions if self.groups[n] is group] for group in (False, True)}
        group = not first_calls_only and bool(ring[True]) and (self.is_other_next or not ring[False])
        number = min(ring[group], key=self.positions.__getitem__, default=None)
        return next((item for item in self.waiting if item.request_number == number), None)

    def start(self, item: Item) -> None:
        self.is_other_next = not self.groups[item.request_number]
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
        self.calls = Counter({n: calls for n, calls in self.calls.items() if n in running | waiting})
        groups = {number: number in running or self.calls[number] > MAX_SMALL_CALLS for number in waiting}
        self.positions = {n: at for n, at in self.positions.items() if n in waiting and self.groups[n] is groups[n]}
        for number in waiting - set(self.positions):
            self.positions[number] = next(self.next_position)
        self.groups = groups


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["push", "push 9"]), st.integers(0, 3)),
        st.tuples(st.just("start"), st.integers(0, 1)),
        st.tuples(st.sampled_from(["finished", "remove"]), st.integers(0, 50)),
    ),
    max_size=80,
)


@given(STEPS)
def test_the_request_queue_has_the_same_order_as_the_slow_queue_and_loses_no_call(steps: list[tuple[str, int]]) -> None:
    fast: RequestQueue[Item] = RequestQueue()
    slow = SlowQueue()
    for kind, number in steps:
        if kind.startswith("push"):
            items = [Item(number) for _ in range(9 if kind == "push 9" else 1)]
            slow.push(*items)
            fast.push(*items)
        elif kind == "start":
            next_item = fast.peek(first_calls_only=bool(number))
            assert next_item is slow.peek(bool(number))
            if next_item is not None:
                fast.start(next_item)
                slow.start(next_item)
        elif candidates := slow.running if kind == "finished" else slow.waiting:
            item = candidates[number % len(candidates)]
            getattr(fast, kind)(item)
            getattr(slow, kind)(item)
        assert sorted(map(id, fast)) == sorted(map(id, slow.waiting)) and len(fast) == len(slow.waiting)
        assert fast.is_unused is not bool(slow.waiting or slow.running)


@given(st.integers(1, 5), st.lists(st.integers(0, 20), min_size=60, max_size=60))
def test_a_large_request_does_not_starve_beside_new_small_requests(large: int, ended: list[int]) -> None:
    """Before each start a new request with a single call arrives. So at each start there is a request without running
    calls, whose call is a first call."""
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
