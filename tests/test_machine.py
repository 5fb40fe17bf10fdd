"""Tests of granted cores and memory on machines that consist of files in a directory."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from sandbox import machine

V1_MOUNT = "32 31 0:29 / /sys/fs/cgroup/{0} rw,relatime - cgroup cgroup rw,{0}\n"
V2_MOUNT = "24 23 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
"""Lines of mountinfo for the cgroup file systems of both versions."""
UNLIMITED = str(0x7FFFFFFFFFFFF000)
"""The memory limit that cgroup version 1 shows if none is set."""
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def write_machine(root: Path, *, mounts: str = "", groups: str = "", files: dict[str, str] | None = None) -> str:
    """Write the files of a machine with 16 GiB, 12 GiB of them free, below `root`. Returns `root`."""
    meminfo = "MemTotal: 16777216 kB\nMemAvailable: 12582912 kB\nHugePages_Total: 0\n"
    contents = {"proc/meminfo": meminfo, "proc/self/mountinfo": mounts, "proc/self/cgroup": groups}
    for name, text in (contents | {f"sys/fs/cgroup/{name}": text for name, text in (files or {}).items()}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_without_cgroups_the_whole_machine_is_granted(tmp_path: Path) -> None:
    root = write_machine(tmp_path)
    assert machine.granted_cores(root) == 8
    assert (machine.memory_limit(root), machine.memory_available(root)) == (16 * GIB, 12 * GIB)


@pytest.mark.parametrize(("quota", "expected"), [("max", 8), ("150000", 2), ("1000", 1), ("900000", 8), ("-", 8)])
def test_the_cpu_quota_of_cgroup_v2_is_rounded_up(tmp_path: Path, quota: str, expected: int) -> None:
    root = write_machine(tmp_path, mounts=V2_MOUNT, groups="0::/a\n", files={"a/cpu.max": f"{quota} 100000\n"})
    assert machine.granted_cores(root) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("250000", 5)])
def test_the_cpu_quota_of_cgroup_v1_is_rounded_up(tmp_path: Path, quota: str, expected: int) -> None:
    files = {"cpu/a/cpu.cfs_quota_us": quota, "cpu/a/cpu.cfs_period_us": "50000"}
    root = write_machine(tmp_path, mounts=V1_MOUNT.format("cpu"), groups="1:cpu:/a\n", files=files)
    assert machine.granted_cores(root) == expected


def test_controllers_of_one_hierarchy_have_the_same_cgroup(tmp_path: Path) -> None:
    root = write_machine(tmp_path, groups="4:cpu,cpuacct:/a\n0::/b\n")
    assert machine.cgroup_paths(root) == {"cpu": "/a", "cpuacct": "/a", "": "/b"}


def test_limits_of_parent_cgroups_count(tmp_path: Path) -> None:
    files = {
        "cpu.max": "300000 100000",
        "a/b/cpu.max": "max 100000",
        "a/memory.max": str(4 * GIB),
        "a/memory.current": str(3 * GIB),
        "a/memory.stat": f"anon 7\ninactive_file {GIB}\n",
        "a/b/memory.max": "max",
    }
    root = write_machine(tmp_path, mounts=V2_MOUNT, groups="0::/a/b\n", files=files)
    assert machine.granted_cores(root) == 3
    assert machine.memory_limit(root) == 4 * GIB
    # 3 GiB are in use, of which 1 GiB is reclaimable cache. The rest of the limit is available.
    assert machine.memory_available(root) == 2 * GIB


def test_memory_limits_of_cgroup_v1_count(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": UNLIMITED,
        "memory/a/memory.limit_in_bytes": str(2 * GIB),
        "memory/a/memory.usage_in_bytes": str(3 * GIB),
        "memory/a/memory.stat": f"cache 1\ntotal_inactive_file {GIB // 2}\n",
    }
    root = write_machine(tmp_path, mounts=V1_MOUNT.format("memory"), groups="4:memory:/a\n", files=files)
    assert machine.memory_limit(root) == 2 * GIB
    assert machine.memory_available(root) == 0  # 2.5 GiB are in use without the reclaimable cache


def test_a_cgroup_outside_the_mounted_part_has_the_limits_of_the_mounted_root(tmp_path: Path) -> None:
    mounts = V2_MOUNT.replace(" / ", " /box ", 1)
    root = write_machine(tmp_path, mounts=mounts, groups="0::/elsewhere\n", files={"cpu.max": "100000 100000"})
    assert machine.granted_cores(root) == 1


def test_this_machine_has_cores_and_memory() -> None:
    assert 1 <= machine.granted_cores() <= 8  # the fixture grants eight
    assert 0 < machine.memory_available() <= machine.memory_limit()


@pytest.mark.parametrize(
    ("limits", "granted", "new_limits"),
    [
        ((100, 1000), 500, (500, 1000)),
        ((100, 300), 300, (300, 300)),
        ((800, 1000), 800, (800, 1000)),
        ((100, resource.RLIM_INFINITY), 500, (500, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), sys.maxsize, (resource.RLIM_INFINITY,) * 2),
    ],
)
def test_the_descriptor_limit_is_raised_to_500_or_the_hard_limit(
    limits: tuple[int, int], granted: int, new_limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits are pairs of the soft and the hard limit."""
    current = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: current[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: current.append(pair))
    assert machine.raise_fd_limit(500) == granted
    assert current[-1] == new_limits
