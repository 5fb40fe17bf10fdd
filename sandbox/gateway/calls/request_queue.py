"""Waiting calls of several HTTP requests, which take turns.

    requests with waiting calls:   next is a first call   A -> B -> C     a start takes the first request of one ring,
                                   the others             D -> E          then of the other; the request goes to the
                                                                          end of its new ring

The next call of a request is a *first call* if the request is small (`MAX_SMALL_CALLS`) and none of its calls runs.

Invariants:
- The calls of one request start in the order in which they were pushed.
- A first call waits for at most one start of each request before it in its ring, and for as many starts of the other
  ring. So a small request passes large ones, and also a large one that its client sends as many requests.
- No request starves: a request that is n-th in its ring starts a call within 2n starts, or it changes to the other
  ring, where the same holds.
- The cost of a step does not depend on how many calls or requests wait.
- No clock and no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class OfRequest(Protocol):
    """The field of a call that the queue reads. Calls are compared by identity."""

    @property
    def request_number(self) -> int: ...


Item = TypeVar("Item", bound=OfRequest)

MAX_SMALL_CALLS = 16
"""A request is small if it has had at most this many calls. A group of 16 episodes makes as many tool calls at once."""


class RequestQueue(Generic[Item]):
    """Waiting calls in order, and the number of running calls of each request. `finished` must be called once for each
    call that was started."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request[Item]] = {}
        """Requests with waiting or running calls, by number."""
        self._first_calls: OrderedDict[int, _Request[Item]] = OrderedDict()
        """Requests with waiting calls, the next of which is a first call."""
        self._others: OrderedDict[int, _Request[Item]] = OrderedDict()
        """The other requests with waiting calls."""
        self._is_other_next = False
        """Whether the next start is one of `_others`, if it has a request."""
        self._count = 0

    def __len__(self) -> int:
        """Return the number of waiting calls."""
        return self._count

    def __iter__(self) -> Iterator[Item]:
        """Yield the waiting calls, in no particular order."""
        for request in self._requests.values():
            yield from request.waiting

    @property
    def is_unused(self) -> bool:
        """Whether there are neither waiting nor running calls."""
        return not self._requests

    def push(self, *items: Item) -> None:
        """Add calls of one request, behind its other calls."""
        request = self._request(items[0].request_number)
        before = self._ring(request) if request.waiting else {}
        request.calls += len(items)
        request.waiting.update(dict.fromkeys(items))
        self._count += len(items)
        after = self._ring(request)
        if after is not before:
            before.pop(request.number, None)
            after[request.number] = request

    def peek(self, *, first_calls_only: bool = False) -> Item | None:
        """Return the call that is to start next, or None."""
        if self._others and not first_calls_only and (self._is_other_next or not self._first_calls):
            ring = self._others
        else:
            ring = self._first_calls
        return next(iter(next(iter(ring.values())).waiting)) if ring else None

    def start(self, item: Item) -> None:
        """Remove a call that `peek` has returned. It counts as running, and the turn of its request is over."""
        request = self._requests[item.request_number]
        self._is_other_next = self._ring(request) is self._first_calls
        self.remove(item)
        self.count_running(item)
        if request.waiting:
            self._others.move_to_end(request.number)

    def remove(self, item: Item) -> None:
        """Remove a waiting call."""
        request = self._requests[item.request_number]
        del request.waiting[item]
        self._count -= 1
        if not request.waiting:
            del self._ring(request)[request.number]
            self._remove_if_unused(request)

    def count_running(self, item: Item) -> None:
        """Count a call that does not wait here as running."""
        self._set_running(self._request(item.request_number), 1)

    def finished(self, item: Item) -> None:
        """Count a call as running no longer."""
        self._set_running(self._requests[item.request_number], -1)

    def _set_running(self, request: _Request[Item], change: int) -> None:
        before = self._ring(request)
        request.running += change
        after = self._ring(request)
        if request.waiting and after is not before:
            after[request.number] = before.pop(request.number)
        self._remove_if_unused(request)

    def _ring(self, request: _Request[Item]) -> OrderedDict[int, _Request[Item]]:
        return self._others if request.running or request.calls > MAX_SMALL_CALLS else self._first_calls

    def _request(self, number: int) -> _Request[Item]:
        request = self._requests.get(number)
        if request is None:
            request = self._requests[number] = _Request(number)
        return request

    def _remove_if_unused(self, request: _Request[Item]) -> None:
        if not request.waiting and not request.running:
            del self._requests[request.number]


class _Request(Generic[Item]):
    """The calls of one request."""

    __slots__ = ("calls", "number", "running", "waiting")

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0
        """Number of all calls that were pushed since the request last had neither waiting nor running calls."""
        self.waiting: OrderedDict[Item, None] = OrderedDict()
        self.running = 0
