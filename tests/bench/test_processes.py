"""Tests of the resources of processes. The values that are read from /proc agree with measurements by other means."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.probes import processes


def test_a_process_and_its_children_are_a_tree() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        tree = processes.tree(os.getpid())
        assert tree[0] == os.getpid()
        assert child.pid in tree
    finally:
        child.communicate(b"\n")
    assert child.pid not in processes.tree(os.getpid())


def test_cpu_time_of_running_and_of_ended_processes_is_counted() -> None:
    meter = processes.CpuMeter(os.getpid())
    start = time.process_time()
    while time.process_time() < start + 0.1:
        pass
    assert meter.own_s() == pytest.approx(time.process_time() - start, abs=0.05)
    use_200_ms = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", use_200_ms], check=True)
    assert meter.total_s() - meter.own_s() >= 0.17  # 0.2 s were used; clock ticks of 10 ms are rounded down


def test_descriptors_mounts_and_memory_are_counted() -> None:
    before = processes.descriptors(os.getpid())
    with open(os.devnull):
        assert processes.descriptors(os.getpid()) == before + 1
    assert processes.mounts(os.getpid()) > 0
    assert processes.pss_mb([os.getpid()]) > 1


def test_the_first_descriptor_of_a_cgroup_file_is_not_counted() -> None:
    """A server opens the cgroup of a slot once and keeps it open. This is no leak."""
    cgroup_file = next(Path("/sys/fs/cgroup").rglob("cgroup.procs"), None)
    if cgroup_file is None:
        pytest.skip("no control groups are mounted here")
    before = processes.descriptors(os.getpid())
    with open(cgroup_file):
        assert processes.descriptors(os.getpid()) == before
        with open(cgroup_file):
            assert processes.descriptors(os.getpid()) == before + 1


def test_a_process_that_is_gone_has_no_resources() -> None:
    gone = 1 << 30  # above the largest pid of Linux
    assert processes.tree(gone) == []
    assert processes.cpu_s([gone]) == processes.pss_mb([gone]) == 0
    assert processes.descriptors(gone) == processes.mounts(gone) == 0
    assert processes.command(gone) == ""
