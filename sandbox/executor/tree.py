"""The processes of one call, read from /proc: what the kernel counts of each thread, and how eager it is for a core.

Outside the jail, where there is a /proc. Which processes there are, a call's control group says, if it has one; else
those are meant that descend from its first, which one that has left its parents does not.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Protocol

from sandbox.executor.clock import Look, Process, Thread
from sandbox.jail import Idle, may_set_priorities

log = logging.getLogger(__name__)

CROWD = 128
"""More threads are a crowd: nobody looks at them any more, as each costs about 30 us, and of those to be moved no more
are at a time."""
_UNKNOWN = -1
"""A policy."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATE, _PARENT, _FLAGS, _CHILDREN_TIME, _THREADS, _STARTED, _POLICY = 0, 1, 6, slice(13, 15), 17, 19, 38
"""Places in /proc/PID/stat (proc_pid_stat(5)), counted from what follows the name."""
_EXITING = 0x4
"""Of the flags (PF_EXITING): it runs no code of its own any more. To end it waits for a core and for locks that others
hold, on a swamped machine for seconds, as when all that leave a mount namespace queue for the same one."""
_SLEEPS = b"\nvoluntary_ctxt_switches:"
_NORMAL = os.sched_param(0)
_GONE = OSError, IndexError, ValueError
"""What reading raises of what has just ended."""


def host_pid(pidfd: int) -> int | None:
    """The process a pidfd stands for, as this /proc numbers it; None if it is gone."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        for line in info:
            if line.startswith("Pid:"):
                pid = int(line.split()[1])
                return pid if pid > 0 else None
    return None


class Members(Protocol):
    """Who is in a call's control group, by the numbers of this /proc."""

    def others(self, first: int) -> list[int]:
        """The processes besides `first`; 0 for those that are not to be seen here."""
        ...

    def threads(self) -> list[int]: ...


