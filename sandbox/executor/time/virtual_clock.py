"""The virtual clock of a call: the time that its processes would have taken on an idle machine.

Virtual time is wall time minus run delay, which is the time that runnable threads wait for a core. Sleep counts as
virtual time. This module reads nothing from the machine: the caller samples the processes at random moments
(`process_tree`) and passes the samples to `VirtualClock.advance`.

    what runs                   virtual time                                     error
    one thread at a time        wall time minus run delay                        none
    several processes           CPU time on the critical path plus sleep         some per cent
    threads of one process      as if one ran at a time (Python's lock)          up to N times too fast, if N threads
                                                                                 run without the lock
    processes never sampled     CPU time is counted by the cgroup; idle time is  estimate, in favour of the call
                                split into sleep and waiting (`UnobservedTime`)
    a call that is not sampled  wall time                                        counts all run delay

A path leads from the start of the call to one of its processes, through the starts and ends of the processes in
between. The critical path is the path with the most CPU time. It is taken to have at least the CPU time of all
processes divided by the number of cores.

If the kind of some time is unknown, this time counts as run delay, and not as virtual time. A call gains little by
hiding the kind, because all CPU time counts and the wall time is limited (`call_state.wall_cap_s`).

A simple rule for several processes (wall time minus run delay, but at least CPU time divided by the cores) would change
57 of 576 statuses of recorded calls (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_UNOBSERVED_CPU_S = 0.001
"""If the cgroup counts at least this many CPU seconds more than all sampled processes have used, a process must have
started and ended between two samples."""
EXACT_WITHIN_S = 0.01
"""A clock counts as exact if fewer seconds than this are uncertain. When a thread has slept and is runnable
again, the time since the last sample is uncertain (`_current_wait_s`)."""
MAX_WAIT_RATIO = 3.0
"""An unobserved process is assumed to have at most this many times the run delay per CPU second of the observed
processes."""


@dataclass(frozen=True, slots=True)
class ThreadSample:
    """The counters that the kernel keeps for a thread."""

    cpu_s: float
    run_delay_s: float
    """Seconds that the thread has waited for a core. A wait that has not ended yet is not included."""
    timeslices: int
    """Number of times that the thread was given a core."""
    voluntary_switches: int
    """Number of times that the thread gave up its core by itself. May be 0 if the thread is not runnable."""
    is_runnable: bool
    """Whether the thread runs, waits for a core, or is exiting."""
    is_exiting: bool = False


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """A process of a call that has not ended."""

    parent: int
    age_s: float
    """Seconds since the process started; accurate to one clock tick."""
    cpu_s: float
    """CPU time of all its threads, ended ones included."""
    threads: Mapping[int, ThreadSample]

    @property
    def is_runnable(self) -> bool:
        return any(thread.is_runnable for thread in self.threads.values())


TreeSample = Mapping[int, ProcessSample]
"""All processes of a call at one moment, by pid. The call's first process comes first."""


@dataclass(slots=True)
class _ThreadHistory:
    """A thread's time up to the last sample. Age = CPU time + run delay + sleep."""

    age_s: float
    slept_s: float = 0.0
    total_delay_s: float = 0.0
    """Run delay, with the wait that has not ended yet."""
    uncertain_s: float = 0.0
    """The part of `total_delay_s` that may have been sleep."""
    timeslices: int = 0
    voluntary_switches: int = 0
    is_runnable: bool = True


