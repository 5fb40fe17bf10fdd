"""What this machine grants the server: cores and memory, less what control groups take away.

A container on 2 of 64 cores still sees 64, unless somebody asks its group; the same goes for memory. The group the
server is in counts, and so do all above it, as far as they can be seen. `root` stands before every path, for tests.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path


def granted_cores(root: str = "/") -> int:
    """Cores for us: those we may run on, or the groups' CPU quota, rounded up, where that is less. At least 1."""
    granted = float(len(os.sched_getaffinity(0)))
    for group in _own_cgroups("cpu", root):
        quota, period = _cpu_quota(group)
        if quota > 0 and period > 0:
            granted = min(granted, quota / period)
    return max(1, math.ceil(granted))


def memory_limit(root: str = "/") -> int:
    """Bytes that we may ever use: the machine's, or the least limit of our groups."""
    limits = [limit for group in _own_cgroups("memory", root) if (limit := _cgroup_memory(group)[0])]
    return min([_meminfo(root)["MemTotal"], *limits])


def memory_available(root: str = "/") -> int:
    """Bytes that we may use now, page cache that can be dropped included. Never negative."""
    available = _meminfo(root)["MemAvailable"]
    for group in _own_cgroups("memory", root):
        limit, used = _cgroup_memory(group)
        if limit:
            available = min(available, limit - used)
    return max(0, available)


def raise_fd_limit(wanted: int) -> int:
    """Raise this process's limit on open file descriptors (RLIMIT_NOFILE) to `wanted`, or to the hard limit where that
    is lower. A higher limit is left as it is. Returns the limit that holds then; `sys.maxsize` stands for none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _cpu_quota(group: Path) -> tuple[float, float]:
    """Microseconds of CPU per period; a quota of 0 or less is none."""
    quota, _, period = _read(group / "cpu.max").partition(" ")  # version 2: "max 100000" or "50000 100000"
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return _number(quota), _number(period)


def _cgroup_memory(group: Path) -> tuple[int, int]:
    """The limit of a group, 0 for none, and what it holds that could not be dropped at once."""
    limit = _number(_read(group / "memory.max") or _read(group / "memory.limit_in_bytes"))
    used = _number(_read(group / "memory.current") or _read(group / "memory.usage_in_bytes"))
    counted = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    cache = _number(counted.get("total_inactive_file") or counted.get("inactive_file", ""))
    return limit, max(0, used - cache)


def _own_cgroups(controller: str, root: str) -> Iterator[Path]:
    """The group we are in and all above it, in the hierarchy of `controller` and in that of version 2."""
    paths = {name: path for names, path in cgroup_paths(root) for name in names.split(",")}
    for inside, place, kind, options in mounts(root):
        if kind == "cgroup2":
            name = ""
        elif kind == "cgroup" and controller in options.split(","):
            name = controller
        else:
            continue
        if name not in paths:
            continue
        below = os.path.relpath(paths[name], inside)
        top = Path(root, place.lstrip("/"))
        group = top if below.startswith("..") else top / below  # else another part of the hierarchy than ours
        yield group
        yield from (above for above in group.parents if above == top or top in above.parents)


def cgroup_paths(root: str = "/") -> Iterator[tuple[str, str]]:
    for line in _read(Path(root, "proc/self/cgroup")).splitlines():
        _order, names, path = line.split(":", 2)
        yield names, path


def mounts(root: str = "/") -> Iterator[tuple[str, str, str, str]]:
    """Root, mount point, type and the file system's options, of every mount (proc_pid_mountinfo(5))."""
    for line in _read(Path(root, "proc/self/mountinfo")).splitlines():
        mount, _, system = line.partition(" - ")
        inside, place = mount.split()[3:5]
        kind, _source, options = system.split()[:3]
        yield inside, place, kind, options


def _meminfo(root: str) -> dict[str, int]:
    lines = Path(root, "proc/meminfo").read_text(encoding="ascii").splitlines()
    return {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}


def _number(text: str) -> int:
    return int(text) if text.lstrip("-").isdigit() else 0


def _read(file: Path) -> str:
    """What `file` says; nothing if there is no such file, or none that we may read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
