"""Monitors calls that run longer than `demote_after_ms`: advances their virtual clock, moves them to long slots,
changes their CPU priority, and kills them at their time limit.

    virtual time   reaches `demote_after_s`        the call is long: demoted, and in a long slot once one is free
                   lags behind 1/4 of the share    the call is promoted until it has caught up
                   reaches `timeout_s`             killed: timed out
    wall cap       used up                         killed: timed out if it has several threads, else starved
    memory         over the limit, no cgroup       killed: out of memory

Invariants:
- A call is monitored only once its zygote has reported it as still running; most calls end before that.
- A long call has at least a quarter of its fair share of the cores, so it reaches its time limit before the wall cap,
  whatever the load.
- After a sample, all processes of the call that existed then have the CPU priority of the call.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import random
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto
from typing import Protocol

import trio

from sandbox.executor.call_state import Attempt, StillRunning, wall_cap_rate, wall_cap_s
from sandbox.executor.process_tree import CpuPriority, ProcessTree, exceeds_memory, pid_of_pidfd
from sandbox.executor.slots import Slots
from sandbox.executor.virtual_clock import VirtualClock

log = logging.getLogger(__name__)

SAMPLE_INTERVAL_S, SAMPLE_INTERVAL_THREADED_S = (0.05, 0.25), (0.02, 0.1)
"""Range of the seconds between two samples of a call with one thread, and with more. Each interval is random, so that
the code cannot hide its children from the samples."""
CROWDED_CALLS_PER_CORE = 48
"""Calls per core above which sample intervals grow in proportion, so that the total cost of sampling stays constant.
Not lower: the virtual time of child processes that start and end between two samples is only estimated."""
MIN_SAMPLE_INTERVAL_S = 0.002
"""Minimum seconds between two samples of a call."""
POLL_BUDGET_S = 0.002
"""CPU seconds of sampling after which the monitor yields to the event loop."""
FREE_SAMPLE_CPU_S, MAX_COSTLY_SAMPLE_SHARE = 0.0005, 0.2
"""CPU seconds that a sample may take for free; what all samples together take beyond that is limited to this share of a
core. So calls with many threads are sampled less often."""
SAMPLE_RETRY_S = 0.1
"""Seconds until the next sample after one failed because the machine lacked a resource."""
MIN_GUESS_INTERVAL_S = 0.01
"""Minimum seconds between two samples if the call is over its limit only when the uncertain part of its virtual time is
counted."""
MAX_SPEEDUP = 4
"""Until the next sample, a demoted call is assumed to run at most this many times faster than since the last one. This
bounds how late a time-out can be noticed."""
MIN_SHARE_DIVISOR = 4
"""A long call is promoted while it has had less than 1/4 of its fair share of the cores."""
MAX_LAG_S = 0.05
"""Seconds of virtual time that a long call may lag before it is promoted (times the crowding factor). Moving a thread
between cgroups takes a lock that every fork and exit on the machine waits for."""
_memory_reader = ThreadPoolExecutor(1, "memory")
"""Runs `exceeds_memory`, which blocks for milliseconds, for one call at a time, beside the event loop."""


class KillReason(Enum):
    """Why the monitor has killed a call."""

    TIMED_OUT = auto()
    STARVED = auto()
    OUT_OF_MEMORY = auto()


class MonitorOwner(Protocol):
    """The executor, as far as the monitor uses it."""

    granted_cores: int
    cpu_priority: CpuPriority

    @property
    def demote_after_s(self) -> float:
        """Virtual time after which a call is long."""
        ...

    @property
    def calls_per_core(self) -> float: ...

    def take_long_slot(self, slots: Slots, slot: int) -> bool:
        """Count the slot against the long quota, if that is possible."""
        ...

    def extend_hang_deadline(self, attempt: Attempt, wall_s: float) -> None:
        """Expect the end of the attempt within `wall_s` seconds from now."""
        ...

    def count(self, event: str) -> None: ...


def lag_s(virtual_s: float, wall_s: float, calls_per_core: float) -> float:
    """Return by how many seconds of virtual time a long call lags behind its minimum share. `virtual_s` and `wall_s`
    count from the moment at which it became long."""
    return wall_s / (MIN_SHARE_DIVISOR * max(1.0, calls_per_core)) - virtual_s


def next_sample_in_s(
    left_s: float,
    uncertain_s: float,
    slowness: float,
    calls_per_core: float,
    *,
    is_promoted: bool,
    is_single_threaded: bool,
) -> float:
    """Return the seconds until the next sample.

    `left_s`: virtual seconds until the limit, of which up to `uncertain_s` may be gone already. `slowness`: wall
    seconds per virtual second since the last sample; 1 if the call slept.
    """
    factor = crowding_factor(calls_per_core)
    interval_s = factor * random.uniform(*(SAMPLE_INTERVAL_S if is_single_threaded else SAMPLE_INTERVAL_THREADED_S))
    left_s = min(left_s, max(left_s - uncertain_s, factor * MIN_GUESS_INTERVAL_S))
    if is_promoted:  # it must not get much more than its minimum share
        interval_s = min(interval_s, factor * MAX_LAG_S)
    elif is_single_threaded:
        left_s = max(MIN_SAMPLE_INTERVAL_S, left_s) * min(factor, max(1.0, slowness / MAX_SPEEDUP))
    return max(MIN_SAMPLE_INTERVAL_S, min(interval_s, left_s))


def crowding_factor(calls_per_core: float) -> float:
    """Return the factor by which intervals are longer than for a few calls."""
    return max(1.0, calls_per_core / CROWDED_CALLS_PER_CORE)


class CallMonitor:
    """The monitoring of one attempt. Owns the pidfd of its first process."""

    def __init__(
        self, attempt: Attempt, slots: Slots, running: StillRunning, started: float, owner: MonitorOwner
    ) -> None:
        self.is_stopped = False
        self.kill_reason: KillReason | None = None
        self.max_cpu_s = math.inf
        """CPU seconds beyond which the call has timed out even if it ended by itself before the next sample: virtual
        time is never less than CPU time per core."""
        self._attempt, self._slots, self._running, self._started = attempt, slots, running, started
        self._owner = owner
        self._pidfd = running.pidfd
        self._timeout_s = attempt.call.request.timeout_s
        self._is_long = self._has_long_slot = self._is_promoted = False
        self._tree: ProcessTree | None = None
        self._memory_check: Future[bool] | None = None
        self._clock = VirtualClock(owner.granted_cores)
        self._wall_cap_left_s = wall_cap_s(self._timeout_s)
        self._last = self._long_since = 0.0, 0.0
        """Wall time and virtual time of the last sample, and of the sample at which the call became long."""

    def step(self) -> float | None:
        """Sample the call and act on the sample. Return the seconds until the next step, or None after the last."""
        try:
            interval_s = self._step()
        except OSError as error:
            interval_s = SAMPLE_RETRY_S if self._is_alive() else None
            log.debug("sampling a monitored call failed: %s", error)
        if interval_s is None:
            self.stop()
        return interval_s

    def stop(self) -> None:
        """Close the pidfd. Idempotent."""
        if not self.is_stopped:
            self.is_stopped = True
            os.close(self._pidfd)

    def _is_alive(self) -> bool:
        """Return whether the call's first process still exists. False also if the zygote sent a descriptor that is no
        pidfd; `Executor._kill_hung_jails` handles that case."""
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except OSError:
            return False
        return True

    def _step(self) -> float | None:
        clock, owner = self._clock, self._owner
        tree = self._tree = self._tree or self._open_process_tree()
        if tree is None:
            return None
        wall_s, calls_per_core = trio.current_time() - self._started, owner.calls_per_core
        self._advance_clock(tree, wall_s)
        rate = wall_cap_rate(calls_per_core)
        span_s, gained_s = wall_s - self._last[0], clock.elapsed_s - self._last[1]
        self._last = wall_s, clock.elapsed_s
        self._wall_cap_left_s -= span_s * rate
        self.kill_reason = self._find_kill_reason(tree)
        if self.kill_reason is not None:
            self._kill(tree)
            return None
        owner.extend_hang_deadline(self._attempt, self._wall_cap_left_s / rate)
        left_s, demote_after_s = self._timeout_s - clock.elapsed_s, owner.demote_after_s
        if not self._is_long and clock.elapsed_s >= demote_after_s:
            self._is_long, self._long_since = True, self._last
            self._slots.hold_mount_namespace(self._attempt.slot, tree.root)
        if self._is_long:
            self._has_long_slot = self._has_long_slot or owner.take_long_slot(self._slots, self._attempt.slot)
            self._update_priority(tree, wall_s, calls_per_core)
        else:
            left_s = min(left_s, demote_after_s - clock.elapsed_s)
        return next_sample_in_s(
            left_s,
            clock.uncertain_s,
            span_s / max(gained_s, 1e-9) if clock.is_exact else 1.0,
            calls_per_core,
            is_promoted=self._is_promoted,
            is_single_threaded=clock.is_single_threaded,
        )

    def _open_process_tree(self) -> ProcessTree | None:
        pid = pid_of_pidfd(self._pidfd, self._running.zygote_pid, self._running.pid_in_jail)
        return None if pid is None else ProcessTree(pid, self._slots.cgroup(self._attempt.slot))

    def _advance_clock(self, tree: ProcessTree, wall_s: float) -> None:
        clock, cgroup = self._clock, self._slots.cgroup(self._attempt.slot)
        processes = tree.sample()
        signal.pidfd_send_signal(self._pidfd, 0)  # raises if the first process is gone: its pid may then be another's
        if processes is None or processes:
            cgroup_cpu_s = cgroup.cpu_s() if cgroup is not None else None
            cpu_s = tree.cpu_s if cgroup_cpu_s is None else cgroup_cpu_s
            clock.advance(wall_s, processes, cpu_s)
            cores = 1 if clock.is_single_threaded else self._owner.granted_cores
            self.max_cpu_s = cpu_s + (self._timeout_s - clock.elapsed_s) * cores

    def _find_kill_reason(self, tree: ProcessTree) -> KillReason | None:
        if self._clock.elapsed_s >= self._timeout_s:
            return KillReason.TIMED_OUT
        if self._wall_cap_left_s <= 0:
            # The processes of a fork bomb wait for each other. That must not count as the server's fault.
            return KillReason.STARVED if self._clock.is_single_threaded else KillReason.TIMED_OUT
        if self._slots.cgroup(self._attempt.slot) is None and self._is_over_memory(tree):
            return KillReason.OUT_OF_MEMORY
        return None

    def _is_over_memory(self, tree: ProcessTree) -> bool:
        """Return whether an earlier sample was over the memory limit, and start the next check if the current one may
        be. Used where no cgroup counts the memory of a call."""
        attempt, check = self._attempt, self._memory_check
        if check is None:
            resident = tree.resident_bytes()
            if sum(resident.values()) > attempt.memory_bytes:
                self._memory_check = _memory_reader.submit(
                    exceeds_memory, resident, attempt.memory_bytes, attempt.zygote_bytes
                )
            return False
        if not check.done():
            return False
        self._memory_check = None
        return check.result()

    def _kill(self, tree: ProcessTree) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._is_long:  # an exiting process takes kernel locks, so it must not run at SCHED_IDLE
            self._owner.cpu_priority.apply(tree, self._slots.idle_cgroup, is_demoted=False)

    def _update_priority(self, tree: ProcessTree, wall_s: float, calls_per_core: float) -> None:
        owner = self._owner
        lag = lag_s(self._clock.elapsed_s - self._long_since[1], wall_s - self._long_since[0], calls_per_core)
        max_lag_s = 0.0 if self._is_promoted else MAX_LAG_S * crowding_factor(calls_per_core)
        was_promoted, self._is_promoted = self._is_promoted, lag > max_lag_s
        if self._is_promoted and not was_promoted:
            owner.count("promoted")
        owner.cpu_priority.apply(tree, self._slots.idle_cgroup, is_demoted=not self._is_promoted)


class Monitor:
    """Steps all monitored calls in one task. A task for each call would cost as much in wake-ups as the samples do."""

    def __init__(self, owner: MonitorOwner) -> None:
        self._owner = owner
        self._due: list[tuple[float, int, CallMonitor]] = []
        """Heap of (time of the next step, number, monitor)."""
        self._numbers = itertools.count()
        self._added = trio.Event()

    def add(self, attempt: Attempt, slots: Slots, running: StillRunning) -> CallMonitor:
        """Monitor an attempt until it ends or the returned monitor is stopped."""
        now = trio.current_time()
        call_monitor = CallMonitor(attempt, slots, running, now - running.wall_s, self._owner)
        self._schedule(now, call_monitor)
        self._added.set()
        return call_monitor

    async def run(self) -> None:
        """Step the calls as they become due, until cancelled; then stop them all."""
        try:
            while True:
                with trio.move_on_at(self._due[0][0] if self._due else math.inf):
                    await self._added.wait()
                self._added = trio.Event()
                self._poll_due()
        finally:
            for *_, call_monitor in self._due:
                call_monitor.stop()

    def _poll_due(self) -> None:
        """Step the calls that are due, for at most about `POLL_BUDGET_S`."""
        started = now = time.thread_time()
        while self._due and self._due[0][0] <= trio.current_time() and now - started < POLL_BUDGET_S:
            call_monitor = heapq.heappop(self._due)[-1]
            if call_monitor.is_stopped:
                continue
            interval_s = call_monitor.step()
            before, now = now, time.thread_time()
            if interval_s is not None:
                costly_s = max(0.0, now - before - FREE_SAMPLE_CPU_S) * (len(self._due) + 1)
                interval_s = max(interval_s, costly_s / MAX_COSTLY_SAMPLE_SHARE)
                self._schedule(trio.current_time() + interval_s, call_monitor)

    def _schedule(self, at: float, call_monitor: CallMonitor) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), call_monitor))
