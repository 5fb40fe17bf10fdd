"""What /proc says of a call's processes, and that they can be made to give way."""

from __future__ import annotations

import errno
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sandbox.executor import process_tree
from sandbox.executor.process_tree import CpuPriority, ProcessTree, pid_of_pidfd
from sandbox.executor.virtual_clock import VirtualClock
from sandbox.jail import IdleCgroup

HERE = os.getpid()
THREADS = """
import sys, threading
for _ in range(int(sys.argv[1])):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
input()
"""
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


@contextmanager
def running(code: str, *arguments: str) -> Iterator[int]:
    """A process that has said that it is ready; ended, with what it has started, at the end."""
    argv = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate(b"\n")


@pytest.mark.parametrize(
    ("state", "flags", "is_ready"),
    [(b"D", 4, True), (b"R", 4, True), (b"D", 0, False), (b"S", 4, True), (b"S", 0, False)],
)
def test_what_is_about_to_end_sleeps_no_more(
    monkeypatch: pytest.MonkeyPatch, state: bytes, flags: int, is_ready: bool
) -> None:
    """It runs no code any more, and how long it waits for others to end is not the call's time."""
    read = process_tree._read_stat

    def changed(path: str) -> list[bytes]:
        fields = read(path)
        fields[process_tree._STAT_STATE], fields[process_tree._STAT_FLAGS] = (
            state,
            b"%d" % (int(fields[process_tree._STAT_FLAGS]) | flags),
        )
        return fields

    with running("print(flush=True); input()") as pid:
        monkeypatch.setattr(process_tree, "_read_stat", changed)
        look = ProcessTree(pid).sample()
        assert look is not None
        assert look[pid].is_runnable == is_ready


def test_a_pidfd_leads_to_its_process_while_there_is_one() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        fd = os.pidfd_open(child.pid)
        assert pid_of_pidfd(fd) == child.pid
        child.kill()
        child.wait()
        assert pid_of_pidfd(fd) is None
        os.close(fd)
    with open(os.devnull) as null:
        assert pid_of_pidfd(null.fileno()) == process_tree.UNKNOWN_PID


def hide(monkeypatch: pytest.MonkeyPatch, *ends: str) -> None:
    """Files of /proc that a kernel may lack, by how their paths end."""
    read = process_tree._read

    def hidden(path: str) -> bytes:
        if path.endswith(ends):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return read(path)

    monkeypatch.setattr(process_tree, "_read", hidden)


def test_a_pidfd_whose_number_the_kernel_does_not_give_leads_to_a_child_of_its_zygote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = process_tree._read
    monkeypatch.setattr(process_tree, "_read", lambda path: b"" if "fdinfo" in path else read(path))
    with subprocess.Popen(["sleep", "1000"]) as child:
        fd = os.pidfd_open(child.pid)
        assert pid_of_pidfd(fd, HERE, child.pid) == child.pid, "here a process has one number alone"
        assert pid_of_pidfd(fd, HERE, 2**22 + 1) == process_tree.UNKNOWN_PID
        assert pid_of_pidfd(fd, child.pid, child.pid) == process_tree.UNKNOWN_PID
        monkeypatch.setattr(
            process_tree,
            "_pids_by_namespace",
            lambda pid: [1, 2] if pid == HERE else [pid, 57 if pid == child.pid else 58, 1],
        )
        assert pid_of_pidfd(fd, HERE, 57) == child.pid, "as the zygote's namespace numbers it"
        child.kill()
        child.wait()
        assert pid_of_pidfd(fd, HERE, 57) == process_tree.UNKNOWN_PID
        os.close(fd)


def test_a_call_whose_first_process_is_unknown_has_wall_time_and_gives_way_with_its_group() -> None:
    with running(THREADS, "2") as pid:
        own = ProcessTree(process_tree.UNKNOWN_PID, Members(pid))
        assert own.sample() is None
        assert len(own._policy_by_thread) == 3
        assert own.cpu_s == math.inf
        assert ProcessTree(process_tree.UNKNOWN_PID).sample() is None


BUSY = "import os, time\nprint(flush=True)\nwhile True: {what}"


