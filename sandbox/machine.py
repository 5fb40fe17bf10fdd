"""Resources that this machine grants to the server: cores, memory and file descriptors.

In a container, cgroups may grant less than the machine has. The server's own cgroup counts, and so do all its visible
ancestors. `root` is a prefix of every path, for tests.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path


def granted_cores(root: str = "/") -> int:
    """Return the number of cores in the affinity mask. If the CPU quota of the cgroups is lower, return the quota,
    rounded up. At least 1."""
    granted = float(len(os.sched_getaffinity(0)))
    for group in _limiting_cgroups("cpu", root):
        quota, period = _cpu_quota(group)
        if quota > 0 and period > 0:
            granted = min(granted, quota / period)
    return max(1, math.ceil(granted))


def memory_limit(root: str = "/") -> int:
    """Return the bytes of the machine's memory. If a limit of the cgroups is lower, return the lowest limit."""
    limits = [limit for group in _limiting_cgroups("memory", root) if (limit := _cgroup_memory(group)[0])]
    return min([_meminfo(root)["MemTotal"], *limits])


def memory_available(root: str = "/") -> int:
    """Return the bytes of memory that are free now, including page cache that the kernel can drop. At least 0."""
    available = _meminfo(root)["MemAvailable"]
    for group in _limiting_cgroups("memory", root):
        limit, used = _cgroup_memory(group)
        if limit:
            available = min(available, limit - used)
    return max(0, available)


def oom_kills() -> int:
    """Return how many processes the kernel has killed since the boot because memory ran out, on the machine or in a
    cgroup; 0 if it does not count them (before Linux 4.13)."""
    counters = dict(line.split() for line in _read(Path("/proc/vmstat")).splitlines())
    return _number(counters.get("oom_kill", ""))


def raise_fd_limit(wanted: int) -> int:
    """Raise the limit of open file descriptors (RLIMIT_NOFILE) to `wanted`, or to the hard limit if that is lower. A
    higher limit stays. Returns the limit then in force; `sys.maxsize` means no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _cpu_quota(group: Path) -> tuple[float, float]:
    """Return quota and period in microseconds. A quota of 0 or less means no quota."""
    quota, _, period = _read(group / "cpu.max").partition(" ")  # version 2: "max 100000" or "50000 100000"
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return _number(quota), _number(period)


def _cgroup_memory(group: Path) -> tuple[int, int]:
    """Return the limit in bytes (0: none) and the bytes in use, without page cache that the kernel can drop."""
    limit = _number(_read(group / "memory.max") or _read(group / "memory.limit_in_bytes"))
    used = _number(_read(group / "memory.current") or _read(group / "memory.usage_in_bytes"))
    counted = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    cache = _number(counted.get("total_inactive_file") or counted.get("inactive_file", ""))
    return limit, max(0, used - cache)


def _limiting_cgroups(controller: str, root: str) -> Iterator[Path]:
    """Yield the directory of this process's cgroup and of each ancestor, for cgroup v2 and for `controller` in v1."""
    for name, mount_point, directory in own_cgroups(root):
        if name in ("", controller):
            yield directory
            yield from (parent for parent in directory.parents if parent.is_relative_to(mount_point))


def own_cgroups(root: str = "/") -> Iterator[tuple[str, Path, Path]]:
    """Yield controller ("" for cgroup v2), mount point and directory of each mounted cgroup of this process."""
    paths = cgroup_paths(root)
    for mount_root, mount_point, fs_type, options in mounts(root):
        names = [""] if fs_type == "cgroup2" else options.split(",") if fs_type == "cgroup" else []
        for name in paths.keys() & names:
            relative = os.path.relpath(paths[name], mount_root)
            mount_dir = Path(root, mount_point.lstrip("/"))
            is_outside = relative.startswith("..")  # the mount shows a part of the tree without this cgroup
            yield name, mount_dir, mount_dir if is_outside else mount_dir / relative


def cgroup_paths(root: str = "/") -> dict[str, str]:
    """Return the path of this process's cgroup by controller of cgroup v1; the path in cgroup v2 is under ""."""
    lines = [line.split(":", 2) for line in _read(Path(root, "proc/self/cgroup")).splitlines()]
    return {name: path for _order, names, path in lines for name in names.split(",")}


def mounts(root: str = "/") -> Iterator[tuple[str, str, str, str]]:
    """Yield root, mount point, file system type and super options of each mount (see proc_pid_mountinfo(5))."""
    for line in _read(Path(root, "proc/self/mountinfo")).splitlines():
        mount, _, system = line.partition(" - ")
        mount_root, mount_point = mount.split()[3:5]
        fs_type, _source, options = system.split()[:3]
        yield mount_root, mount_point, fs_type, options


def _meminfo(root: str) -> dict[str, int]:
    lines = Path(root, "proc/meminfo").read_text(encoding="ascii").splitlines()
    return {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}


def _number(text: str) -> int:
    return int(text) if text.lstrip("-").isdigit() else 0


def _read(file: Path) -> str:
    """Return the text of `file`, or an empty string if it does not exist or may not be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
