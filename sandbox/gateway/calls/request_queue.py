"""Waiting calls of several HTTP requests, which take turns.

A request is small if it has had at most `MAX_SMALL_CALLS` calls. A waiting call is a *first call* if its request is
small and no call of the request runs. The requests with waiting calls are in two rings:

    ring of first calls   A -> B -> C     requests whose next call is a first call
    ring of others        D -> E          all other requests

Each start takes one call of the request at the head of a ring. If this request still has waiting calls, it goes to the
end of the ring of others, because a call of it now runs. Starts alternate between the rings while both have requests.
Only a start for a reserved place (a place at an executor that only a first call gets) always uses the ring of first
calls.

Invariants:
- The calls of one request start in the order in which they were pushed.
- A first call whose request is n-th in its ring waits for at most n - 1 starts of its ring and n starts of the other
  ring. So a small request does not wait for the end of a large request. If a client divides a large request into many
  small requests, another small request waits for the first call of each of them, and not for all their calls.
- No request starves. A request that is n-th in its ring starts a call within 2n starts, those for reserved places not
  counted, or it changes to the other ring and is last there. It cannot change without end: between two starts of its
  own, it returns to the ring of others only if a requeued call of it starts or if it stops being small.
- The cost of a step does not depend on how many calls or requests wait.
- No clock and no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class OfRequest(Protocol):
    """A call of a request, with the only field that the queue reads. Calls are compared by identity."""

    @property
    def request_number(self) -> int: ...


Item = TypeVar("Item", bound=OfRequest)

MAX_SMALL_CALLS = 16
"""Maximum number of calls of a small request. In training, a group of 16 episodes makes 16 tool calls at once."""


class RequestQueue(Generic[Item]):
    """Waiting calls in order, and the number of running calls of each request. `finished` must be called once for each
    call that was passed to `start` or `count_running`."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request[Item]] = {}
        """Requests with waiting or running calls, by number."""
        self._first_calls: OrderedDict[int, _Request[Item]] = OrderedDict()
        """The ring of first calls: requests by number, the head first."""
        self._others: OrderedDict[int, _Request[Item]] = OrderedDict()
        """The ring of others."""
        self._is_other_next = False
        """Whether the ring of others has the next turn. If this ring is empty, the ring of first calls has it."""
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
        """Return the call that is to start next, or None. With `first_calls_only`, other calls are passed over."""
        if self._others and not first_calls_only and (self._is_other_next or not self._first_calls):
            ring = self._others
        else:
            ring = self._first_calls
        # The first waiting call of the request at the head of the ring.
        return next(iter(next(iter(ring.values())).waiting)) if ring else None

    def start(self, item: Item) -> None:
        """Remove a call that `peek` has returned. It counts as running, and the turn of its request is over."""
        request = self._requests[item.request_number]
        self._is_other_next = self._ring(request) is self._first_calls
        self.remove(item)
        self.count_running(item)
        if request.waiting:  # it is in the ring of others, since one of its calls runs
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
        """Count a call as running that `start` has not returned: a requeued call, which waits outside of this queue."""
        self._set_running(self._request(item.request_number), 1)

    def finished(self, item: Item) -> None:
        """Stop counting a call as running."""
        self._set_running(self._requests[item.request_number], -1)

    def _set_running(self, request: _Request[Item], change: int) -> None:
        before = self._ring(request)
        request.running += change
        if not request.waiting:
            self._remove_if_unused(request)
        elif (after := self._ring(request)) is not before:
            after[request.number] = before.pop(request.number)

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
