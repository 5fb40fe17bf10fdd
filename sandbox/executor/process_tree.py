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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from sandbox.executor.virtual_clock import Look, Process, Thread
from sandbox.jail import IdleCgroup, can_restore_priority

log = logging.getLogger(__name__)

CROWD = 128
"""More threads are a crowd: nobody looks at them any more, as each costs about 30 us, and of those to be moved no more
are at a time."""
UNKNOWN = 0
"""The number of a process that cannot be had."""
_NO_POLICY = -1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATE, _PARENT, _FLAGS, _TIME, _CHILDREN_TIME = 0, 1, 6, slice(11, 13), slice(13, 15)
_THREADS, _STARTED, _POLICY = 17, 19, 38
"""Places in /proc/PID/stat (proc_pid_stat(5)), counted from what follows the name."""
_EXITING = 0x4
"""Of the flags (PF_EXITING): it runs no code of its own any more. To end it waits for a core and for locks that others
hold, on a swamped machine for seconds, as when all that leave a mount namespace queue for the same one."""
_SLEEPS = b"\nvoluntary_ctxt_switches:"
_RESIDENT = b"RssAnon:", b"RssShmem:", b"VmSwap:"
_PROPORTIONAL, _OF_FILES = (b"Pss:", b"SwapPss:"), (b"Pss_File:",)
"""Lines of /proc/PID/status and /proc/PID/smaps_rollup, in KiB."""
_NORMAL = os.sched_param(0)
_GONE = OSError, IndexError, ValueError
"""What reading raises of what has just ended."""


def host_pid(pidfd: int, zygote: int = 0, inner: int = 0) -> int | None:
    """The process a pidfd refers to, as this /proc numbers it; None if it is gone. Where the kernel does not give a
    pidfd's number, it is that child of `zygote` which has the number `inner` in the zygote's PID namespace; `UNKNOWN`
    if there is none."""
    for line in _read(f"/proc/self/fdinfo/{pidfd}").splitlines():
        if line.startswith(b"Pid:"):
            pid = int(line.split()[1])
            return pid if pid > 0 else None
    with suppress(FileNotFoundError, ProcessLookupError):
        depth = len(_inner_pids(zygote))
        for pid in map(int, _read(f"/proc/{zygote}/task/{zygote}/children").split()):
            with suppress(FileNotFoundError, ProcessLookupError):
                if _inner_pids(pid)[depth - 1 : depth] == [inner]:
                    return pid
    return UNKNOWN


def _inner_pids(pid: int) -> list[int]:
    """The numbers of a process in each PID namespace that it is in, from that of this /proc inwards."""
    status = _read(f"/proc/{pid}/status")
    return [*map(int, status.partition(b"\nNSpid:")[2].partition(b"\n")[0].split())] or [pid]


def counts_waits() -> bool:
    """Whether the kernel counts how long threads wait for a core. Without CONFIG_SCHED_INFO there is no such file;
    where it is off, or a sandbox only imitates the file, it holds zeros."""
    try:
        return any(map(int, _read("/proc/self/schedstat").split()))
    except _GONE:
        return False


class Members(Protocol):
    """Who is in a call's control group, by the numbers of this /proc."""

    def other_pids(self, first: int) -> list[int]:
        """The processes besides `first`; 0 for those that are not to be seen here."""
        ...

    def thread_ids(self) -> list[int]: ...


