"""Sends calls from the call table to the executors, and their results back. Owns the table and the executors.

The executors are either a fixed number of processes of this machine, or the executors of a `Membership`. A membership
adds and removes executors of other machines while the server runs.

Invariants:
- All calls that can be sent in one iteration of the event loop are sent together: `_dispatch` runs at most once per
  iteration, and sends frames of up to `wire.MAX_FRAME_CALLS`.
- Once the server drains, no call is dispatched. Waiting calls, and calls of an executor that dies, get `unavailable`
  with `Stopped` at once, so that their clients can send them to another server.
- No task, timer or future belongs to a single call. A batch has at most one timer, and none if all of its calls were
  sent at once and have no deadline.
- The number of an executor is never used again after its removal.
- The call table decides what happens to a call; this module has the clock, the executors and the counters.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Protocol, cast

from sandbox import machine, wire
from sandbox.errors import ConfigError, NodeError, Overloaded, ProtocolError, RequestRefused
from sandbox.gateway.calls.batch import Batch, PendingCall
from sandbox.gateway.calls.call_table import AdmissionLimits, CallTable, Ended, LostAttempt
from sandbox.gateway.calls.executor_handle import ExecutorHandle, ExecutorProcess, Launch, SizedResult
from sandbox.gateway.calls.sessions import Session, SessionTable
from sandbox.gateway.heap import trim_at_rest
from sandbox.gateway.metrics import TENANT_METRICS, Counters, MetricSample
from sandbox.settings.server import RESERVED_PART, ServeConfig, reserved_slots, weakness, within_memory
from sandbox.settings.tenants import Tenant, Tenants, load_tenants
from sandbox.types import EncodedCall, EncodedCellResult, EncodedResult, Status, UnavailableReason
from sandbox.wire import MAX_FRAME_BYTES, MAX_FRAME_CALLS, TARGET_FRAME_BYTES

log = logging.getLogger(__name__)

TIMER_SLACK_S = 0.002
"""Seconds added to each timer, because the event loop's clock has whole milliseconds and a timer may fire too early."""
SESSION_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks whether the time of a session is over."""
STOPPED_MESSAGE = "the server stopped before this call was done; send it again"
CANCELLED_MESSAGE = "its caller cancelled it by its id"
MAX_STOPPED_AT_ONCE = 512
"""Calls that get `Stopped` or `Cancelled` in one iteration of the event loop, which takes some milliseconds."""
MAX_CALL_BYTES = MAX_FRAME_BYTES - 4 * TARGET_FRAME_BYTES
"""Maximum bytes of an encoded call. The rest of its frame is for other calls of up to `TARGET_FRAME_BYTES` characters,
of at most four bytes each."""
UNHEALTHY_AFTER_S = 150.0
"""Seconds without any ready executor after which `/health` fails. It is longer than one start of an executor may take
(`executor_handle.START_S`)."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node of a cluster, as `/v1/stats` shows it."""

    name: str
    address: str
    state: str
    """One of `NODE_STATES`."""
    reason: str
    """The reason why the node is lost or refused."""
    isolation: str
    executors: tuple[ExecutorHandle, ...]
    restarts: int
    """Number of times that the executors of the node were started again."""


NODE_STATES = ("starting", "ready", "lost", "refused")


class Membership(Protocol):
    """The nodes of a cluster. Adds their executors to a dispatcher, and removes them."""

    async def run(self, dispatcher: Dispatcher) -> None:
        """Follow the cluster until cancelled."""

    async def started(self) -> None:
        """Wait until the first node is ready. Raises `ConfigError` if the cluster cannot be used."""

    def rows(self) -> Sequence[NodeRow]:
        """Return all nodes."""
        ...


