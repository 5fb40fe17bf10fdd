"""Tests of the cgroups of a zygote pool on the real kernel: what the kernel counts and limits, how the cgroups are
removed, and how their parent cgroup is found."""

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
from sandbox.jail import CgroupTree, cgroup_tree, kernel
from sandbox.jail.cgroup import V2

MIB = 1 << 20
DEADLINE_S = 60


@pytest.fixture
def tree() -> Iterator[CgroupTree]:
    try:
        created = CgroupTree()
    except IsolationError as error:
        pytest.skip(str(error))
    yield created
    created.close()


def directories(tree: CgroupTree) -> list[Path]:
    """Return the top directories of a tree. The tree holds a lock on each."""
    return [Path(directory) for directory in tree._top_locks]


def run_inside(tree: CgroupTree, slot: int, action: Callable[[], object]) -> int:
    """Run `action` in a child process in the slot's cgroup, and return the child's exit status.

    The exit status is 1 if the action raises an error, 2 if it returns False, and 0 otherwise.
    """
    procs_fds = list(tree.open_procs_files(slot))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for fd in procs_fds:
                os.write(fd, b"0")
            status = 0 if action() is not False else 2
        finally:
            os._exit(status)
    for fd in procs_fds:
        os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def use_memory(mib: int) -> None:
    assert bytearray(b"x") * (mib * MIB)


def use_memory_in_a_child(mib: int) -> None:
    child = os.fork()
    if child == 0:
        use_memory(mib)
        os._exit(0)
    os.waitpid(child, 0)


def test_memory_of_all_processes_is_counted_per_call(tree: CgroupTree) -> None:
    cgroup = tree.cgroup(0)
    for mib in (40, 80, 5):
        cgroup.set_limits(512 * MIB, 64)
        assert run_inside(tree, 0, lambda mib=mib: use_memory_in_a_child(mib)) == 0
        usage = cgroup.read_usage()
        if usage.peak_bytes is None:
            # If the kernel cannot reset the peak, the peak of the last call is unknown, because this call uses less
            # than the first two calls. If the kernel has no file for the peak, the peak of all calls is unknown.
            assert mib == 5 or cgroup._peak_fd < 0
            pytest.skip("this kernel cannot reset the peak of a cgroup")
        assert mib * MIB <= usage.peak_bytes < (mib + 20) * MIB  # 20 MiB for the interpreters
        assert not usage.hit_own_limit


def test_cpu_time_of_children_that_nobody_waits_for_is_counted(tree: CgroupTree) -> None:
    def compute_in_a_child() -> None:
        readable, writable = os.pipe()
        if os.fork() == 0:
            while sum(os.times()[:2]) < 0.3:
                pass
            os.write(writable, b".")
            os._exit(0)
        os.read(readable, 1)

    cgroup = tree.cgroup(0)
    cgroup.set_limits(512 * MIB, 64)
    assert run_inside(tree, 0, compute_in_a_child) == 0
    usage = cgroup.read_usage()
    if usage.cpu_ms is None:
        pytest.skip("no hierarchy of cpuacct is mounted")
    assert usage.cpu_ms >= 290  # the child computes for 300 ms; its clock and the cgroup's differ by some ticks
    assert (cgroup.read_usage().cpu_ms or 0) < 100, "each reading must start the count from 0"


