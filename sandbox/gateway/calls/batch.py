"""A batch of calls and their results: data that HTTP routes fill and read, and that the call table changes.

Invariants:
- Each index of a batch gets exactly one result.
- A finished call keeps no reference to its code. A finished batch keeps no reference to its calls.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from operator import itemgetter

from sandbox.gateway.calls.sessions import Session
from sandbox.settings.tenants import Tenant
from sandbox.types import EncodedCall, EncodedResult, call_size, clamp, memory_bytes

ExecutorId = int
"""Number of an executor, from 0."""
_request_numbers = itertools.count(1)


def next_request_number() -> int:
    """Return a number that no other request has."""
    return next(_request_numbers)


class PendingCall:
    """One call of a batch, from its admission to its result."""

    __slots__ = (
        "attempts", "batch", "call", "clamped", "executor", "has_reserved_place", "has_started", "id", "index",
        "priority", "queue_ms", "seq", "session", "size_bytes", "tenant", "waiting_since",
    )  # fmt: skip

    def __init__(self, index: int, call: EncodedCall, call_id: str, clamped: dict[str, float]) -> None:
        self.batch: Batch
        """Set when the batch is admitted."""
        self.index = index
        self.call: EncodedCall | None = call
        """None once the call is finished or cancelled, to free its memory."""
        self.id = call_id
        self.clamped = clamped
        """The limits that were lowered, by name, with their new values."""
        self.priority = call.get("priority", 0)
        self.tenant = call.get("tenant", "")
        self.size_bytes = call_size(call)
        self.attempts = 0
        """Number of times that the call was sent to an executor. No other place counts attempts."""
        self.has_started = False
        """Whether the code may have started in an attempt that was lost."""
        self.executor: ExecutorId | None = None
        """The executor that has the call; None while the call waits."""
        self.has_reserved_place = False
        """Whether the call is in a reserved place of its executor, which does not count against the executor's window
        (`sandbox.wire`)."""
        self.session: Session | None = None
        """The session to which the call belongs. Its executor is the only one that may run the call."""
        self.seq = 0
        """Number of the current attempt, unique in the call table."""
        self.waiting_since = 0.0
        """Time at which the call last entered the queue."""
        self.queue_ms = 0.0
        """Milliseconds that the call waited in the gateway, all attempts together."""

    @property
    def request_number(self) -> int:
        return self.batch.request_number

    def set_tenant(self, tenant: Tenant) -> None:
        """Give the call an owner, whose bounds apply from now on. Raises `InvalidCall` if it names another tenant."""
        assert self.call is not None
        tenant.check_owner(self.tenant, "call")
        self.tenant = tenant.name
        self.priority = max(self.priority, tenant.priority)  # the lower number goes first
        self.call, lowered = clamp(self.call, tenant.max_limits)
        self.clamped = self.clamped | lowered


class Batch:
    """The calls of one HTTP request and their results, by index.

    `on_result(index)` is called for each result, `on_done()` after the last one. Calls that are malformed get their
    result by `set_result` before the batch is admitted.
    """

    __slots__ = (
        "admitted_at", "calls", "deadline_s", "deadlines", "first_never_sent", "has_sessions", "is_admitted", "on_done",
        "on_read",
        "on_result", "queue_timeout_s", "reads_results", "request_number", "requeued", "results", "tenant",
        "unfinished", "unread_bytes",
    )  # fmt: skip

    def __init__(
        self, size: int, queue_timeout_s: float, deadline_s: float = math.inf, request_number: int | None = None
    ) -> None:
        self.request_number = next_request_number() if request_number is None else request_number
        """Number of the HTTP request, the same for all its batches. Requests take turns in starting calls."""
        self.queue_timeout_s = queue_timeout_s
        self.deadline_s = deadline_s
        """Seconds after the admission at which unfinished calls are cancelled."""
        self.deadlines: list[tuple[float, PendingCall]] = []
        """Calls with a deadline, each with the seconds from the admission to its deadline. After the admission the list
        is sorted, the earliest deadline last. It may contain finished calls."""
        self.tenant: Tenant | None = None
        """The owner of all calls; None if the server has no tenants file or the request has the server's token."""
        self.reads_results = False
        """Whether the calls of this batch check the results of another batch. Those results count as unread until then,
        so this batch is admitted even if too many results are unread."""
        self.has_sessions = False
        """Whether each call belongs to a session."""
        self.is_admitted = False
        self.admitted_at = 0.0
        self.results: list[EncodedResult | None] = [None] * size
        self.unfinished = size
        """Number of indexes without a result."""
        self.unread_bytes = 0
        """Bytes of results from executors that the client has not read."""
        self.calls: list[PendingCall] = []
        self.first_never_sent = 0
        """Index in `calls` of the first call that was never sent to an executor; all before it were sent or are
        finished."""
        self.requeued: deque[tuple[float, PendingCall]] = deque()
        """Requeued calls, each with its `waiting_since`, oldest first. May contain calls that no longer wait."""
        self.on_result: Callable[[int], None] | None = None
        self.on_done: Callable[[], None] | None = None
        self.on_read: Callable[[EncodedResult], None] | None = None
        """Called with each result that `pop_result` returns."""

    def add(self, index: int, call: EncodedCall, call_id: str, clamped: dict[str, float]) -> None:
        """Add a checked call, whose result will have this index."""
        pending = PendingCall(index, call, call_id, clamped)
        self.calls.append(pending)
        deadline_s = min(call.get("deadline_s", math.inf), self.deadline_s)
        if deadline_s < math.inf:
            self.deadlines.append((deadline_s, pending))

    def start(self, now: float) -> None:
        """Set the time of the admission, from which the calls wait and their deadlines count."""
        self.is_admitted, self.admitted_at = True, now
        self.deadlines.sort(key=itemgetter(0), reverse=True)
        for call in self.calls:
            call.batch, call.waiting_since = self, now

    def set_result(self, index: int, result: EncodedResult) -> None:
        """Store the only result of an index."""
        assert self.results[index] is None
        self.results[index] = result
        self.unfinished -= 1
        if not self.unfinished:
            self.forget_calls()
        if self.on_result is not None:
            self.on_result(index)
        if not self.unfinished and self.on_done is not None:
            self.on_done()

    def forget_calls(self) -> None:
        """Drop the calls. They refer to this batch, and the reference cycle would keep calls and batch in memory until
        a garbage collection."""
        self.calls.clear()
        self.deadlines.clear()
        self.requeued.clear()
        self.first_never_sent = 0

    def pop_result(self, index: int) -> EncodedResult:
        """Remove and return the result of an index, which must have one."""
        result, self.results[index] = self.results[index], None
        assert result is not None
        if self.on_read is not None:
            self.on_read(result)
        return result

    def add_unread(self, size_bytes: int) -> None:
        """Count bytes of a result that the client has not read."""
        self.unread_bytes += size_bytes

    def mark_read(self, size_bytes: int | None = None) -> int:
        """Count up to `size_bytes` of the unread bytes as read, or all of them if None. Return how many these were."""
        read_bytes = self.unread_bytes if size_bytes is None else min(size_bytes, self.unread_bytes)
        self.unread_bytes -= read_bytes
        return read_bytes

    def requeue(self, call: PendingCall, now: float) -> None:
        """Let a call whose attempt was lost wait again, from `now` on."""
        call.executor, call.waiting_since = None, now
        self.requeued.append((now, call))

    def next_deadline(self) -> tuple[float, PendingCall] | None:
        """Return the earliest deadline of an unfinished call, and the call; None if no such call has one."""
        while self.deadlines:
            deadline_s, call = self.deadlines[-1]
            if call.call is not None:
                return self.admitted_at + deadline_s, call
            self.deadlines.pop()
        return None

    def longest_waiting(self) -> PendingCall | None:
        """Return the call of this batch that has waited longest, None if no call waits."""
        for index in range(self.first_never_sent, len(self.calls)):  # all of these have waited since the admission
            call = self.calls[index]
            if call.call is not None and not call.attempts:
                self.first_never_sent = index
                return call
        self.first_never_sent = len(self.calls)
        while self.requeued:
            waiting_since, call = self.requeued[0]
            if call.call is not None and call.executor is None and call.waiting_since == waiting_since:
                return call
            self.requeued.popleft()
        return None


def result_bytes(result: EncodedResult) -> int:
    """Return the approximate memory of a result in bytes. Raises `TypeError`, `KeyError` or `AttributeError` if it is
    no result."""
    stdout, stderr, value = result["stdout"], result["stderr"], result["value"] or ""
    size = 1024 + len(stdout) + len(stderr) + len(value)  # 1024: the mapping without its texts and files
    if not (stdout.isascii() and stderr.isascii() and value.isascii()):  # ASCII, the usual case, costs no further calls
        size = 1024 + memory_bytes(stdout) + memory_bytes(stderr) + memory_bytes(value)
    if (error := result["error"]) is not None:
        size += memory_bytes(error["traceback"]) + memory_bytes(error["message"])
    if files := result["files"]:
        size += sum(map(len, files.values()))
    return size