class CallTree:
    """The processes of the call whose first one is `root`, and whose group has the `members`."""

    def __init__(self, root: int, members: Members | None = None) -> None:
        self.root = root
        self._members = members
        self._is_crowd = False
        """And stays one."""
        self._policies: dict[int, int] = {}  # by thread
        self._is_inside: bool | None = None  # they are to be in the group of those that give way; None: none ever was
        self._moved: set[int] = set()  # threads that are where they are to be
        # By thread: its turns, and how often it had slept by then; in the last look, and in the one before.
        self._sleeps: dict[int, tuple[int, int]] = {}
        self._sleeps_before: dict[int, tuple[int, int]] = {}
        self.ran_s = 0.0
        """CPU seconds of all in the last look, and of those they have waited for: all that is known without a group."""

    def look(self) -> Look | None:
        """All of them, the first one first. Empty when that has ended; None if they are a crowd, or were one: of
        those only the numbers are read, so that they, too, can be made to give way."""
        if self._is_crowd:
            self._skim()
            return None
        look: dict[int, Process] = {}
        self._policies = {}
        self._sleeps_before, self._sleeps = self._sleeps, {}
        self.ran_s = 0.0
        for pid in self._numbers():
            with suppress(*_GONE):
                process = self._read(pid)
                if process is not None:
                    look[pid] = process
            if len(self._policies) > CROWD:
                self._is_crowd, self.ran_s = True, math.inf
                return None
        return look if self.root in look else {}

    def set_policy(self, policy: int) -> None:
        """Have all threads of the last look scheduled so. What they start later inherits it; what they have started
        since comes with the next look. Raises `PermissionError`."""
        for tid, now in self._policies.items():
            if now != policy:
                with suppress(ProcessLookupError):
                    os.sched_setscheduler(tid, policy, _NORMAL)
                    self._policies[tid] = policy

    def move(self, group: Idle, *, inside: bool) -> None:
        """The same by control group, and of a crowd some at a time. Raises `OSError`."""
        if self._is_inside is None and not inside:
            return
        if inside is not self._is_inside:  # those that have been started since the last look are not there, either
            self._is_inside, self._moved = inside, set()
        for tid in list(islice(self._policies.keys() - self._moved, CROWD)):
            try:
                group.move(tid, inside=inside)
            except OSError as why:  # it has ended; or, before Linux 6.1, is so new that it has had no core yet
                if why.errno not in (errno.ESRCH, errno.EINVAL):
                    raise
            else:
                self._moved.add(tid)
        self._moved &= self._policies.keys()

    def _numbers(self) -> list[int]:
        if self._members is None:
            return list(self._descendants())
        try:
            return [self.root, *filter(None, self._members.others(self.root))]
        except OSError:
            return [self.root]

    def _descendants(self) -> Iterator[int]:
        """As far as `CROWD` threads have them."""
        found, threads = [self.root], 0
        for pid in found:
            yield pid
            for tid in _threads(pid):
                threads += 1
                if threads > CROWD:
                    break
                with suppress(OSError):
                    found += map(int, _read(f"/proc/{pid}/task/{tid}/children").split())

    def _skim(self) -> None:
        before, tids = self._policies, []
        with suppress(OSError):
            if self._members is None:
                tids = [tid for pid in self._descendants() for tid in _threads(pid)]
            else:
                tids = self._members.threads()
        self._policies = {tid: before.get(tid, _UNKNOWN) for tid in tids if tid}

    def _read(self, pid: int) -> Process | None:
        fields = _stat(f"/proc/{pid}/stat")
        if fields[_STATE] in (b"Z", b"X") and int(fields[_THREADS]) <= 1:  # else its first thread alone has ended
            return None
        threads = {}
        if fields[_THREADS] == b"1":
            threads[pid] = self._thread(pid, f"/proc/{pid}", fields)
        else:
            for tid in _threads(pid)[: CROWD + 1]:
                path = f"/proc/{pid}/task/{tid}"
                with suppress(*_GONE):  # or whoever starts and ends threads without pause were never seen
                    threads[tid] = self._thread(tid, path, _stat(f"{path}/stat"))
        ran_s = time.clock_gettime(~pid << 3 | 2)  # CPU time of a process (clock_getcpuclockid(3)), ended threads too
        self.ran_s += ran_s + sum(map(int, fields[_CHILDREN_TIME])) / _TICKS_PER_S
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) / _TICKS_PER_S
        return Process(int(fields[_PARENT]), max(0.0, age_s), ran_s, threads)

    def _thread(self, tid: int, path: str, fields: list[bytes]) -> Thread:
        self._policies[tid] = int(fields[_POLICY])
        ran, waited, turns = map(int, _read(f"{path}/schedstat").split())
        is_ending = fields[_STATE] in (b"S", b"D") and int(fields[_FLAGS]) & _EXITING != 0
        is_ready = fields[_STATE] == b"R" or is_ending
        return Thread(ran / 1e9, waited / 1e9, turns, self._slept(tid, path, turns) if is_ready else 0, is_ready)

    def _slept(self, tid: int, path: str, turns: int) -> int:
        """How often, by its last turn: to read that takes as long as all else."""
        known = self._sleeps_before.get(tid)
        if known is None or known[0] != turns:
            known = turns, int(_read(f"{path}/status").partition(_SLEEPS)[2].split(None, 1)[0])
        self._sleeps[tid] = known
        return known[1]


class Eagerness:
    """Whether threads of calls can be made less eager for a core, and eager again. Either both or none."""

    def __init__(self) -> None:
        self.can_change = may_set_priorities()
        if not self.can_change:
            log.info("no right to set priorities (CAP_SYS_NICE): long calls take cores as short ones do")

    def set(self, tree: CallTree, group: Idle | None = None, *, is_idle: bool) -> None:
        """All that the last look at it found. Idempotent."""
        if not self.can_change:
            return
        try:
            tree.set_policy(os.SCHED_IDLE if is_idle else os.SCHED_OTHER)
            if group is not None:
                tree.move(group, inside=is_idle)
        except OSError as why:
            self.can_change = False
            log.warning("long calls take cores as short ones do: %s", why)


def _threads(pid: int) -> list[int]:
    try:
        return [*map(int, os.listdir(f"/proc/{pid}/task"))]
    except OSError:
        return []


def _stat(path: str) -> list[bytes]:
    return _read(path).rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
