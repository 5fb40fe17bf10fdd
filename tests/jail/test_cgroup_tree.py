"""Real control groups: what the kernel counts and bounds in them, and that nothing of them is left."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox import machine
from sandbox.errors import IsolationError
from sandbox.jail import CgroupTree, cgroup_tree

MIB = 1 << 20
DEADLINE_S = 60


@pytest.fixture
def tree() -> Iterator[CgroupTree]:
    try:
        made = CgroupTree()
    except IsolationError as why:
        pytest.skip(str(why))
    yield made
    made.close()


def folders(made: CgroupTree) -> list[Path]:
    return [Path(folder) for folder in made._locks]


def inside(made: CgroupTree, slot: int, what: Callable[[], object]) -> int:
    """Do that in a process in the slot's group; its exit status."""
    doors = list(made.open_procs_files(slot))
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


def test_memory_of_all_processes_is_counted_call_by_call(tree: CgroupTree) -> None:
    group = tree.cgroup(0)
    for mib in (40, 80, 5):
        group.set_limits(512 * MIB, 64)
        assert inside(tree, 0, lambda mib=mib: fork_and_fill(mib)) == 0
        spent = group.read_usage()
        if spent.peak_bytes is None:
            assert mib == 5 or group._peak_fd < 0
            pytest.skip("this kernel's peak of a group cannot be reset")
        assert mib * MIB <= spent.peak_bytes < (mib + 20) * MIB
        assert not spent.hit_own_limit


def test_cpu_time_of_children_that_nobody_waited_for_is_counted(tree: CgroupTree) -> None:
    def work() -> None:
        readable, writable = os.pipe()
        if os.fork() == 0:
            while sum(os.times()[:2]) < 0.3:
                pass
            os.write(writable, b".")
            os._exit(0)
        os.read(readable, 1)

    group = tree.cgroup(0)
    group.set_limits(512 * MIB, 64)
    assert inside(tree, 0, work) == 0
    spent = group.read_usage()
    if spent.cpu_ms is None:
        pytest.skip("no hierarchy of cpuacct is mounted")
    assert spent.cpu_ms >= 290
    assert (group.read_usage().cpu_ms or 0) < 100, "it starts anew"


def test_too_much_memory_kills_and_is_told_from_any_other_kill(tree: CgroupTree) -> None:
    group = tree.cgroup(0)
    group.set_limits(32 * MIB, 64)
    assert inside(tree, 0, lambda: fill(64)) == -signal.SIGKILL
    assert group.read_usage().hit_own_limit
    group.set_limits(32 * MIB, 64)
    assert inside(tree, 0, lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
    spent = group.read_usage()
    assert not spent.hit_own_limit
    assert not spent.hit_outer_limit


def test_memory_that_lacks_elsewhere_is_not_the_calls_doing(tree: CgroupTree) -> None:
    limit = folders(tree)[0] / tree._version.memory_limit
    limit.write_text(str(32 * MIB))
    group = tree.cgroup(0)
    group.set_limits(512 * MIB, 64)
    assert inside(tree, 0, lambda: fill(64)) == -signal.SIGKILL
    spent = group.read_usage()
    assert spent.hit_outer_limit
    assert not spent.hit_own_limit


def test_limits_follow_the_call(tree: CgroupTree) -> None:
    group = tree.cgroup(0)
    for limit, ends in ((32, -signal.SIGKILL), (256, 0), (32, -signal.SIGKILL), (1 << 40, 0)):
        group.set_limits(limit * MIB, 10**9)
        assert inside(tree, 0, lambda: fill(64)) == ends


def test_a_zygote_is_admitted_to_groups_that_nobody_else_may_change(tree: CgroupTree) -> None:
    stranger = 54_321
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as zygote:
        tree.allow_clone_into(zygote.pid, stranger)
        if not (floors := list(tree.open_directories(1))):
            pytest.skip("version 1, or a container without clone3: calls enter by doors")
        (folder,) = folders(tree)
        assert (folder / "zygotes" / "cgroup.procs").read_text().split() == [str(zygote.pid)]
        owned = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.stat().st_uid == stranger)
        assert owned == ["0/cgroup.procs", "1/cgroup.procs", "cgroup.procs"]
        zygote.communicate(b"\n")
    (floor,) = floors
    try:
        assert os.path.samestat(os.stat(".", dir_fd=floor), os.stat(folder / "1"))
        assert os.path.samestat(os.stat("..", dir_fd=floor), os.stat(".", dir_fd=floor)), "no way leads up"
    finally:
        os.close(floor)