class Dispatcher:
    """Use as `async with Dispatcher(config) as dispatcher`, then `await dispatcher.started()`.

    With a `membership`, no executor runs on this machine, and `launch` is not used.
    """

    def __init__(
        self, config: ServeConfig, launch: Launch = ExecutorProcess.launch, membership: Membership | None = None
    ) -> None:
        self.config = config
        self._max_limits = config.max_limits
        if membership is None:
            self.config = config.resolved(machine.granted_cores(), machine.memory_limit() >> 20)
        self.membership = membership
        self.counters = Counters()
        self.call_table = CallTable(
            AdmissionLimits(
                max_calls=config.queue_calls,
                max_bytes=config.queue_mb << 20,
                max_attempts=config.attempts,
                tenant_share=config.tenant_share,
                max_result_bytes=config.results_mb << 20,
            )
        )
        self.sessions = SessionTable()
        self.tenants = _load_tenants(config)
        self.counters.add_tenants(self.tenants.names if self.tenants is not None else ())
        self.is_draining = False
        self.executors: list[ExecutorHandle] = []
        self._launch = launch
        self._loop: asyncio.AbstractEventLoop
        self._tasks = asyncio.TaskGroup()
        self._executor_tasks: dict[int, asyncio.Task[None]] = {}
        """The tasks of the executors, by number of the executor."""
        self._other_tasks: list[asyncio.Task[None]] = []
        self._executor_numbers = itertools.count()
        self._restarts_of_removed = 0
        self._expiry_timers: dict[Batch, tuple[float, asyncio.TimerHandle]] = {}
        """For each batch: the time of the expiry, and the timer that is set for it."""
        self._submitted: list[Batch] = []
        """Batches that were admitted since the last `_dispatch`."""
        self._is_dispatch_scheduled = False
        self._idle = asyncio.Event()
        self._last_ready_at = 0.0

    async def __aenter__(self) -> Dispatcher:
        self._loop = asyncio.get_running_loop()
        self._last_ready_at = monotonic()
        await self._tasks.__aenter__()
        trimming = trim_at_rest(self._is_at_rest, lambda: self.counters.bytes_in)
        self._other_tasks.append(self._tasks.create_task(trimming))
        self._other_tasks.append(self._tasks.create_task(self._expire_sessions()))
        if self.membership is not None:
            self._other_tasks.append(self._tasks.create_task(self.membership.run(self)))
        else:
            for share in self.config.per_executor():
                self.add_executor(self._launch, share.encode())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_draining = True
        for executor in self.executors:
            executor.started.cancel()
        tasks = list(self._executor_tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)  # before the membership ends, which would kill the executors
        for task in self._other_tasks:
            task.cancel()
        await self._tasks.__aexit__(None, None, None)  # the task group would wrap `error`

    def add_executor(
        self, launch: Launch, settings: Mapping[str, object], silence_timeout_s: float | None = None
    ) -> ExecutorHandle:
        """Start an executor. It gets calls once it is ready."""
        executor = ExecutorHandle(next(self._executor_numbers), launch, settings, self, silence_timeout_s)
        self.executors.append(executor)
        self._executor_tasks[executor.number] = self._tasks.create_task(executor.run())
        return executor

    def remove_executor(self, executor: ExecutorHandle) -> None:
        """Kill an executor and forget it. Its calls are sent to other executors."""
        executor.drop()
        executor.started.cancel()
        self._executor_tasks.pop(executor.number).cancel()
        self._restarts_of_removed += executor.restarts
        self.executors.remove(executor)

    def limit_memory(self, memory_mb: int) -> None:
        """Lower the memory limit of further calls to `memory_mb`, the memory of the smallest machine that may run them.
        If the operator's maximum is lower, it stays the limit. Calls in the queue keep their limits."""
        self.config = replace(self.config, max_limits=within_memory(self._max_limits, memory_mb))

    def reload_tenants(self) -> None:
        """Read the tenants file again. A file with an error changes nothing. The new bounds apply to new requests at
        once. Unfinished calls keep their old bounds, with one exception: the next request of a tenant sets the
        `max_running` of all calls of the tenant."""
        try:
            self.tenants = _load_tenants(self.config)
        except ConfigError as error:
            log.error("the tenants are unchanged: %s", error)
        else:
            self.counters.add_tenants(self.tenants.names if self.tenants is not None else ())
            log.info("%s: %d tenants read", self.config.tenants, len(self.tenants or ()))

    async def started(self) -> None:
        """Wait until every executor is ready; in a cluster, until the first node is. Raises `ConfigError` if an
        executor or the cluster cannot start."""
        if self.membership is not None:
            return await self.membership.started()
        try:
            await asyncio.gather(*(executor.started for executor in self.executors))
        except NodeError as error:
            raise ConfigError(str(error)) from None
        return None

    async def drain(self, timeout_s: float) -> None:
        """Reject new calls, answer waiting calls with `unavailable`, and give running calls `timeout_s` to finish.
        Calls that still run then get `unavailable` too."""
        self.is_draining = True
        log.info(
            "stopping: %d running calls get up to %g s to finish, %d waiting calls get `Stopped`; a second signal "
            "(Ctrl-C or SIGTERM) stops at once, and calls that still run are then lost",
            self.dispatched,
            timeout_s,
            self.call_table.waiting,
        )
        self._schedule_dispatch()
        self._check_idle()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            failed = self.call_table.fail_all(UnavailableReason.STOPPED, STOPPED_MESSAGE)
            self._count_unavailable(failed)
            log.warning("stopped with %d calls unfinished after %g s", len(failed), timeout_s)

    def kill(self) -> None:
        """Kill all executors at once."""
        for executor in self.executors:
            executor.kill()

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and any(executor.is_ready for executor in self.executors)

    @property
    def executors_ready(self) -> int:
        return sum(executor.is_ready for executor in self.executors)

    @property
    def isolation(self) -> dict[str, str]:
        """The weakest isolation level that the executors report, and why `auto` did not choose a stronger level."""
        levels = {executor.ready_report.isolation for executor in self.executors if executor.ready_report}
        weakest = max(filter(None, levels), key=weakness, default="")
        return {"isolation": weakest, "isolation_reason": self.config.isolation_reason}

    @property
    def is_alive(self) -> bool:
        """False if no executor has been ready for `UNHEALTHY_AFTER_S`."""
        if any(executor.is_ready for executor in self.executors):
            return True
        return monotonic() - self._last_ready_at < UNHEALTHY_AFTER_S

    @property
    def dispatched(self) -> int:
        """Number of calls sent to executors and not finished, including those that wait in an executor."""
        return sum(self.call_table.running(executor.number) for executor in self.executors)

    @property
    def executor_restarts(self) -> int:
        """Number of restarts of all executors, including those of executors that have been removed."""
        return self._restarts_of_removed + sum(executor.restarts for executor in self.executors)

    def check_accepting(self) -> None:
        """Raises `Overloaded` if the server drains."""
        if self.is_draining:
            raise Overloaded("the server is stopping; send this request to another one", retry_after_s=1)

    def connection_rejected(self) -> None:
        """Count a connection that exceeded the limit."""
        self.counters.refused[503] += 1

    def connection_stalled(self) -> None:
        """Count a connection that is closed because its client does not read."""
        self.counters.stalled += 1

    def submit(self, batch: Batch) -> None:
        """Admit the calls of a batch. Raises `Overloaded` or `RequestRefused`."""
        self.check_accepting()
        if not batch.calls:
            return
        for call in batch.calls:
            _check_frame_size(call)
        self.call_table.admit(batch, monotonic())
        if batch.has_sessions:
            self._send_cells(batch)
        self._submitted.append(batch)
        self._schedule_dispatch()

    def _send_cells(self, batch: Batch) -> None:
        """Send the calls of sessions to the executors of their sessions."""
        frames: dict[int, list[list[object]]] = {}
        for call in batch.calls:
            assert call.session is not None
            call.session.call, call.session.used_at = call, monotonic()
            frames.setdefault(call.session.executor, []).append([call.seq, _encode_call(call)])
        for executor in self.executors:
            calls = frames.get(executor.number, [])
            for start in range(0, len(calls), MAX_FRAME_CALLS):
                executor.send_calls(calls[start : start + MAX_FRAME_CALLS])

    def place_session(self) -> ExecutorHandle:
        """Return the executor for a new session: the one with the most free places. Raises `Overloaded` if there is
        none, and `NodeError` if no executor has sessions."""
        reports = {e: e.ready_report for e in self.executors if e.is_ready and e.ready_report is not None}
        if not reports:
            raise Overloaded("no executor is ready yet; try again in 1 s", retry_after_s=1)
        if not any(report.sessions for report in reports.values()):
            raise NodeError(
                "this server has no sessions: they need isolation level namespaces or nsjail, and the setting sessions "
                "above 0"
            )
        free = {
            executor: report.sessions - self.sessions.count(executor.number) for executor, report in reports.items()
        }
        best = max(free, key=free.__getitem__)
        if free[best] <= 0:
            raise Overloaded(
                f"all places for sessions are in use, and {len(self.sessions)} sessions are open; close some, or start "
                "the server with a larger --sessions",
                retry_after_s=1,
            )
        return best

    def close_session(self, session: Session, reason: str) -> None:
        """End a session and its cell."""
        if self.sessions.end(session.id, reason) is None:
            return
        for executor in self.executors:
            if executor.number == session.executor:
                executor.send(["close_session", session.id])

    async def _expire_sessions(self) -> None:
        """Close sessions whose time is over, until cancelled."""
        while True:
            await asyncio.sleep(SESSION_CHECK_INTERVAL_S)
            now = monotonic()
            for session in self.sessions:
                if reason := session.end_reason(now):
                    self.close_session(session, reason)

    def on_session_ended(self, executor: ExecutorHandle, session_id: str, reason: str) -> None:
        self.sessions.end(session_id, reason)

    def cancel(self, batch: Batch) -> None:
        """Cancel the unfinished calls of a batch, and drop its unread results. Does nothing if there are none."""
        self.call_table.results_read(batch)
        _, timer = self._expiry_timers.pop(batch, (0.0, None))
        if timer is not None:
            timer.cancel()
        if not batch.unfinished:
            return
        before = self.call_table.outstanding.calls
        self._cancel_running(self.call_table.cancel(batch))
        self.counters.cancelled += before - self.call_table.outstanding.calls
        self._schedule_dispatch()
        self._check_idle()

    def retry_after_s(self) -> int:
        """Return the seconds in which the calls that wait now are expected to finish."""
        return self.call_table.retry_after_s(self.call_table.waiting, monotonic())

    async def cancel_calls(self, call_id: str, owner: Tenant | None) -> int:
        """Cancel all unfinished calls whose caller gave them this id, and return their number. They get the result
        `unavailable`. `owner` is the tenant of the request's token; None means the calls of all tenants. Yields to the
        event loop after every `MAX_STOPPED_AT_ONCE` calls."""
        calls, count = self.call_table.with_id(call_id, owner), 0
        for start in range(0, len(calls), MAX_STOPPED_AT_ONCE):
            part = calls[start : start + MAX_STOPPED_AT_ONCE]
            count += self._end(self.call_table.end(part, UnavailableReason.CANCELLED, CANCELLED_MESSAGE))
            await asyncio.sleep(0)
        return count

    def samples(self, owner: Tenant | None = None) -> list[MetricSample]:
        """Return all metrics, or with `owner` only the metrics that this tenant may read. Gauges are read now."""
        if owner is not None:
            own = (sample for sample in self.samples() if sample[0] in TENANT_METRICS)
            return [*own, *self._tenant_samples([owner.name])]
        return [
            *self.counters.samples(),
            ("calls_waiting", {}, self.call_table.waiting),
            ("calls_dispatched", {}, self.dispatched),
            ("calls_bytes", {}, self.call_table.outstanding.bytes),
            ("results_bytes", {}, self.call_table.unread_result_bytes),
            ("executors_ready", {}, self.executors_ready),
            ("executor_restarts_total", {}, self.executor_restarts),
            *(sample for executor in self.executors for sample in executor.stats.samples(executor.number)),
            *self._node_samples(),
            *self._tenant_samples(self.used_tenants()),
        ]

    def used_tenants(self) -> list[str]:
        """Return the tenants of the tenants file that have had calls, in the order of their names."""
        usage, table = self.counters.by_tenant, self.call_table
        return sorted(name for name in usage if usage[name].by_status or table.outstanding_of(name).calls)

    def on_executor_ready(self, executor: ExecutorHandle) -> None:
        self._schedule_dispatch()

    def on_window_grown(self, executor: ExecutorHandle) -> None:
        self._schedule_dispatch()

    def on_results(self, executor: ExecutorHandle, results: list[SizedResult]) -> None:
        finished, now = 0, monotonic()
        for seq, result, size_bytes in results:
            call = self.call_table.finish(executor.number, seq, result, size_bytes)
            if call is not None:
                finished += 1
                self._count(call, result, now)
                if call.session is not None and "session" in result:
                    call.session.update(cast(EncodedCellResult, result)["session"], now)
        self.call_table.answer_rate.count(finished, now)
        self._schedule_dispatch()
        self._check_idle()

    def on_executor_lost(self, executor: ExecutorHandle) -> None:
        self._last_ready_at = monotonic()
        self.sessions.end_all_of(executor.number, "its executor died")
        self._requeue(*self.call_table.executor_lost(executor.number, monotonic()))

    def on_calls_lost(self, executor: ExecutorHandle, lost: list[LostAttempt]) -> None:
        self._requeue(*self.call_table.calls_lost(executor.number, lost, monotonic()))

    def _requeue(self, requeued: list[PendingCall], failed: list[PendingCall]) -> None:
        """Dispatch the lost calls that the call table has requeued, and count the calls that have failed."""
        self.counters.retried += len(requeued)
        self._count_unavailable(failed)
        for batch in {call.batch for call in requeued}:
            self._arm_expiry_timer(batch)
        self._schedule_dispatch()
        self._check_idle()

    def _node_samples(self) -> Iterator[MetricSample]:
        rows = self.membership.rows() if self.membership is not None else ()
        for state in NODE_STATES if self.membership is not None else ():
            yield "nodes", {"state": state}, sum(row.state == state for row in rows)
        for row in rows:
            yield "node_restarts_total", {"node": row.name}, row.restarts

    def _tenant_samples(self, names: Sequence[str]) -> Iterator[MetricSample]:
        for name in names:
            usage, outstanding = self.counters.by_tenant[name], self.call_table.outstanding_of(name)
            labels = {"tenant": name}
            for status, count in sorted(usage.by_status.items()):
                yield "tenant_calls_total", {**labels, "status": status}, count
            yield "tenant_calls_unfinished", labels, outstanding.calls
            yield "tenant_calls_dispatched", labels, self.call_table.running_of(name)
            yield "tenant_calls_bytes", labels, outstanding.bytes
            yield "tenant_run_seconds_total", labels, usage.run_s
            yield "tenant_cpu_seconds_total", labels, usage.cpu_s

    def _is_at_rest(self) -> bool:
        return not self.call_table.outstanding.calls and not self.call_table.unread_result_bytes

    def _schedule_dispatch(self) -> None:
        if not self._is_dispatch_scheduled:
            self._is_dispatch_scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Send waiting calls to the executors, and set timers for those batches whose calls still wait."""
        self._is_dispatch_scheduled = False
        if self.is_draining:
            self._stop_waiting_calls()
        else:
            self._send_waiting_calls()
        submitted, self._submitted = self._submitted, []
        for batch in submitted:
            self._arm_expiry_timer(batch)

    def _send_waiting_calls(self) -> None:
        """Send frames of calls until all windows are full, each time to the executor with the largest free window."""
        max_per_tenant = self._max_per_tenant()
        send_frame = functools.partial(self._send_frame, max_per_tenant)
        # `any` stops at the first executor that accepted a frame; the next iteration compares the windows again.
        while self.call_table.waiting and any(
            map(send_frame, sorted(self.executors, key=self._free_window, reverse=True))
        ):
            pass

    def _stop_waiting_calls(self) -> None:
        """Answer some of the waiting calls with `Stopped`, and the rest in later iterations of the event loop."""
        self._count_unavailable(
            self.call_table.fail_waiting(UnavailableReason.STOPPED, STOPPED_MESSAGE, MAX_STOPPED_AT_ONCE)
        )
        if self.call_table.waiting:
            self._schedule_dispatch()
        self._check_idle()

    def _max_per_tenant(self) -> float:
        """Return how many calls one tenant may have at all executors together.

        A tenant that uses the executors alone has no bound. While several tenants use them, the bound leaves some short
        slots (the slots of calls that are not long) free, and no call of the tenant waits in an executor. So a call of
        another tenant gets a slot at once. It does not have to wait until calls that sleep have become long calls.
        """
        if not self.call_table.is_shared(monotonic()):
            return math.inf
        ready = [(e.window, e.ready_report.slots) for e in self.executors if e.is_ready and e.ready_report]
        return max(1, sum(window - slots - math.ceil(slots * RESERVED_PART) for window, slots in ready))

    def _send_frame(self, max_per_tenant: float, executor: ExecutorHandle) -> bool:
        """Send an executor one frame of calls: for its reserved places, or if there are no such calls, for the places
        of its window. Returns False if the executor may run none of the waiting calls. This has one of three reasons:
        the executor has no free place; the calls are on their last attempt, and the executor already runs such a call;
        or the tenants of the calls have reached their bounds."""
        for reserved, free in ((True, self._free_reserved(executor)), (False, self._free_window(executor))):
            max_calls = min(free, MAX_FRAME_CALLS)
            now = monotonic()
            calls = self.call_table.assign(
                executor.number, max_calls, TARGET_FRAME_BYTES, now, max_per_tenant, reserved=reserved
            )
            if calls:
                executor.send_calls([[call.seq, _encode_call(call, reserved=reserved)] for call in calls])
                return True
        return False

    def _free_window(self, executor: ExecutorHandle) -> int:
        return executor.window - self.call_table.running_in_window(executor.number) if executor.takes_calls else 0

    def _free_reserved(self, executor: ExecutorHandle) -> int:
        if not executor.takes_calls or executor.ready_report is None:
            return 0
        return reserved_slots(executor.ready_report.slots) - self.call_table.running_reserved(executor.number)

    def _arm_expiry_timer(self, batch: Batch) -> None:
        """Set the timer of a batch to its next expiry or deadline. An earlier timer stays."""
        expiry = self.call_table.next_expiry(batch)
        timed_for, timer = self._expiry_timers.get(batch, (math.inf, None))
        if expiry < timed_for:
            if timer is not None:
                timer.cancel()
            delay_s = expiry - monotonic() + TIMER_SLACK_S
            self._expiry_timers[batch] = expiry, self._loop.call_later(delay_s, self._expire, batch)

    def _expire(self, batch: Batch) -> None:
        del self._expiry_timers[batch]
        now = monotonic()
        self._count_unavailable(self.call_table.expire(batch, now))
        self._end(self.call_table.expire_deadlines(batch, now))
        self._arm_expiry_timer(batch)

    def _end(self, ended: Ended) -> int:
        """Tell the executors to cancel the running ones of the `ended` calls. Returns the number of all ended calls."""
        self._cancel_running(ended.running)
        self._count_unavailable(ended.calls)
        self._schedule_dispatch()
        self._check_idle()
        return len(ended.calls)

    def _cancel_running(self, cancelled: Mapping[int, list[int]]) -> None:
        for executor in self.executors if cancelled else ():  # a removed executor gets no frame
            if executor.number in cancelled:
                executor.send(["cancel", cancelled[executor.number]])

    def _count(self, call: PendingCall, result: EncodedResult, now: float) -> None:
        usage = result["usage"]
        self.counters.count_calls(result["status"], call.tenant)
        if (tenant := self.counters.by_tenant.get(call.tenant)) is not None:
            tenant.run_s += usage["run_ms"] / 1000
            tenant.cpu_s += usage["cpu_ms"] / 1000
        self.counters.queue_s.observe(usage["queue_ms"] / 1000)
        self.counters.run_s.observe(usage["run_ms"] / 1000)
        self.counters.answer_s.observe(now - call.batch.admitted_at)

    def _count_unavailable(self, calls: list[PendingCall]) -> None:
        for tenant, count in Counter(call.tenant for call in calls).items():
            self.counters.count_calls(Status.UNAVAILABLE.value, tenant, count)

    def _check_idle(self) -> None:
        if self.is_draining and not self.call_table.outstanding.calls:
            self._idle.set()


def _load_tenants(config: ServeConfig) -> Tenants | None:
    return None if config.tenants is None else load_tenants(Path(config.tenants), config.token)


def _check_frame_size(call: PendingCall) -> None:
    """Raise `RequestRefused` if a call does not fit into a frame together with small calls."""
    if 2 * call.size_bytes > MAX_CALL_BYTES:  # a text has at most twice as many bytes in UTF-8 as in memory
        try:
            size_bytes = sum(map(len, wire.pack_calls([[0, _encode_call(call)]])))
        except ProtocolError:
            size_bytes = MAX_FRAME_BYTES
        if size_bytes > MAX_CALL_BYTES:
            raise RequestRefused(
                f"call {call.id!r:.80} has more than {MAX_CALL_BYTES >> 20} MiB, which no executor can receive; send "
                "less in one call"
            )


def _encode_call(call: PendingCall, *, reserved: bool = False) -> EncodedCall:
    assert call.call is not None
    return {**call.call, "reserved": True} if reserved else call.call
