"""A call's own clock: the time its processes would have taken, by now, on a machine that had nothing else to do.

Pure: `OwnClock` is told at random moments what the kernel counts of each thread (`tree`), and says what that comes to.
Asleep or running, the time of a call is its own; while it waits for a core that others have, it is not.

- One thread at a time is active (a plain call, a child that is waited for, processes that answer each other): own time
  is wall time less what threads waited for cores, exactly.
- Several are: own time is that of the process which has got furthest, counted from the start of the call through the
  starts and ends of processes on the way to it (its critical path), and never less than all CPU time over the cores.
  Threads of one process take turns, since Python's do; where they do not, own time runs up to so many times too fast,
  though never faster than the wall.
- What a process did after the last look at it is known in sum only, if at all: CPU time. Whether the tree waited or
  slept meanwhile is estimated from how often a look found it asleep.

So a call that only ever has one thread active at a time is judged alike on every machine, and others within some per
cent; where it cannot be known, time is not counted. That is bounded: all CPU time counts, and wall time has a cap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HARD_CAP, HARD_CAP_S = 10, 60.0
"""Wall time may be so many times the limit, and always so many seconds, whatever the own clock says; then the node is
hopeless, not the call."""
CALLS_PER_CORE = 2
"""While more calls than that share a core, the cap is further away in proportion: the wait is for each other."""
UNSEEN_S = 0.001
"""CPU time that no process seen can account for, from which on somebody has run unseen."""
SURE_S = 0.01
"""So little may be a guess of what is sure. What has once slept is never quite."""
MOST_WAIT = 3.0
"""What ran unseen has not waited more than so many times as long, for each second of CPU, as what was seen."""


def hard_cap_s(timeout_s: float) -> float:
    """The wall time after which a call ends, where no more than `CALLS_PER_CORE` run."""
    return max(HARD_CAP * timeout_s, HARD_CAP_S)


def pace(calls_per_core: float) -> float:
    """How fast the hard cap comes nearer."""
    return min(1.0, CALLS_PER_CORE / max(calls_per_core, 1e-9))


@dataclass(frozen=True, slots=True)
class Thread:
    """What the kernel counts of a thread."""

    ran_s: float
    waited_s: float
    """Less the wait that it may be in."""
    turns: int
    """How often it was given a core."""
    sleeps: int
    """How often it has let go of one by itself; need not be known of a thread that is not ready."""
    is_ready: bool
    """It runs, or waits for a core, or for others to let it end."""
    is_estimate: bool = False
    """`waited_s` is estimated, since the kernel does not count it, and contains the wait that the thread may be in."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a call that has not ended. `age_s` may be off by a hundredth."""

    parent: int
    age_s: float
    ran_s: float
    """By all its threads, ended ones included."""
    threads: Mapping[int, Thread]

    @property
    def is_ready(self) -> bool:
        return any(thread.is_ready for thread in self.threads.values())


Look = Mapping[int, Process]
"""All processes of a call at one moment, by number; the first is the one that was forked for it."""


@dataclass(slots=True)
class _Seen:
    """A thread, from its start or the first look at it to the last."""

    age_s: float
    slept_s: float = 0.0
    held_s: float = 0.0
    guess_s: float = 0.0
    turns: int = 0
    sleeps: int = 0
    is_ready: bool = True


