"""Resources of processes, read from /proc: CPU time, memory, descriptors, mounts.

The CPU time of a living process is `sum_exec_runtime` of its threads (the first field of schedstat, nanoseconds). The
CPU time of ended children can only be read in clock ticks of 10 ms (cutime and cstime of /proc/PID/stat). The kernel
adds it up exactly, and rounds only the sum when it is read.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def children() -> defaultdict[int, list[int]]:
    """The children of every process, by its id."""
    by_parent = defaultdict(list)
    for pid in _numbers(_PROC):
        if fields := _stat(pid):
            by_parent[int(fields[1])].append(pid)
    return by_parent


def tree(root: int) -> list[int]:
    """`root` and its descendants, parents first; empty if `root` is gone."""
    by_parent = children()
    pids = [root] if _stat(root) else []
    for pid in pids:
        pids += by_parent[pid]
    return pids


def cpu_s(pids: list[int]) -> float:
    """CPU seconds of living processes, without their children."""
    return sum(_thread_cpu_s(pid) for pid in pids)


def ended_children_cpu_s(pids: list[int]) -> float:
    """CPU seconds of ended and reaped children of these processes, their own children included."""
    return sum((int(fields[13]) + int(fields[14])) * _TICK_S for pid in pids if (fields := _stat(pid)))


class CpuMeter:
    """CPU time of a process and its descendants since the meter was created."""

    def __init__(self, root: int) -> None:
        self._pids = tree(root)
        self._own_s, self._ended_s = cpu_s(self._pids), ended_children_cpu_s(self._pids)

    def own_s(self) -> float:
        """CPU seconds of the processes that existed at the start, without ended children."""
        return cpu_s(self._pids) - self._own_s

    def total_s(self) -> float:
        """`own_s` and the CPU seconds of children that have ended since."""
        return self.own_s() + ended_children_cpu_s(self._pids) - self._ended_s


def pss_mb(pids: list[int]) -> float:
    """MiB of memory with shared pages counted once (proportional set size). Unreadable processes count 0."""
    return sum(_rollup_kb(pid, "Pss:") for pid in pids) / 1024


def descriptors(pid: int) -> int:
    """The number of open descriptors; 0 if the process is gone.

    A server creates the control group of a slot when the slot is first used, and keeps it open. So the first descriptor
    of each control group file is not counted.
    """
    fd_dir, cgroup_devices = _PROC / str(pid) / "fd", _cgroup_devices()
    cgroup_files: set[tuple[int, int]] = set()
    count = 0
    try:
        for name in os.listdir(fd_dir):
            with contextlib.suppress(FileNotFoundError):
                file = os.stat(fd_dir / name)
                key = (file.st_dev, file.st_ino)
                if file.st_dev in cgroup_devices and key not in cgroup_files:
                    cgroup_files.add(key)
                else:
                    count += 1
    except OSError:
        return 0
    return count


def _cgroup_devices() -> set[int]:
    """Device numbers of the mounted cgroup file systems (proc_pid_mountinfo(5))."""
    devices = set()
    for line in (_PROC / "self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1].startswith("cgroup"):
            devices.add(os.makedev(*map(int, fields[2].split(":"))))
    return devices


def mounts(pid: int) -> int:
    """The number of mounts in the process's namespace; 0 if it is gone."""
    try:
        return len((_PROC / str(pid) / "mountinfo").read_text().splitlines())
    except OSError:
        return 0


def state(pid: int) -> str:
    """The state letter: "R" running, "S" sleeping, "T" stopped, "Z" zombie; empty if the process is gone."""
    return "".join(_stat(pid)[:1])


def is_zombie(pid: int) -> bool:
    """Whether the process has ended and has not been reaped."""
    return state(pid) == "Z"


def command(pid: int) -> str:
    """The first 200 characters of the command line; empty if the process is gone."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    return " ".join(word for word in words if word)[:200]


def _thread_cpu_s(pid: int) -> float:
    total = 0
    for thread in _numbers(_PROC / str(pid) / "task"):
        try:
            total += int((_PROC / str(pid) / "task" / str(thread) / "schedstat").read_text().split()[0])
        except (OSError, IndexError):
            continue
    return total / 1e9


def _rollup_kb(pid: int, name: str) -> int:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, ...; empty if the process is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _numbers(directory: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(directory) if name.isdecimal()]
    except OSError:
        return []
