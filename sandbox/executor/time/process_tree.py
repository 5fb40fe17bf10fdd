"""Samples the processes of one call from /proc, outside the jail, and sets their CPU priority.

If the call has a cgroup, its processes are the members of the cgroup. Otherwise its processes are its first process and
the descendants of the first process. Without a cgroup, a process whose parent has exited is missed (as after `setsid`
and a double fork).
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Protocol

from sandbox.executor.time.virtual_clock import ProcessSample, ThreadSample, TreeSample
from sandbox.jail import IdleCgroup, can_restore_priority

log = logging.getLogger(__name__)

MAX_SAMPLED_THREADS = 128
"""A call with more threads than this is no longer sampled, because sampling takes about 30 us for each thread. This is
also the largest number of threads that are moved between cgroups at once."""
LONG_THREADS_WEIGHT = 0.25
"""Weight that the threads of all long calls together get on each core, where long calls are demoted by nice values. One
thread at normal priority has the weight 1. With a smaller weight, long calls would starve while short calls keep
arriving. With a larger weight, long calls would delay short calls."""
WEIGHT_PER_NICE = 1.25
"""For each step of a thread's nice value, its weight is divided by this number (sched(7)). Its share of a core is
proportional to its weight."""
MAX_NICE = 19
_UNKNOWN_POLICY = -1
_UNKNOWN_NICE = -21
"""Lower than every nice value (-20 to 19), so that `raise_nice` tries to set the value of the thread."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Positions in /proc/PID/stat (proc_pid_stat(5)), counted from the field after the name.
_STAT_STATE = 0
_STAT_PPID = 1
_STAT_SESSION = 3
_STAT_FLAGS = 6
_STAT_CHILDREN_CPU = slice(13, 15)
_STAT_NICE = 16
_STAT_THREADS = 17
_STAT_START = 19
_STAT_POLICY = 38
_PF_EXITING = 0x4
"""Flag of a thread that has begun to exit. On an overloaded machine the exit waits seconds for a core and for kernel
locks; this time is not charged to the call."""
_VOLUNTARY_KEY = b"\nvoluntary_ctxt_switches:"
_RESIDENT_KEYS = b"RssAnon:", b"RssShmem:", b"VmSwap:"
"""Lines of /proc/PID/status, in KiB."""
_PSS_KEYS = (b"Pss:", b"SwapPss:")
"""Lines of /proc/PID/smaps_rollup, in KiB. In them, a page that n processes share counts 1/n for each process."""
_FILE_KEYS = (b"Pss_File:",)
"""Line of /proc/PID/smaps_rollup: the part of `Pss:` that belongs to files."""
_SOCKET_BYTES = 212_992
"""Data that an AF_UNIX stream can hold: net.core.wmem_default of all usual machines."""
_MAX_DATAGRAMS = 11
"""Number of datagrams of `_SOCKET_BYTES` that an AF_UNIX socket can hold (net.unix.max_dgram_qlen of a new network
namespace)."""
_MAX_UNCOUNTED_TABLE_BYTES = 1024
"""Length of /proc/PID/net/unix up to which the data in AF_UNIX sockets is not counted. The table then has about 12
sockets or fewer."""
_MAX_TABLE_LINES = 1 << 17
"""Maximum number of lines that are read from a table of sockets. Each line is one socket, so the lines that are read
count as 26 GiB if all of them are AF_UNIX streams."""
_IP_SOCKET_BYTES = 4096
"""Upper bound of the memory of a TCP or UDP socket without its data."""
_TCP_TIME_WAIT = b"06"  # include/net/tcp_states.h
_SCHED_PARAM = os.sched_param(0)
_GONE_ERRORS = OSError, IndexError, ValueError
"""Errors from reading the files of a process that has just ended."""


def pid_of_pidfd(pidfd: int) -> int | None:
    """Return the pid in this /proc of the process that a pidfd refers to. Return None if the process has ended, or if
    the descriptor is no pidfd."""
    for line in _read(f"/proc/self/fdinfo/{pidfd}").splitlines():
        if line.startswith(b"Pid:"):
            pid = int(line.split()[1])
            return pid if pid > 0 else None
    return None