class CallTree:
    """The processes of the call whose first one is `root`, or `UNKNOWN`, and whose group has the `members`."""

    def __init__(self, root: int, members: Members | None = None) -> None:
        self.root = root
        self._members = members
        self._waits = None if counts_waits() else _Waits()
        self._is_crowd = root == UNKNOWN
        """And stays one. A call whose first process is not known is treated as one: only its wall time is known."""
        self._pids: list[int] = []  # of the last look
        self._policies: dict[int, int] = {}  # by thread
        self._is_inside: bool | None = None  # they are to be in the group of those that give way; None: none ever was
        self._moved: set[int] = set()  # threads that are where they are to be
        # By thread: its turns, and how often it had slept by then; in the last look, and in the one before.
        self._sleeps: dict[int, tuple[int, int]] = {}
        self._sleeps_before: dict[int, tuple[int, int]] = {}
        self.ran_s = math.inf if self._is_crowd else 0.0
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
        if self._waits is not None:
            self._waits.begin()
        self.ran_s = 0.0
        self._pids = self._numbers()
        for pid in self._pids:
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

    def move(self, group: IdleCgroup, *, inside: bool) -> None:
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
            return [self.root, *filter(None, self._members.other_pids(self.root))]
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

    def resident(self) -> dict[int, int]:
        """Bytes that each process of the last look has in memory, those of files aside, if there are several: one alone
        is bounded by its own limit. What they share counts for each, so together they have no more than the sum."""
        found = {}
        for pid in self._pids if len(self._pids) > 1 else ():
            with suppress(*_GONE):
                found[pid] = _kilobytes(f"/proc/{pid}/status", _RESIDENT) << 10
        return found

    def _skim(self) -> None:
        before, tids = self._policies, []
        with suppress(OSError):
            if self._members is None:
                self._pids = [*self._descendants()]
                tids = [tid for pid in self._pids for tid in _threads(pid)]
            else:
                tids = self._members.thread_ids()
        self._policies = {tid: before.get(tid, _NO_POLICY) for tid in tids if tid}

    def _read(self, pid: int) -> Process | None:
        fields = _stat(f"/proc/{pid}/stat")
        if fields[_STATE] in (b"Z", b"X") and int(fields[_THREADS]) <= 1:  # else its first thread alone has ended
            return None
        ran_s = _ran_s(pid, fields)
        threads = {}
        if fields[_THREADS] == b"1":
            threads[pid] = self._thread(pid, f"/proc/{pid}", fields, ran_s)
        else:
            for tid in _threads(pid)[: CROWD + 1]:
                path = f"/proc/{pid}/task/{tid}"
                with suppress(*_GONE):  # or whoever starts and ends threads without pause were never seen
                    threads[tid] = self._thread(tid, path, _stat(f"{path}/stat"))
        self.ran_s += ran_s + _seconds(fields[_CHILDREN_TIME])
        return Process(int(fields[_PARENT]), _age_s(fields), ran_s, threads)

    def _thread(self, tid: int, path: str, fields: list[bytes], ran_s: float | None = None) -> Thread:
        self._policies[tid] = int(fields[_POLICY])
        is_ending = fields[_STATE] in (b"S", b"D") and int(fields[_FLAGS]) & _EXITING != 0
        is_ready = fields[_STATE] == b"R" or is_ending
        if self._waits is not None:
            return self._waits.thread(tid, fields, ran_s, _slept(path), is_ready)
        ran, waited, turns = map(int, _read(f"{path}/schedstat").split())
        return Thread(ran / 1e9, waited / 1e9, turns, self._slept(tid, path, turns) if is_ready else 0, is_ready)

    def _slept(self, tid: int, path: str, turns: int) -> int:
        """How often, by its last turn: to read that takes as long as all else."""
        known = self._sleeps_before.get(tid)
        if known is None or known[0] != turns:
            known = turns, _slept(path)
        self._sleeps[tid] = known
        return known[1]


def hold_more(resident: Mapping[int, int], limit: int, inherited: int) -> bool:
    """Whether processes, with what each has `resident`, hold more than `limit` bytes together, where what several share
    counts once. The kernel takes milliseconds for each 100 MiB to say, so the largest are asked about first, and no
    more than decide it.

    Where the server may not ask (at level `landlock` as root without CAP_SYS_PTRACE), what is shared counts for each,
    but for the `inherited` bytes of a zygote's.
    """
    held, rest = 0, sum(resident.values())
    for pid, most in sorted(resident.items(), key=lambda item: -item[1]):
        if held > limit or held + rest <= limit:
            break
        rest -= most
        path = f"/proc/{pid}/smaps_rollup"
        try:
            held += max(0, _kilobytes(path, _PROPORTIONAL) - _kilobytes(path, _OF_FILES)) << 10
        except PermissionError:
            held += max(0, most - inherited)
        except _GONE:
            continue
    return held > limit


