"""Values from /proc agree with what this process measures itself."""

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
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert meter.total_s() - meter.own_s() >= 0.17


def test_descriptors_mounts_and_memory_are_counted() -> None:
    before = processes.descriptors(os.getpid())
    with open(os.devnull):
        assert processes.descriptors(os.getpid()) == before + 1
    assert processes.mounts(os.getpid()) > 0
    assert processes.pss_mb([os.getpid()]) > 1


def test_the_first_descriptor_of_a_cgroup_file_is_not_counted() -> None:
    """A server opens a slot's cgroup once and keeps it open, which is no leak."""
    group = next((file for file in Path("/sys/fs/cgroup").rglob("cgroup.procs")), None)
    if group is None:
        pytest.skip("no control groups are mounted here")
    before = processes.descriptors(os.getpid())
    with open(group):
        assert processes.descriptors(os.getpid()) == before
        with open(group):
            assert processes.descriptors(os.getpid()) == before + 1


def test_a_process_that_is_gone_has_no_resources() -> None:
    gone = 1 << 30
    assert processes.tree(gone) == []
    assert (processes.cpu_s([gone]), processes.pss_mb([gone]), processes.descriptors(gone), processes.mounts(gone)) == (
        0,
        0,
        0,
        0,
    )
    assert processes.command(gone) == ""