def counts_run_delay() -> bool:
    """Return whether the kernel counts how long threads wait for a core. If not, the file schedstat is missing (without
    CONFIG_SCHED_INFO) or contains zeros (if the statistics are off). Raises `OSError` if no descriptor is left."""
    try:
        return any(map(int, _read("/proc/self/schedstat").split()))
    except FileNotFoundError:
        return False


class CgroupMembers(Protocol):
    """The part of a call's cgroup that lists its members, by their ids in the /proc of this process. The id 0 stands
    for a member that this /proc does not show."""

    def other_pids(self, first: int) -> list[int]:
        """Return the processes besides `first`."""
        ...

    def thread_ids(self) -> list[int]: ...


class ProcessTree:
    """The processes of the call whose first process is `root`."""

    def __init__(self, root: int, members: CgroupMembers | None = None) -> None:
        self.root = root
        self._members = members
        self._is_not_sampled = not counts_run_delay()
        """Whether the call has ever had more than `MAX_SAMPLED_THREADS` threads, or the kernel does not count run
        delay. Then the virtual clock follows wall time until the end of the call."""
        self._pids: list[int] = []
        self._policy_by_thread: dict[int, int] = {}
        """Scheduling policy of each thread in the last sample."""
        self._nice_by_thread: dict[int, int] = {}
        """Nice value of each thread in the last sample."""
        self._pid_by_session: dict[int, int] = {}
        """A process of each session in the last sample."""
        self._nice_by_session: dict[int, int] = {}
        """The last nice value that `raise_nice` handled for each session."""
        self.runnable_threads = 0
        """Number of runnable threads in the last sample. If there are too many threads to sample, the number of all
        threads."""
        self.is_exiting = False
        """Whether the main thread of the first process was exiting in the last sample."""
        self._should_be_idle: bool | None = None
        """Whether the threads belong in the idle cgroup. None until they belong there for the first time."""
        self._moved: set[int] = set()
        """Threads that are already in the cgroup in which they belong."""
        self._switches_by_thread: dict[int, tuple[int, int]] = {}
        """For each runnable thread of the last sample: its number of timeslices, and its number of voluntary context
        switches. The second number is read again only when the first number has changed."""
        self._previous_switches_by_thread: dict[int, tuple[int, int]] = {}
        """`_switches_by_thread` as it was in the sample before the last sample."""
        self.cpu_s = math.inf if self._is_not_sampled else 0.0
        """CPU seconds of all processes in the last sample and of the children that they have waited for. Infinite if
        the processes are not sampled."""

    def sample(self) -> TreeSample | None:
        """Sample all processes, the first process first. Return an empty sample if the first process has ended. Return
        None if the call is not sampled; then only the thread ids are read, for `CpuPriority`."""
        if self._is_not_sampled:
            self._list_threads()
            return None
        sample: dict[int, ProcessSample] = {}
        self._policy_by_thread, self._nice_by_thread, self._pid_by_session = {}, {}, {}
        self.runnable_threads, self.is_exiting = 0, False
        self._previous_switches_by_thread, self._switches_by_thread = self._switches_by_thread, {}
        self.cpu_s = 0.0
        self._pids = self._list_pids()
        for pid in self._pids:
            with suppress(*_GONE_ERRORS):
                process = self._sample_process(pid)
                if process is not None:
                    sample[pid] = process
            if len(self._policy_by_thread) > MAX_SAMPLED_THREADS:
                self._is_not_sampled, self.cpu_s = True, math.inf
                return None
        return sample if self.root in sample else {}

    def set_policy(self, policy: int) -> None:
        """Set the scheduling policy of all threads of the last sample. Threads that they start later inherit the
        policy. Threads that were started since the sample get the policy after the next sample. Raises
        `PermissionError`."""
        for tid, current in self._policy_by_thread.items():
            if current != policy:
                with suppress(ProcessLookupError):
                    os.sched_setscheduler(tid, policy, _SCHED_PARAM)
                    self._policy_by_thread[tid] = policy

    def raise_nice(self, nice: int) -> None:
        """Raise the nice values of all threads of the last sample to at least `nice`. Threads that they start later
        inherit their nice value. Raises `PermissionError` if this process may not change the threads
        (setpriority(2))."""
        for tid, current in self._nice_by_thread.items():
            if current < nice:
                try:
                    os.setpriority(os.PRIO_PROCESS, tid, nice)
                except ProcessLookupError:
                    continue
                except OSError as error:
                    # EACCES: the thread has a higher nice value already. This happens if its value was unknown.
                    if error.errno != errno.EACCES:
                        raise
                self._nice_by_thread[tid] = nice
        self._raise_nice_of_sessions(nice)

    def _raise_nice_of_sessions(self, nice: int) -> None:
        """Raise the nice values of the call's own sessions: those to which its zygote does not belong.

        If sched_autogroup_enabled is set, the kernel first divides the cores between sessions, and each session has a
        nice value of its own for this. The nice values of threads then count only within their session.
        """
        for session, pid in self._pid_by_session.items():
            if self._nice_by_session.get(session, 0) >= nice:
                continue
            with suppress(*_GONE_ERRORS):
                zygote = int(_read_stat(f"/proc/{self.root}/stat")[_STAT_PPID])
                if session != int(_read_stat(f"/proc/{zygote}/stat")[_STAT_SESSION]) and not _set_autogroup(pid, nice):
                    continue  # the session is tried again after the next sample
            # Also after an error, and for the session of the zygote: it is not tried again with the same value.
            self._nice_by_session[session] = nice

    def move_to_idle_cgroup(self, idle_cgroup: IdleCgroup, *, inside: bool) -> None:
        """Move threads of the last sample: into the idle cgroup if `inside`, otherwise out of it. At most
        `MAX_SAMPLED_THREADS` threads are moved at once, and further threads after the next sample. Raises `OSError`."""
        if self._should_be_idle is None and not inside:
            return
        if inside is not self._should_be_idle:
            self._should_be_idle, self._moved = inside, set()
        for tid in list(islice(self._policy_by_thread.keys() - self._moved, MAX_SAMPLED_THREADS)):
            try:
                idle_cgroup.move(tid, inside=inside)
            except OSError as error:
                # ESRCH: the thread has ended. EINVAL, before Linux 6.1: the thread has not run yet and is moved later.
                if error.errno not in (errno.ESRCH, errno.EINVAL):
                    raise
            else:
                self._moved.add(tid)
        self._moved &= self._policy_by_thread.keys()

    def resident_bytes(self) -> dict[int, int]:
        """Return the resident bytes of each process of the last sample, without pages of files, by pid. The result is
        empty if there is only one process, because RLIMIT_AS limits its memory. A page that several processes share
        counts for each of them, so the sum is an upper bound."""
        resident = {}
        for pid in self._pids if len(self._pids) > 1 else ():
            with suppress(*_GONE_ERRORS):
                resident[pid] = _sum_kib(f"/proc/{pid}/status", _RESIDENT_KEYS) << 10
        return resident

    def _list_pids(self) -> list[int]:
        if self._members is None:
            return list(self._descendants())
        try:
            return [self.root, *filter(None, self._members.other_pids(self.root))]
        except OSError:
            return [self.root]

    def _descendants(self) -> Iterator[int]:
        """Yield the first process and its descendants, up to `MAX_SAMPLED_THREADS` threads."""
        pids, threads = [self.root], 0
        for pid in pids:  # the list grows while it is read: a breadth-first search
            yield pid
            for tid in _thread_ids(pid):
                threads += 1
                if threads > MAX_SAMPLED_THREADS:
                    break  # the pids that are in the list already are still yielded, but no child is added
                with suppress(OSError):
                    pids += map(int, _read(f"/proc/{pid}/task/{tid}/children").split())

    def _list_threads(self) -> None:
        policies, nices, tids = self._policy_by_thread, self._nice_by_thread, []
        with suppress(OSError):
            if self._members is None:
                self._pids = [*self._descendants()]
                tids = [tid for pid in self._pids for tid in _thread_ids(pid)]
            else:
                tids = self._members.thread_ids()
        self._policy_by_thread = {tid: policies.get(tid, _UNKNOWN_POLICY) for tid in tids if tid}
        self._nice_by_thread = {tid: nices.get(tid, _UNKNOWN_NICE) for tid in self._policy_by_thread}
        self.runnable_threads = len(self._policy_by_thread)

    def _sample_process(self, pid: int) -> ProcessSample | None:
        stat = _read_stat(f"/proc/{pid}/stat")
        # A zombie with further threads is a process whose main thread alone has ended.
        if stat[_STAT_STATE] in (b"Z", b"X") and int(stat[_STAT_THREADS]) <= 1:
            return None
        self._pid_by_session[int(stat[_STAT_SESSION])] = pid
        cpu_s = time.clock_gettime(~pid << 3 | 2)  # the process's clock, as clock_getcpuclockid(3) computes its number
        threads = {}
        if stat[_STAT_THREADS] == b"1":
            threads[pid] = self._sample_thread(pid, f"/proc/{pid}", stat)
        else:
            for tid in _thread_ids(pid)[: MAX_SAMPLED_THREADS + 1]:
                path = f"/proc/{pid}/task/{tid}"
                with suppress(*_GONE_ERRORS):  # one ended thread must not hide the other threads of the process
                    threads[tid] = self._sample_thread(tid, path, _read_stat(f"{path}/stat"))
        self.cpu_s += cpu_s + sum(map(int, stat[_STAT_CHILDREN_CPU])) / _TICKS_PER_S
        return ProcessSample(int(stat[_STAT_PPID]), _age_s(stat), cpu_s, threads)

    def _sample_thread(self, tid: int, path: str, stat: list[bytes]) -> ThreadSample:
        self._policy_by_thread[tid], self._nice_by_thread[tid] = int(stat[_STAT_POLICY]), int(stat[_STAT_NICE])
        is_exiting = stat[_STAT_STATE] in (b"R", b"S", b"D") and int(stat[_STAT_FLAGS]) & _PF_EXITING != 0
        is_runnable = stat[_STAT_STATE] == b"R" or is_exiting
        self.is_exiting = self.is_exiting or (is_exiting and tid == self.root)
        self.runnable_threads += is_runnable
        run_ns, delay_ns, timeslices = map(int, _read(f"{path}/schedstat").split())
        switches = self._voluntary_switches(tid, path, timeslices) if is_runnable else 0
        return ThreadSample(run_ns / 1e9, delay_ns / 1e9, timeslices, switches, is_runnable, is_exiting)

    def _voluntary_switches(self, tid: int, path: str, timeslices: int) -> int:
        """Return the number of voluntary switches. To read it takes as long as the rest of a thread's sample. So it is
        read only after a new timeslice: without a new timeslice it cannot have changed."""
        known = self._previous_switches_by_thread.get(tid)
        if known is None or known[0] != timeslices:
            status = _read(f"{path}/status")
            known = timeslices, int(status.partition(_VOLUNTARY_KEY)[2].split(None, 1)[0])
        self._switches_by_thread[tid] = known
        return known[1]


