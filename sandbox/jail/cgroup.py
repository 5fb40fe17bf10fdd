"""The cgroup of one slot: sets limits before a call, and reads the usage after the call, through files that stay open.

A slot is a numbered set of resources that one call uses at a time.

- A limit is written only if it differs from the current one, because most calls have the same limits.
- The kernel's counters only grow, so a call's usage is the difference of two readings. Only the peak is reset.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

MAX_BYTES = 1 << 62
"""Largest memory limit, in bytes, that is written. All kernels accept it."""
MAX_TASKS = 1 << 22
"""Largest limit on processes and threads that the kernel accepts (PID_MAX_LIMIT)."""


@dataclass(frozen=True, slots=True)
class CgroupVersion:
    """File names of a version of cgroups (kernel: admin-guide/cgroup-v1/, admin-guide/cgroup-v2.rst)."""

    name: str
    memory_hierarchy: str
    """Name of the hierarchy that limits memory. Version 2 has a single hierarchy; its name is empty."""
    pids_hierarchy: str
    cpu_hierarchy: str
    """Name of the hierarchy that counts CPU time. It may not be mounted."""
    initial_texts: tuple[tuple[str, str], ...]
    """Files of the memory hierarchy, and the text that is written to each of them when the cgroup is created."""
    memory_limit_file: str
    memory_peak_file: str
    oom_kills_file: str
    """File with a line oom_kill: the number of processes of the cgroup that the OOM killer has killed for any
    reason."""
    limit_hits_file: str
    """File that counts how often the cgroup's own limit was reached."""
    limit_hits_key: bytes
    """Key of the line in `limit_hits_file`. It is empty if the file holds a single number."""
    cpu_file: str
    cpu_key: bytes
    cpu_units_per_ms: float
    enter_file: str
    """File to which a process writes "0" to enter the cgroup."""
    threads_file: str
    """File that lists the threads in the cgroup."""


V1 = CgroupVersion(
    name="version 1",
    memory_hierarchy="memory",
    pids_hierarchy="pids",
    cpu_hierarchy="cpuacct",
    initial_texts=(("memory.swappiness", "0"),),
    memory_limit_file="memory.limit_in_bytes",
    memory_peak_file="memory.max_usage_in_bytes",
    oom_kills_file="memory.oom_control",
    limit_hits_file="memory.failcnt",
    limit_hits_key=b"",
    cpu_file="cpuacct.usage",
    cpu_key=b"",
    cpu_units_per_ms=1e6,
    enter_file="tasks",  # moves one thread. cgroup.procs moves a process, during which all forks on the machine wait
    threads_file="tasks",
)
V2 = CgroupVersion(
    name="version 2",
    memory_hierarchy="",
    pids_hierarchy="",
    cpu_hierarchy="",
    initial_texts=(("memory.swap.max", "0"), ("memory.oom.group", "1")),
    memory_limit_file="memory.max",
    memory_peak_file="memory.peak",
    oom_kills_file="memory.events",
    limit_hits_file="memory.events",
    limit_hits_key=b"oom",
    cpu_file="cpu.stat",
    cpu_key=b"usage_usec",
    cpu_units_per_ms=1e3,
    enter_file="cgroup.procs",
    threads_file="cgroup.threads",
)


@dataclass(frozen=True, slots=True)
class CgroupUsage:
    """Resources that all processes of a call used together. A field is None if the kernel does not count it."""

    cpu_ms: float | None
    peak_bytes: int | None
    hit_own_limit: bool = False
    """Whether the OOM killer killed a process of the call because the call reached its own memory limit."""
    hit_outer_limit: bool = False
    """Whether the OOM killer killed a process of the call because of another limit: the machine's memory or a parent
    cgroup."""


