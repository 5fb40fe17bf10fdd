"""Demotion and promotion of all threads of a call."""

from __future__ import annotations

import errno
import os

import pytest

from sandbox.executor import process_tree
from sandbox.executor.process_tree import CpuPriority, ProcessTree
from sandbox.jail import IdleCgroup
from tests.executor.test_process_tree import CHILDREN, THREADS, Members, running


def test_all_threads_are_demoted_and_promoted() -> None:
    priority = CpuPriority()
    if not priority.can_change:
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
    """The process that is listed last may be the one that computes, so it is demoted like all others."""
    priority = CpuPriority()
    if not priority.can_change:
        pytest.skip("needs CAP_SYS_NICE in the initial user namespace")
    with running(THREADS, str(3 * process_tree.MAX_SAMPLED_THREADS)) as pid, running(THREADS, "0") as last:
        tree = ProcessTree(pid, Members(pid, last) if has_cgroup else None)
        for is_demoted, policy in ((True, os.SCHED_IDLE), (False, os.SCHED_OTHER)):
            for _ in range(2):
                assert tree.sample() is None
                priority.apply(tree, is_demoted=is_demoted)
            tids = process_tree._thread_ids(pid) + ([last] if has_cgroup else [])
            assert {os.sched_getscheduler(tid) for tid in tids} == {policy}


class FakeIdleCgroup(IdleCgroup):
    """Records the moves of threads as pairs of thread id and `inside`."""

    def __init__(self, errno_by_tid: dict[int, int] | None = None) -> None:
        self.moves: list[tuple[int, bool]] = []
        self.errno_by_tid = errno_by_tid or {}
        """Threads whose moves fail, and with which error."""

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
    assert not priority.can_change
    assert len(caplog.records) == 1
