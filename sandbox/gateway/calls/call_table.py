"""The table of admitted calls: a state machine that admits, assigns, requeues and finishes them.

             admit             assign
    (batch) ------> waiting ---------> running ---finish--------> result
                      ^  |                |
                      |  +--expire,       +---calls_lost, last attempt------> `unavailable`
                      |     fail_waiting -> `unavailable`
                      +----calls_lost-----+

    waiting or running ---expire_deadlines, end---> `unavailable`

Invariants:
- A batch is admitted whole or rejected whole. Unfinished calls never exceed `AdmissionLimits`. The unfinished calls of
  one tenant never exceed the tenant's share.
- While unread results exceed `max_result_bytes`, no batch is admitted, except a batch with `reads_results`. If a batch
  then holds more than an equal share of `max_result_bytes`, its further results are replaced by `unavailable`.
- An admitted call waits, or runs on exactly one executor, until it is finished once or cancelled with its batch.
- Each assignment is an attempt, and a call has at most `max_attempts` attempts. An attempt is lost if a process dies
  (zygote, jail, executor or node); the executor does not repeat it.
- A call that was lost `max_attempts` times is `unavailable`: with `NodeError` if its code has never started, and with
  `Poison` otherwise.
- Lost calls go to the head of the queue. Each executor runs at most one call on its last attempt, so a call that kills
  zygotes or executors cannot use up the last attempt of another call that died with it.
- The window of an executor is the number of calls that it accepts at once. In addition it has reserved places. A
  reserved place is only for a call whose request has no running call, and does not count against the window.
- The cost of a step does not depend on how many calls wait or run. Only `admit` and `cancel` visit each call of their
  batch, `calls_lost` each lost call, and `with_id` every call.
- If its deadline or its caller ends a call early, the call is forgotten at once, so a late result of it is dropped.
- No clock and no I/O: `now` (seconds, monotonic) is an argument. `Dispatcher` acts on what this module decides.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from sandbox.errors import Overloaded, RequestRefused
from sandbox.gateway.calls.batch import Batch, ExecutorId, PendingCall, result_bytes
from sandbox.gateway.calls.fair_queue import FairQueue
from sandbox.settings.tenants import Tenant
from sandbox.types import EncodedResult, Result, UnavailableReason, unavailable_result, used_up_result

RATE_WINDOW_S = 10.0
"""Seconds over which the answer rate is averaged."""
MAX_RETRY_AFTER_S = 60
SHARED_S = 10.0
"""Seconds for which the executors count as shared between tenants (`CallTable.is_shared`)."""
LostAttempt = tuple[int, str, bool]
"""`seq`, the reason, and whether the code may have started."""
MAX_EXPIRED_AT_ONCE = 512
"""Maximum number of calls that one `expire` finishes. So many calls block the event loop for some milliseconds."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits on unfinished calls. Without a tenants file, the server does not check the tenant that a client names. A
    tenant's share then protects against a greedy tenant, but not against a client that uses several names."""

    max_calls: int
    max_bytes: int
    max_attempts: int
    tenant_share: float = 1.0
    """Part of `max_calls` and of `max_bytes` that one tenant may hold."""
    max_result_bytes: int = 1 << 30
    """Maximum bytes of results that clients have not read."""


class Outstanding:
    """Unfinished calls and their bytes, in total or of one tenant."""

    __slots__ = ("bytes", "calls")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0

    def add(self, calls: int, size_bytes: int) -> None:
        self.calls += calls
        self.bytes += size_bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """Calls that were finished before their executor sent a result."""

    calls: list[PendingCall] = field(default_factory=list)
    running: dict[ExecutorId, list[int]] = field(default_factory=dict)
    """By executor: the `seq` of each of these calls that was running. The executor must cancel them."""


class _Excess(NamedTuple):
    """A limit that a batch would exceed: its `wanted` calls or bytes do not fit beside those that are held already."""

    tenant: str | None
    """The tenant to which the limit applies; None if it applies to the whole queue."""
    unit: str
    held: int
    wanted: int
    maximum: int
    queue_maximum: int

    @property
    def holder(self) -> str:
        return "the queue" if self.tenant is None else f"tenant {self.tenant!r}"

    @property
    def derivation(self) -> str:
        """Derivation of the maximum for an error message."""
        return "" if self.tenant is None else f", a tenant's share of {self.queue_maximum}"