def test_processes_are_bounded_whoever_they_belong_to(tree: CgroupTree) -> None:
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

    group = tree.cgroup(0)
    group.set_limits(512 * MIB, 5)
    assert inside(tree, 0, bomb) == 0
    assert not group.is_empty, "they wait for what never comes"
    assert tree.cgroup(1).is_empty
    group.kill()
    wait_empty(tree, 0)


def wait_empty(made: CgroupTree, slot: int) -> None:
    """They are nobody's children here, so the kernel's count is all there is to watch."""
    deadline = time.monotonic() + DEADLINE_S
    while not made.cgroup(slot).is_empty:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_tree_leaves_nothing_even_with_somebody_inside(tree: CgroupTree) -> None:
    tree.cgroup(1)
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


def test_the_tree_of_a_killed_owner_is_removed_by_the_next_and_that_of_a_living_one_is_not(tree: CgroupTree) -> None:
    code = "from sandbox.jail import CgroupTree\nt = CgroupTree()\nprint(*t._locks, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        left = [Path(folder) for folder in owner.stdout.readline().decode().split()]
        assert left
        CgroupTree().close()
        assert all(folder.exists() for folder in left)
        owner.kill()
        owner.wait(DEADLINE_S)
        CgroupTree().close()
        assert not any(folder.exists() for folder in left)
    assert all(folder.exists() for folder in folders(tree))


def test_too_few_descriptors_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _resource: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda _resource, _limits: None)
    with pytest.raises(IsolationError, match=r"1000 slots need \d+ descriptors, got 1024; raise ulimit -n"):
        cgroup_tree.raise_fd_limit_for(1000)
    cgroup_tree.raise_fd_limit_for(cgroup_tree.max_slots_for_fds())


def test_no_hierarchies_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "mounts", lambda: iter([("/", "/", "ext4", "rw")]))
    with pytest.raises(IsolationError, match="2: it is not mounted; version 1: no hierarchy of memory or pids is"):
        CgroupTree()