class VirtualClock:
    """The virtual time of a call. `advance` adds a sample, and `elapsed_s` is the virtual time at the last sample. The
    samples have to come at moments that the call cannot predict."""

    def __init__(self, cores: int) -> None:
        self.elapsed_s = 0.0
        self.is_single_threaded = True
        """Whether no sample has contained a second thread or process."""
        self._cores = cores
        self._follows_wall_time = False
        self._wall_s = 0.0
        self._runnable = 1
        """Number of runnable processes in the last sample."""
        self._threads: dict[tuple[int, int], _ThreadHistory] = {}
        self._processes: TreeSample = {}
        self._path_cpu_s: dict[int, float] = {}
        """By pid: the CPU time on the longest path from the start of the call to the last sample of the process."""
        self._critical_path_cpu_s = 0.0
        self._cpu_s = self._ended_cpu_s = self._unobserved_cpu_s = self._run_delay_s = self._uncertain_s = 0.0
        self._last_single_process = 0.0, 0.0
        """CPU time on the critical path, and CPU time of all processes, at the last sample that had only one
        process."""
        self._unobserved = UnobservedTime()

    @property
    def is_exact(self) -> bool:
        """Whether `elapsed_s` is accurate and the call was runnable in the last sample."""
        return self._runnable > 0 and self.uncertain_s < EXACT_WITHIN_S

    @property
    def uncertain_s(self) -> float:
        """Seconds by which the virtual time of a single-threaded call may exceed `elapsed_s`; 0 for other calls."""
        return self._uncertain_s if self.is_single_threaded else 0.0

    def advance(self, wall_s: float, processes: TreeSample | None, cpu_s: float) -> None:
        """Advance the clock to `wall_s` seconds after the call's start.

        `processes` is the sample; None means that the call cannot be sampled, and from then on virtual time follows
        wall time. `cpu_s` is the CPU time of all processes, ended ones included, as far as it is known.

        The clock gains the growth of the critical path plus the sleep, but at least the wall time minus the run delay.
        If the run delay is unknown, the sleep is estimated. This estimate then replaces the minimum.
        """
        span_s, self._wall_s = wall_s - self._wall_s, wall_s
        if processes is None or self._follows_wall_time:
            self._follows_wall_time, self.is_single_threaded = True, False
            self.elapsed_s += span_s
            return
        threads = sum(len(process.threads) for process in processes.values())
        self.is_single_threaded = self.is_single_threaded and threads == 1
        was_uncertain_s = self._uncertain_s
        delay_s, ended = self._account_run_delay(span_s, processes)
        new_cpu_s, unobserved_s = self._account_cpu(processes, cpu_s)
        runnable = sum(process.is_runnable for process in processes.values())
        # Unobserved processes may have run side by side: as many as were runnable on average, or one per core.
        mean_runnable = (self._runnable + runnable) / 2
        num_parallel = min(max(mean_runnable, 1.0), float(self._cores))
        path_s = self._critical_path_s(span_s, processes, unobserved_s / num_parallel)
        path_gain_s = path_s - self._critical_path_cpu_s
        slept_s = max(0.0, span_s - new_cpu_s - delay_s)
        min_gain_s = span_s - delay_s
        is_delay_unknown = ended or unobserved_s > MIN_UNOBSERVED_CPU_S
        if is_delay_unknown or (was_uncertain_s > 0 and not self.is_single_threaded):
            delay_per_cpu_s = self._run_delay_s / max(self._cpu_s - self._unobserved_cpu_s, MIN_UNOBSERVED_CPU_S)
            max_delay_s = MAX_WAIT_RATIO * delay_per_cpu_s * unobserved_s + was_uncertain_s
            if any(history.is_runnable for history in ended):
                max_delay_s = max(max_delay_s, span_s)  # such a thread may have waited, or been exiting, until it ended
            slept_s = self._unobserved.slept_s(span_s, slept_s, max_delay_s, is_asleep=runnable == 0)
            min_gain_s = slept_s
        self.elapsed_s = min(wall_s, self.elapsed_s + max(path_gain_s + slept_s, min_gain_s))
        self._critical_path_cpu_s, self._runnable, self._processes = path_s, runnable, processes

    def _account_run_delay(self, span_s: float, processes: TreeSample) -> tuple[float, list[_ThreadHistory]]:
        """Return the run delay of all threads since the last sample, and the threads that have ended since then."""
        before, self._threads = self._threads, {}
        total_s = self._uncertain_s = 0.0
        for pid, process in processes.items():
            for tid, thread in process.threads.items():
                history = before.pop((pid, tid), None)
                if history is None:
                    history = _ThreadHistory(min(process.age_s, span_s))
                else:
                    history.age_s += span_s
                unknown_s = history.age_s - thread.cpu_s - thread.run_delay_s - history.slept_s
                wait_s, history.uncertain_s = _current_wait_s(thread, history, max(unknown_s, 0.0), span_s)
                self._uncertain_s += history.uncertain_s
                history.slept_s += unknown_s - wait_s  # a negative time corrects earlier sleep
                total_delay_s = thread.run_delay_s + wait_s
                total_s += total_delay_s - history.total_delay_s
                history.total_delay_s, history.is_runnable = total_delay_s, thread.is_runnable
                history.timeslices, history.voluntary_switches = thread.timeslices, thread.voluntary_switches
                self._threads[pid, tid] = history
        self._run_delay_s += total_s
        return total_s, list(before.values())

    def _account_cpu(self, processes: TreeSample, cpu_s: float) -> tuple[float, float]:
        """Return the CPU seconds of all processes since the last sample, and the part of them that no sampled process
        has used."""
        self._ended_cpu_s += sum(process.cpu_s for pid, process in self._processes.items() if pid not in processes)
        observed_s = self._ended_cpu_s + sum(process.cpu_s for process in processes.values())
        unobserved_s = max(0.0, cpu_s - observed_s - self._unobserved_cpu_s)
        self._unobserved_cpu_s += unobserved_s
        total_s = observed_s + self._unobserved_cpu_s
        new_s, self._cpu_s = total_s - self._cpu_s, total_s
        return new_s, unobserved_s

    def _critical_path_s(self, span_s: float, processes: TreeSample, unobserved_s: float) -> float:
        """Return the CPU time on the critical path. `unobserved_s` is the time that processes which started and
        ended between two samples add to it. Every other process is assumed to have waited for them, so all paths grow
        by this time."""
        first_pid = next(iter(processes))
        before, self._path_cpu_s = self._path_cpu_s, {}
        for pid in before.keys() - processes.keys():  # the parent of an ended process has waited for it
            waiting_parent = self._processes[pid].parent
            if waiting_parent not in before or waiting_parent not in processes:
                waiting_parent = first_pid
            before[waiting_parent] = max(before[waiting_parent], before.pop(pid))
        # The first process, then the oldest first: the path of a parent is known before those of its children.
        for pid, process in sorted(processes.items(), key=lambda item: (item[0] != first_pid, -item[1].age_s)):
            if pid in before:
                start_s, gain_s = before[pid], process.cpu_s - self._processes[pid].cpu_s
            else:  # a new process continues the path of its parent
                start_s = self._path_cpu_s.get(process.parent, self._path_cpu_s.get(first_pid, 0.0))
                gain_s = process.cpu_s
            self._path_cpu_s[pid] = start_s + min(gain_s, span_s)  # several threads may have used more than the span
        self._path_cpu_s = {pid: path_s + unobserved_s for pid, path_s in self._path_cpu_s.items()}
        earlier_path_s, earlier_cpu_s = self._last_single_process
        # Even if all cores were used since then, the new CPU time would take this long on an idle machine.
        min_path_s = earlier_path_s + (self._cpu_s - earlier_cpu_s) / self._cores
        path_s = max(*self._path_cpu_s.values(), min_path_s)
        if len(processes) == 1:
            self._path_cpu_s[first_pid] = path_s
            self._last_single_process = path_s, self._cpu_s
        return path_s


