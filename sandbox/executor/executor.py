"""The executor receives calls, runs them, and delivers results. Each call that is not cancelled ends exactly once: with
a result or as lost.

    submit -> queue -> pool.start_call -+-> on_call_ended -------------> on_results([(seq, result), ...])
                ^                       |
                |                       +-> the call is lost -> delay -> on_lost(seq, reason, has_started)
                |                       |
                +------- delay <--------+-- the call failed to start

Terms:
- A zygote is a preloaded interpreter that forks once per call. A pool is one jail with its zygotes and slots.
- A slot is a numbered set of resources (uid, cgroup, scratch directory) for one call at a time. A slot in use is a
  short, a reserved or a long slot. When a call has run for some time, it becomes a long call in a long slot.
- The window is the number of calls that the executor accepts at once. The gateway sends the calls of some small
  requests beyond the window, in reserved places. Only such a call may start in a reserved slot.

Invariants:
- The executor starts the code of a call once. There is one exception: a call that got too little CPU time while it was
  demoted (at low CPU priority) is started a second time. The sender of the call decides about further attempts.
- A call without a result is in one of these states: it is in the queue; it has an attempt on one zygote; it waits until
  the `verify` zygote is ready; or it waits for the delay after a loss or after a failed start.
- There is no task per call. One task steps all monitored calls (`monitor`).
- Calls in reserved places start before all other calls. Otherwise calls start in the order of their arrival. A call
  starts on the pool with the most free slots, in the smallest zygote that has all modules which the call imports.
- The work for one call does not grow with the number of calls.
"""

from __future__ import annotations

import itertools
import logging
import math
import signal
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Set
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import trio

from sandbox import jail
from sandbox.backoff import backoff_s
from sandbox.errors import IsolationError, NodeError, ProtocolError
from sandbox.executor.call_state import HANG_GRACE_S, Attempt, CallSpec, StillRunning, SubmittedCall, wall_cap_s
from sandbox.executor.machine_memory import MachineMemory
from sandbox.executor.pool_plan import PoolPlan
from sandbox.executor.result import build_result, total_cpu_ms
from sandbox.executor.session import Session, with_session
from sandbox.executor.slots import Slots
from sandbox.executor.time.monitor import CallMonitor, KillReason, Monitor, start_memory_reader
from sandbox.executor.time.process_tree import CpuPriority
from sandbox.executor.zygote import Zygote
from sandbox.executor.zygote_frames import Header, get_number
from sandbox.executor.zygote_pool import ZygotePool
from sandbox.types import EncodedCall, EncodedResult, Profile, Result, Status, UnavailableReason, invalid_result

log = logging.getLogger(__name__)

STALL_S = 0.08
"""If calls are queued and no call has ended for this many seconds, running calls are demoted earlier
(`Executor.demote_after_s`). It is less than the default of `demote_after_ms` (100), at which a call is sampled first,
so that the first sample of a call can already demote it."""
MIN_RETRY_DELAY_S = 0.1
"""Seconds until a call is started again after its first failed start. Each further failure doubles the delay. A lost
call is also reported after this delay."""
MAX_RETRY_DELAY_S = 5.0
"""Maximum delay, in seconds, until a call that failed to start is started again."""
MAX_START_FAILURES = 8
"""Number of failed starts (no process, no descriptor) after which a call is still started again. The next failure makes
the call lost. With the delays, this takes about 20 s."""
MAX_MISSED_IMPORTS = 1000
"""Maximum number of module names in `missed_imports`. The names come from the code of calls."""

OnResults = Callable[[list[tuple[int, EncodedResult]]], None]
OnLost = Callable[[int, str, bool], None]