def _kilobytes(path: str, names: tuple[bytes, ...]) -> int:
    return sum(int(line.split()[1]) for line in _read(path).splitlines() if line.startswith(names))


@dataclass(slots=True)
class _Estimate:
    """What is known of a thread where the kernel does not count its waits."""

    age_s: float = 0.0
    ran_s: float = 0.0
    sleeps: int = 0
    was_ready: bool = True
    waited_s: float = 0.0
    mixed_s: float = 0.0
    """Age and CPU time that it gained between looks between which it may both have slept and waited."""
    mixed_ran_s: float = 0.0
    mixed_waited_s: float = 0.0
    looks: int = 0
    looks_ready: int = 0


class _Waits:
    """How long threads have waited for a core, estimated where the kernel does not count it (`counts_waits`).

    Of the time between two looks that is not CPU time, a thread that was ready in both and has not slept in between has
    waited all, and one that slept through has waited none. Otherwise it was ready for that part of the time in which
    looks, which come at random moments, found it ready.
    """

    def __init__(self) -> None:
        self._threads: dict[int, _Estimate] = {}
        self._before: dict[int, _Estimate] = {}

    def begin(self) -> None:
        """Before each look: threads that were not in the last one are forgotten."""
        self._before, self._threads = self._threads, {}

    def thread(self, tid: int, fields: list[bytes], ran_s: float | None, sleeps: int, is_ready: bool) -> Thread:
        """`ran_s` is its CPU time, if that is known better than in ticks."""
        ran_s = _seconds(fields[_TIME]) if ran_s is None else ran_s
        one = self._threads[tid] = self._before.get(tid) or _Estimate()
        age_s = _age_s(fields)
        span_s, span_ran_s = age_s - one.age_s, ran_s - one.ran_s
        one.looks += 1
        one.looks_ready += is_ready
        if is_ready is not one.was_ready or sleeps != one.sleeps:
            one.mixed_s += span_s
            one.mixed_ran_s += span_ran_s
            likely_s = one.mixed_s * one.looks_ready / one.looks - one.mixed_ran_s
            waited_s = min(max(likely_s - one.mixed_waited_s, 0.0), max(span_s - span_ran_s, 0.0))
            one.mixed_waited_s += waited_s
            one.waited_s += waited_s
        elif is_ready:
            one.waited_s += max(span_s - span_ran_s, 0.0)
        one.age_s, one.ran_s, one.sleeps, one.was_ready = age_s, ran_s, sleeps, is_ready
        return Thread(ran_s, one.waited_s, 0, sleeps, is_ready, is_estimate=True)


class Eagerness:
    """Whether threads of calls can be made less eager for a core, and eager again. Either both or none."""

    def __init__(self) -> None:
        self.can_change = can_restore_priority()
        if not self.can_change:
            log.info("no right to set priorities (CAP_SYS_NICE): long calls take cores as short ones do")

    def set(self, tree: CallTree, group: IdleCgroup | None = None, *, is_idle: bool) -> None:
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


def _slept(path: str) -> int:
    """How often a thread has let go of a core by itself; 0 where the kernel does not count it."""
    return int((_read(f"{path}/status").partition(_SLEEPS)[2].split(None, 1) or (0,))[0])


def _ran_s(pid: int, fields: list[bytes]) -> float:
    """CPU time of a process, of its ended threads too, to the nanosecond where the kernel has a clock for it
    (clock_getcpuclockid(3)), else in ticks."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return _seconds(fields[_TIME])


def _age_s(fields: list[bytes]) -> float:
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) / _TICKS_PER_S)


def _seconds(ticks: list[bytes]) -> float:
    return sum(map(int, ticks)) / _TICKS_PER_S


def _stat(path: str) -> list[bytes]:
    return _read(path).rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