class OwnClock:
    """`look` at the call now and then, at moments that it cannot foresee; `own_s` is the outcome so far."""

    def __init__(self, cores: int) -> None:
        self.own_s = 0.0
        self.was_alone = True
        """Whether the call has never been seen with a second thread or process."""
        self._cores = cores
        self._wall_s = 0.0
        self._ready = 1
        self._threads: dict[tuple[int, int], _Seen] = {}
        self._processes: Look = {}
        self._paths: dict[int, float] = {}
        """By process: the CPU time on the longest way to where it is now."""
        self._furthest_s = 0.0
        self._ran_s = self._ended_s = self._unseen_s = self._held_s = self._guessed_s = 0.0
        self._fork = 0.0, 0.0
        """When there was but one process for the last time: the longest way, and the CPU time of all."""
        self._blur = _Blur()

    @property
    def is_sure(self) -> bool:
        """Whether time so far is known for what it is, nearly, and the call was ready in the last look."""
        return self._ready > 0 and self.guess_s < SURE_S

    @property
    def guess_s(self) -> float:
        """Of a call that was always alone: how much further it may be than `own_s`."""
        return self._guessed_s if self.was_alone else 0.0

    def look(self, wall_s: float, processes: Look | None, ran_s: float | None = None) -> None:
        """What there is `wall_s` after the start; `ran_s` is the CPU time of all that ever ran, if it is known. None
        for a crowd, which is too many to look at: it waits for itself, so from then on its time is wall time."""
        span, self._wall_s = wall_s - self._wall_s, wall_s
        if processes is None or self._cores == 0:
            self._cores, self.was_alone = 0, False
            self.own_s += span
            return
        self.was_alone = self.was_alone and sum(len(process.threads) for process in processes.values()) == 1
        guessed = self._guessed_s
        held, has_ended = self._take_threads(span, processes)
        ran, unseen = self._take_cpu(processes, ran_s)
        ready = sum(process.is_ready for process in processes.values())
        parallel = min(max((self._ready + ready) / 2, 1.0), float(self._cores))
        furthest = self._take_paths(span, processes, unseen / parallel)
        gained = furthest - self._furthest_s
        slept = max(0.0, span - ran - held)
        least = span - held
        if has_ended or unseen > UNSEEN_S or (guessed > 0 and not self.was_alone):
            per_cpu_s = self._held_s / max(self._ran_s - self._unseen_s, UNSEEN_S)
            slept = self._blur.slept_s(span, slept, MOST_WAIT * per_cpu_s * unseen + guessed, ready > 0)
            least = slept
        self.own_s = min(wall_s, self.own_s + max(gained + slept, least))
        self._furthest_s, self._ready, self._processes = furthest, ready, processes

    def _take_threads(self, span: float, processes: Look) -> tuple[float, bool]:
        """How long threads were held up since the last look, and whether any has ended."""
        before, self._threads = self._threads, {}
        root = next(iter(processes))
        total = self._guessed_s = 0.0
        for pid, process in processes.items():
            for tid, thread in process.threads.items():
                seen = before.pop((pid, tid), None)
                if seen is None:
                    seen = _Seen(span if pid == root and not self._processes else min(process.age_s, span))
                else:
                    seen.age_s += span
                unknown = seen.age_s - thread.ran_s - thread.waited_s - seen.slept_s
                wait, seen.guess_s = _present_wait_s(thread, seen, max(unknown, 0.0), span)
                self._guessed_s += seen.guess_s
                held = thread.waited_s + wait
                seen.slept_s += unknown - wait
                total += held - seen.held_s
                seen.held_s, seen.turns, seen.sleeps, seen.is_ready = held, thread.turns, thread.sleeps, thread.is_ready
                self._threads[pid, tid] = seen
        self._held_s += total
        return total, bool(before)

    def _take_cpu(self, processes: Look, ran_s: float | None) -> tuple[float, float]:
        """CPU seconds of all since the last look, and how much of that nobody seen accounts for."""
        self._ended_s += sum(was.ran_s for pid, was in self._processes.items() if pid not in processes)
        seen_s = self._ended_s + sum(process.ran_s for process in processes.values())
        unseen = max(0.0, (ran_s or 0.0) - seen_s - self._unseen_s)
        self._unseen_s += unseen
        ran, self._ran_s = seen_s + self._unseen_s - self._ran_s, seen_s + self._unseen_s
        return ran, unseen

    def _take_paths(self, span: float, processes: Look, unseen: float) -> float:
        """The CPU time of the process that has got furthest; what ran unseen, somebody is taken to have waited for."""
        root = next(iter(processes))
        before, self._paths = self._paths, {}
        for pid in before.keys() - processes.keys():  # whoever waited for it goes on from there
            heir = self._processes[pid].parent
            heir = heir if heir in before and heir in processes else root
            before[heir] = max(before[heir], before.pop(pid))
        for pid, process in sorted(processes.items(), key=lambda item: (item[0] != root, -item[1].age_s)):
            if pid in before:
                start, ran = before[pid], process.ran_s - self._processes[pid].ran_s
            else:
                start, ran = self._paths.get(process.parent, self._paths.get(root, 0.0)), process.ran_s
            self._paths[pid] = start + min(ran, span)
        self._paths = {pid: path + unseen for pid, path in self._paths.items()}
        at_fork, ran_at_fork = self._fork
        furthest = max(*self._paths.values(), at_fork + (self._ran_s - ran_at_fork) / self._cores, self._furthest_s)
        if len(processes) == 1:
            self._paths[root] = furthest
            self._fork = furthest, self._ran_s
        return furthest


def _present_wait_s(thread: Thread, seen: _Seen, unknown: float, span: float) -> tuple[float, float]:
    """How long a thread has been waiting, out of the time that is not accounted for, and how much of it is a guess: the
    kernel counts a wait when it is over. Since it was last seen ready, without a turn, it has waited; with a turn since
    the last look, at most since then, and if it has not slept since, all that time. What was sleep of a guess comes out
    at the next look."""
    if not thread.is_ready or thread.is_estimate:
        return 0.0, 0.0
    if not thread.turns or (seen.is_ready and seen.turns == thread.turns):
        return unknown, seen.guess_s
    wait = min(unknown, span)
    return wait, min(wait, seen.guess_s) if seen.is_ready and seen.sleeps == thread.sleeps else wait


class _Blur:
    """The time in which processes ended, or ran unseen: what they waited then is not known, only that nobody ran."""

    def __init__(self) -> None:
        self._span_s = self._rest_s = self._most_held_s = self._slept_s = 0.0
        self._looks = self._looks_asleep = 0

    def slept_s(self, span: float, rest: float, most_held: float, is_ready: bool) -> float:
        """How much more of it the call has slept: in all, the part of the looks that found it asleep. `rest` is when it
        may have slept, and `most_held` how much of that it may have waited. Less than 0 corrects an earlier answer."""
        self._span_s += span
        self._rest_s += rest
        self._most_held_s += most_held
        self._looks += 1
        self._looks_asleep += not is_ready
        likely = min(self._rest_s, self._span_s * self._looks_asleep / self._looks)
        slept = max(likely, self._rest_s - self._most_held_s)
        more, self._slept_s = slept - self._slept_s, slept
        return more
