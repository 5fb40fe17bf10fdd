"""Monitors calls that run longer than `demote_after_ms`: advances their virtual clock, moves them to long slots,
changes their CPU priority, and kills them at their time limit.

The virtual time of a call is its wall time minus its run delay, which is the time that its runnable threads wait for a
core. A sample is one reading of `/proc` and of the cgroup for all processes of a call. A long call is a call that has
used `demote_after_s` of virtual time. It is demoted, which means that it gets a lower CPU priority. To promote it is to
restore its priority. The wall cap is the wall time after which a call is killed whatever its virtual time is.

    quantity       event                                consequence for the call
    virtual time   reaches `demote_after_s`             long: demoted, and moved to a long slot once one is free
                   lags behind 1/4 of the fair share    promoted until it has caught up
    main thread    is exiting                           promoted
                   reaches `timeout_s`                  killed: timed out
    wall cap       is used up                           killed: timed out if it ever had two threads, else starved
                   half is used up, demoted, and the    killed, and started again at normal priority
                   executor may not promote
    memory         exceeds the limit, and there is no   killed: out of memory
                   cgroup

Invariants:
- A call is monitored only once its zygote has reported it as still running; most calls end before that.
- A long call gets at least a quarter of its fair share of the cores. So it reaches its time limit before the wall cap,
  even on a loaded machine. Where the executor may not promote, this holds only for the second half of the wall cap.
- After a sample, all processes of the call that existed then have the CPU priority of the call.
"""

from __future__ import annotations

import contextlib
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
from sandbox.executor.slots import Slots
from sandbox.executor.time.process_tree import (
    CpuPriority,
    ProcessTree,
    counts_run_delay,
    exceeds_memory,
    has_few_sockets,
    pid_of_pidfd,
    socket_bytes,
)
from sandbox.executor.time.virtual_clock import VirtualClock

log = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 0.05, 0.25
"""Minimum and maximum seconds between two samples of a call with one thread. Each interval is random. Otherwise the
code could start children just after each sample, and end them before the next one."""
SAMPLE_INTERVAL_THREADED_S = 0.02, 0.1
"""Minimum and maximum seconds between two samples of a call with several threads or processes."""
CROWDED_CALLS_PER_CORE = 48
"""Calls per core above which sample intervals grow in proportion, so that the total cost of sampling stays constant.
Longer intervals make virtual time less accurate: child processes that start and end between two samples are missed."""
MIN_SAMPLE_INTERVAL_S = 0.002
"""Minimum seconds between two samples of a call."""
POLL_BUDGET_S = 0.002
"""CPU seconds of sampling after which the monitor yields to the event loop."""
FREE_SAMPLE_CPU_S = 0.0005
"""CPU seconds that each sample may take without an effect on the sample intervals."""
MAX_COSTLY_SAMPLE_SHARE = 0.2
"""Maximum share of a core for the costly part of all samples together. The costly part of a sample is its CPU time
beyond `FREE_SAMPLE_CPU_S`. Because of this maximum, calls with many threads, whose samples take long, are sampled less
often."""
SAMPLE_RETRY_S = 0.1
"""Seconds until the next sample, if a sample failed because the machine lacked a resource."""
MIN_UNCERTAIN_INTERVAL_S = 0.01
"""Minimum seconds between two samples of a call that may have reached its time limit: it has reached the limit only if
the uncertain part of its virtual time counts."""
MAX_SPEEDUP = 4
"""The monitor assumes that a demoted call runs, until its next sample, at most this many times as fast as between its
last two samples. This bounds how late a time-out is noticed."""
MIN_SHARE_DIVISOR = 4
"""A long call is promoted while it has had less than its fair share of the cores divided by this number."""
MAX_LAG_S = 0.05
"""Seconds of virtual time by which a long call may lag before it is promoted. They are multiplied by the crowding
factor. The limit is not 0, because the move of a thread between cgroups takes a lock for which every fork and exit on
the machine waits."""
_memory_reader = ThreadPoolExecutor(1, "memory")
"""A thread that runs `socket_bytes` and `exceeds_memory` for one call at a time. These functions block for
milliseconds, so they must not run in the event loop."""


def start_memory_reader() -> None:
    """Start the thread that reads memory. This has to happen before the first call, because a fork bomb may use up all
    processes and threads."""
    _memory_reader.submit(int)


class KillReason(Enum):
    """Why the monitor has killed a call."""

    TIMED_OUT = auto()
    STARVED = auto()
    RESTARTED = auto()
    """It got too little of a core while it was demoted, so it runs again at normal priority."""
    OUT_OF_MEMORY = auto()


class MonitorOwner(Protocol):
    """The part of the executor that the monitor uses."""

    granted_cores: int
    cpu_priority: CpuPriority

    @property
    def demote_after_s(self) -> float:
        """Virtual time after which a call is long."""
        ...

    @property
    def calls_per_core(self) -> float: ...

    def take_long_slot(self, slots: Slots, slot: int) -> bool:
        """Count the slot against the long quota and return True; return False if the quota or the memory is used up."""
        ...

    def extend_hang_deadline(self, attempt: Attempt, wall_s: float) -> None:
        """Set the attempt's hang deadline to `wall_s` seconds from now plus `HANG_GRACE_S`."""
        ...

    def count(self, event: str) -> None: ...