def _current_wait_s(
    thread: ThreadSample, history: _ThreadHistory, unknown_s: float, span_s: float
) -> tuple[float, float]:
    """Return how long a runnable thread has been waiting for a core, and how much of that time is uncertain.

    The kernel adds a wait to the thread's run delay only when the wait ends. `unknown_s` is time that is neither CPU
    time, nor run delay that the kernel has counted, nor known sleep. The next sample corrects an overestimate. An
    exiting thread also waits for locks of the kernel, which other calls may hold for seconds on a loaded machine. The
    kernel never adds this time to its run delay.

        the thread (the first row that applies)              wait                uncertain
        is exiting                                           `unknown_s`         as before
        has had no timeslice, or none since the last
        sample, in which it was runnable                     `unknown_s`         as before
        was runnable in the last sample, has made no
        voluntary switch since, and nothing was uncertain    `unknown_s`         nothing
        the same, but some time was uncertain                at most `span_s`    as before
        any other                                            at most `span_s`    all of it
    """
    if not thread.is_runnable:
        return 0.0, 0.0
    if thread.is_exiting or not thread.timeslices or (history.is_runnable and history.timeslices == thread.timeslices):
        return unknown_s, history.uncertain_s
    has_not_slept = history.is_runnable and history.voluntary_switches == thread.voluntary_switches
    if has_not_slept and not history.uncertain_s:
        return unknown_s, 0.0  # for example time that the hypervisor gave to other machines
    wait_s = min(unknown_s, span_s)
    uncertain_s = min(wait_s, history.uncertain_s) if has_not_slept else wait_s
    return wait_s, uncertain_s


class UnobservedTime:
    """The intervals between two samples in which a process ended, or started and ended.

    The run delay of such a process is unknown, so the idle time of the interval is split into sleep and waiting. The
    share of sleep is estimated as the share of all these intervals whose last sample found no runnable process.
    """

    def __init__(self) -> None:
        self._wall_s = self._idle_s = self._max_run_delay_s = self._slept_s = 0.0
        self._samples = self._samples_asleep = 0

    def slept_s(self, span_s: float, idle_s: float, max_run_delay_s: float, *, is_asleep: bool) -> float:
        """Add an interval and return the seconds of sleep that it adds. A negative number corrects earlier results.

        `idle_s`: time in the interval that was neither CPU time nor known run delay; at most `max_run_delay_s` of it
        was waiting. `is_asleep`: the sample at the end of the interval found no runnable process.
        """
        self._wall_s += span_s
        self._idle_s += idle_s
        self._max_run_delay_s += max_run_delay_s
        self._samples += 1
        self._samples_asleep += is_asleep
        likely_s = min(self._idle_s, self._wall_s * self._samples_asleep / self._samples)
        slept_s = max(likely_s, self._idle_s - self._max_run_delay_s)
        added_s, self._slept_s = slept_s - self._slept_s, slept_s
        return added_s