@pytest.mark.parametrize(
    ("what", "error"),
    [("pass", 0.1), ("time.sleep(0.3)", 0.4), ("time.sleep(0.02); [0 for _ in range(400_000)]", 0.6)],
    ids=["computes", "sleeps", "does both"],
)
def test_without_counted_waits_own_time_is_wall_time_less_an_estimate_of_them(
    what: str, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six others want the same core, so that it waits most of the time that it does not sleep."""
    hide(monkeypatch, "/schedstat")
    assert not process_tree.counts_run_delay()
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=on_one_core) for _ in range(6)]
    argv = [sys.executable, "-c", BUSY.format(what=what)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, preexec_fn=on_one_core) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            own, calls, wall_s = VirtualClock(2), ProcessTree(child.pid), 0.0
            start = time.monotonic() - process_tree._age_s(process_tree._read_stat(f"/proc/{child.pid}/stat"))
            while wall_s < 3:
                time.sleep(random.uniform(0.05, 0.15))
                wall_s, look = time.monotonic() - start, calls.sample()
                assert look
                own.advance(wall_s, look, calls.cpu_s)
            assert own.elapsed_s == pytest.approx(wall_s - counted_wait_s(child.pid), rel=error, abs=0.15)
        finally:
            for one in (child, *others):
                one.kill()
                one.wait()


def on_one_core() -> None:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


def counted_wait_s(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


def test_every_thread_and_process_is_seen() -> None:
    with running(THREADS, "5") as pid:
        look = ProcessTree(pid).sample()
        assert look is not None
        assert list(look) == [pid]
        assert len(look[pid].threads) == 6
        assert look[pid].parent == HERE
        assert look[pid].cpu_s + 1e-6 >= sum(thread.cpu_s for thread in look[pid].threads.values()) > 0
        assert 0 <= look[pid].age_s < 600
    with running(CHILDREN) as pid:
        look = ProcessTree(pid).sample()
        assert look is not None
        assert len(look) == 7
        assert next(iter(look)) == pid
        assert sum(process.parent == pid for process in look.values()) == 3


def test_who_runs_is_ready_and_its_time_grows() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        own = ProcessTree(process.pid)
        while not (look := own.sample()) or look[process.pid].cpu_s < 0.1:
            pass
        assert look[process.pid].is_runnable
        assert own.cpu_s >= 0.1
        (thread,) = look[process.pid].threads.values()
        assert thread.timeslices > 0
        process.kill()


def test_how_often_a_thread_has_slept_is_read_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel counts it; to read that takes as long as all else."""
    code = "import time\nfor _ in range(50): time.sleep(0.001)\nprint(flush=True)\nwhile True: pass"
    turns, reads = [7], []
    read = process_tree._read

    def counted(path: str) -> bytes:
        if path.endswith("/schedstat"):
            return b"%b %d" % (read(path).rpartition(b" ")[0], turns[0])
        if path.endswith("/status"):
            reads.append(path)
        return read(path)

    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            monkeypatch.setattr(process_tree, "_read", counted)
            calls = ProcessTree(child.pid)
            for turn, wanted in ((7, 1), (7, 1), (8, 2), (8, 2)):
                turns[0] = turn
                look = calls.sample()
                assert look is not None
                assert look[child.pid].threads[child.pid].voluntary_switches >= 50
                assert len(reads) == wanted
        finally:
            child.kill()


class Members:
    """A group that has these processes."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids

    def other_pids(self, first: int) -> list[int]:
        return [pid for pid in self._pids if pid != first]

    def thread_ids(self) -> list[int]:
        return [tid for pid in self._pids for tid in process_tree._thread_ids(pid)]


def test_a_group_says_who_is_there_and_the_first_is_first() -> None:
    with running(THREADS, "0") as pid, running(THREADS, "0") as other:
        look = ProcessTree(pid, Members(pid, other, 0, 2**22 + 1)).sample()
        assert look is not None
        assert list(look) == [pid, other]


def test_what_has_gone_is_not_there() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
        assert ProcessTree(child.pid).sample() == {}
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ProcessTree(child.pid).sample() == {}, "it is a zombie"
    child.wait()


def test_a_process_whose_first_thread_has_ended_is_still_there() -> None:
    code = """
import ctypes, threading, time
def rest():
    while not open("/proc/self/stat").read().rpartition(")")[2].startswith(" Z"):
        time.sleep(0.001)
    print(flush=True)
    input()
    import os; os._exit(0)
threading.Thread(target=rest).start()
ctypes.CDLL(None).syscall(60, 0)  # exit(2) of this thread alone
"""
    if os.uname().machine != "x86_64":
        pytest.skip("the number of exit(2) is that of x86-64")
    with running(code) as pid:
        look = ProcessTree(pid).sample()
        assert look
        assert len(look[pid].threads) == 2


def test_a_crowd_is_not_looked_at() -> None:
    with running(THREADS, str(process_tree.MAX_SAMPLED_THREADS + 1)) as pid:
        own = ProcessTree(pid)
        assert own.sample() is None
        assert own.cpu_s == math.inf, "of all its time only some is known"
        with running(THREADS, "0") as other:
            own.root = other
            assert own.sample() is None, "what was a crowd once has wall time for good"


CHURN = """
import _thread, threading, time
for _ in range(40):
    _thread.start_new_thread(time.sleep, (1000,))
print(flush=True)
few = threading.Semaphore(20)
def rest():
    time.sleep(0.0005)
    few.release()
while few.acquire():
    _thread.start_new_thread(rest, ())
"""


def test_who_starts_and_ends_threads_without_pause_is_seen_all_the_same() -> None:
    with subprocess.Popen([sys.executable, "-c", CHURN], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            own, vanished = ProcessTree(process.pid), 0
            for _ in range(50):
                listed = len(process_tree._thread_ids(process.pid))
                look = own.sample()
                assert look is not None
                assert len(look[process.pid].threads) > 40
                vanished += listed > len(look[process.pid].threads)
            assert vanished, "no thread has ended while it was looked at, so nothing was tried"
        finally:
            process.kill()


def test_all_threads_give_way_and_come_back() -> None:
    eagerness = CpuPriority()
    if not eagerness.can_change:
        pytest.skip("needs CAP_SYS_NICE in the machine's own user namespace")
    for code, count in ((THREADS, 5), (CHILDREN, 7)):
        with running(code, "4") as pid:
            own = ProcessTree(pid)
            for is_idle, policy in ((True, os.SCHED_IDLE), (False, os.SCHED_OTHER)):
                own.sample()
                eagerness.apply(own, is_demoted=is_idle)
                own.sample()
                assert len(own._policy_by_thread) == count
                assert {os.sched_getscheduler(tid) for tid in own._policy_by_thread} == {policy}


@pytest.mark.parametrize("has_group", [True, False])
def test_a_crowd_gives_way_as_a_whole(has_group: bool) -> None:
    """A process that computes can be the last one of it."""
    eagerness = CpuPriority()
    if not eagerness.can_change:
        pytest.skip("needs CAP_SYS_NICE in the machine's own user namespace")
    with running(THREADS, str(3 * process_tree.MAX_SAMPLED_THREADS)) as pid, running(THREADS, "0") as last:
        own = ProcessTree(pid, Members(pid, last) if has_group else None)
        for is_idle, policy in ((True, os.SCHED_IDLE), (False, os.SCHED_OTHER)):
            for _ in range(2):
                assert own.sample() is None
                eagerness.apply(own, is_demoted=is_idle)
            threads = process_tree._thread_ids(pid) + [last] * has_group
            assert {os.sched_getscheduler(tid) for tid in threads} == {policy}


class FakeIdleCgroup(IdleCgroup):
    """Who was moved to where, in turn; some cannot be."""

    def __init__(self, **refused: int) -> None:
        self.moves: list[tuple[int, bool]] = []
        self.refused = {int(tid[1:]): number for tid, number in refused.items()}

    def move(self, tid: int, *, inside: bool) -> None:
        if number := self.refused.get(tid):
            raise OSError(number, os.strerror(number))
        self.moves.append((tid, inside))

    def taken(self) -> list[tuple[int, bool]]:
        moves, self.moves = sorted(self.moves), []
        return moves


def test_what_has_been_started_since_a_look_is_moved_with_the_others() -> None:
    own, group = ProcessTree(1), FakeIdleCgroup()
    own._policy_by_thread = {1: 0}
    own.move_to_idle_cgroup(group, inside=False)
    assert group.taken() == [], "none was ever inside"
    own.move_to_idle_cgroup(group, inside=True)
    assert group.taken() == [(1, True)]
    own._policy_by_thread = {1: 0, 2: 0}  # by 1, so it began inside
    own.move_to_idle_cgroup(group, inside=False)
    assert group.taken() == [(1, False), (2, False)]
    own._policy_by_thread = {1: 0, 2: 0, 3: 0}  # by 1, before that came out
    own.move_to_idle_cgroup(group, inside=False)
    assert group.taken() == [(3, False)]
    own.move_to_idle_cgroup(group, inside=False)
    assert group.taken() == []


def test_of_a_crowd_some_are_moved_at_a_time() -> None:
    own, group = ProcessTree(1), FakeIdleCgroup()
    own._policy_by_thread = dict.fromkeys(range(1, 300), 0)
    sizes = []
    for _ in range(4):
        own.move_to_idle_cgroup(group, inside=True)
        sizes.append(len(group.taken()))
    assert sizes == [
        process_tree.MAX_SAMPLED_THREADS,
        process_tree.MAX_SAMPLED_THREADS,
        299 - 2 * process_tree.MAX_SAMPLED_THREADS,
        0,
    ]


def test_a_thread_that_cannot_be_moved_yet_is_moved_later() -> None:
    own, group = ProcessTree(1), FakeIdleCgroup(_2=errno.EINVAL, _3=errno.ESRCH)
    own._policy_by_thread = {1: 0, 2: 0, 3: 0}
    own.move_to_idle_cgroup(group, inside=True)
    assert group.taken() == [(1, True)]
    group.refused.clear()
    own.move_to_idle_cgroup(group, inside=True)
    assert group.taken() == [(2, True), (3, True)]
    group.refused = {4: errno.EACCES}
    own._policy_by_thread = {4: 0}
    with pytest.raises(PermissionError):
        own.move_to_idle_cgroup(group, inside=True)


def test_without_the_right_nothing_is_changed_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(process_tree, "can_restore_priority", lambda: True)
    eagerness = CpuPriority()
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with running(THREADS, "0") as pid:
        own = ProcessTree(pid)
        own.sample()
        for _ in range(3):
            eagerness.apply(own, is_demoted=True)
    assert not eagerness.can_change
    assert len(caplog.records) == 1
