"""Tests of demotion and promotion, which change the priority of all threads of a long call.

To demote is to put the threads at SCHED_IDLE, to promote is to put them back. Without CAP_SYS_NICE, to demote is to
raise their nice values.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable

import pytest

from bench.probes import processes
from sandbox.executor.time import process_tree
from sandbox.executor.time.process_tree import CpuPriority, ProcessTree, nice_of_long_calls
from sandbox.jail import IdleCgroup
from sandbox.jail.userns import NOBODY
from tests.executor.time.test_process_tree import CHILDREN, THREADS, Members, running


def test_all_threads_are_demoted_and_promoted() -> None:
    priority = CpuPriority()
    if not priority.can_promote:
        pytest.skip("needs CAP_SYS_NICE in the initial user namespace")
    # `THREADS` starts as many threads as its argument says; `CHILDREN` starts three children with one child each.
    for code, count in ((THREADS, 1 + 4), (CHILDREN, 1 + 3 + 3)):
        with running(code, "4") as pid:
            tree = ProcessTree(pid)
            for is_demoted, policy in ((True, os.SCHED_IDLE), (False, os.SCHED_OTHER)):
                tree.sample()
                priority.apply(tree, is_demoted=is_demoted)
                tree.sample()
                assert len(tree._policy_by_thread) == count, "the threads of the last sample"
                assert {os.sched_getscheduler(tid) for tid in tree._policy_by_thread} == {policy}


@pytest.mark.parametrize("has_cgroup", [True, False])
def test_a_call_with_too_many_threads_is_demoted_as_a_whole(has_cgroup: bool) -> None:
    """Any process of the call may be the process that computes. So all of them are demoted, also the last one in the
    list."""
    priority = CpuPriority()
    if not priority.can_promote:
        pytest.skip("needs CAP_SYS_NICE in the initial user namespace")
    with running(THREADS, str(3 * process_tree.MAX_SAMPLED_THREADS)) as pid, running(THREADS, "0") as last:
        tree = ProcessTree(pid, Members(pid, last) if has_cgroup else None)
        for is_demoted, policy in ((True, os.SCHED_IDLE), (False, os.SCHED_OTHER)):
            for _ in range(2):
                assert tree.sample() is None
                priority.apply(tree, is_demoted=is_demoted)
            tids = process_tree._thread_ids(pid) + ([last] if has_cgroup else [])
            assert {os.sched_getscheduler(tid) for tid in tids} == {policy}


def nice_values(tids: Iterable[int]) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, tid) for tid in tids}


def wait_until_asleep(tids: Iterable[int]) -> None:
    """Wait until these threads sleep. The nice value of long calls depends on the number of their runnable threads, and
    a thread that has just started is runnable."""
    for tid in tids:
        while processes.state(tid) != "S":
            time.sleep(0.001)


def run_as_ordinary_user(code: Callable[[], int]) -> int:
    """Run `code` in a child process of an ordinary user, without capabilities. Return the number that it returns."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            status = code()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def demote_own_child() -> int:
    """Start a child process, which starts a child of its own. Demote both processes, and then try to promote them.
    Return how many of the two have the nice value of a long call at the end."""
    ready_r, ready_w = os.pipe()
    child = os.fork()
    if child == 0:
        os.fork()
        os.write(ready_w, f"{os.getpid():8}".encode())
        while True:
            signal.pause()
    wait_until_asleep([int(os.read(ready_r, 8)) for _ in range(2)])
    priority, tree = CpuPriority(), ProcessTree(child)
    for is_demoted in (True, False):
        tree.sample()
        priority.apply(tree, is_demoted=is_demoted)
    nice = nice_of_long_calls(0, os.getpriority(os.PRIO_PROCESS, 0))
    demoted = [pid for pid in tree._nice_by_thread if os.getpriority(os.PRIO_PROCESS, pid) == nice]
    for pid in tree._nice_by_thread:
        os.kill(pid, signal.SIGKILL)
    return len(demoted)