class CallTable:
    """All unfinished calls, and the results that clients have not read."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.outstanding = Outstanding()
        self._tenants: dict[str, Outstanding] = {}
        self.unread_result_bytes = 0
        self._unread_batches = 0
        """Number of batches with unread results."""
        self.answer_rate = AnswerRate()
        self._queue: FairQueue[PendingCall] = FairQueue()
        self._waiting_last_attempts: OrderedDict[PendingCall, None] = OrderedDict()
        """Waiting calls with one attempt left. They are not in the queue."""
        self._running: dict[ExecutorId, dict[int, PendingCall]] = {}
        """Running calls by executor and `seq`."""
        self._reserved: Counter[ExecutorId] = Counter()
        """Number of running calls in reserved places, by executor."""
        self._of_sessions: Counter[ExecutorId] = Counter()
        """Number of running calls of sessions, by executor."""
        self._running_last_attempt: dict[ExecutorId, PendingCall] = {}
        """The running call on its last attempt, by executor. The queue counts all running calls but these."""
        self._seq = 0
        self._shared_until = -math.inf
        self._last_tenant = ""
        """Tenant of the last admitted calls."""
        self._last_admitted_at = -math.inf

    @property
    def waiting(self) -> int:
        """Number of waiting calls."""
        return len(self._queue) + len(self._waiting_last_attempts)

    def running(self, executor: ExecutorId) -> int:
        """Return how many calls an executor has."""
        return len(self._running.get(executor, ()))

    def running_reserved(self, executor: ExecutorId) -> int:
        """Return how many calls an executor has in reserved places."""
        return self._reserved[executor]

    def running_in_window(self, executor: ExecutorId) -> int:
        """Return how many calls an executor has that count against its window."""
        return self.running(executor) - self._reserved[executor] - self._of_sessions[executor]

    def outstanding_of(self, tenant: str) -> Outstanding:
        """Return the unfinished calls of a tenant."""
        return self._tenants.get(tenant, _NOTHING)

    def running_of(self, tenant: str) -> int:
        """Return how many calls of a tenant all executors have, without calls on their last attempt."""
        return self._queue.running(tenant)

    def admit(self, batch: Batch, now: float) -> None:
        """Queue all calls of a batch. Raises `Overloaded` if they do not fit now, `RequestRefused` if they never do."""
        groups = _group_by_tenant(batch.calls)
        wanted = _load_by_tenant(groups)
        self.check_capacity(wanted, batch.tenant, now, reads_results=batch.reads_results)
        for name, load in wanted.items():
            self.outstanding.add(load.calls, load.bytes)
            self._tenants.setdefault(name, Outstanding()).add(load.calls, load.bytes)
        batch.start(now)
        max_running = batch.tenant.max_running if batch.tenant is not None else None
        if batch.has_sessions:
            for call in batch.calls:
                self._run_in_session(call)
        else:
            for group in groups:
                self._queue.push(*group, max_running=math.inf if max_running is None else max_running)
        self._note_tenants(wanted, now)

    def is_shared(self, now: float) -> bool:
        """Return whether several tenants use the executors. This holds for `SHARED_S` after an admission of calls at
        which another tenant had unfinished calls, or had calls admitted less than `SHARED_S` before."""
        return now < self._shared_until

    def assign(
        self,
        executor: ExecutorId,
        max_calls: int,
        target_bytes: int,
        now: float,
        max_per_tenant: float = math.inf,
        *,
        reserved: bool = False,
    ) -> list[PendingCall]:
        """Assign the next calls to an executor and return them.

        - At most `max_calls` are assigned, and none after they have `target_bytes` together.
        - A tenant with `max_per_tenant` running calls, on all executors together, gets no more. Calls on their last
          attempt do not count for this; an executor has at most one such call.
        - With `reserved`, the calls get reserved places.
        """
        assigned: list[PendingCall] = []
        running = self._running.setdefault(executor, {})
        size_bytes = 0
        while len(assigned) < max_calls and size_bytes < target_bytes:
            call: PendingCall | None
            has_last_attempt = executor in self._running_last_attempt
            if self._waiting_last_attempts and not has_last_attempt and not reserved:
                call = self._running_last_attempt[executor] = self._waiting_last_attempts.popitem(last=False)[0]
            elif (call := self._queue.pop(max_per_tenant, reserved=reserved)) is None:
                break
            call.has_reserved_place = reserved
            self._reserved[executor] += reserved
            self._seq += 1
            call.seq, call.executor = self._seq, executor
            call.attempts += 1
            call.queue_ms += max(0.0, now - call.waiting_since) * 1000
            running[call.seq] = call
            size_bytes += call.size_bytes
            assigned.append(call)
        return assigned

    def _run_in_session(self, call: PendingCall) -> None:
        """Assign a call to the executor of its session. It counts neither in the queue nor against the window."""
        assert call.session is not None
        self._seq += 1
        call.seq, call.executor, call.attempts = self._seq, call.session.executor, 1
        self._of_sessions[call.executor] += 1
        self._running.setdefault(call.executor, {})[call.seq] = call

    def finish(self, executor: ExecutorId, seq: int, result: EncodedResult, size_bytes: int = 0) -> PendingCall | None:
        """Store the result that an executor sent for `seq`, and return its call; None if the call was cancelled or
        `seq` is unknown. `size_bytes` is `result_bytes(result)`. Changes `result`."""
        running = self._running.get(executor)
        call = running.pop(seq, None) if running else None
        if call is None:
            return None
        self._stop_running(executor, call)
        result["id"] = call.id
        result["attempts"] = call.attempts
        result["clamped"] = call.clamped
        result["usage"]["queue_ms"] = round(result["usage"]["queue_ms"] + call.queue_ms, 3)
        self._buffer_result(call.batch, result, size_bytes)
        self._forget(call)
        call.batch.set_result(call.index, result)
        return call

    def results_read(self, batch: Batch, size_bytes: int | None = None) -> None:
        """Count `size_bytes` of a batch's results as read by its client; all of them if None."""
        if batch.unread_bytes:
            self.unread_result_bytes -= batch.mark_read(size_bytes)
            self._unread_batches -= not batch.unread_bytes

    def executor_lost(self, executor: ExecutorId, now: float) -> tuple[list[PendingCall], list[PendingCall]]:
        """Requeue or fail all calls of a lost executor, as `calls_lost` does. Any of them may have started."""
        lost = [(seq, "its executor died", True) for seq in self._running.get(executor, ())]
        requeued, failed = self.calls_lost(executor, lost, now)
        self._running.pop(executor, None)
        self._reserved.pop(executor, None)
        self._of_sessions.pop(executor, None)
        return requeued, failed

    def calls_lost(
        self, executor: ExecutorId, lost: Iterable[LostAttempt], now: float
    ) -> tuple[list[PendingCall], list[PendingCall]]:
        """Requeue calls that were lost at an executor. Calls without an attempt left get `unavailable`. Returns the
        list of the requeued calls and the list of the failed ones. The attempt of a cancelled call, and an unknown
        `seq`, are ignored."""
        requeued: list[PendingCall] = []
        failed: list[PendingCall] = []
        running = self._running.get(executor, {})
        for seq, reason, has_started in lost:
            if (call := running.pop(seq, None)) is None:
                continue
            if call.session is not None:
                self._stop_running(executor, call)
                message = f"session {call.session.id}: {reason}"
                self._finish_unavailable(call, UnavailableReason.SESSION_GONE, message)
                failed.append(call)
                continue
            attempts_left = self.limits.max_attempts - call.attempts
            if attempts_left > 1:
                self._reserved[executor] -= call.has_reserved_place
                self._queue.requeue(call)
            else:
                self._stop_running(executor, call)
            if attempts_left == 1:
                self._waiting_last_attempts[call] = None
            call.has_started |= has_started
            if attempts_left:
                call.batch.requeue(call, now)
                requeued.append(call)
            else:
                call.executor = None
                self._finish_with(call, used_up_result(call.id, call.attempts, reason, has_started=call.has_started))
                failed.append(call)
        return requeued, failed

    def expire(self, batch: Batch, now: float) -> list[PendingCall]:
        """Finish, with `unavailable`, the calls of a batch that have waited for `queue_timeout_s`, and return them. One
        `expire` finishes at most `MAX_EXPIRED_AT_ONCE` calls, so that the event loop is not blocked; a further `expire`
        finishes more."""
        timeout_s, expired = batch.queue_timeout_s, list[PendingCall]()
        while len(expired) < MAX_EXPIRED_AT_ONCE:
            call = batch.longest_waiting()
            if call is None or now - call.waiting_since < timeout_s:
                break
            self._dequeue(call)
            message = (
                f"waited {round(now - call.waiting_since, 3):g} s for a slot, at most {timeout_s:g} s; send fewer "
                "calls at once, set a longer queue_timeout_s, or start the server with a larger --queue-timeout-s"
            )
            self._finish_unavailable(call, UnavailableReason.QUEUE_TIMEOUT, message)
            expired.append(call)
        return expired

    def expire_deadlines(self, batch: Batch, now: float) -> Ended:
        """Finish, with `unavailable`, the calls of a batch whose deadline has passed: at most `MAX_EXPIRED_AT_ONCE`, as
        in `expire`."""
        expired = Ended()
        while len(expired.calls) < MAX_EXPIRED_AT_ONCE:
            deadline, call = batch.next_deadline() or (math.inf, None)
            if call is None or now < deadline:
                break
            state = "waited for a slot" if call.executor is None else f"ran (attempt {call.attempts})"
            message = (
                f"not finished {deadline - batch.admitted_at:g} s after its admission, which is its deadline_s; it "
                f"{state}; set a longer deadline_s, or send fewer calls at once"
            )
            self._end(call, UnavailableReason.DEADLINE, message, expired)
        return expired

    def next_expiry(self, batch: Batch) -> float:
        """Return the time at which the first waiting call of a batch expires, or at which the first deadline passes;
        infinity if no call waits or has a deadline."""
        call, deadline = batch.longest_waiting(), batch.next_deadline()
        expiry = math.inf if call is None else call.waiting_since + batch.queue_timeout_s
        return expiry if deadline is None else min(expiry, deadline[0])

    def with_id(self, call_id: str, owner: Tenant | None) -> list[PendingCall]:
        """Return the unfinished calls to which their caller gave this id, waiting calls first: those of the tenant
        `owner`, or of all tenants if it is None.

        Visits every unfinished call, 100,000 in about 10 ms. An index of the ids would cost time and memory for every
        call, and few calls are cancelled.
        """
        running = chain.from_iterable(calls.values() for calls in self._running.values())
        found = [call for call in chain(self._queue, self._waiting_last_attempts, running) if call.id == call_id]
        # A call without an id of its own has its index as `id`. It does not count: many batches have the same indexes.
        found = [call for call in found if call.call is not None and call.call.get("id") == call_id]
        if owner is None:
            return found
        return [call for call in found if call.batch.tenant is not None and call.batch.tenant.name == owner.name]

    def end(self, calls: Iterable[PendingCall], reason: UnavailableReason, message: str) -> Ended:
        """Finish, with `unavailable`, those calls that are unfinished."""
        ended = Ended()
        for call in calls:
            if call.call is not None:
                self._end(call, reason, message, ended)
        return ended

    def cancel(self, batch: Batch) -> dict[ExecutorId, list[int]]:
        """Forget the unfinished calls of a batch. Returns the `seq`s of the running calls, by executor."""
        ended = Ended()
        for call in batch.calls if batch.is_admitted else ():
            if call.call is not None:
                self._release(call, ended)
                self._forget(call)
        batch.forget_calls()
        return ended.running

    def fail_waiting(self, reason: UnavailableReason, message: str, max_calls: int) -> list[PendingCall]:
        """Finish at most `max_calls` waiting calls with `unavailable`, and return them."""
        failed: list[PendingCall] = []
        self._queue.lift_bounds()
        while len(failed) < max_calls:
            if self._waiting_last_attempts:
                call = self._waiting_last_attempts.popitem(last=False)[0]
            elif (popped := self._queue.pop()) is not None:
                call = popped
                self._queue.finished(call)
            else:
                break
            self._finish_unavailable(call, reason, message)
            failed.append(call)
        return failed

    def fail_all(self, reason: UnavailableReason, message: str) -> list[PendingCall]:
        """Finish every call with `unavailable`, and return them."""
        waiting = self.fail_waiting(reason, message, self.waiting)
        running = [call for calls in self._running.values() for call in calls.values()]
        self._running.clear()
        self._reserved.clear()
        self._of_sessions.clear()
        self._running_last_attempt.clear()
        self._queue = FairQueue()
        for call in running:
            self._finish_unavailable(call, reason, message)
        return waiting + running

    def retry_after_s(self, calls: int, now: float) -> int:
        """Return the seconds until `calls` more calls are finished, at the current answer rate."""
        rate = self.answer_rate.per_s(now)
        seconds = calls / rate if rate > 0 else 1.0
        return math.ceil(min(MAX_RETRY_AFTER_S, max(1.0, seconds)))

    def _buffer_result(self, batch: Batch, result: EncodedResult, size_bytes: int) -> None:
        """Count a result as unread. If it does not fit, the mapping `result` itself is changed to `unavailable`."""
        maximum, unread_bytes = self.limits.max_result_bytes, self.unread_result_bytes
        equal_part = maximum / max(1, self._unread_batches)
        if unread_bytes + size_bytes > maximum and batch.unread_bytes + size_bytes > equal_part:
            message = (
                f"clients have not read results of {unread_bytes} bytes, at most {maximum}, and {batch.unread_bytes} "
                "of them are this batch's; send smaller batches, request a stream, or read it faster"
            )
            replacement = unavailable_result(
                result["id"], UnavailableReason.RESULTS_UNREAD, message, result["attempts"]
            )
            result.update({**replacement.encode(binary=True), "usage": result["usage"], "clamped": result["clamped"]})
            size_bytes = result_bytes(result)
        self._unread_batches += not batch.unread_bytes and size_bytes > 0
        batch.add_unread(size_bytes)
        self.unread_result_bytes += size_bytes

    def check_capacity(
        self, wanted: Mapping[str, Outstanding], owner: Tenant | None, now: float, *, reads_results: bool = False
    ) -> None:
        """Check whether a batch with this load by tenant would be admitted now. `owner` is `Batch.tenant`. Raises
        `RequestRefused` if the batch alone exceeds a limit, and `Overloaded` if the batch and the unfinished calls
        together exceed one."""
        if self.unread_result_bytes > self.limits.max_result_bytes and not reads_results:
            after_s = self.retry_after_s(1, now)
            raise Overloaded(
                f"clients have not read results of {self.unread_result_bytes} bytes, at most "
                f"{self.limits.max_result_bytes}; try again in {after_s} s",
                retry_after_s=after_s,
            )
        exceeded = list(self._exceeded(wanted, self._share(owner)))
        for excess in exceeded:
            if excess.wanted > excess.maximum:
                raise RequestRefused(
                    f"{excess.wanted} {excess.unit} in one batch, but {excess.holder} holds at most "
                    f"{excess.maximum}{excess.derivation}; send smaller batches"
                )
        if exceeded:
            excess = exceeded[0]
            # The excess is this part of the calls or bytes held, so about this part of all calls must finish first.
            part = (excess.held + excess.wanted - excess.maximum) / max(excess.held, 1)
            after_s = self.retry_after_s(math.ceil(part * self.outstanding.calls), now)
            raise Overloaded(
                f"{excess.holder} holds {excess.held} of at most {excess.maximum} {excess.unit}{excess.derivation}, "
                f"and this batch has {excess.wanted} more; try again in {after_s} s",
                retry_after_s=after_s,
            )

    def _exceeded(self, wanted: Mapping[str, Outstanding], share: float) -> Iterator[_Excess]:
        """Yield the limits on calls and on bytes that a load by tenant exceeds: of the queue, then of each tenant."""
        limits, total = self.limits, Outstanding()
        for load in wanted.values():
            total.add(load.calls, load.bytes)
        holders: list[tuple[str | None, Outstanding, Outstanding, float]] = [(None, self.outstanding, total, 1.0)]
        holders += [(name, self._tenants.get(name, _NOTHING), load, share) for name, load in wanted.items()]
        for tenant, held, load, part in holders:
            max_calls, max_bytes = math.ceil(limits.max_calls * part), math.ceil(limits.max_bytes * part)
            if held.calls + load.calls > max_calls:
                yield _Excess(tenant, "calls", held.calls, load.calls, max_calls, limits.max_calls)
            if held.bytes + load.bytes > max_bytes:
                yield _Excess(tenant, "bytes", held.bytes, load.bytes, max_bytes, limits.max_bytes)

    def _note_tenants(self, admitted: Iterable[str], now: float) -> None:
        """Note that calls of these tenants were admitted."""
        is_shared = len(self._tenants) > 1
        for name in admitted:
            is_shared |= name != self._last_tenant and now - self._last_admitted_at < SHARED_S
            self._last_tenant, self._last_admitted_at = name, now
        if is_shared:
            self._shared_until = now + SHARED_S

    def _share(self, owner: Tenant | None) -> float:
        """Return the part of the queue that one tenant of a batch may hold."""
        share = owner.queue_share if owner is not None else None
        return self.limits.tenant_share if share is None else share

    def _end(self, call: PendingCall, reason: UnavailableReason, message: str, ended: Ended) -> None:
        self._release(call, ended)
        self._finish_unavailable(call, reason, message)
        ended.calls.append(call)

    def _release(self, call: PendingCall, ended: Ended) -> None:
        """Take an unfinished call from the queue or from its executor."""
        if call.executor is None:
            self._dequeue(call)
            return
        del self._running[call.executor][call.seq]
        self._stop_running(call.executor, call)
        ended.running.setdefault(call.executor, []).append(call.seq)

    def _dequeue(self, call: PendingCall) -> None:
        if call in self._waiting_last_attempts:
            del self._waiting_last_attempts[call]
        else:
            self._queue.remove(call)

    def _stop_running(self, executor: ExecutorId, call: PendingCall) -> None:
        if call.session is not None:
            self._of_sessions[executor] -= 1
            return
        self._reserved[executor] -= call.has_reserved_place
        if self._running_last_attempt.get(executor) is call:
            del self._running_last_attempt[executor]
        else:
            self._queue.finished(call)

    def _finish_unavailable(self, call: PendingCall, reason: UnavailableReason, message: str) -> None:
        self._finish_with(call, unavailable_result(call.id, reason, message, attempts=call.attempts))

    def _finish_with(self, call: PendingCall, result: Result) -> None:
        self._forget(call)
        call.batch.set_result(call.index, result.encode(binary=True))

    def _forget(self, call: PendingCall) -> None:
        """Count a call as no longer outstanding, and free its code."""
        assert call.call is not None
        call.call = None
        tenant = self._tenants[call.tenant]
        tenant.add(-1, -call.size_bytes)
        self.outstanding.add(-1, -call.size_bytes)
        if not tenant.calls:
            del self._tenants[call.tenant]


class AnswerRate:
    """Finished calls per second: an exponential average over about `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._counted_at: float | None = None

    def count(self, calls: int, now: float) -> None:
        """Count `calls` more finished calls."""
        self._rate = self.per_s(now) + calls / RATE_WINDOW_S
        self._counted_at = now

    def per_s(self, now: float) -> float:
        """Return finished calls per second."""
        if self._counted_at is None:
            return 0.0
        return self._rate * math.exp(min(0.0, self._counted_at - now) / RATE_WINDOW_S)


_NOTHING = Outstanding()
"""What a tenant without unfinished calls holds. Never changed."""


def _group_by_tenant(calls: Sequence[PendingCall]) -> Collection[Sequence[PendingCall]]:
    """Return the calls in groups of one priority and tenant."""
    groups: defaultdict[tuple[int, str], list[PendingCall]] = defaultdict(list)
    for call in calls:
        groups[call.priority, call.tenant].append(call)
    return groups.values()


def _load_by_tenant(groups: Iterable[Sequence[PendingCall]]) -> dict[str, Outstanding]:
    load: defaultdict[str, Outstanding] = defaultdict(Outstanding)
    for group in groups:
        load[group[0].tenant].add(len(group), sum(call.size_bytes for call in group))
    return load
