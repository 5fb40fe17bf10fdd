"""A call that lasts: what its own clock says, when it makes room for short ones, and when it ends.

Invariants:
- A call is looked at only once it has run for a while; most never are.
- Long, a call takes the cores that nobody else wants, and no short place as soon as there is a long one. But it has a
  quarter of its fair share at the least: where it falls behind that, it takes cores like any other until it has caught
  up. So no storm keeps it from its verdict, to which that brings it before the hard cap.
- What a call is told to be, its processes are at the latest after the next look, those that it starts included.
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
from typing import Protocol

import trio

from sandbox.executor import virtual_clock
from sandbox.executor.call_state import Work
from sandbox.executor.process_tree import CallTree, Eagerness, hold_more, host_pid
from sandbox.executor.slots import Slots

log = logging.getLogger(__name__)

LOOK_S, LOOK_AT_MANY_S = (0.05, 0.25), (0.02, 0.1)
"""How often, if the call has one thread, and if it has more: at moments that the code cannot foresee, to have its
children gone."""
CROWDED = 48
"""Calls on each core, from which on looks are rarer in proportion: so is what any of them can do between two, and all
that looking costs stays what it is. Were it sooner, children could come and go between two looks, and what those did is
a guess."""
LEAST_PAUSE_S = 0.002
TURN_S = 0.002
"""Of looking, after which it is others' turn."""
CHEAP_S, COSTLY_SHARE = 0.0005, 0.2
"""What a look may take; those that take longer have no more than this share of a core for what is beyond that, all
together: who has many threads has them looked at more rarely, in proportion."""
RETRY_S = 0.1
"""After a look that failed for want of something that the machine will have again."""
GUESS_S = 0.01
"""Between two looks at least, where only a guess says that the call may be out of time."""
BRISKER = 4
"""A call among so many is taken to get on so many times faster, until the next look, than it did until this one."""
SLOWEST = 4
"""A long call has this part of its fair share of the cores whatever others want. Against the hard cap: `clock.pace`."""
SLACK_S = 0.05
"""Of its own time, by which it may fall behind, and in proportion more in a crowd: to move a thread between groups
takes a lock for which all that fork or end on the machine wait."""
_weigher = ThreadPoolExecutor(1, "memory")
"""Asks the kernel what processes hold, one call at a time: on one core, and beside the event loop."""


class Host(Protocol):
    """What a lasting call needs of the executor."""

    all_cores: int
    eagerness: Eagerness

    @property
    def demote_after_s(self) -> float:
        """Virtual time after which a call becomes a long call."""
        ...

    @property
    def calls_per_core(self) -> float: ...

    def lengthen(self, slots: Slots, work: Work) -> bool:
        """Give it a long place, if there is one."""
        ...

    def allow(self, work: Work, wall_s: float) -> None:
        """So much longer it may take before its zygote counts as wedged."""
        ...

    def count(self, what: str) -> None: ...


def behind_s(own_s: float, wall_s: float, calls_per_core: float) -> float:
    """By how much of its own time a call has fallen behind, of which it had `own_s` in the `wall_s` since it became a
    long one. Over its slack, it needs its share of the cores until it has caught up."""
    return wall_s / (SLOWEST * max(1.0, calls_per_core)) - own_s


def pause_s(
    left_s: float, guess_s: float, slowness: float, calls_per_core: float, *, has_share: bool, was_alone: bool
) -> float:
    """Until the next look at a call that has `left_s` of its own time, or up to `guess_s` less. A second of it took
    `slowness` lately, which is 1 if it slept."""
    stretch = stretched(calls_per_core)
    pause = stretch * random.uniform(*(LOOK_S if was_alone else LOOK_AT_MANY_S))
    left_s = min(left_s, max(left_s - guess_s, stretch * GUESS_S))
    if has_share:  # and is to have no more than that
        pause = min(pause, stretch * SLACK_S)
    elif was_alone:
        left_s = max(LEAST_PAUSE_S, left_s) * min(stretch, max(1.0, slowness / BRISKER))
    return max(LEAST_PAUSE_S, min(pause, left_s))


def stretched(calls_per_core: float) -> float:
    """How much rarer all is that is done for one of so many."""
    return max(1.0, calls_per_core / CROWDED)