def test_an_oom_kill_is_distinguished_from_other_kills(tree: CgroupTree) -> None:
    cgroup = tree.cgroup(0)
    cgroup.set_limits(32 * MIB, 64)
    assert run_inside(tree, 0, lambda: use_memory(64)) == -signal.SIGKILL
    assert cgroup.read_usage().hit_own_limit
    cgroup.set_limits(32 * MIB, 64)
    assert run_inside(tree, 0, lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
    usage = cgroup.read_usage()
    assert not usage.hit_own_limit
    assert not usage.hit_outer_limit


def test_an_oom_kill_by_an_outer_limit_is_reported_as_such(tree: CgroupTree) -> None:
    limit = directories(tree)[0] / tree._version.memory_limit_file
    limit.write_text(str(32 * MIB))
    cgroup = tree.cgroup(0)
    cgroup.set_limits(512 * MIB, 64)
    assert run_inside(tree, 0, lambda: use_memory(64)) == -signal.SIGKILL
    usage = cgroup.read_usage()
    assert usage.hit_outer_limit
    assert not usage.hit_own_limit


def test_limits_of_each_call_apply(tree: CgroupTree) -> None:
    cgroup = tree.cgroup(0)
    above_maximum_mib, above_maximum_tasks = 1 << 40, 10**9  # more than the kernel accepts
    for limit_mib, status in ((32, -signal.SIGKILL), (256, 0), (32, -signal.SIGKILL), (above_maximum_mib, 0)):
        cgroup.set_limits(limit_mib * MIB, above_maximum_tasks)
        assert run_inside(tree, 0, lambda: use_memory(64)) == status


def test_only_cgroup_procs_files_belong_to_the_zygote(tree: CgroupTree) -> None:
    zygote_uid = 54_321
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as zygote:
        tree.allow_clone_into(zygote.pid, zygote_uid)
        if not (dir_fds := list(tree.open_directories(1))):
            pytest.skip("version 1, or a container without clone3: calls enter by cgroup.procs")
        (directory,) = directories(tree)
        assert (directory / "zygotes" / "cgroup.procs").read_text().split() == [str(zygote.pid)]
        owned = sorted(
            str(path.relative_to(directory)) for path in directory.rglob("*") if path.stat().st_uid == zygote_uid
        )
        assert owned == ["0/cgroup.procs", "1/cgroup.procs", "cgroup.procs"]
        zygote.communicate(b"\n")
    (dir_fd,) = dir_fds
    try:
        assert os.path.samestat(os.stat(".", dir_fd=dir_fd), os.stat(directory / "1"))
        assert os.path.samestat(os.stat("..", dir_fd=dir_fd), os.stat(".", dir_fd=dir_fd)), (
            "the parent must not be reachable"
        )
    finally:
        os.close(dir_fd)


def test_a_zygote_whose_user_may_not_own_files_enters_each_cgroup_by_its_procs_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary user with subordinate ids may not give files to them. The slots of cgroups that do not exist yet must
    stay usable."""
    monkeypatch.setattr(cgroup_tree, "_find_version", lambda: (V2, {"": str(tmp_path)}))
    monkeypatch.setattr(cgroup_tree, "_enable_controllers", lambda _directory: None)
    monkeypatch.setattr(kernel, "has_clone3", lambda: True)

    def refuse(path: str, _uid: int, _gid: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", path)

    monkeypatch.setattr(os, "chown", refuse)
    tree = CgroupTree()
    (top,) = tree._top_locks
    tree.allow_clone_into(os.getpid(), 100_000)
    for slot in (0, 7):
        Path(top, str(slot)).mkdir(exist_ok=True)
        Path(top, str(slot), "cgroup.procs").touch()
        assert not [*tree.open_directories(slot)]
        (fd,) = tree.open_procs_files(slot)
        os.close(fd)
        Path(top, str(slot), "cgroup.procs").unlink()
    tree.close()


def test_number_of_processes_is_limited_for_any_uid(tree: CgroupTree) -> None:
    max_tasks = 5

    def fork_up_to_the_limit() -> bool:
        children = 0
        readable, _writable = os.pipe()
        try:
            while children < 4 * max_tasks:
                if os.fork() == 0:
                    os.read(readable, 1)  # blocks for ever
                children += 1
        except BlockingIOError:
            pass
        return children == max_tasks - 1  # the limit counts this process too

    cgroup = tree.cgroup(0)
    cgroup.set_limits(512 * MIB, max_tasks)
    assert run_inside(tree, 0, fork_up_to_the_limit) == 0
    assert not cgroup.is_empty, "the children block for ever"
    assert tree.cgroup(1).is_empty
    cgroup.kill()
    wait_empty(tree, 0)


def wait_empty(tree: CgroupTree, slot: int) -> None:
    """Wait until a cgroup is empty. This polls the cgroup, since its processes are not children of this process."""
    deadline = time.monotonic() + DEADLINE_S
    while not tree.cgroup(slot).is_empty:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_closing_a_tree_kills_its_processes_and_removes_it(tree: CgroupTree) -> None:
    tree.cgroup(1)
    tree_dirs = directories(tree)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as sleeper:
        for directory in tree_dirs:
            (directory / "1" / "cgroup.procs").write_text(str(sleeper.pid))
        fd_count = len(os.listdir("/proc/self/fd"))
        tree.close()
        assert sleeper.wait(DEADLINE_S) == -signal.SIGKILL
    assert not any(directory.exists() for directory in tree_dirs)
    assert len(os.listdir("/proc/self/fd")) < fd_count
    tree.close()  # a second time, without an error


def test_only_the_tree_of_a_killed_owner_is_removed_by_the_next_owner(tree: CgroupTree) -> None:
    code = "from sandbox.jail import CgroupTree\nt = CgroupTree()\nprint(*t._top_locks, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner_dirs = [Path(directory) for directory in owner.stdout.readline().decode().split()]
        assert owner_dirs
        CgroupTree().close()
        assert all(directory.exists() for directory in owner_dirs)
        owner.kill()
        owner.wait(DEADLINE_S)
        CgroupTree().close()
        assert not any(directory.exists() for directory in owner_dirs)
    assert all(directory.exists() for directory in directories(tree))


def test_too_few_descriptors_are_an_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _resource: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda _resource, _limits: None)
    with pytest.raises(IsolationError, match=r"1000 slots need \d+ descriptors, got 1024; raise ulimit -n"):
        cgroup_tree.raise_fd_limit_for(1000)
    cgroup_tree.raise_fd_limit_for(cgroup_tree.max_slots_for_fds())


def test_missing_hierarchies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "mounts", lambda _root: iter([("/", "/", "ext4", "rw")]))
    with pytest.raises(IsolationError, match="2: it is not mounted; version 1: no hierarchy of memory or pids is"):
        CgroupTree()


@pytest.mark.parametrize(
    ("own_paths", "mounts", "expected"),
    [
        # First: the path of each controller in its hierarchy. Second: (mounted part of the hierarchy, mount point,
        # type, options) of each mount.
        ({"memory": "/a/b"}, [("/", "/m", "cgroup", "rw,memory")], {"memory": "/m/a/b"}),
        ({"memory": "/docker/x"}, [("/docker/x", "/m", "cgroup", "rw,memory")], {"memory": "/m"}),
        ({"memory": "/docker/x/y"}, [("/docker/x", "/m", "cgroup", "rw,memory")], {"memory": "/m/y"}),
        ({"memory": "/docker/x"}, [("/docker/other", "/m", "cgroup", "rw,memory")], {"memory": "/m"}),
        ({"cpu": "/", "cpuacct": "/"}, [("/", "/c", "cgroup", "rw,cpu,cpuacct")], {"cpu": "/c", "cpuacct": "/c"}),
        ({"": "/s"}, [("/", "/u", "cgroup2", "rw"), ("/", "/again", "cgroup2", "rw")], {"": "/u/s"}),
        ({"": "/"}, [("/", "/x", "tmpfs", "rw")], {}),
    ],
)
def test_own_cgroups_are_found_where_they_are_mounted(
    own_paths: dict[str, str],
    mounts: list[tuple[str, str, str, str]],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "cgroup_paths", lambda _root: own_paths)
    monkeypatch.setattr(machine, "mounts", lambda _root: iter(mounts))
    assert cgroup_tree.own_cgroup_dirs() == expected


class FakeCgroup:
    """Imitates a cgroup of version 2 in an ordinary directory `parent`, with the processes `pids`.

    Enabling controllers fails with EBUSY while the cgroup has processes. Process 10 forks process 12 just before it is
    moved.
    """

    def __init__(self, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parent = parent
        self.pids = [10, 11]
        self.moved: list[int] = []
        parent.mkdir(exist_ok=True)
        (parent / "cgroup.controllers").write_text("cpu memory pids\n")
        (parent / "cgroup.subtree_control").write_text("\n")
        self.write_procs_file()
        monkeypatch.setattr(cgroup_tree, "write_file", self.write)

    def write_procs_file(self) -> None:
        pids = [0, *self.pids]  # 0 stands for a process of another PID namespace
        (self.parent / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))

    def write(self, path: str, text: str) -> None:
        if path == f"{self.parent}/cgroup.subtree_control":
            if self.pids:
                raise OSError(errno.EBUSY, "Device or resource busy")
            Path(path).write_text(text.replace("+", ""))
        elif path == f"{self.parent}/{cgroup_tree.SERVER_LEAF}/cgroup.procs":
            self.pids.remove(int(text))
            self.moved.append(int(text))
            if text == "10":
                self.pids.append(12)
            self.write_procs_file()
        else:
            pytest.fail(f"{text} written to {path}")


@pytest.fixture
def fake_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCgroup:
    return FakeCgroup(tmp_path / "parent", monkeypatch)


def set_own_path(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(machine, "cgroup_paths", lambda _root="/": {"": path})


def test_processes_of_a_containers_cgroup_move_to_a_leaf(
    fake_cgroup: FakeCgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_own_path(monkeypatch, "/")
    assert cgroup_tree._find_v2_parent({"": str(fake_cgroup.parent)}) == str(fake_cgroup.parent)
    assert fake_cgroup.moved == [10, 11, 12]
    assert (fake_cgroup.parent / "cgroup.subtree_control").read_text() == "memory pids"
    fake_cgroup.pids = [13]  # controllers are enabled already, so this new process is not moved
    assert cgroup_tree._find_v2_parent({"": str(fake_cgroup.parent)}) == str(fake_cgroup.parent)
    assert cgroup_tree._find_v2_parent({"": f"{fake_cgroup.parent}/{cgroup_tree.SERVER_LEAF}"}) == str(
        fake_cgroup.parent
    )
    assert fake_cgroup.moved == [10, 11, 12]


def test_an_empty_cgroup_needs_no_leaf(fake_cgroup: FakeCgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    set_own_path(monkeypatch, "/elsewhere")
    fake_cgroup.pids = []
    assert cgroup_tree._find_v2_parent({"": str(fake_cgroup.parent)}) == str(fake_cgroup.parent)
    assert not (fake_cgroup.parent / cgroup_tree.SERVER_LEAF).exists()


def test_a_cgroup_that_others_manage_is_left_alone(fake_cgroup: FakeCgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    set_own_path(monkeypatch, "/user.slice/session-1.scope")
    with pytest.raises(
        OSError, match="has processes that are not the server's; run in a container, or under systemd with Delegate=yes"
    ):
        cgroup_tree._find_v2_parent({"": str(fake_cgroup.parent)})
    assert not fake_cgroup.moved
    monkeypatch.setattr(os, "getxattr", lambda _path, name: b"1" if name == "user.delegate" else b"")
    assert cgroup_tree._find_v2_parent({"": str(fake_cgroup.parent)}) == str(fake_cgroup.parent)
    assert fake_cgroup.moved == [10, 11, 12]


SYSTEMCTL = """#!/bin/sh
[ "$*" = "--user show --property=Delegate --value -- own.service" ] && echo {answer}
"""


@pytest.mark.parametrize(("answer", "is_delegated"), [("yes", True), ("no", False)])
def test_the_systemd_of_a_user_is_asked_whether_a_unit_is_delegated(
    answer: str, is_delegated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sets no attribute on the cgroup of a unit with Delegate=yes."""
    program = tmp_path / "systemctl"
    program.write_text(SYSTEMCTL.format(answer=answer))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    unit = tmp_path / f"user@{os.geteuid()}.service" / "own.service"
    unit.mkdir(parents=True)
    assert cgroup_tree._is_delegated(str(unit)) == is_delegated
    assert not cgroup_tree._is_delegated(str(unit / "other.service"))
    assert not cgroup_tree._is_delegated(str(tmp_path / "own.service"))


def test_missing_controllers_are_named(fake_cgroup: FakeCgroup) -> None:
    (fake_cgroup.parent / "cgroup.controllers").write_text("cpu pids\n")
    with pytest.raises(OSError, match=r"parent has no memory$"):
        cgroup_tree._find_v2_parent({"": str(fake_cgroup.parent)})


def test_stale_cgroups_of_another_user_are_skipped_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{cgroup_tree.PREFIX}1-abc" / "0").mkdir(parents=True)

    def rmdir(path: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", path)

    monkeypatch.setattr(cgroup_tree.os, "rmdir", rmdir)
    started_at = time.monotonic()
    cgroup_tree._remove_stale(str(tmp_path))
    assert time.monotonic() - started_at < cgroup_tree.KILL_TIMEOUT_S


def test_a_thread_moves_to_the_idle_cgroup_and_back(tree: CgroupTree) -> None:
    if tree.idle is None:
        pytest.skip("needs a hierarchy cpu of version 1")
    with subprocess.Popen(["sleep", "1000"]) as child:
        membership = Path(f"/proc/{child.pid}/cgroup")
        before = membership.read_text()
        tree.idle.move(child.pid, inside=True)
        assert "/rstar-sandbox-" in next(line for line in membership.read_text().splitlines() if ":cpu:" in line)
        tree.idle.move(child.pid, inside=False)
        assert membership.read_text() == before
        child.kill()
