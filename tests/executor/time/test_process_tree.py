"""Tests of samples: what one reading of /proc returns for the processes of one call. The processes are real."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sandbox.executor.time import process_tree
from sandbox.executor.time.process_tree import ProcessTree, pid_of_pidfd
from sandbox.jail.syscalls import NUMBERS

OWN_PID = os.getpid()
NO_PID = 2**22 + 1
"""Larger than any pid (PID_MAX_LIMIT of the kernel)."""
THREADS = """
import sys, threading
for _ in range(int(sys.argv[1])):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
input()
"""
"""Code that starts as many threads as its argument says."""
CHILDREN = """
import os
readable, writable = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        if os.fork() == 0:
            os.write(writable, b".")
        os.read(0, 1)
        os._exit(0)
for _ in range(3):
    os.read(readable, 1)
print(flush=True)
input()
"""
"""Code that starts three child processes, each of which starts one child process."""


@contextmanager
def running(code: str, *arguments: str) -> Iterator[int]:
    """Start a process, wait for its first line of output, and end it and its children afterwards."""
    argv = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate(b"\n")


@pytest.mark.parametrize(
    ("state", "flags", "is_runnable", "is_exiting"),
    [
        (b"D", 4, True, True),
        (b"R", 4, True, True),
        (b"R", 0, True, False),
        (b"D", 0, False, False),
        (b"S", 4, True, True),
        (b"S", 0, False, False),
    ],
)
def test_an_exiting_process_is_runnable_and_not_asleep(
    monkeypatch: pytest.MonkeyPatch, state: bytes, flags: int, is_runnable: bool, is_exiting: bool
) -> None:
    """Flag 4 is PF_EXITING. An exiting process may wait for locks of the kernel. This time must not count as sleep of
    the call."""
    read_stat = process_tree._read_stat

    def read_changed_stat(path: str) -> list[bytes]:
        fields = read_stat(path)
        fields[process_tree._STAT_STATE] = state
        fields[process_tree._STAT_FLAGS] = b"%d" % (int(fields[process_tree._STAT_FLAGS]) | flags)
        return fields

    with running("print(flush=True); input()") as pid:
        monkeypatch.setattr(process_tree, "_read_stat", read_changed_stat)
        tree = ProcessTree(pid)
        sample = tree.sample()
        assert sample is not None
        assert sample[pid].is_runnable == is_runnable
        assert sample[pid].threads[pid].is_exiting == tree.is_exiting == is_exiting


def test_a_pidfd_gives_the_pid_while_its_process_exists() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        fd = os.pidfd_open(child.pid)
        assert pid_of_pidfd(fd) == child.pid
        child.kill()
        child.wait()
        assert pid_of_pidfd(fd) is None
        os.close(fd)
    with open(os.devnull) as null:
        assert pid_of_pidfd(null.fileno()) is None


def test_every_thread_and_process_is_sampled() -> None:
    with running(THREADS, "5") as pid:
        sample = ProcessTree(pid).sample()
        assert sample is not None
        assert list(sample) == [pid]
        assert len(sample[pid].threads) == 6
        assert sample[pid].parent == OWN_PID
        # The threads were sampled after the process, and may have run meanwhile. So compare with the time afterwards.
        cpu_s = time.clock_gettime(~pid << 3 | 2)
        assert 0 < sum(thread.cpu_s for thread in sample[pid].threads.values()) <= cpu_s + 1e-6
        assert 0 < sample[pid].cpu_s <= cpu_s
        assert 0 <= sample[pid].age_s < 600
    with running(CHILDREN) as pid:
        sample = ProcessTree(pid).sample()
        assert sample is not None
        assert len(sample) == 7
        assert next(iter(sample)) == pid
        assert sum(process.parent == pid for process in sample.values()) == 3


def test_a_running_process_is_runnable_and_its_cpu_time_grows() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        tree = ProcessTree(process.pid)
        while not (sample := tree.sample()) or sample[process.pid].cpu_s < 0.1:
            pass
        assert sample[process.pid].is_runnable
        assert tree.cpu_s >= 0.1
        (thread,) = sample[process.pid].threads.values()
        assert thread.timeslices > 0
        process.kill()


def test_voluntary_switches_are_read_once_per_timeslice(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read the voluntary switches of a thread takes as long as the rest of its sample. They cannot change without a
    new timeslice."""
    code = "import time\nfor _ in range(50): time.sleep(0.001)\nprint(flush=True)\nwhile True: pass"
    timeslices, reads = 0, 0
    read = process_tree._read

    def count_reads(path: str) -> bytes:
        nonlocal reads
        if path.endswith("/schedstat"):  # the last number in this file is the number of timeslices
            return b"%b %d" % (read(path).rpartition(b" ")[0], timeslices)
        reads += path.endswith("/status")
        return read(path)

    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            monkeypatch.setattr(process_tree, "_read", count_reads)
            tree = ProcessTree(child.pid)
            for count, expected_reads in ((7, 1), (7, 1), (8, 2), (8, 2)):
                timeslices = count
                sample = tree.sample()
                assert sample is not None
                assert sample[child.pid].threads[child.pid].voluntary_switches >= 50
                assert reads == expected_reads
        finally:
            child.kill()