@pytest.mark.parametrize(
    ("own", "mounts", "expected"),
    [
        ([("memory", "/a/b")], [("/", "/m", "cgroup", "rw,memory")], {"memory": "/m/a/b"}),
        ([("memory", "/docker/x")], [("/docker/x", "/m", "cgroup", "rw,memory")], {"memory": "/m"}),
        ([("memory", "/docker/x/y")], [("/docker/x", "/m", "cgroup", "rw,memory")], {"memory": "/m/y"}),
        ([("memory", "/docker/x")], [("/docker/other", "/m", "cgroup", "rw,memory")], {"memory": "/m"}),
        ([("cpu,cpuacct", "/")], [("/", "/c", "cgroup", "rw,cpu,cpuacct")], {"cpu": "/c", "cpuacct": "/c"}),
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
    monkeypatch.setattr(machine, "cgroup_paths", lambda: iter(own))
    monkeypatch.setattr(machine, "mounts", lambda: iter(mounts))
    assert cgroup_tree.own_cgroup_dirs() == expected


class Kernel:
    """Version 2 as far as dividing a group goes: in an ordinary folder, with `members` in it."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = home
        self.members = [10, 11]
        self.moved: list[int] = []
        home.mkdir(exist_ok=True)
        (home / "cgroup.controllers").write_text("cpu memory pids\n")
        (home / "cgroup.subtree_control").write_text("\n")
        self.show()
        monkeypatch.setattr(cgroup_tree, "write_file", self.write)

    def show(self) -> None:
        (self.home / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in [0, *self.members]))

    def write(self, path: str, text: str) -> None:
        if path == f"{self.home}/cgroup.subtree_control":
            if self.members:
                raise OSError(errno.EBUSY, "Device or resource busy")
            Path(path).write_text(text.replace("+", ""))
        elif path == f"{self.home}/{cgroup_tree.SERVER_LEAF}/cgroup.procs":
            self.members.remove(int(text))
            self.moved.append(int(text))
            if int(text) == 10:
                self.members.append(12)  # it had just forked
            self.show()
        else:
            pytest.fail(f"{text} written to {path}")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path / "home", monkeypatch)


def own_path(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(machine, "cgroup_paths", lambda: iter([("", path)]))


def test_a_containers_group_is_divided_and_whoever_was_in_it_moves(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_path(monkeypatch, "/")
    assert cgroup_tree._find_v2_parent({"": str(kernel.home)}) == str(kernel.home)
    assert kernel.moved == [10, 11, 12]
    assert (kernel.home / "cgroup.subtree_control").read_text() == "memory pids"
    kernel.members = [13]  # somebody new is no reason to do it again
    assert cgroup_tree._find_v2_parent({"": str(kernel.home)}) == str(kernel.home)
    assert cgroup_tree._find_v2_parent({"": f"{kernel.home}/{cgroup_tree.SERVER_LEAF}"}) == str(kernel.home)
    assert kernel.moved == [10, 11, 12]


def test_an_empty_group_is_divided_as_it_is(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    own_path(monkeypatch, "/elsewhere")
    kernel.members = []
    assert cgroup_tree._find_v2_parent({"": str(kernel.home)}) == str(kernel.home)
    assert not (kernel.home / cgroup_tree.SERVER_LEAF).exists()


def test_a_group_that_others_manage_is_left_alone(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    own_path(monkeypatch, "/user.slice/session-1.scope")
    with pytest.raises(OSError, match="is not ours to divide; run in a container, or under systemd with Delegate=yes"):
        cgroup_tree._find_v2_parent({"": str(kernel.home)})
    assert not kernel.moved
    monkeypatch.setattr(os, "getxattr", lambda _path, name: b"1" if name == "user.delegate" else b"")
    assert cgroup_tree._find_v2_parent({"": str(kernel.home)}) == str(kernel.home)
    assert kernel.moved == [10, 11, 12]


def test_controllers_that_are_elsewhere_are_named(kernel: Kernel) -> None:
    (kernel.home / "cgroup.controllers").write_text("cpu pids\n")
    with pytest.raises(OSError, match=r"home has no memory$"):
        cgroup_tree._find_v2_parent({"": str(kernel.home)})


def test_what_another_user_left_does_not_stop_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{cgroup_tree.PREFIX}1-abc" / "0").mkdir(parents=True)

    def rmdir(path: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", path)

    monkeypatch.setattr(cgroup_tree.os, "rmdir", rmdir)
    before = time.monotonic()
    cgroup_tree._remove_stale(str(tmp_path))
    assert time.monotonic() - before < cgroup_tree.KILL_TIMEOUT_S


def test_a_thread_can_be_put_among_those_that_give_way_and_back(tree: CgroupTree) -> None:
    if tree.idle is None:
        pytest.skip("version 1 of control groups does not divide the cores here")
    with subprocess.Popen(["sleep", "1000"]) as child:
        group = Path(f"/proc/{child.pid}/cgroup")
        before = group.read_text()
        tree.idle.move(child.pid, inside=True)
        assert "/rstar-sandbox-" in next(line for line in group.read_text().splitlines() if ":cpu:" in line)
        tree.idle.move(child.pid, inside=False)
        assert group.read_text() == before
        child.kill()
