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
from collections.abc import Iterator
from typing import Protocol

import trio

from sandbox.executor import clock
from sandbox.executor.slot import Slots
from sandbox.executor.tree import CallTree, Eagerness, host_pid
from sandbox.executor.work import Work

log = logging.getLogger(__name__)

LOOK_S, LOOK_AT_MANY_S = (0.05, 0.25), (0.02, 0.1)
"""How often, if the call has one thread, and if it has more: at moments that the code cannot foresee, to have its
children gone."""
CROWDED = 48
"""Calls on each core, from which on looks are rarer in proportion: so is what any of them can do between two, and all
that looking costs stays what it is. Were it sooner, children could come and go between two looks, and what those did is
a guess."""
LEAST_PAUSE_S = 0.002
AT_ONCE = 16
"""Looks, after which it is others' turn: a millisecond or two."""
GUESS_S = 0.01
"""Between two looks at least, where only a guess says that the call may be out of time."""
BRISKER = 4
"""A call among so many is taken to get on so many times faster, until the next look, than it did until this one."""
SLOWEST = 4
"""A long call has this part of its fair share of the cores whatever others want. Against the hard cap: `clock.pace`."""
SLACK_S = 0.05
"""Of its own time, by which it may fall behind, and in proportion more in a crowd: to move a thread between groups
takes a lock for which all that fork or end on the machine wait."""


class Host(Protocol):
    """What a lasting call needs of the executor."""

    all_cores: int
    demote_after_s: float
    eagerness: Eagerness

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
    """A call that lasts, and the pidfd of its first process, which belongs to this."""

    def __init__(self, looks: Iterator[float], pidfd: int) -> None:
        self.is_over = False
        self._looks, self._pidfd = looks, pidfd

    def look(self) -> float | None:
        """Seconds until the next look; None if there is to be none."""
        pause = None
        try:
            pause = next(self._looks, None)
        except OSError as why:  # gone by itself just now; or it is no pidfd, and then `_end_wedged` has the last word
            log.debug("a lasting call was not watched to its end: %s", why)
        if pause is None:
            self.end()
        return pause

    def end(self) -> None:
        """Idempotent."""
        if not self.is_over:
            self.is_over = True
            os.close(self._pidfd)


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
        watch = Watch(looks(work, slots, pidfd, now - wall_s, self._host), pidfd)
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
                for _ in range(AT_ONCE):
                    if not self._due or self._due[0][0] > trio.current_time():
                        break
                    watch = heapq.heappop(self._due)[-1]
                    if not watch.is_over and (pause := watch.look()) is not None:
                        self._add(trio.current_time() + pause, watch)
        finally:
            for *_, watch in self._due:
                watch.end()

    def _add(self, at: float, watch: Watch) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), watch))


def looks(work: Work, slots: Slots, pidfd: int, started: float, host: Host) -> Iterator[float]:
    """At a call that began at `started`, until it is out of time: the seconds from each to the next. Raises `OSError`
    if the pidfd is none, or its process is gone."""
    pid = host_pid(pidfd)
    if pid is None:
        return
    group = slots.group(work.slot)
    tree = CallTree(pid, group.others if group else None)
    own = clock.OwnClock(host.all_cores)
    cap_left_s, limit = clock.hard_cap_s(work.timeout_s), work.timeout_s
    before = before_own = 0.0
    long_since = 0.0, 0.0
    while True:
        wall_s, crowd = trio.current_time() - started, host.calls_per_core
        processes = tree.look()
        if processes is None or processes:
            ran_s = tree.ran_s if group is None or (all_s := group.ran_s()) is None else all_s
            own.look(wall_s, processes, ran_s)
            work.most_cpu_s = ran_s + (limit - own.own_s) * (1 if own.was_alone else host.all_cores)
        pace, span = clock.pace(crowd), wall_s - before
        cap_left_s -= span * pace
        slowness = span / max(own.own_s - before_own, 1e-9) if own.is_sure else 1.0
        before, before_own = wall_s, own.own_s
        left_s = limit - own.own_s
        # A fork bomb waits for itself: were that our fault, it would be free of charge.
        work.out_of_time = left_s <= 0 or (cap_left_s <= 0 and not own.was_alone)
        work.starved = cap_left_s <= 0 and not work.out_of_time
        if work.out_of_time or work.starved:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if work.is_long:  # to end takes a core, too, and locks that others wait for; but not to move, first
                host.eagerness.set(tree, slots.idle, is_idle=False)
            return
        host.allow(work, cap_left_s / pace)
        if own.own_s >= host.demote_after_s:
            if not work.is_long:
                work.is_long = True
                long_since = wall_s, own.own_s
                slots.outlive(work.slot, pid)
            work.has_long_place = work.has_long_place or host.lengthen(slots, work)
        else:
            left_s = min(left_s, host.demote_after_s - own.own_s)
        if work.is_long:
            behind = behind_s(own.own_s - long_since[1], wall_s - long_since[0], crowd)
            slack_s = 0.0 if work.has_share else SLACK_S * stretched(crowd)
            had_share, work.has_share = work.has_share, behind > slack_s
            if work.has_share and not had_share:
                host.count("promoted")
            host.eagerness.set(tree, slots.idle, is_idle=not work.has_share)
        yield pause_s(left_s, own.guess_s, slowness, crowd, has_share=work.has_share, was_alone=own.was_alone)