def lag_s(virtual_s: float, wall_s: float, calls_per_core: float) -> float:
    """Return how many seconds of virtual time a long call lacks to its minimum share of the cores. `virtual_s` and
    `wall_s` count from the moment at which the call became long."""
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

    `left_s`: virtual seconds until the limit, of which up to `uncertain_s` may already have passed. `slowness`: wall
    seconds per virtual second between the last two samples; 1 if the call slept.
    """
    factor = crowding_factor(calls_per_core)
    interval_s = factor * random.uniform(*(SAMPLE_INTERVAL_S if is_single_threaded else SAMPLE_INTERVAL_THREADED_S))
    left_s = min(left_s, max(left_s - uncertain_s, factor * MIN_UNCERTAIN_INTERVAL_S))
    if is_promoted:  # sample it soon, because a promoted call must not get much more than its minimum share
        interval_s = min(interval_s, factor * MAX_LAG_S)
    elif is_single_threaded:
        left_s = max(MIN_SAMPLE_INTERVAL_S, left_s) * min(factor, max(1.0, slowness / MAX_SPEEDUP))
    return max(MIN_SAMPLE_INTERVAL_S, min(interval_s, left_s))


def crowding_factor(calls_per_core: float) -> float:
    """Return the factor by which sample intervals are longer because of many calls: 1 up to
    `CROWDED_CALLS_PER_CORE`."""
    return max(1.0, calls_per_core / CROWDED_CALLS_PER_CORE)


class CallMonitor:
    """The monitoring of one attempt. It owns the pidfd of the attempt's first process."""

    def __init__(
        self, attempt: Attempt, slots: Slots, running: StillRunning, started: float, owner: MonitorOwner
    ) -> None:
        self.is_stopped = False
        self.kill_reason: KillReason | None = None
        self.max_cpu_s = math.inf
        """A call that has used more CPU seconds than this has timed out, even if it ended by itself before its next
        sample. The reason is that virtual time is never less than the CPU time divided by the cores."""
        self._attempt, self._slots, self._started, self._owner = attempt, slots, started, owner
        self._pidfd = running.pidfd
        self._timeout_s = attempt.call.spec.timeout_s
        self._is_long = self._has_long_slot = self._is_promoted = self._is_demoted_for_good = False
        self._tree: ProcessTree | None = None
        self._memory_check: Future[bool] | None = None
        self._clock = VirtualClock(owner.granted_cores)
        self._wall_cap_left_s = wall_cap_s(self._timeout_s) * (0.5 if attempt.call.keeps_priority else 1.0)
        self._last_sample = 0.0, 0.0
        """Wall time and virtual time of the last sample."""
        self._long_since = 0.0, 0.0
        """Wall time and virtual time of the sample at which the call became long."""

    def step(self) -> float | None:
        """Sample the call and act on the sample. Return the seconds until the next step, or None if this was the last
        one."""
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
            if self._tree is not None:
                self._owner.cpu_priority.forget(self._tree)

    def restore_priority(self) -> None:
        """Promote the threads of the last sample, which go on as a state of a session."""
        if self._is_long and self._tree is not None:
            with contextlib.suppress(OSError):
                self._owner.cpu_priority.apply(self._tree, self._slots.idle_cgroup, is_demoted=False)

    def _is_alive(self) -> bool:
        """Return whether the call's first process still exists. Also return False if the zygote sent a descriptor that
        is no pidfd; `Executor._kill_hung_jails` handles that case."""
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
        cap_rate = wall_cap_rate(calls_per_core)
        span_s, gained_s = wall_s - self._last_sample[0], clock.elapsed_s - self._last_sample[1]
        self._last_sample = wall_s, clock.elapsed_s
        self._wall_cap_left_s -= span_s * cap_rate
        self.kill_reason = self._find_kill_reason(tree)
        if self.kill_reason is not None:
            self._kill(tree)
            return None
        owner.extend_hang_deadline(self._attempt, self._wall_cap_left_s / cap_rate)
        left_s, demote_after_s = self._timeout_s - clock.elapsed_s, owner.demote_after_s
        if not self._is_long and clock.elapsed_s >= demote_after_s:
            self._is_long, self._long_since = True, self._last_sample
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
        pid = pid_of_pidfd(self._pidfd)
        # The cgroup of a session also has the processes of its states, so only descendants belong to a cell.
        is_cell = self._attempt.resource_slot != self._attempt.slot
        cgroup = None if is_cell else self._slots.cgroup(self._attempt.slot)
        return None if pid is None else ProcessTree(pid, cgroup)

    def _advance_clock(self, tree: ProcessTree, wall_s: float) -> None:
        clock, cgroup = self._clock, self._slots.cgroup(self._attempt.resource_slot)
        processes = tree.sample()
        # Raises if the first process has ended. Its pid, and so the sample, may then belong to another process.
        signal.pidfd_send_signal(self._pidfd, 0)
        if processes is None or processes:  # the sample is empty if the first process is a zombie
            cgroup_cpu_s = cgroup.cpu_s() if cgroup is not None else None
            cpu_s = tree.cpu_s if cgroup_cpu_s is None else cgroup_cpu_s
            clock.advance(wall_s, processes, cpu_s)
            cores = 1 if clock.is_single_threaded else self._owner.granted_cores
            self.max_cpu_s = cpu_s + (self._timeout_s - clock.elapsed_s) * cores

    def _find_kill_reason(self, tree: ProcessTree) -> KillReason | None:
        if self._clock.elapsed_s >= self._timeout_s:
            return KillReason.TIMED_OUT
        if self._wall_cap_left_s <= 0:
            # A call with several threads may have used up its wall cap because they waited for each other, as in a fork
            # bomb. That must not count as the server's fault.
            return KillReason.STARVED if self._clock.is_single_threaded else KillReason.TIMED_OUT
        if self._is_demoted_for_good and self._wall_cap_left_s <= wall_cap_s(self._timeout_s) / 2:
            return KillReason.RESTARTED
        if self._is_over_memory(tree):
            return KillReason.OUT_OF_MEMORY
        return None

    def _is_over_memory(self, tree: ProcessTree) -> bool:
        """Return whether a finished check found the call over its memory limit. If no check runs, start one if the
        call may be over the limit by its last sample. A cgroup counts all memory except the data in TCP and UDP
        sockets."""
        attempt, check = self._attempt, self._memory_check
        if check is None:
            has_cgroup, has_loopback = (
                self._slots.cgroup(attempt.resource_slot) is not None,
                attempt.call.spec.has_loopback,
            )
            resident = {} if has_cgroup else tree.resident_bytes()
            counts_sockets = self._slots.have_networks and (
                has_loopback or (not has_cgroup and not has_few_sockets(tree.root))
            )
            limit_bytes = attempt.memory_bytes
            if counts_sockets or sum(resident.values()) > limit_bytes:
                self._memory_check = _memory_reader.submit(
                    lambda: (
                        (counts_sockets and socket_bytes(tree.root, counts_unix=not has_cgroup) > limit_bytes)
                        or exceeds_memory(resident, limit_bytes, attempt.zygote_bytes)
                    )
                )
            return False
        if not check.done():
            return False
        self._memory_check = None
        return check.result()

    def _kill(self, tree: ProcessTree) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._is_long:  # an exiting process holds kernel locks, so it must not run at SCHED_IDLE
            self._owner.cpu_priority.apply(tree, self._slots.idle_cgroup, is_demoted=False)

    def _update_priority(self, tree: ProcessTree, wall_s: float, calls_per_core: float) -> None:
        owner = self._owner
        lag = lag_s(self._clock.elapsed_s - self._long_since[1], wall_s - self._long_since[0], calls_per_core)
        max_lag_s = 0.0 if self._is_promoted else MAX_LAG_S * crowding_factor(calls_per_core)
        # An exiting process holds locks that the exits of all calls of its zygote wait for.
        is_lagging = lag > max_lag_s or tree.is_exiting
        if owner.cpu_priority.can_promote:
            if is_lagging and not self._is_promoted:
                owner.count("promoted")
            self._is_promoted = is_lagging
        elif self._attempt.call.keeps_priority:
            return
        elif owner.cpu_priority.can_demote and not is_lagging:
            self._is_demoted_for_good = True
        owner.cpu_priority.apply(tree, self._slots.idle_cgroup, is_demoted=not is_lagging)


