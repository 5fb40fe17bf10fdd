"""What a client has submitted: calls and programs, each with the future of its result, and the requests with them.

An item is abandoned if its caller has cancelled the future. Its result is then not awaited.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sandbox.errors import ServiceError
from sandbox.types import UnavailableReason

ResultT = TypeVar("ResultT", covariant=True)
T = TypeVar("T")


class BatchRoute(Protocol[ResultT]):
    """A route of the server that takes many items in one request and streams a result for each. Items with the same
    `BatchRoute` may share a request."""

    path: str
    content_type: str
    """Content type of a request's body."""
    noun: str
    """What its items are, for log lines."""
    max_weight: int | None
    """Maximum sum of the weights of the items in one request. An item that is heavier is sent in a request of its own.
    None means the transport's batch size."""

    def encode(self, items: Sequence[Any], fields: Mapping[str, float]) -> bytes:
        """Return the body of a request with these items, and with further `fields`."""

    def decode(self, encoded: dict[str, Any]) -> ResultT:
        """Return the result of an item. May raise any error that shows that `encoded` is no result."""
        ...

    def retryable_reason(self, encoded: dict[str, Any]) -> UnavailableReason | None:
        """Return the reason for which an item with this result is sent again; None if the result is final."""
        ...

    def unavailable(self, item_id: str, reason: UnavailableReason, message: str) -> ResultT:
        """Return the result of an item that no server has."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Submission(Generic[T]):
    """A call or a program that is to be sent."""

    route: BatchRoute[T]
    item: Any
    id: str
    """The id that the caller gave the item, or an empty text."""
    result_id: str
    """The id of its result."""
    size: int
    """Approximate bytes of its encoding."""
    weight: int = 1
    """Number of calls that the server runs for the item: 1 for a call, the number of its tests for a program."""


class PendingResult(Generic[T]):
    """A submitted call or program and the future of its result."""

    __slots__ = ("failing_since", "failures", "future", "max_items", "request", "submission")

    def __init__(self, submission: Submission[T], future: asyncio.Future[T]) -> None:
        self.submission = submission
        self.future = future
        self.failures = 0
        """Number of failed attempts in a row."""
        self.failing_since = 0.0
        """Time at which the first of these attempts was sent."""
        self.max_items = sys.maxsize
        """Maximum number of items in a request that contains this item."""
        self.request: BatchRequest | None = None
        """The request that contains the item; None while the item waits."""

    def count_failure(self, sent_at: float, *, is_first: bool = False) -> None:
        """Count a failed attempt that was sent at `sent_at`. `is_first` means that earlier failures no longer count."""
        if is_first or not self.failures:
            self.failures, self.failing_since = 0, sent_at
        self.failures += 1

    def detach(self) -> None:
        """Remove the item from its request, so that another request can send it."""
        assert self.request is not None
        self.request.num_awaited -= 1
        self.request = None

    def set_result(self, encoded: dict[str, Any]) -> None:
        assert self.request is not None
        encoded["id"] = self.submission.result_id
        self.future.set_result(self.submission.route.decode(encoded))
        self.request.num_awaited -= 1
        self.request.num_results += 1

    def set_cancelled(self) -> None:
        """Set the result `unavailable` with `Cancelled`. Only for an item that no server has."""
        message = "its caller cancelled it by its id before a server had it"
        route, result_id = self.submission.route, self.submission.result_id
        self.future.set_result(route.unavailable(result_id, UnavailableReason.CANCELLED, message))
        if self.request is not None:
            self.request.num_awaited -= 1

    def set_error(self, error: ServiceError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            if self.request is not None:
                self.request.num_awaited -= 1


class BatchRequest:
    """Items that are sent together, all of one route, and the task that sends them."""

    def __init__(self, items: list[PendingResult[Any]]) -> None:
        self.items = items
        self.num_awaited = len(items)
        """Number of items that are unfinished and not abandoned."""
        self.num_results = 0
        """Number of results that have arrived, over all attempts of the request."""
        self.has_abandoned_items = False
        self.is_sent = False
        """False while the request pauses between two attempts, so that no server has its items."""
        self.task: asyncio.Task[None]
        for pending in items:
            pending.request = self

    @property
    def route(self) -> BatchRoute[Any]:
        return self.items[0].submission.route

    def unfinished(self) -> list[PendingResult[Any]]:
        return [pending for pending in self.items if self.is_waiting_for(pending)]

    def is_waiting_for(self, pending: PendingResult[Any]) -> bool:
        return pending.request is self and not pending.future.done()

    @property
    def is_abandoned(self) -> bool:
        return self.has_abandoned_items and not self.num_awaited

    def abandon_one(self) -> None:
        """Count one abandoned item, and cancel the request if no other item in it is awaited."""
        self.has_abandoned_items = True
        self.num_awaited -= 1
        if not self.num_awaited:
            self.task.cancel()
