"""Real control groups: what the kernel counts and bounds in them, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import Tree, cgroups

MIB = 1 << 20
DEADLINE_S = 60


@pytest.fixture
def tree() -> Iterator[Tree]:
    try:
        made = Tree(2)
    except IsolationError as why:
        pytest.skip(str(why))
    yield made
    made.close()


def folders(made: Tree) -> list[Path]:
    return [Path(folder) for folder in made._locks]


def inside(made: Tree, slot: int, what: Callable[[], object]) -> int:
    """Do that in a process in the slot's group; its exit status."""
    doors = made.doors(slot)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for door in doors:
                os.write(door, b"0")
            code = 0 if what() is not False else 2
        finally:
            os._exit(code)
    for door in doors:
        os.close(door)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fill(mib: int) -> None:
    assert bytearray(b"x") * (mib * MIB)


def fork_and_fill(mib: int) -> None:
    child = os.fork()
    if child == 0:
        fill(mib)
        os._exit(0)
    os.waitpid(child, 0)


def test_memory_of_all_processes_is_counted_call_by_call(tree: Tree) -> None:
    group = tree.groups[0]
    for mib in (40, 5):
        group.begin(512 * MIB, 64)
        assert inside(tree, 0, lambda mib=mib: fork_and_fill(mib)) == 0
        spent = group.end()
        if spent.peak_bytes is None:
            pytest.skip("this kernel's peak of a group cannot be reset")
        assert mib * MIB <= spent.peak_bytes < (mib + 20) * MIB
        assert not spent.was_oom


def test_cpu_time_of_children_that_nobody_waited_for_is_counted(tree: Tree) -> None:
    def work() -> None:
        readable, writable = os.pipe()
        if os.fork() == 0:
            while sum(os.times()[:2]) < 0.3:
                pass
            os.write(writable, b".")
            os._exit(0)
        os.read(readable, 1)

    group = tree.groups[0]
    group.begin(512 * MIB, 64)
    assert inside(tree, 0, work) == 0
    spent = group.end()
    if spent.cpu_ms is None:
        pytest.skip("no hierarchy of cpuacct is mounted")
    assert spent.cpu_ms >= 290
    assert (group.end().cpu_ms or 0) < 100, "it starts anew"


def test_too_much_memory_kills_and_is_told_from_any_other_kill(tree: Tree) -> None:
    group = tree.groups[0]
    group.begin(32 * MIB, 64)
    assert inside(tree, 0, lambda: fill(64)) == -signal.SIGKILL
    assert group.end().was_oom
    group.begin(32 * MIB, 64)
    assert inside(tree, 0, lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
    spent = group.end()
    assert not spent.was_oom
    assert not spent.was_squeezed


def test_memory_that_lacks_elsewhere_is_not_the_calls_doing(tree: Tree) -> None:
    limit = folders(tree)[0] / tree._dialect.limit
    limit.write_text(str(32 * MIB))
    group = tree.groups[0]
    group.begin(512 * MIB, 64)
    assert inside(tree, 0, lambda: fill(64)) == -signal.SIGKILL
    spent = group.end()
    assert spent.was_squeezed
    assert not spent.was_oom


def test_limits_follow_the_call(tree: Tree) -> None:
    group = tree.groups[0]
    for limit, ends in ((32, -signal.SIGKILL), (256, 0), (32, -signal.SIGKILL), (1 << 40, 0)):
        group.begin(limit * MIB, 10**9)
        assert inside(tree, 0, lambda: fill(64)) == ends


def test_processes_are_bounded_whoever_they_belong_to(tree: Tree) -> None:
    def bomb() -> bool:
        born = 0
        readable, _writable = os.pipe()
        try:
            while born < 20:
                if os.fork() == 0:
                    os.read(readable, 1)  # never
                born += 1
        except BlockingIOError:
            pass
        return born == 4

    group = tree.groups[0]
    group.begin(512 * MIB, 5)
    assert inside(tree, 0, bomb) == 0
    assert not group.is_empty, "they wait for what never comes"
    assert tree.groups[1].is_empty
    group.kill()
    wait_empty(tree, 0)


def wait_empty(made: Tree, slot: int) -> None:
    """They are nobody's children here, so the kernel's count is all there is to watch."""
    deadline = time.monotonic() + DEADLINE_S
    while not made.groups[slot].is_empty:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_tree_leaves_nothing_even_with_somebody_inside(tree: Tree) -> None:
    places = folders(tree)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as sleeper:
        for folder in places:
            (folder / "1" / "cgroup.procs").write_text(str(sleeper.pid))
        descriptors = len(os.listdir("/proc/self/fd"))
        tree.close()
        assert sleeper.wait(DEADLINE_S) == -signal.SIGKILL
    assert not any(folder.exists() for folder in places)
    assert len(os.listdir("/proc/self/fd")) < descriptors
    tree.close()


def test_the_tree_of_a_killed_owner_is_removed_by_the_next_and_that_of_a_living_one_is_not(tree: Tree) -> None:
    code = "from sandbox.jail import Tree\nt = Tree(1)\nprint(*t._locks, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        left = [Path(folder) for folder in owner.stdout.readline().decode().split()]
        assert left
        Tree(1).close()
        assert all(folder.exists() for folder in left)
        owner.kill()
        owner.wait(DEADLINE_S)
        Tree(1).close()
        assert not any(folder.exists() for folder in left)
    assert all(folder.exists() for folder in folders(tree))


def test_too_few_descriptors_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups.resource, "getrlimit", lambda _what: (1024, 1024))
    with pytest.raises(IsolationError, match=r"1000 slots need \d+ descriptors, got 1024; raise ulimit -n"):
        Tree(1000)


def test_no_hierarchies_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_mounts", lambda: iter([("/", "/", "ext4", "rw")]))
    with pytest.raises(IsolationError, match="2: it is not mounted; version 1: no hierarchy of memory or pids is"):
        Tree(1)


@pytest.mark.parametrize(
    ("own", "mounts", "expected"),
    [
        ([("memory", "/a/b")], [("/", "/m", "cgroup", "rw,memory")], {"memory": "/m/a/b"}),
        ([("memory", "/docker/x")], [("/docker/x", "/m", "cgroup", "rw,memory")], {"memory": "/m"}),
        ([("memory", "/docker/x/y")], [("/docker/x", "/m", "cgroup", "rw,memory")], {"memory": "/m/y"}),
        ([("memory", "/docker/x")], [("/docker/other", "/m", "cgroup", "rw,memory")], {"memory": "/m"}),
        ([("cpu", "/"), ("cpuacct", "/")], [("/", "/c", "cgroup", "rw,cpu,cpuacct")], {"cpu": "/c", "cpuacct": "/c"}),
        ([("", "/s")], [("/", "/u", "cgroup2", "rw"), ("/", "/again", "cgroup2", "rw")], {"": "/u/s"}),
        ([("", "/")], [("/", "/x", "tmpfs", "rw")], {}),
    ],
)
def test_own_groups_are_found_where_they_are_mounted(
    own: list[tuple[str, str]],
    mounts: list[tuple[str, str, str, str]],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "_own_paths", lambda: iter(own))
    monkeypatch.setattr(cgroups, "_mounts", lambda: iter(mounts))
    assert cgroups.own_folders() == expected