def test_an_ordinary_user_demotes_all_processes_of_its_long_calls() -> None:
    if os.getpriority(os.PRIO_PROCESS, 0) == process_tree.MAX_NICE:
        pytest.skip("the tests run at the highest nice value")
    assert run_as_ordinary_user(demote_own_child) == 2, "the child and the grandchild"


@pytest.mark.parametrize("threads", [4, 3 * process_tree.MAX_SAMPLED_THREADS])
def test_without_cap_sys_nice_all_threads_get_a_higher_nice_value_and_keep_it(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_tree, "can_restore_priority", lambda: False)
    priority, own_nice = CpuPriority(), os.getpriority(os.PRIO_PROCESS, 0)
    with running(THREADS, str(threads)) as pid:
        tree = ProcessTree(pid)
        tids = process_tree._thread_ids(pid)
        wait_until_asleep(tids)
        tree.sample()
        priority.apply(tree, is_demoted=False)
        assert nice_values(tids) == {own_nice}, "the call was never demoted"
        for is_demoted in (True, False, True):
            tree.sample()
            priority.apply(tree, is_demoted=is_demoted)
            sleeping = threads <= process_tree.MAX_SAMPLED_THREADS
            assert nice_values(tids) == {nice_of_long_calls(0 if sleeping else threads + 1, own_nice)}
        assert {os.sched_getscheduler(tid) for tid in tids} == {os.SCHED_OTHER}
    assert priority.can_demote