class Members:
    """A fake cgroup that contains these processes."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids

    def other_pids(self, first: int) -> list[int]:
        return [pid for pid in self._pids if pid != first]

    def thread_ids(self) -> list[int]:
        return [tid for pid in self._pids for tid in process_tree._thread_ids(pid)]


def test_the_members_of_the_cgroup_are_sampled_and_the_first_process_comes_first() -> None:
    invisible = 0
    with running(THREADS, "0") as pid, running(THREADS, "0") as other:
        sample = ProcessTree(pid, Members(other, pid, invisible, NO_PID)).sample()
        assert sample is not None
        assert list(sample) == [pid, other]


def test_the_sample_of_an_ended_process_is_empty() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
        assert ProcessTree(child.pid).sample() == {}
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ProcessTree(child.pid).sample() == {}, "a zombie has ended"
    child.wait()


def test_a_process_whose_main_thread_has_ended_is_sampled() -> None:
    code = """
import ctypes, sys, threading, time
def second_thread():
    while not open("/proc/self/stat").read().rpartition(")")[2].startswith(" Z"):
        time.sleep(0.001)
    print(flush=True)
    input()
    import os; os._exit(0)
threading.Thread(target=second_thread).start()
ctypes.CDLL(None).syscall(int(sys.argv[1]), 0)  # exit(2) of this thread alone
"""
    with running(code, str(NUMBERS[os.uname().machine]["exit"])) as pid:
        sample = ProcessTree(pid).sample()
        assert sample
        assert len(sample[pid].threads) == 2, "the ended main thread and the other one"


def test_a_call_with_too_many_threads_is_not_sampled_any_more() -> None:
    with running(THREADS, str(process_tree.MAX_SAMPLED_THREADS + 1)) as pid:
        tree = ProcessTree(pid)
        assert tree.sample() is None
        assert tree.cpu_s == math.inf, "its CPU time is not known"
        with running(THREADS, "0") as other:
            tree.root = other
            assert tree.sample() is None, "the number of threads is small again, but this is not looked at"


def test_a_call_is_not_sampled_if_the_kernel_does_not_count_run_delay_but_its_threads_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_tree, "counts_run_delay", lambda: False)
    with running(THREADS, "2") as pid:
        tree = ProcessTree(pid)
        assert tree.sample() is None
        assert len(tree._policy_by_thread) == 3, "the main thread and two others"
        assert tree.cpu_s == math.inf


def test_run_delay_counts_only_if_schedstat_has_other_numbers_than_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_path: str) -> bytes:
        raise FileNotFoundError

    for read, counts in (
        (lambda _path: b"12 0 1\n", True),
        (lambda _path: b"0 0 0\n", False),
        (missing, False),
    ):
        monkeypatch.setattr(process_tree, "_read", read)
        assert process_tree.counts_run_delay() is counts


STARTS_AND_ENDS_THREADS = """
import _thread, threading, time
for _ in range(40):
    _thread.start_new_thread(time.sleep, (1000,))
print(flush=True)
at_most_20 = threading.Semaphore(20)
def short_thread():
    time.sleep(0.0005)
    at_most_20.release()
while at_most_20.acquire():
    _thread.start_new_thread(short_thread, ())
"""


def test_a_process_is_sampled_while_its_threads_start_and_end() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS_AND_ENDS_THREADS], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            tree, samples_with_ended_threads = ProcessTree(process.pid), 0
            for _ in range(50):
                listed = len(process_tree._thread_ids(process.pid))
                sample = tree.sample()
                assert sample is not None
                assert len(sample[process.pid].threads) > 40, "those that do not end are all in the sample"
                samples_with_ended_threads += listed > len(sample[process.pid].threads)
            assert samples_with_ended_threads, "no thread has ended during a sample, so the test has tested nothing"
        finally:
            process.kill()
