"""A machine with a scheduler, made up: cores that take turns at what is ready, and count as Linux does.

A program is a generator of steps: `Run(s)`, `Sleep(s)`, `Fork(program)`, `Spawn(program)` (a thread), `Join()` (until
all that it forked and spawned has ended), `Take()` and `Give()` of its process's one lock. It is sent nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from sandbox.executor.virtual_clock import ProcessSample, ThreadSample, TreeSample, VirtualClock

TICK_S = 0.001
SLICE = 3
"""Ticks that a thread runs before the next one's turn."""


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
class Take:
    pass


@dataclass(frozen=True)
class Give:
    pass


Step = Run | Sleep | Fork | Spawn | Join | Take | Give
Program = Iterator[Step]


@dataclass(eq=False)
class Task:
    """A thread. `ready_at` is when its present wait for a core began."""

    pid: int
    tid: int
    program: Program
    parent: Task | None
    born: int
    ran: int = 0
    waited: int = 0
    left: int = 0
    ready_at: int | None = None
    wakes_at: int | None = None
    children: int = 0
    turns: int = 0
    sleeps: int = 0
    joins: bool = False
    has_ended: bool = False

    @property
    def is_ready(self) -> bool:
        return self.wakes_at is None and self.left > 0


@dataclass
class Lock:
    owner: Task | None = None
    waiting: deque[Task] = field(default_factory=deque)


class Machine:
    """`cores` of them, and `load` threads of others that always want one."""

    def __init__(self, cores: int, load: int, *, seed: int = 0) -> None:
        self.cores = cores
        self.now = 0
        self._rng = random.Random(seed)
        self._queue: deque[Task] = deque()
        self._on_core: list[Task | None] = [None] * cores
        self._slice = [0] * cores
        self._tasks: dict[int, Task] = {}
        self._locks: dict[int, Lock] = {}
        self._ended_ran: dict[int, int] = {}
        self._numbers = 0
        self._all_ran = 0
        self._on_end: Callable[[], None] | None = None
        for _ in range(load):
            self._enqueue(Task(0, 0, iter(()), None, 0, left=1 << 40))

    def run(self, program: Program, *, cap_s: float = 1000.0, every: tuple[float, float] = (0.05, 0.25)) -> float:
        """The wall time of a call."""
        return self.timed(program, None, cap_s=cap_s, every=every)[0]

    def timed(
        self,
        program: Program,
        clock: VirtualClock | None,
        *,
        counts_all: bool = True,
        cap_s: float = 1000.0,
        every: tuple[float, float] = (0.05, 0.25),
    ) -> tuple[float, float]:
        """Wall time of a call, and its own, as a clock that looks at random moments says at its end."""
        started = self.now
        root = self._add(program, None, pid=None)
        if clock is not None:
            self._on_end = partial(self._last_look, clock, root, started, counts_all)
        next_look = self.now + self._rng.uniform(*every) / TICK_S
        while not root.has_ended and (self.now - started) * TICK_S < cap_s:
            self._tick()
            if clock is not None and not root.has_ended and self.now >= next_look:
                self._look(clock, root, started, counts_all)
                next_look = self.now + self._rng.uniform(*every) / TICK_S
        return (self.now - started) * TICK_S, 0.0 if clock is None else clock.elapsed_s

    def _last_look(self, clock: VirtualClock, root: Task, started: int, counts_all: bool) -> None:
        """In its last moment, which is one of running."""
        root.left = 1
        self._look(clock, root, started, counts_all)

    def _look(self, clock: VirtualClock, root: Task, started: int, counts_all: bool) -> None:
        all_ran = self._all_ran * TICK_S if counts_all else None
        clock.advance((self.now - started) * TICK_S, self._seen(root), all_ran)

    def _seen(self, root: Task) -> TreeSample:
        by_pid: dict[int, list[Task]] = {}
        for task in self._tasks.values():
            by_pid.setdefault(task.pid, []).append(task)
        look: dict[int, ProcessSample] = {}
        for pid in sorted(by_pid, key=lambda pid: pid != root.pid):
            tasks = by_pid[pid]
            main = min(tasks, key=lambda task: task.tid)
            ran = sum(task.ran for task in tasks) + self._ended_ran.get(pid, 0)
            threads = {
                task.tid: ThreadSample(task.ran * TICK_S, task.waited * TICK_S, task.turns, task.sleeps, task.is_ready)
                for task in tasks
            }
            parent = main.parent.pid if main.parent is not None else 0
            look[pid] = ProcessSample(parent, (self.now - main.born) * TICK_S, ran * TICK_S, threads)
        return look

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
            task.ran += 1
            task.left -= 1
            self._slice[core] -= 1
            if task.pid:
                self._all_ran += 1
            if task.left == 0:
                self._on_core[core] = None
                self._step(task)

    def _schedule(self, core: int) -> None:
        task = self._on_core[core]
        if task is not None and self._slice[core] <= 0 and self._queue:
            self._on_core[core] = None
            self._enqueue(task)
        if self._on_core[core] is None and self._queue:
            task = self._queue.popleft()
            assert task.ready_at is not None
            task.waited += self.now - task.ready_at
            task.ready_at = None
            task.turns += 1
            self._on_core[core], self._slice[core] = task, SLICE

    def _enqueue(self, task: Task) -> None:
        task.ready_at = self.now
        self._queue.append(task)

    def _add(self, program: Program, parent: Task | None, pid: int | None) -> Task:
        self._numbers += 1
        task = Task(pid or self._numbers, self._numbers, program, parent, self.now)
        self._tasks[task.tid] = task
        self._locks.setdefault(task.pid, Lock())
        self._step(task)
        return task

    def _step(self, task: Task) -> None:  # noqa: C901  a branch for each kind of step
        """Up to the next step that takes time."""
        while True:
            match next(task.program, None):
                case Run(s):
                    task.left = max(1, round(s / TICK_S))
                    return self._enqueue(task)
                case Sleep(s):
                    task.wakes_at = self.now + max(1, round(s / TICK_S))
                    task.sleeps += 1
                    return None
                case Fork(program):
                    task.children += 1
                    self._add(program, task, pid=None)
                case Spawn(program):
                    task.children += 1
                    self._add(program, task, pid=task.pid)
                case Join():
                    if task.children:
                        task.joins = True
                        task.sleeps += 1
                        return None
                case Take():
                    lock = self._locks[task.pid]
                    if lock.owner is not None:
                        lock.waiting.append(task)
                        task.sleeps += 1
                        return None
                    lock.owner = task
                case Give():
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
        self._ended_ran[task.pid] = self._ended_ran.get(task.pid, 0) + task.ran
        parent = task.parent
        if parent is not None:
            parent.children -= 1
            if parent.joins and not parent.children:
                parent.joins = False
                self._step(parent)


def own_time(
    program: Callable[[], Program],
    *,
    cores: int,
    load: int,
    seed: int,
    counts_all: bool = True,
    every: tuple[float, float] = (0.02, 0.1),
) -> tuple[float, float, float]:
    """Of a call: wall time on an idle machine, and both its wall time and own time beside `load` others."""
    idle = Machine(cores, 0).run(program())
    clock = VirtualClock(cores)
    wall, own = Machine(cores, load, seed=seed).timed(program(), clock, counts_all=counts_all, every=every)
    return idle, wall, own