class SlotCgroup:
    """The cgroup of a slot. `dirs` has the cgroup's existing directory in each hierarchy. Raises `OSError`."""

    def __init__(self, version: CgroupVersion, dirs: Mapping[str, str]) -> None:
        self._version = version
        self._memory_dir, self._pids_dir = dirs[version.memory_hierarchy], dirs[version.pids_hierarchy]
        self._limits: tuple[int, int] | None = None  # (memory_bytes, max_tasks) as last written
        self._peak_before = 0
        for name, text in version.initial_texts:
            with suppress(OSError):  # kernels without swap have no such file
                write_file(f"{self._memory_dir}/{name}", text)
        self._fds: list[int] = []
        peak_path = f"{self._memory_dir}/{version.memory_peak_file}"
        try:
            self._peak_fd = self._open(peak_path, os.O_RDWR)
        except PermissionError:  # version 2 before Linux 6.12: the file is read-only for all users but root
            self._peak_fd = self._open(peak_path, os.O_RDONLY)
        self._oom_kills_fd = self._open(f"{self._memory_dir}/{version.oom_kills_file}", os.O_RDONLY)
        self._limit_hits_fd = self._open(f"{self._memory_dir}/{version.limit_hits_file}", os.O_RDONLY)
        self._tasks_fd = self._open(f"{self._pids_dir}/pids.current", os.O_RDONLY)
        cpu_dir = dirs.get(version.cpu_hierarchy)
        self._cpu_fd = self._open(f"{cpu_dir}/{version.cpu_file}", os.O_RDONLY) if cpu_dir else -1
        self._last_counters = self._read_counters()
        self._can_reset_peak = True
        try:
            self._reset_peak()
        except OSError:  # version 2 before Linux 6.12 cannot reset the peak
            self._can_reset_peak = False
            self._peak_before = int(os.pread(self._peak_fd, 64, 0))

    def allow_single_kills(self) -> None:
        """Let the OOM killer kill a single process of the cgroup. Without this, version 2 kills all of them."""
        with suppress(OSError):  # version 1 and old kernels have no such file
            write_file(f"{self._memory_dir}/memory.oom.group", "0")

    def set_limits(self, memory_bytes: int, max_tasks: int) -> None:
        """Set the limits of the next call. Raises `OSError`."""
        limits = min(memory_bytes, MAX_BYTES), min(max_tasks, MAX_TASKS)
        if self._limits != limits:
            self._limits = None  # unknown, if one of the writes fails
            write_file(f"{self._memory_dir}/{self._version.memory_limit_file}", str(limits[0]))
            write_file(f"{self._pids_dir}/pids.max", str(limits[1]))
            self._limits = limits
        self._reset_peak()

    def read_usage(self) -> CgroupUsage:
        """Return the usage since `set_limits`, at the end of a call."""
        before, self._last_counters = self._last_counters, self._read_counters()
        oom_kills, limit_hits, cpu = (new - old for new, old in zip(self._last_counters, before, strict=True))
        return CgroupUsage(
            cpu_ms=cpu / self._version.cpu_units_per_ms if self._cpu_fd >= 0 else None,
            peak_bytes=self._read_peak(),
            hit_own_limit=oom_kills > 0 and limit_hits > 0,
            hit_outer_limit=oom_kills > 0 and not limit_hits,
        )

    def cpu_s(self) -> float | None:
        """Return the CPU seconds of the present call so far, or None if the kernel does not count them."""
        if self._cpu_fd < 0:
            return None
        _, _, cpu_before = self._last_counters
        cpu = _read_number(self._cpu_fd, self._version.cpu_key) - cpu_before
        return cpu / self._version.cpu_units_per_ms / 1e3

    @property
    def task_count(self) -> int:
        """Number of processes and threads in the cgroup."""
        return int(os.pread(self._tasks_fd, 64, 0))

    def other_pids(self, first: int) -> list[int]:
        """Return the pids of all processes except `first`. A process outside of this PID namespace has pid 0."""
        if self.task_count <= 1:  # reading the count takes a tenth of the time of reading the list
            return []
        with open(f"{self._pids_dir}/cgroup.procs", encoding="ascii") as pids:
            return [pid for pid in map(int, pids.read().split()) if pid != first]

    def thread_ids(self) -> list[int]:
        """Return the ids of all threads. A thread outside of this PID namespace has id 0."""
        with open(f"{self._pids_dir}/{self._version.threads_file}", encoding="ascii") as tids:
            return [*map(int, tids.read().split())]

    @property
    def is_empty(self) -> bool:
        return self.task_count == 0

    def kill(self) -> None:
        """Kill all processes in the cgroup."""
        kill_processes(self._pids_dir)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _reset_peak(self) -> None:
        """Reset the peak to the memory that is in use now, which is mostly cached files. This memory is not charged to
        the next call."""
        if self._peak_fd >= 0 and self._can_reset_peak:
            os.pwrite(self._peak_fd, b"0", 0)
            self._peak_before = int(os.pread(self._peak_fd, 64, 0))

    def _read_peak(self) -> int | None:
        """Return the call's peak, or None if it is unknown.

        If the kernel cannot reset the peak, it is known only if this call has used more memory than any call before it.
        """
        if self._peak_fd < 0:
            return None
        peak = int(os.pread(self._peak_fd, 64, 0))
        if self._can_reset_peak:
            return peak - self._peak_before
        peak_before, self._peak_before = self._peak_before, peak
        return peak if peak > peak_before else None

    def _open(self, path: str, flags: int) -> int:
        """Open a file until `close`. Returns -1 if the kernel or the hierarchy has no such file."""
        try:
            fd = os.open(path, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1
        self._fds.append(fd)
        return fd

    def _read_counters(self) -> tuple[int, int, int]:
        """Return (OOM kills, limit hits, CPU time) since the cgroup was created."""
        version = self._version
        return (
            _read_number(self._oom_kills_fd, b"oom_kill"),
            _read_number(self._limit_hits_fd, version.limit_hits_key),
            _read_number(self._cpu_fd, version.cpu_key),
        )


def kill_processes(directory: str) -> None:
    """Kill all processes of a cgroup. Where the kernel has no cgroup.kill, only processes that are visible in this PID
    namespace are killed."""
    with suppress(FileNotFoundError):  # version 1, or Linux before 5.14
        write_file(f"{directory}/cgroup.kill", "1")
        return
    with suppress(FileNotFoundError), open(f"{directory}/cgroup.procs", encoding="ascii") as pids:
        for pid in map(int, pids.read().split()):
            if pid > 0:  # 0 stands for a process of another PID namespace
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def write_file(path: str, text: str) -> None:
    """Write to a cgroup file by a single write(2)."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read_number(fd: int, key: bytes) -> int:
    """Return the number in the line "key number" of a file, or its only number if `key` is empty.

    Returns 0 if the kernel has no such file (`fd` is negative) or no such line.
    """
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
