"""A simulated machine: cores with a round-robin scheduler that counts what Linux counts.

A program is a generator of steps:

    Run(s)            compute for s seconds
    Sleep(s)          sleep for s seconds
    Fork(program)     start a child process
    Spawn(program)    start a thread
    Join()            sleep until all children and threads of this program have ended
    Acquire()         sleep until the one lock of its process is free, and take it
    Release()         release that lock
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from sandbox.executor.time.virtual_clock import ProcessSample, ThreadSample, TreeSample, VirtualClock

TICK_S = 0.001
SAMPLE_INTERVAL_S = 0.02, 0.1
"""Smallest and largest number of seconds between two samples."""
SLICE_TICKS = 3
"""Ticks that a thread runs before another waiting thread gets the core."""


@dataclass(frozen=True)
class Run:
    s: float


@dataclass(frozen=True)
class Sleep:
    s: float


@dataclass(frozen=True)
class Fork:
    program: Program


@dataclass(frozen=True)
class Spawn:
    program: Program


@dataclass(frozen=True)
class Join:
    pass


@dataclass(frozen=True)
class Acquire:
    pass


@dataclass(frozen=True)
class Release:
    pass


Step = Run | Sleep | Fork | Spawn | Join | Acquire | Release
Program = Iterator[Step]


@dataclass(eq=False)
class Task:
    """A thread. All times are in ticks of `TICK_S`."""

    pid: int
    tid: int
    program: Program
    parent: Task | None
    started_at: int
    cpu_ticks: int = 0
    delay_ticks: int = 0
    """Run delay: the sum of all finished waits for a core."""
    left_ticks: int = 0
    """CPU time until the end of the current step."""
    waiting_since: int | None = None
    """Start of the current wait for a core."""
    wakes_at: int | None = None
    """End of the current sleep."""
    children: int = 0
    """Number of child processes and threads that have not ended."""
    timeslices: int = 0
    voluntary_switches: int = 0
    is_joining: bool = False
    has_ended: bool = False

    @property
    def is_runnable(self) -> bool:
        return self.wakes_at is None and self.left_ticks > 0

    def sample(self) -> ThreadSample:
        cpu_s, delay_s = self.cpu_ticks * TICK_S, self.delay_ticks * TICK_S
        return ThreadSample(cpu_s, delay_s, self.timeslices, self.voluntary_switches, self.is_runnable)


@dataclass
class Lock:
    owner: Task | None = None
    waiting: deque[Task] = field(default_factory=deque)


class Machine:
    """A machine with `load` threads that compute without end, besides the call."""

    def __init__(self, cores: int, load: int, *, seed: int = 0) -> None:
        self.cores = cores
        self.now = 0
        self._rng = random.Random(seed)
        self._queue: deque[Task] = deque()
        self._on_core: list[Task | None] = [None] * cores
        self._slice_left_ticks = [0] * cores
        self._tasks: dict[int, Task] = {}
        self._locks: dict[int, Lock] = {}
        self._ended_cpu_ticks: dict[int, int] = {}
        self._last_tid = 0
        self._call_cpu_ticks = 0
        self._on_end: Callable[[], None] | None = None
        for _ in range(load):
            self._enqueue(Task(0, 0, iter(()), None, 0, left_ticks=1 << 40))  # longer than any test

    def run(self, program: Program, clock: VirtualClock | None = None) -> float:
        """Run a call and return its wall time. The clock is advanced at random moments and at the end."""
        started = self.now
        root = self._add(program, None, pid=None)
        if clock is not None:
            self._on_end = partial(self._last_sample, clock, root, started)
        next_sample_at = self._next_sample_at()
        while not root.has_ended:
            self._tick()
            if clock is not None and not root.has_ended and self.now >= next_sample_at:
                self._advance(clock, root, started)
                next_sample_at = self._next_sample_at()
        return (self.now - started) * TICK_S

    def _next_sample_at(self) -> float:
        return self.now + self._rng.uniform(*SAMPLE_INTERVAL_S) / TICK_S

    def _last_sample(self, clock: VirtualClock, root: Task, started: int) -> None:
        """Sample in the last tick of the call, with the first process as runnable."""
        root.left_ticks = 1
        self._advance(clock, root, started)

    def _advance(self, clock: VirtualClock, root: Task, started: int) -> None:
        clock.advance((self.now - started) * TICK_S, self._sample(root), self._call_cpu_ticks * TICK_S)

    def _sample(self, root: Task) -> TreeSample:
        by_pid: dict[int, list[Task]] = {}
        for task in self._tasks.values():
            by_pid.setdefault(task.pid, []).append(task)
        sample: dict[int, ProcessSample] = {}
        for pid in sorted(by_pid, key=lambda pid: pid != root.pid):
            tasks = by_pid[pid]
            main = min(tasks, key=lambda task: task.tid)
            cpu_ticks = sum(task.cpu_ticks for task in tasks) + self._ended_cpu_ticks.get(pid, 0)
            threads = {task.tid: task.sample() for task in tasks}
            parent = main.parent.pid if main.parent is not None else 0
            sample[pid] = ProcessSample(parent, (self.now - main.started_at) * TICK_S, cpu_ticks * TICK_S, threads)
        return sample

    def _tick(self) -> None:
        for task in list(self._tasks.values()):
            if task.wakes_at is not None and task.wakes_at <= self.now:
                task.wakes_at = None
                self._step(task)
        for core in range(self.cores):
            self._schedule(core)
        self.now += 1
        for core, task in enumerate(self._on_core):
            if task is None:
                continue
            task.cpu_ticks += 1
            task.left_ticks -= 1
            self._slice_left_ticks[core] -= 1
            if task.pid:
                self._call_cpu_ticks += 1
            if task.left_ticks == 0:
                self._on_core[core] = None
                self._step(task)

    def _schedule(self, core: int) -> None:
        task = self._on_core[core]
        if task is not None and self._slice_left_ticks[core] <= 0 and self._queue:
            self._on_core[core] = None
            self._enqueue(task)
        if self._on_core[core] is None and self._queue:
            task = self._queue.popleft()
            assert task.waiting_since is not None
            task.delay_ticks += self.now - task.waiting_since
            task.waiting_since = None
            task.timeslices += 1
            self._on_core[core], self._slice_left_ticks[core] = task, SLICE_TICKS

    def _enqueue(self, task: Task) -> None:
        task.waiting_since = self.now
        self._queue.append(task)

    def _add(self, program: Program, parent: Task | None, pid: int | None) -> Task:
        self._last_tid += 1
        task = Task(pid or self._last_tid, self._last_tid, program, parent, self.now)
        self._tasks[task.tid] = task
        self._locks.setdefault(task.pid, Lock())
        self._step(task)
        return task

    def _step(self, task: Task) -> None:  # noqa: C901  a branch for each kind of step
        """Execute steps up to the next one that takes time."""
        while True:
            match next(task.program, None):
                case Run(s):
                    task.left_ticks = max(1, round(s / TICK_S))
                    return self._enqueue(task)
                case Sleep(s):
                    task.wakes_at = self.now + max(1, round(s / TICK_S))
                    task.voluntary_switches += 1
                    return None
                case Fork(program):
                    task.children += 1
                    self._add(program, task, pid=None)
                case Spawn(program):
                    task.children += 1
                    self._add(program, task, pid=task.pid)
                case Join():
                    if task.children:
                        task.is_joining = True
                        task.voluntary_switches += 1
                        return None
                case Acquire():
                    lock = self._locks[task.pid]
                    if lock.owner is not None:
                        lock.waiting.append(task)
                        task.voluntary_switches += 1
                        return None
                    lock.owner = task
                case Release():
                    lock = self._locks[task.pid]
                    lock.owner = lock.waiting.popleft() if lock.waiting else None
                    if lock.owner is not None:
                        self._step(lock.owner)
                case None:
                    return self._end(task)

    def _end(self, task: Task) -> None:
        if task.parent is None and self._on_end is not None:
            self._on_end()
        task.has_ended = True
        del self._tasks[task.tid]
        self._ended_cpu_ticks[task.pid] = self._ended_cpu_ticks.get(task.pid, 0) + task.cpu_ticks
        parent = task.parent
        if parent is not None:
            parent.children -= 1
            if parent.is_joining and not parent.children:
                parent.is_joining = False
                self._step(parent)


def virtual_time(program: Callable[[], Program], *, cores: int, load: int, seed: int) -> tuple[float, float, float]:
    """Return three times of a call: its wall time on an idle machine, and its wall time and virtual time on a machine
    with `load` busy threads. All in seconds."""
    idle_s = Machine(cores, 0).run(program())
    clock = VirtualClock(cores)
    wall_s = Machine(cores, load, seed=seed).run(program(), clock)
    return idle_s, wall_s, clock.elapsed_s
