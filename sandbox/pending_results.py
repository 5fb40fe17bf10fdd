"""The calls that a client has submitted, each with the future of its result, and the requests that contain these calls.

A call is abandoned if its caller has cancelled the future. Its result is then not awaited.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from sandbox.errors import ServiceError
from sandbox.types import Call, Result, unavailable_result


class PendingResult:
    """A submitted call and the future of its result."""

    __slots__ = ("call", "failing_since", "failures", "future", "id", "max_calls", "request")

    def __init__(self, call: Call, call_id: str, future: asyncio.Future[Result]) -> None:
        self.call = call
        self.id = call_id
        self.future = future
        self.failures = 0
        """Number of failed attempts in a row."""
        self.failing_since = 0.0
        """Time at which the first of these attempts was sent."""
        self.max_calls = sys.maxsize
        """Number of calls that a request with this call may have."""
        self.request: BatchRequest | None = None
        """The request that contains the call; None while the call waits."""

    def count_failure(self, sent_at: float, *, is_first: bool = False) -> None:
        """Count a failed attempt that was sent at `sent_at`. `is_first` means that earlier failures no longer count."""
        if is_first or not self.failures:
            self.failures, self.failing_since = 0, sent_at
        self.failures += 1

    def detach(self) -> None:
        """Remove the call from its request, so that another request can send it."""
        assert self.request is not None
        self.request.num_awaited -= 1
        self.request = None

    def set_result(self, encoded: dict[str, Any]) -> None:
        assert self.request is not None
        encoded["id"] = self.id
        self.future.set_result(Result.decode(encoded))
        self.request.num_awaited -= 1
        self.request.num_results += 1

    def set_cancelled(self) -> None:
        """Set the result `unavailable` with `Cancelled`. Only for a call that no server has."""
        message = "its caller cancelled it by its id before a server had it"
        self.future.set_result(unavailable_result(self.id, "Cancelled", message))
        if self.request is not None:
            self.request.num_awaited -= 1

    def set_error(self, error: ServiceError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            if self.request is not None:
                self.request.num_awaited -= 1


class BatchRequest:
    """Calls that are sent together, and the task that sends them."""

    def __init__(self, calls: list[PendingResult]) -> None:
        self.calls = calls
        self.num_awaited = len(calls)
        """Number of calls that are unfinished and not abandoned."""
        self.num_results = 0
        self.has_abandoned_calls = False
        self.is_sent = False
        """False while the request pauses between two attempts, so that no server has its calls."""
        self.task: asyncio.Task[None]
        for pending in calls:
            pending.request = self

    def unfinished(self) -> list[PendingResult]:
        return [pending for pending in self.calls if self.is_waiting_for(pending)]

    def is_waiting_for(self, pending: PendingResult) -> bool:
        return pending.request is self and not pending.future.done()

    @property
    def is_abandoned(self) -> bool:
        return self.has_abandoned_calls and not self.num_awaited

    def abandon_one(self) -> None:
        """Count one abandoned call, and cancel the request if no other call in it is awaited."""
        self.has_abandoned_calls = True
        self.num_awaited -= 1
        if not self.num_awaited:
            self.task.cancel()