class Executor:
    """Runs calls on its zygote pools. The thread that runs Trio must make all calls of its methods.

    - `on_results([(seq, result), ...])` is called with the results of calls.
    - `on_lost(seq, reason, has_started)` is called for a call that is lost. A call that is not cancelled gets
      exactly one result or is lost once; a cancelled call gets at most one of the two.
    - `on_window_changed(window)` is called whenever the window has changed.
    - `on_session_ended(id, reason)` is called when a session has ended that was ready.
    - `is_replacement`: this executor replaces an executor that has died. A replacement is ready as soon as its first
      zygote is ready.
    """

    def __init__(
        self,
        plan: PoolPlan,
        on_results: OnResults,
        on_lost: OnLost,
        on_window_changed: Callable[[int], None] = lambda _window: None,
        on_session_ended: Callable[[str, str], None] = lambda _id, _reason: None,
        *,
        is_replacement: bool = False,
    ) -> None:
        self.plan = plan
        self.granted_cores = plan.granted_cores
        self.profile_tree = plan.profile_tree
        self.cgroups = ""
        """Text with the version and the directories of the cgroups; empty if calls have no cgroups."""
        self.warnings = list(plan.warnings)
        """What this machine lacks, one sentence each. A server logs them once. The command `run` does not print them;
        the command `doctor` does."""
        self.cpu_priority = CpuPriority(plan.cores)
        self.counts: Counter[str] = Counter()
        self.missed_imports: Counter[str] = Counter()
        """By module: how often calls have imported it in a zygote that had not loaded it."""
        self._on_results = on_results
        self._ended: list[tuple[int, EncodedResult]] = []
        """Results that are not delivered yet. The results of all frames that a zygote sent at once are delivered
        together: a frame for each result would cost the gateway 30 % more CPU for a call of a batch."""
        self._on_lost = on_lost
        self._on_window_changed = on_window_changed
        self._on_session_ended = on_session_ended
        self._is_replacement = is_replacement
        self._demote_after_s = plan.config.demote_after_ms / 1e3
        self._progress_at = -math.inf
        """Monotonic time at which a call last ended or, if that is later, was added to the empty queue."""
        self._machine_memory = MachineMemory()
        self._calls: dict[int, SubmittedCall] = {}
        """All calls without a result, by seq."""
        self._queues = (OrderedDict[int, SubmittedCall](), OrderedDict[int, SubmittedCall]())
        """Calls that wait for a slot, by seq. The first queue has the calls in places of the window, the second queue
        the calls in reserved places, so `has_reserved_place` is the index of a call's queue."""
        self._waiting_for_verifier: list[SubmittedCall] = []
        self._run_ids = itertools.count(1)
        self._monitor = Monitor(self)
        self._monitored: dict[int, CallMonitor] = {}
        """The monitors of running calls, by run id."""
        self._nursery: trio.Nursery | None = None
        self._ready = trio.Event()
        self.pools = [self._new_pool(spec) for spec in plan.specs]
        self._announced_window = self.window

    def _new_pool(self, spec: jail.JailSpec) -> ZygotePool:
        slots = Slots(*self.plan.slots_per_pool)
        slots.have_networks = spec.has_slot_networks
        return ZygotePool(
            spec,
            self.plan.profiles,
            slots,
            self,
            report_after_s=self._demote_after_s,  # from the report on, a call is monitored and may become long
            is_replacement=self._is_replacement,
        )

    async def run(self) -> None:
        """Run calls until cancelled. Raises `NodeError` if the zygotes fail to start and have never been ready."""
        with ExitStack() as stack:
            self._create_cgroups(stack)
            start_memory_reader()
            async with trio.open_nursery() as self._nursery:
                for pool in self.pools:
                    self._nursery.start_soon(pool.run)
                self._nursery.start_soon(self._kill_hung_jails)
                self._nursery.start_soon(self._monitor.run)

    def _create_cgroups(self, stack: ExitStack) -> None:
        """Create a cgroup tree for each pool, if the machine grants cgroups. `stack` removes the trees at its end."""
        if self.plan.level is jail.Level.NONE:
            return
        try:
            jail.raise_fd_limit_for(len(self.pools) * sum(self.plan.slots_per_pool))
            trees = [stack.enter_context(closing(jail.CgroupTree())) for _ in self.pools]
        except IsolationError as error:
            stack.close()
            self.warnings.append(f"no cgroups, the memory of a call is summed over its processes by sampling: {error}")
            return
        self.cgroups = "; ".join(map(str, trees))
        for pool, tree in zip(self.pools, trees, strict=True):
            pool.slots.cgroups = tree

    async def wait_ready(self) -> None:
        """Wait until all zygotes of every pool have been ready. If this executor replaces another, wait only until one
        zygote has been ready."""
        await self._ready.wait()

    def submit(self, seq: int, encoded: EncodedCall) -> None:
        """Queue a validated call (`Call.encode(binary=True)`). `start_queued_calls` has to follow."""
        call = SubmittedCall(CallSpec.decode(seq, encoded, self.profile_tree))
        self._calls[seq] = call
        if call.spec.has_loopback and (reason := self._loopback_problem()):
            self._add_result(call, invalid_result(call.spec.id, reason).encode(binary=True))
            self._deliver_results()
            return
        if not self._queued:
            self._progress_at = time.monotonic()
        self._queues[call.spec.has_reserved_place][seq] = call

    def close_session(self, session_id: str) -> None:
        """End a session. An unknown id is ignored, since the session may have ended just before."""
        for pool in self.pools:
            if (session := pool.sessions.get(session_id)) is not None:
                session.end()

    def _loopback_problem(self) -> str:
        """Return why calls with `network: "loopback"` cannot run here, or "" if they can."""
        # All pools have the same level and the same mounts, so the first pool stands for all.
        if self.plan.level is jail.Level.NONE or self.pools[0].slots.have_networks:
            return ""
        reason = "this server has mounts, and the code could connect to sockets in them"
        if self.plan.level is jail.Level.LANDLOCK:
            reason = "level landlock has no private network; use level namespaces"
        return f"network: expected none, got loopback: {reason}"

    def cancel(self, seq: int) -> None:
        """Kill a call and send no result. An unknown `seq` is ignored, since the call may have ended just before."""
        call = self._calls.pop(seq, None)
        if call is None:
            return
        call.mark_cancelled()
        if (attempt := call.attempt) is not None:
            attempt.hang_deadline = min(attempt.hang_deadline, time.monotonic() + HANG_GRACE_S)
            attempt.kill()
        else:
            self._queues[call.spec.has_reserved_place].pop(seq, None)  # a call that waits otherwise is in no queue

    def start_queued_calls(self) -> None:
        """Start calls while there are free slots and zygotes for the next one."""
        for queue in reversed(self._queues):  # calls in reserved places first
            while queue:
                seq, call = next(iter(queue.items()))
                profile = call.spec.profile
                if profile == Profile.VERIFY:
                    for pool in self.pools:
                        pool.request_verifier()
                    if all(pool.is_waiting_for_verifier for pool in self.pools):
                        del queue[seq]
                        self._waiting_for_verifier.append(call)
                        continue
                try:
                    picked = self._pick_any(call)
                except NodeError as error:
                    del queue[seq]
                    self._on_cannot_start(call, str(error))
                    continue
                if picked is None:
                    break
                del queue[seq]
                pool, zygote, reserved = picked
                self._start(call, pool, zygote, reserved=reserved)
        if self.window != self._announced_window:
            self._announced_window = self.window
            self._on_window_changed(self._announced_window)

    def stats(self) -> dict[str, Any]:
        """Return gauges and counters for `/v1/stats` and `/metrics`, as plain data."""
        return {
            "queued": self._queued + len(self._waiting_for_verifier),
            "running": self.running,
            "running_long": self.running_long,
            "slots": self.plan.slots,
            "long_slots": self.plan.long_slots,
            "sessions": sum(len(pool.sessions) for pool in self.pools),
            "zygotes": Counter(str(zygote.profile) for zygote in self.all_zygotes()),
            "zygote_restarts_total": sum(pool.restarts for pool in self.pools),
            "retried_total": self.counts["retried"],
            "demoted_total": self.counts["demoted"],
            "promoted_total": self.counts["promoted"],
            "missed_imports": dict(self.missed_imports.most_common(20)),
        }

    @property
    def _queued(self) -> int:
        return sum(map(len, self._queues))

    @property
    def is_idle(self) -> bool:
        return not self._calls and not self._ended

    @property
    def running(self) -> int:
        """Number of slots in use, short and long. A parked slot counts: its call has ended, but its cgroup is not empty
        yet."""
        return sum(pool.slots.used for pool in self.pools)

    @property
    def running_long(self) -> int:
        return sum(len(pool.slots.long) for pool in self.pools)

    @property
    def window(self) -> int:
        """Number of calls without a result that the gateway may send to this executor. Calls in reserved places do not
        count against it. It is two calls for each short slot, plus one call for each call in a long slot."""
        return 2 * self.plan.slots + self.running_long

    @property
    def demote_after_s(self) -> float:
        """Seconds of virtual time after which a running call becomes a long call.

        1. If calls are queued, and a call has ended within `STALL_S`, it is `demote_after_ms`. A shorter time would let
           more calls start, which takes memory, and no queued call would end sooner.
        2. Otherwise it is `demote_after_ms`, divided by the number of calls in short slots per core. With n such calls
           on a core, each of them gets 1/n of the core, and a new call would get the same share.
        """
        if self._queued and time.monotonic() - self._progress_at < STALL_S:
            return self._demote_after_s
        return self._demote_after_s / max(1.0, (self.running - self.running_long) / self.plan.cores)

    @property
    def calls_per_core(self) -> float:
        return self.running / self.plan.cores

    def all_zygotes(self) -> list[Zygote]:
        return [zygote for pool in self.pools for zygote in pool.zygotes.values()]

    def _on_cannot_start(self, call: SubmittedCall, reason: str) -> None:
        """Handle a call of a session that cannot start. A new session is tried again, since the slots of sessions that
        were closed become free soon."""
        if call.spec.session["op"] == "open":
            self._start_task(self._start_later, call, reason)
        else:
            self._forget_lost(call, reason, has_started=False)

    def _pick_any(self, call: SubmittedCall) -> tuple[ZygotePool, Zygote, bool] | None:
        """Return what `_pick` returns, and whether the slot is to be a reserved one. A call in a reserved place also
        tries a short slot first, so that the reserved slots stay free for further calls in reserved places."""
        for reserved in (False, True) if call.spec.has_reserved_place else (False,):
            if (picked := self._pick(call, reserved=reserved)) is not None:
                return *picked, reserved
        return None

    def _pick(self, call: SubmittedCall, *, reserved: bool) -> tuple[ZygotePool, Zygote] | None:
        """Return the zygote that is to start a call, and the zygote's pool. Return None if the call has to wait. Raises
        `NodeError` if the call's session has ended, or if there is no slot for a session."""
        match call.spec.session:
            case {"op": "open"}:
                pool = max(self.pools, key=lambda pool: len(pool.slots.free_of_sessions))
                if not pool.slots.free_of_sessions:
                    raise NodeError(f"all slots of sessions are in use, {self.plan.sessions} here (setting sessions)")
                zygote = pool.best_zygote(call.spec.profile)
                return None if zygote is None else (pool, zygote)
            case {"op": "cell", "id": str(session_id)}:
                for pool in self.pools:
                    if (session := pool.sessions.get(session_id)) is not None:
                        if (state := call.spec.session.get("state", session.head)) not in session.states:
                            raise NodeError(f"state {state} is no longer kept")
                        free = pool.slots.free_reserved if reserved else pool.slots.free_short
                        return (pool, session) if free > 0 and pool.slots.free else None
                raise NodeError("the session has ended")
        return self._pick_zygote(call.spec.profile, reserved=reserved)

    def _pick_zygote(self, profile: str, *, reserved: bool) -> tuple[ZygotePool, Zygote] | None:
        """Return a zygote for a call, and the zygote's pool. The pool has a free reserved slot if `reserved`, else a
        free short slot. Return None if there is no such pool."""
        free = {pool: pool.slots.free_reserved if reserved else pool.slots.free_short for pool in self.pools}
        for pool in sorted(self.pools, key=free.__getitem__, reverse=True):
            if free[pool] <= 0 or not pool.slots.free:
                return None
            if (zygote := pool.best_zygote(profile)) is not None:
                return pool, zygote
        return None

    def _start(self, call: SubmittedCall, pool: ZygotePool, zygote: Zygote, *, reserved: bool) -> None:
        run_id, now = next(self._run_ids), time.monotonic()
        try:
            if isinstance(zygote, Session):
                pool.start_cell(call, zygote, run_id, now, reserved=reserved)
            elif call.spec.session:
                pool.open_session(call, zygote, run_id, now)
            else:
                pool.start_call(call, zygote, run_id, now, reserved=reserved)
        except OSError as error:
            self._start_task(self._start_later, call, f"the cgroup of its slot cannot be used: {error}")
            return
        if not call.spec.modules <= zygote.modules:
            self._count_missed_imports(call.spec.modules - zygote.modules)

    def _count_missed_imports(self, modules: Set[str]) -> None:
        for module in modules:
            name = module[:60]  # a name may be as long as the code
            if name in self.missed_imports or (name.isidentifier() and len(self.missed_imports) < MAX_MISSED_IMPORTS):
                self.missed_imports[name] += 1

    def on_zygote_ready(self) -> None:
        pools_ready = (pool.has_been_ready for pool in self.pools)
        if any(pools_ready) if self._is_replacement else all(pools_ready):
            self._ready.set()
        self._requeue_waiting()

    def on_session_ready(self, session: Session) -> None:
        call = session.keeper.call
        result = Result(call.spec.id, Status.OK).encode(binary=True)
        self._add_result(call, with_session(result, session.encoded()))
        self._deliver_results()
        call.mark_cancelled()  # it stands for the keeper from now on, whose end is not the result of a call

    def on_session_ended(self, session: Session, reason: str) -> None:
        if session.was_ready:  # otherwise the call that was to open it has been lost
            self._on_session_ended(session.id, reason)

    def on_call_ended(self, zygote: Zygote, attempt: Attempt, ended: Header, blobs: list[bytes]) -> None:
        call, spec, usage = attempt.call, attempt.call.spec, attempt.usage
        if attempt.is_keeper:
            reason = blobs[2][:300].decode("utf-8", "replace") if len(blobs) > 2 else ""
            log.info("the keeper of a session has ended: %s", reason or "no reason")
            self._start_task(self._report_lost, call, f"the session did not start: {reason or 'its keeper has ended'}")
            return
        is_committed = isinstance(zygote, Session) and ended.get("state") is not None
        call_monitor = self._stop_monitoring(attempt, restores_priority=is_committed)
        self._progress_at = time.monotonic()
        was_killed = ended.get("signal") == signal.SIGKILL
        kill_reason = call_monitor.kill_reason if call_monitor is not None and was_killed else None
        if was_killed and self._machine_memory.has_killed(attempt, kill_reason, self._progress_at):
            self._start_task(self._report_lost, call, "killed because the machine or a parent cgroup ran out of memory")
            return
        if kill_reason is KillReason.RESTARTED:
            call.keeps_priority = True
            self.count("promoted")
            self._queue_first(call)
            return
        if kill_reason is KillReason.OUT_OF_MEMORY:
            usage = jail.CgroupUsage(cpu_ms=None, peak_bytes=None, hit_own_limit=True)
        try:
            max_cpu_s = call_monitor.max_cpu_s if call_monitor is not None else math.inf
            result = build_result(
                ended,
                blobs,
                call_id=spec.id,
                return_files=spec.return_files,
                figures=spec.figures,
                timeout_s=spec.timeout_s,
                timed_out=kill_reason is KillReason.TIMED_OUT
                or (not is_committed and _is_cpu_exceeded(ended, attempt.usage, spec.timeout_s, max_cpu_s)),
                usage=usage,
            )
            if isinstance(zygote, Session):
                result = with_session(result, zygote.read_state(ended))
        except ProtocolError as error:
            self._start_task(self._report_lost, call, str(error))
            raise
        if kill_reason is KillReason.STARVED:
            cap_s = wall_cap_s(spec.timeout_s)
            message = f"the overloaded machine gave it less than {spec.timeout_s:g} s of virtual time in {cap_s:g} s"
            result = call.unavailable_result(UnavailableReason.STARVED, message)
        self._add_result(call, result)

    def on_start_failed(self, call: SubmittedCall, reason: str) -> None:
        log.warning("call could not be started: %s", reason)
        self._start_task(self._start_later, call, reason)

    def on_frames_handled(self) -> None:
        self._deliver_results()
        self.start_queued_calls()

    def on_calls_lost(self, attempts: list[Attempt], reason: str) -> None:
        self._deliver_results()  # those in front of an invalid frame
        for attempt in attempts:
            self._stop_monitoring(attempt)
            self._start_task(self._report_lost, attempt.call, reason)
        self._requeue_waiting()

    def _requeue_waiting(self) -> None:
        """Return the calls that wait for the `verify` zygote to the head of their queues, and start queued calls."""
        for call in reversed(self._waiting_for_verifier):
            self._queue_first(call)
        self._waiting_for_verifier.clear()
        self.start_queued_calls()

    def _queue_first(self, call: SubmittedCall) -> None:
        if not call.is_cancelled:
            queue, seq = self._queues[call.spec.has_reserved_place], call.spec.seq
            queue[seq] = call
            queue.move_to_end(seq, last=False)

    def on_still_running(self, pool: ZygotePool, attempt: Attempt, running: StillRunning) -> None:
        wall_s = max(0.0, min(running.wall_s, time.monotonic() - attempt.sent_at))  # the zygote is untrusted
        self._monitored[attempt.run_id] = self._monitor.add(attempt, pool.slots, replace(running, wall_s=wall_s))

    def take_long_slot(self, slots: Slots, slot: int) -> bool:
        if not self._machine_memory.is_available(time.monotonic()) or not slots.try_mark_long(slot):
            return False
        self.count("demoted")
        self.start_queued_calls()
        return True

    def extend_hang_deadline(self, attempt: Attempt, wall_s: float) -> None:
        if not attempt.call.is_cancelled:
            attempt.hang_deadline = time.monotonic() + wall_s + HANG_GRACE_S

    def count(self, event: str) -> None:
        self.counts[event] += 1

    def _start_task(
        self, task: Callable[[SubmittedCall, str], Awaitable[None]], call: SubmittedCall, reason: str
    ) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(task, call, reason)

    async def _report_lost(self, call: SubmittedCall, reason: str) -> None:
        """Report a call as lost, after a delay. Its code may have started. `reason` is for the message of its result.

        If a whole jail dies, the executor notices the exits of its zygotes one after another. Without the delay, the
        call could be sent again and be lost a second time, with the next zygote.
        """
        await trio.sleep(MIN_RETRY_DELAY_S)
        self._forget_lost(call, reason, has_started=True)

    async def _start_later(self, call: SubmittedCall, reason: str) -> None:
        """Queue a call again that could not be started because there was no process, descriptor or cgroup. After more
        than `MAX_START_FAILURES` failures, the call is lost."""
        call.start_failures += 1
        await trio.sleep(backoff_s(call.start_failures, MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S))
        if call.start_failures > MAX_START_FAILURES:
            self._forget_lost(call, reason, has_started=False)
        elif not call.is_cancelled:
            self.count("retried")
            self._queue_first(call)
        self.start_queued_calls()

    def _forget_lost(self, call: SubmittedCall, reason: str, *, has_started: bool) -> None:
        if not call.is_cancelled:
            seq = call.spec.seq
            del self._calls[seq]
            self._on_lost(seq, reason, has_started)

    def _add_result(self, call: SubmittedCall, result: EncodedResult) -> None:
        if not call.is_cancelled:
            seq = call.spec.seq
            del self._calls[seq]
            self._ended.append((seq, result))

    def _deliver_results(self) -> None:
        if self._ended:
            results, self._ended = self._ended, []
            self._on_results(results)

    def _stop_monitoring(self, attempt: Attempt, *, restores_priority: bool = False) -> CallMonitor | None:
        call_monitor = self._monitored.pop(attempt.run_id, None)
        if call_monitor is not None:
            if restores_priority:
                call_monitor.restore_priority()
            call_monitor.stop()
        return call_monitor

    async def _kill_hung_jails(self) -> None:
        """Kill the jail of every zygote that has not reported the end of a call in time."""
        while True:
            await trio.sleep(1)
            now = time.monotonic()
            for pool in self.pools:
                for session in list(pool.sessions.values()):
                    if any(attempt.hang_deadline < now for attempt in session.running.values()):
                        log.error("session %s did not answer in time; it ends", session.id)
                        session.end()
                attempts = (attempt for zygote in pool.zygotes.values() for attempt in zygote.running.values())
                if any(attempt.hang_deadline < now for attempt in attempts):
                    log.error("zygote did not answer in time; killing its jail")
                    pool.kill_jail()


def _is_cpu_exceeded(ended: Header, usage: jail.CgroupUsage | None, timeout_s: float, max_cpu_s: float) -> bool:
    """Return whether a call that ended by itself had used up its time limit: its wall time reached `timeout_s`, and its
    CPU time reached `max_cpu_s`. Both are needed, because virtual time is at most the wall time and at least the CPU
    time per core. Raises `ProtocolError`."""
    return get_number(ended, "wall_ms") >= 1e3 * timeout_s and total_cpu_ms(ended, usage) >= 1e3 * max_cpu_s