class Monitor:
    """Steps all monitored calls in one task. With one task per call, the wake-ups would cost as much CPU time as the
    samples."""

    def __init__(self, owner: MonitorOwner) -> None:
        self._owner = owner
        self._due: list[tuple[float, int, CallMonitor]] = []
        """Heap of (time of the next step, number that orders equal times, monitor)."""
        self._numbers = itertools.count()
        self._added = trio.Event()
        if not counts_run_delay():
            log.warning("the kernel does not count run delay (/proc/PID/schedstat): time limits are in wall time")

    def add(self, attempt: Attempt, slots: Slots, running: StillRunning) -> CallMonitor:
        """Monitor an attempt until it ends or the returned monitor is stopped."""
        now = trio.current_time()
        call_monitor = CallMonitor(attempt, slots, running, now - running.wall_s, self._owner)
        self._schedule(now, call_monitor)
        self._added.set()
        return call_monitor

    async def run(self) -> None:
        """Step the calls as they become due, until cancelled. Then stop the monitoring of all calls."""
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
            if interval_s is not None:  # assume that the samples of all monitored calls take as long as this one
                costly_s = max(0.0, now - before - FREE_SAMPLE_CPU_S) * (len(self._due) + 1)
                interval_s = max(interval_s, costly_s / MAX_COSTLY_SAMPLE_SHARE)
                self._schedule(trio.current_time() + interval_s, call_monitor)

    def _schedule(self, at: float, call_monitor: CallMonitor) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), call_monitor))