def has_few_sockets(pid: int) -> bool:
    """Return whether the network namespace of a process has so few AF_UNIX sockets that their data is not counted."""
    try:
        return len(_read(f"/proc/{pid}/net/unix")) <= _MAX_UNCOUNTED_TABLE_BYTES
    except OSError:
        return True


def socket_bytes(pid: int, *, counts_unix: bool) -> int:
    """Return an upper bound of the data in all sockets of the network namespace of a process. Connections that wait for
    accept(2), and have no descriptor yet, are included. Each AF_UNIX socket counts as full."""
    total = 0
    with suppress(OSError):
        for line in _table(f"/proc/{pid}/net/unix") if counts_unix else ():
            total += _SOCKET_BYTES * (_MAX_DATAGRAMS if line.split(None, 5)[4] == b"0002" else 1)
        for protocol in ("tcp", "udp"):
            for line in _table(f"/proc/{pid}/net/{protocol}"):
                _, _, _, state, queues, _ = line.split(None, 5)
                if state != _TCP_TIME_WAIT:
                    total += _IP_SOCKET_BYTES + sum(int(size, 16) for size in queues.split(b":"))
    return total


def _table(path: str) -> list[bytes]:
    """Return the lines of a table of sockets without its header, at most `_MAX_TABLE_LINES`."""
    with open(path, "rb") as file:
        file.readline()
        return [*islice(file, _MAX_TABLE_LINES)]


