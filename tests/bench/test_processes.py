"""Figures from /proc, held beside what this process knows of itself."""

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


def test_cpu_is_counted_while_it_runs_and_after_it_has_ended() -> None:
    meter = processes.Meter(os.getpid())
    start = time.process_time()
    while time.process_time() < start + 0.1:
        pass
    assert meter.own_s() == pytest.approx(time.process_time() - start, abs=0.05)
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert meter.whole_s() - meter.own_s() >= 0.17


def test_descriptors_mounts_and_memory_are_there() -> None:
    before = processes.descriptors(os.getpid())
    with open(os.devnull):
        assert processes.descriptors(os.getpid()) == before + 1
    assert processes.mounts(os.getpid()) > 0
    assert processes.pss_mb([os.getpid()]) > 1


def test_a_file_of_a_control_group_counts_from_the_second_time_on() -> None:
    group = next((file for file in Path("/sys/fs/cgroup").rglob("cgroup.procs")), None)
    if group is None:
        pytest.skip("no control groups are mounted here")
    before = processes.descriptors(os.getpid())
    with open(group):
        assert processes.descriptors(os.getpid()) == before
        with open(group):
            assert processes.descriptors(os.getpid()) == before + 1


def test_a_process_that_is_gone_has_nothing() -> None:
    gone = 1 << 30
    assert processes.tree(gone) == []
    assert (processes.cpu_s([gone]), processes.pss_mb([gone]), processes.descriptors(gone), processes.mounts(gone)) == (
        0,
        0,
        0,
        0,
    )
    assert processes.command(gone) == ""
