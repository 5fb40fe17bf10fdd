"""One slot's control group: limits before a call, counts after it, read from files that stay open.

- A limit is written only where it differs from the one that is set: most calls have the same.
- Counters never go back, so what one call used is a difference; only the peak is reset.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

MAX_BYTES, MAX_TASKS = 1 << 62, 1 << 22
"""Limits beyond every machine that the kernel still takes (pids.max: PID_MAX_LIMIT)."""


@dataclass(frozen=True, slots=True)
class CgroupVersion:
    """What a version of control groups calls its files (kernel: admin-guide/cgroup-v1/, admin-guide/cgroup-v2.rst)."""

    name: str
    memory: str
    pids: str
    cpu_time: str
    """The hierarchies; all but the last are needed. Version 2 is the one without a name."""
    once: tuple[tuple[str, str], ...]
    """Files of the memory hierarchy that are written when a group is made; those of a kernel without swap may lack."""
    limit: str
    peak: str
    kills: str
    """Under oom_kill: how many in the group the kernel has killed for want of memory, whosever limit it was."""
    refusals: str
    refusals_key: bytes
    """How often the group's own limit has refused memory."""
    cpu: str
    cpu_key: bytes
    cpu_per_ms: float
    door: str
    """What a process writes "0" to."""
    threads: str
    """Who is in it."""


V1 = CgroupVersion(
    name="version 1",
    memory="memory",
    pids="pids",
    cpu_time="cpuacct",
    once=(("memory.swappiness", "0"),),
    limit="memory.limit_in_bytes",
    peak="memory.max_usage_in_bytes",
    kills="memory.oom_control",
    refusals="memory.failcnt",
    refusals_key=b"",
    cpu="cpuacct.usage",
    cpu_key=b"",
    cpu_per_ms=1e6,
    door="tasks",  # not cgroup.procs: moving a single thread does not wait for every fork on the machine
    threads="tasks",
)
V2 = CgroupVersion(
    name="version 2",
    memory="",
    pids="",
    cpu_time="",
    once=(("memory.swap.max", "0"), ("memory.oom.group", "1")),
    limit="memory.max",
    peak="memory.peak",
    kills="memory.events",
    refusals="memory.events",
    refusals_key=b"oom",
    cpu="cpu.stat",
    cpu_key=b"usage_usec",
    cpu_per_ms=1e3,
    door="cgroup.procs",
    threads="cgroup.threads",
)


@dataclass(frozen=True, slots=True)
class CgroupUsage:
    """What one call used, all its processes together. None: the kernel does not count that here."""

    cpu_ms: float | None
    peak_bytes: int | None
    hit_own_limit: bool = False
    """One of its processes was killed, since together they were at their limit of memory."""
    hit_outer_limit: bool = False
    """The kernel killed one of its processes for want of memory, but the limit was another's: the machine's, or that of
    whoever runs the server."""