def exceeds_memory(resident_bytes: Mapping[int, int], limit_bytes: int, zygote_bytes: int) -> bool:
    """Return whether processes hold more than `limit_bytes` together, where each shared page counts once.

    The kernel needs milliseconds per 100 MiB to count shared pages, so the largest processes are read first, and only
    until the answer is certain. Where this process may not read these counts (level `landlock` as root without
    CAP_SYS_PTRACE), shared pages count for each process, except for `zygote_bytes`.
    """
    sum_bytes, rest_bytes = 0, sum(resident_bytes.values())
    for pid, process_bytes in sorted(resident_bytes.items(), key=lambda item: -item[1]):
        if sum_bytes > limit_bytes or sum_bytes + rest_bytes <= limit_bytes:
            break
        rest_bytes -= process_bytes
        path = f"/proc/{pid}/smaps_rollup"
        try:
            sum_bytes += max(0, _sum_kib(path, _PSS_KEYS) - _sum_kib(path, _FILE_KEYS)) << 10
        except PermissionError:
            sum_bytes += max(0, process_bytes - zygote_bytes)
        except _GONE_ERRORS:
            continue
    return sum_bytes > limit_bytes


def _sum_kib(path: str, keys: tuple[bytes, ...]) -> int:
    return sum(int(line.split()[1]) for line in _read(path).splitlines() if line.startswith(keys))


