"""What processes use, read from /proc: CPU time, memory, descriptors, mounts.

CPU time of a living process is `sum_exec_runtime` of its threads (first field of schedstat, nanoseconds). What ended
children used is known by clock tick only (cutime and cstime of /proc/PID/stat, 10 ms), but the kernel adds it up
exactly and rounds once, when it is read.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def children() -> defaultdict[int, list[int]]:
    """Every process's children, by its id; an empty list for those that have none."""
    found = defaultdict(list)
    for pid in _numbers(_PROC):
        if fields := _stat(pid):
            found[int(fields[1])].append(pid)
    return found


def tree(root: int) -> list[int]:
    """`root` and all that descend from it, parents first."""
    below = children()
    found = [root] if _stat(root) else []
    for pid in found:
        found += below[pid]
    return found


def cpu_s(pids: list[int]) -> float:
    """Seconds of CPU that living processes have used themselves."""
    return sum(_thread_cpu_s(pid) for pid in pids)


def ended_children_cpu_s(pids: list[int]) -> float:
    """Seconds of CPU that children of these used, which have ended and were waited for; theirs included."""
    return sum((int(fields[13]) + int(fields[14])) * _TICK_S for pid in pids if (fields := _stat(pid)))


class Meter:
    """CPU of a process and all that descend from it, from now on."""

    def __init__(self, root: int) -> None:
        self._pids = tree(root)
        self._own_s, self._ended_s = cpu_s(self._pids), ended_children_cpu_s(self._pids)

    def own_s(self) -> float:
        """Seconds that the processes of the beginning have used themselves."""
        return cpu_s(self._pids) - self._own_s

    def whole_s(self) -> float:
        """The same, and what children of theirs used that have ended since."""
        return self.own_s() + ended_children_cpu_s(self._pids) - self._ended_s


def pss_mb(pids: list[int]) -> float:
    """MiB of memory, what is shared counted once (proportional set size). Processes that cannot be read count 0."""
    return sum(_rollup_kb(pid, "Pss:") for pid in pids) / 1024


def descriptors(pid: int) -> int:
    """How many descriptors are open; 0 if it is gone. Of those to the same file of a control group, one is not counted:
    a server makes a slot's group when first so many calls run at once, and keeps it."""
    folder, on_groups, groups = _PROC / str(pid) / "fd", _group_devices(), set()
    found = 0
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                file = os.stat(folder / name)
                is_kept = file.st_dev in on_groups and (file.st_dev, file.st_ino) not in groups
                if is_kept:
                    groups.add((file.st_dev, file.st_ino))
                found += not is_kept
    except OSError:
        return 0
    return found


def _group_devices() -> set[int]:
    """The file systems of control groups that are mounted here (proc_pid_mountinfo(5))."""
    found = set()
    for line in (_PROC / "self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1].startswith("cgroup"):
            found.add(os.makedev(*map(int, fields[2].split(":"))))
    return found


def mounts(pid: int) -> int:
    """How many mounts its mount namespace has; 0 if it is gone."""
    try:
        return len((_PROC / str(pid) / "mountinfo").read_text().splitlines())
    except OSError:
        return 0


def state(pid: int) -> str:
    """A letter: "R" for running, "S" for sleeping, "T" for stopped, "Z" for a zombie; empty if it is gone."""
    return "".join(_stat(pid)[:1])


def is_zombie(pid: int) -> bool:
    """Whether it has ended and nobody has waited for it."""
    return state(pid) == "Z"


def command(pid: int) -> str:
    """Its command line, shortened to what tells it apart."""
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
    """The fields of /proc/PID/stat after the name: state, parent, ...; none if it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]
    except OSError:
        return []