def test_sessions_that_a_call_has_started_get_a_higher_nice_value_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel divides the cores between sessions (autogroup), the nice value of a thread counts only within
    its session. So the session needs a higher nice value as well."""
    if not os.path.exists("/proc/self/autogroup"):
        pytest.skip("the kernel has no CONFIG_SCHED_AUTOGROUP")
    monkeypatch.setattr(process_tree, "can_restore_priority", lambda: False)
    priority, nice = CpuPriority(), nice_of_long_calls(0, os.getpriority(os.PRIO_PROCESS, 0))

    def autogroup(pid: int) -> str:
        with open(f"/proc/{pid}/autogroup") as file:
            return file.read()  # /autogroup-123 nice 0

    own = autogroup(os.getpid())
    with running("import os\nos.setsid()\n" + THREADS, "0") as session, running(THREADS, "0") as without_session:
        for pid in (session, without_session):
            wait_until_asleep([pid])
            tree = ProcessTree(pid)
            tries = 0
            while not tries or (pid == session and not autogroup(pid).endswith(f" nice {nice}\n")):
                tree.sample()
                priority.apply(tree, is_demoted=True)
                tries += 1
                assert tries < 20_000, "the session of the call keeps its nice value"
        assert nice_values([session, without_session]) == {nice}
    assert autogroup(os.getpid()) == own, "the session of the zygote is changed"


def test_the_long_threads_of_a_core_together_have_a_quarter_of_the_weight_of_one_short_call() -> None:
    for threads_per_core in (1, 2, 5, 12):
        weight = threads_per_core * process_tree.WEIGHT_PER_NICE ** -nice_of_long_calls(threads_per_core)
        assert 0.25 / process_tree.WEIGHT_PER_NICE < weight <= 0.25
    assert nice_of_long_calls(0.1) == nice_of_long_calls(1), "a single long call is demoted too"
    assert nice_of_long_calls(1, own_nice=5) == 5 + nice_of_long_calls(1)
    assert nice_of_long_calls(1000) == nice_of_long_calls(1, own_nice=15) == process_tree.MAX_NICE


def test_each_long_call_is_demoted_further_the_more_threads_all_long_calls_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nice: list[int] = []
    monkeypatch.setattr(process_tree, "can_restore_priority", lambda: False)
    monkeypatch.setattr(ProcessTree, "raise_nice", lambda _tree, value: nice.append(value))
    priority, trees = CpuPriority(cores=2), [ProcessTree(pid) for pid in (1, 2)]
    for tree, runnable_threads in zip((*trees, trees[0]), (2, 8, 12), strict=True):
        tree.runnable_threads = runnable_threads
        priority.apply(tree, is_demoted=True)
    priority.forget(trees[1])
    priority.apply(trees[0], is_demoted=True)
    own_nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == [nice_of_long_calls(threads / 2, own_nice) for threads in (2, 2 + 8, 12 + 8, 12)]


class FakeIdleCgroup(IdleCgroup):
    """Records the moves of threads as pairs of thread id and `inside`."""

    def __init__(self, errno_by_tid: dict[int, int] | None = None) -> None:
        self.moves: list[tuple[int, bool]] = []
        self.errno_by_tid = errno_by_tid or {}
        """By thread id: the error with which the move of the thread fails."""

    def move(self, tid: int, *, inside: bool) -> None:
        if error_number := self.errno_by_tid.get(tid):
            raise OSError(error_number, os.strerror(error_number))
        self.moves.append((tid, inside))

    def pop_moves(self) -> list[tuple[int, bool]]:
        """Return the moves since the last call of this method, in the order of thread ids."""
        moves, self.moves = sorted(self.moves), []
        return moves


def test_threads_started_since_the_last_sample_are_moved_with_the_next() -> None:
    tree, idle_cgroup = ProcessTree(1), FakeIdleCgroup()
    tree._policy_by_thread = {1: 0}
    tree.move_to_idle_cgroup(idle_cgroup, inside=False)
    assert idle_cgroup.pop_moves() == [], "no thread was ever in the idle cgroup"
    tree.move_to_idle_cgroup(idle_cgroup, inside=True)
    assert idle_cgroup.pop_moves() == [(1, True)]
    tree._policy_by_thread = {1: 0, 2: 0}  # thread 1 has started thread 2, which therefore is in the idle cgroup
    tree.move_to_idle_cgroup(idle_cgroup, inside=False)
    assert idle_cgroup.pop_moves() == [(1, False), (2, False)]
    tree._policy_by_thread = {1: 0, 2: 0, 3: 0}  # thread 1 started thread 3 before it was moved back
    tree.move_to_idle_cgroup(idle_cgroup, inside=False)
    assert idle_cgroup.pop_moves() == [(3, False)]
    tree.move_to_idle_cgroup(idle_cgroup, inside=False)
    assert idle_cgroup.pop_moves() == []


def test_only_a_limited_number_of_threads_is_moved_at_once() -> None:
    tree, idle_cgroup = ProcessTree(1), FakeIdleCgroup()
    limit = process_tree.MAX_SAMPLED_THREADS
    tree._policy_by_thread = dict.fromkeys(range(1, 2 * limit + 44), 0)
    moved = []
    for _ in range(4):
        tree.move_to_idle_cgroup(idle_cgroup, inside=True)
        moved.append(len(idle_cgroup.pop_moves()))
    assert moved == [limit, limit, 43, 0]


def test_a_thread_that_cannot_be_moved_yet_is_moved_later() -> None:
    tree, idle_cgroup = ProcessTree(1), FakeIdleCgroup({2: errno.EINVAL, 3: errno.ESRCH})
    tree._policy_by_thread = {1: 0, 2: 0, 3: 0}
    tree.move_to_idle_cgroup(idle_cgroup, inside=True)
    assert idle_cgroup.pop_moves() == [(1, True)]
    idle_cgroup.errno_by_tid.clear()
    tree.move_to_idle_cgroup(idle_cgroup, inside=True)
    assert idle_cgroup.pop_moves() == [(2, True), (3, True)]
    idle_cgroup.errno_by_tid = {4: errno.EACCES}
    tree._policy_by_thread = {4: 0}
    with pytest.raises(PermissionError):
        tree.move_to_idle_cgroup(idle_cgroup, inside=True)


def test_without_the_permission_no_priority_is_changed_and_one_line_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(process_tree, "can_restore_priority", lambda: True)
    priority = CpuPriority()
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with running(THREADS, "0") as pid:
        tree = ProcessTree(pid)
        tree.sample()
        for _ in range(3):
            priority.apply(tree, is_demoted=True)
    assert not priority.can_demote
    assert len(caplog.records) == 1