class CpuPriority:
    """Changes the CPU priority of the threads of long calls.

        this process has CAP_SYS_NICE in the initial user namespace    otherwise
        demote: SCHED_IDLE, and the idle cgroup                        demote: raise the nice value
        promote: SCHED_OTHER                                           promote: the kernel refuses it (sched(7))

    An ordinary user may raise the nice values of its own processes, and of all processes in user namespaces that it has
    created. It may not lower them again. So they are raised only as high as `LONG_THREADS_WEIGHT` requires for the
    number of long threads.
    """

    def __init__(self, cores: float = 1.0) -> None:
        self.can_promote = can_restore_priority()
        self.can_demote = True
        self._cores = cores
        self._own_nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._long_threads: Counter[ProcessTree] = Counter()
        """Runnable threads of each long call."""
        self._num_long_threads = 0
        if not self.can_promote:
            log.info("no CAP_SYS_NICE in the initial user namespace: long calls are demoted by their nice values only")

    def apply(self, tree: ProcessTree, idle_cgroup: IdleCgroup | None = None, *, is_demoted: bool) -> None:
        """Set the priority of all threads in the last sample of `tree`, the call of which is long. Idempotent."""
        if not self.can_demote:
            return
        try:
            if self.can_promote:
                tree.set_policy(os.SCHED_IDLE if is_demoted else os.SCHED_OTHER)
                if idle_cgroup is not None:
                    tree.move_to_idle_cgroup(idle_cgroup, inside=is_demoted)
            elif is_demoted:
                self._num_long_threads += tree.runnable_threads - self._long_threads[tree]
                self._long_threads[tree] = tree.runnable_threads
                tree.raise_nice(nice_of_long_calls(self._num_long_threads / self._cores, self._own_nice))
        except OSError as error:
            self.can_demote = False
            log.warning("cannot change the CPU priority of calls, long calls keep normal priority: %s", error)

    def forget(self, tree: ProcessTree) -> None:
        """Stop counting the threads of a call that has ended."""
        self._num_long_threads -= self._long_threads.pop(tree, 0)


def nice_of_long_calls(threads_per_core: float, own_nice: int = 0) -> int:
    """Return the nice value with which this many threads on each core have the weight `LONG_THREADS_WEIGHT` together.
    `own_nice` is the nice value of short calls."""
    weight = LONG_THREADS_WEIGHT / max(1.0, threads_per_core)
    return min(MAX_NICE, own_nice + math.ceil(-math.log(weight, WEIGHT_PER_NICE)))


def _set_autogroup(pid: int, nice: int) -> bool:
    """Set the nice value of a process's session. Return False if the kernel asks to try again later: for an ordinary
    user it accepts one value in 0.1 s on the whole machine."""
    try:
        with open(f"/proc/{pid}/autogroup", "w") as file:
            file.write(str(nice))
    except BlockingIOError:
        return False
    return True


def _thread_ids(pid: int) -> list[int]:
    try:
        return [*map(int, os.listdir(f"/proc/{pid}/task"))]
    except OSError:
        return []


def _age_s(stat: list[bytes]) -> float:
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[_STAT_START]) / _TICKS_PER_S)


def _read_stat(path: str) -> list[bytes]:
    """Return the fields after the name, which may itself contain spaces and parentheses."""
    return _read(path).rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