class Watch:
    """A call that lasts, since `started`, and the pidfd of its first process, which belongs to this."""

    def __init__(self, work: Work, slots: Slots, pidfd: int, started: float, host: Host) -> None:
        self.is_over = False
        self._work, self._slots, self._pidfd, self._started, self._host = work, slots, pidfd, started, host
        self._tree: CallTree | None = None
        self._weighing: Future[bool] | None = None
        self._own = virtual_clock.OwnClock(host.all_cores)
        self._cap_left_s = virtual_clock.hard_cap_s(work.timeout_s)
        self._before = self._long_since = 0.0, 0.0
        """Wall time and own time of the last look, and of when it became a long one."""

    def look(self) -> float | None:
        """Seconds until the next look; None if there is to be none: it is out of time, or gone."""
        try:
            pause = self._look()
        except OSError as why:
            pause = RETRY_S if self._is_there() else None
            log.debug("a lasting call could not be looked at: %s", why)
        if pause is None:
            self.end()
        return pause

    def end(self) -> None:
        """Idempotent."""
        if not self.is_over:
            self.is_over = True
            os.close(self._pidfd)

    def _is_there(self) -> bool:
        """Or it is no pidfd, and then `_end_wedged` has the last word."""
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except OSError:
            return False
        return True

    def _look(self) -> float | None:
        work, host, own = self._work, self._host, self._own
        tree = self._tree = self._tree or self._find()
        if tree is None:
            return None
        wall_s, crowd = trio.current_time() - self._started, host.calls_per_core
        self._count(tree, wall_s)
        pace, span, gained_s = virtual_clock.pace(crowd), wall_s - self._before[0], own.own_s - self._before[1]
        self._before = wall_s, own.own_s
        self._cap_left_s -= span * pace
        left_s = work.timeout_s - own.own_s
        # A fork bomb waits for itself: were that our fault, it would be free of charge.
        work.out_of_time = left_s <= 0 or (self._cap_left_s <= 0 and not own.was_alone)
        work.starved = self._cap_left_s <= 0 and not work.out_of_time
        work.out_of_memory = self._slots.group(work.slot) is None and self._holds_too_much(tree)
        if work.out_of_time or work.starved or work.out_of_memory:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            if work.is_long:  # to end takes a core, too, and locks that others wait for; but not to move, first
                host.eagerness.set(tree, self._slots.idle, is_idle=False)
            return None
        host.allow(work, self._cap_left_s / pace)
        demote_after_s = host.demote_after_s
        if not work.is_long and own.own_s >= demote_after_s:
            work.is_long = True
            self._long_since = self._before
            self._slots.outlive(work.slot, tree.root)
        if work.is_long:
            work.has_long_place = work.has_long_place or host.lengthen(self._slots, work)
            self._give_way(tree, wall_s, crowd)
        else:
            left_s = min(left_s, demote_after_s - own.own_s)
        slowness = span / max(gained_s, 1e-9) if own.is_sure else 1.0
        return pause_s(left_s, own.guess_s, slowness, crowd, has_share=work.has_share, was_alone=own.was_alone)

    def _find(self) -> CallTree | None:
        pid = host_pid(self._pidfd, self._work.zygote_pid, self._work.inner_pid)
        return None if pid is None else CallTree(pid, self._slots.group(self._work.slot))

    def _count(self, tree: CallTree, wall_s: float) -> None:
        """What the call has had by now."""
        work, own, group = self._work, self._own, self._slots.group(self._work.slot)
        processes = tree.look()
        signal.pidfd_send_signal(self._pidfd, 0)  # it is there yet, so its number was no other's
        if processes is None or processes:
            ran_s = tree.ran_s if group is None or (all_s := group.cpu_s()) is None else all_s
            own.look(wall_s, processes, ran_s)
            cores = 1 if own.was_alone else self._host.all_cores
            work.most_cpu_s = ran_s + (work.timeout_s - own.own_s) * cores

    def _holds_too_much(self, tree: CallTree) -> bool:
        """Whether its processes together hold more memory than the call may, where no control group counts it. The
        kernel takes milliseconds to say, so its answer is read by a later look."""
        work, asked = self._work, self._weighing
        if asked is None:
            resident = tree.resident()
            if sum(resident.values()) > work.memory_bytes:
                self._weighing = _weigher.submit(hold_more, resident, work.memory_bytes, work.inherited_bytes)
            return False
        if not asked.done():
            return False
        self._weighing = None
        return asked.result()

    def _give_way(self, tree: CallTree, wall_s: float, crowd: float) -> None:
        """To short calls; or have its share, where it has fallen behind that."""
        work, host = self._work, self._host
        behind = behind_s(self._own.own_s - self._long_since[1], wall_s - self._long_since[0], crowd)
        slack_s = 0.0 if work.has_share else SLACK_S * stretched(crowd)
        had_share, work.has_share = work.has_share, behind > slack_s
        if work.has_share and not had_share:
            host.count("promoted")
        host.eagerness.set(tree, self._slots.idle, is_idle=not work.has_share)


class Watches:
    """All calls that last, in one task: to have one for each woken takes as long as to look."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._due: list[tuple[float, int, Watch]] = []
        self._numbers = itertools.count()
        self._is_more = trio.Event()

    def begin(self, work: Work, slots: Slots, pidfd: int, wall_s: float) -> Watch:
        """From now on, `wall_s` after its start."""
        now = trio.current_time()
        watch = Watch(work, slots, pidfd, now - wall_s, self._host)
        self._add(now, watch)
        self._is_more.set()
        return watch

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                with trio.move_on_at(self._due[0][0] if self._due else math.inf):
                    await self._is_more.wait()
                self._is_more = trio.Event()
                self._take_turn()
        finally:
            for *_, watch in self._due:
                watch.end()

    def _take_turn(self) -> None:
        """Look at those that are due."""
        last = began = time.thread_time()
        while self._due and self._due[0][0] <= trio.current_time() and last - began < TURN_S:
            watch = heapq.heappop(self._due)[-1]
            if watch.is_over:
                continue
            pause = watch.look()
            before, last = last, time.thread_time()
            if pause is not None:
                costly_s = max(0.0, last - before - CHEAP_S) * (len(self._due) + 1)
                self._add(trio.current_time() + max(pause, costly_s / COSTLY_SHARE), watch)

    def _add(self, at: float, watch: Watch) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), watch))