class SlotCgroup:
    """Made over `folders`, which exist: the group in each hierarchy. Raises `OSError`."""

    def __init__(self, version: CgroupVersion, folders: Mapping[str, str]) -> None:
        self._version = version
        self._memory, self._pids = folders[version.memory], folders[version.pids]
        self._limits: tuple[int, int] | None = None
        self._base = 0
        for name, text in version.once:
            with suppress(OSError):
                _write(f"{self._memory}/{name}", text)
        self._fds: list[int] = []
        self._peak = self._opened(f"{self._memory}/{version.peak}", os.O_RDWR)
        self._kills = self._opened(f"{self._memory}/{version.kills}", os.O_RDONLY)
        self._refusals = self._opened(f"{self._memory}/{version.refusals}", os.O_RDONLY)
        self._members = self._opened(f"{self._pids}/pids.current", os.O_RDONLY)
        cpu = folders.get(version.cpu_time)
        self._cpu = self._opened(f"{cpu}/{version.cpu}", os.O_RDONLY) if cpu else -1
        self._last = self._counts()
        self._can_reset = True
        try:
            self._reset_peak()
        except OSError:  # version 2 before Linux 6.12: the peak is that of all calls ever
            self._can_reset = False
            self._base = int(os.pread(self._peak, 64, 0))

    def set_limits(self, memory: int, processes: int) -> None:
        """Bound the next call to so many bytes and processes."""
        memory, processes = min(memory, MAX_BYTES), min(processes, MAX_TASKS)
        if self._limits != (memory, processes):
            self._limits = None  # unknown, should this fail half-way
            _write(f"{self._memory}/{self._version.limit}", str(memory))
            _write(f"{self._pids}/pids.max", str(processes))
            self._limits = (memory, processes)
        self._reset_peak()

    def read_usage(self) -> CgroupUsage:
        """What was used since `begin`."""
        before, self._last = self._last, self._counts()
        kills, refusals, cpu = (now - then for now, then in zip(self._last, before, strict=True))
        return CgroupUsage(
            cpu_ms=cpu / self._version.cpu_per_ms if self._cpu >= 0 else None,
            peak_bytes=self._read_peak(),
            hit_own_limit=kills > 0 and refusals > 0,
            hit_outer_limit=kills > 0 and not refusals,
        )

    def cpu_s(self) -> float | None:
        """CPU seconds since the last `end`, when the present call had not begun; None if the kernel does not count."""
        if self._cpu < 0:
            return None
        return (_number(self._cpu, self._version.cpu_key) - self._last[2]) / self._version.cpu_per_ms / 1e3

    @property
    def task_count(self) -> int:
        """How many processes and threads the kernel counts in it."""
        return int(os.pread(self._members, 64, 0))

    def other_pids(self, first: int) -> list[int]:
        """The processes in it besides `first`, as this PID namespace numbers them: 0 for those that it does not see."""
        if self.task_count <= 1:  # to ask how many takes a tenth of what it takes to ask who
            return []
        with open(f"{self._pids}/cgroup.procs", encoding="ascii") as members:
            return [pid for pid in map(int, members.read().split()) if pid != first]

    def thread_ids(self) -> list[int]:
        """All of them, likewise."""
        with open(f"{self._pids}/{self._version.threads}", encoding="ascii") as members:
            return [*map(int, members.read().split())]

    @property
    def is_empty(self) -> bool:
        """Whether the kernel counts nobody in it any more."""
        return self.task_count == 0

    def kill(self) -> None:
        """Every process in it that this PID namespace sees, at once."""
        kill_members(self._pids)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _reset_peak(self) -> None:
        """What is there already (cached files, mostly) is not the next call's."""
        if self._peak >= 0 and self._can_reset:
            os.pwrite(self._peak, b"0", 0)
            self._base = int(os.pread(self._peak, 64, 0))

    def _read_peak(self) -> int | None:
        """The call's; where it cannot be reset it is only known of a call that went over all before it."""
        if self._peak < 0:
            return None
        peak = int(os.pread(self._peak, 64, 0))
        if self._can_reset:
            return peak - self._base
        highest, self._base = self._base, peak
        return peak if peak > highest else None

    def _opened(self, path: str, flags: int) -> int:
        """-1 where the kernel, or the hierarchy, has no such file."""
        try:
            fd = os.open(path, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1
        self._fds.append(fd)
        return fd

    def _counts(self) -> tuple[int, int, int]:
        """What only grows: kills, refusals, CPU time."""
        version = self._version
        return (
            _number(self._kills, b"oom_kill"),
            _number(self._refusals, version.refusals_key),
            _number(self._cpu, version.cpu_key),
        )


def kill_members(folder: str) -> None:
    """SIGKILL to every process in the group at `folder`."""
    with suppress(FileNotFoundError):  # version 1, or before Linux 5.14
        _write(f"{folder}/cgroup.kill", "1")
        return
    with suppress(FileNotFoundError), open(f"{folder}/cgroup.procs", encoding="ascii") as members:
        for pid in map(int, members.read().split()):
            if pid > 0:  # 0 stands for a process of another PID namespace
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _number(fd: int, key: bytes) -> int:
    """A file's only number, or the one after `key` among lines of "key number"; 0 where the kernel does not count."""
    if fd < 0:
        return 0
    text = os.pread(fd, 1024, 0)
    if not key:
        return int(text)
    for line in text.splitlines():
        name, _, number = line.partition(b" ")
        if name == key:
            return int(number)
    return 0


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
