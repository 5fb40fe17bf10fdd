"""A slot is bounded before its call, asked after it, and free only once the kernel counts nobody in it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from sandbox.executor.slots import KILL_AFTER_S, Slots
from sandbox.jail import CgroupTree, CgroupUsage
from sandbox.jail.cgroup import V1, SlotCgroup

FILES = {
    "memory.limit_in_bytes": "0",
    "memory.max_usage_in_bytes": "0",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
    "memory.failcnt": "0",
    "cpuacct.usage": "0",
    "pids.max": "",
    "pids.current": "0",
    "cgroup.procs": "",
}


class Folder:
    """What a kernel would show of a group, in ordinary files."""

    def __init__(self, path: Path, *missing: str) -> None:
        self.path = path
        path.mkdir()
        for name, text in FILES.items():
            if name not in missing:
                self.say(name, text)

    def say(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def hears(self, name: str) -> str:
        return (self.path / name).read_text()

    def cgroup(self) -> SlotCgroup:
        return SlotCgroup(V1, {name: str(self.path) for name in ("memory", "pids", "cpuacct")})

    def tree(self) -> CgroupTree:
        """With this group alone, whatever the slot."""
        groups: list[SlotCgroup] = []

        def group(_number: int) -> SlotCgroup:
            if not groups:
                groups.append(self.cgroup())
            return groups[0]

        return cast(CgroupTree, SimpleNamespace(cgroup=group, idle=None))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "0")


def equipped(folder: Folder) -> Slots:
    slots = Slots(1)
    slots.attach_cgroups(folder.tree())
    slots.free.pop()
    return slots


def test_slots_without_groups_are_free_at_once_and_know_nothing() -> None:
    slots = Slots(2)
    assert slots.free.pop() == 0
    slots.set_limits(0, 1, 1)
    assert slots.read_usage(0) is None
    assert slots.release(0)
    assert slots.free == [1, 0]


def test_limits_are_written_where_they_differ_from_the_last(folder: Folder) -> None:
    slots = equipped(folder)
    slots.set_limits(0, 1000, 5)
    assert (folder.hears("memory.limit_in_bytes"), folder.hears("pids.max")) == ("1000", "5")
    folder.say("pids.max", "as it was")
    slots.set_limits(0, 1000, 5)
    assert folder.hears("pids.max") == "as it was"
    slots.set_limits(0, 1000, 6)
    assert folder.hears("pids.max")[0] == "6"
    slots.set_limits(0, 1 << 100, 1 << 100)
    assert folder.hears("memory.limit_in_bytes") == str(1 << 62)


def test_a_limit_that_could_not_be_written_is_written_again(folder: Folder) -> None:
    slots = equipped(folder)
    (folder.path / "pids.max").unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            slots.set_limits(0, 1000, 5)
    folder.say("pids.max", "")
    slots.set_limits(0, 1000, 5)
    assert folder.hears("pids.max") == "5"


def test_what_a_call_used_is_what_was_added_since_the_last(folder: Folder) -> None:
    slots = equipped(folder)
    for cpu_ns, kills, refusals, expected in (
        (5_000_000, 0, 3, CgroupUsage(5.0, 4096)),
        (12_500_000, 1, 7, CgroupUsage(7.5, 4096, hit_own_limit=True)),
        (12_500_000, 1, 8, CgroupUsage(0.0, 4096)),
        (13_500_000, 2, 8, CgroupUsage(1.0, 4096, hit_outer_limit=True)),
    ):
        folder.say("memory.max_usage_in_bytes", "1")
        slots.set_limits(0, 1, 1)
        folder.say("memory.max_usage_in_bytes", "4096\n")
        folder.say("cpuacct.usage", f"{cpu_ns}\n")
        folder.say("memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        folder.say("memory.failcnt", f"{refusals}\n")
        assert slots.read_usage(0) == expected


def test_a_peak_that_cannot_be_reset_is_known_of_a_call_that_went_over_it(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(_fd: int, _text: bytes, _offset: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("os.pwrite", pwrite)
    folder.say("memory.max_usage_in_bytes", "10")
    slots = equipped(folder)
    for now, known in ((10, None), (50, 50), (50, None), (60, 60)):
        slots.set_limits(0, 1, 1)
        folder.say("memory.max_usage_in_bytes", str(now))
        spent = slots.read_usage(0)
        assert spent is not None
        assert spent.peak_bytes == known


@pytest.mark.parametrize("missing", ["memory.max_usage_in_bytes", "cpuacct.usage", "memory.failcnt"])
def test_a_kernel_that_does_not_count_something_is_fine(missing: str, tmp_path: Path) -> None:
    slots = equipped(Folder(tmp_path / "0", missing))
    slots.set_limits(0, 1, 1)
    spent = slots.read_usage(0)
    assert spent is not None
    assert (spent.peak_bytes is None) == ("usage_in" in missing)
    assert (spent.cpu_ms is None) == ("cpuacct" in missing)


@pytest.mark.trio
async def test_a_slot_is_free_only_when_its_group_is_empty(folder: Folder, autojump_clock: MockClock) -> None:
    slots = equipped(folder)
    folder.say("pids.current", "3")
    assert not slots.release(0)
    assert slots.free == []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slots.release_when_empty, 0)
        await trio.sleep(KILL_AFTER_S)
        assert slots.free == []
        folder.say("pids.current", "0")
    assert slots.free == [0]


@pytest.mark.trio
async def test_who_stays_in_a_slot_is_killed(
    folder: Folder, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = equipped(folder)
    folder.say("pids.current", "1")
    monkeypatch.setattr(SlotCgroup, "kill", lambda _group: folder.say("pids.current", "0"))
    before = trio.current_time()
    await slots.release_when_empty(0)
    assert slots.free == [0]
    assert KILL_AFTER_S < trio.current_time() - before < 10 * KILL_AFTER_S


@pytest.mark.trio
async def test_a_slot_whose_group_cannot_be_had_comes_back_when_it_can(
    folder: Folder, autojump_clock: MockClock
) -> None:
    slots = Slots(1)
    tree, calls = folder.tree(), 0
    cgroup_of = tree.cgroup

    def group(number: int) -> SlotCgroup:
        nonlocal calls
        calls += 1
        if calls < 4:
            raise OSError(24, "Too many open files")
        return cgroup_of(number)

    tree.cgroup = group  # type: ignore[method-assign]
    slots.attach_cgroups(tree)
    slots.free.pop()
    with pytest.raises(OSError, match="Too many"):
        slots.set_limits(0, 1, 1)
    await slots.release_when_empty(0)
    assert slots.free == [0]
    slots.set_limits(0, 1, 1)


@pytest.mark.trio
async def test_a_mount_namespace_of_its_own_ends_with_the_slot_and_before_the_next_call() -> None:
    with apart() as pid:
        slots = Slots(2)
        for _ in range(2):
            slots.hold_mount_namespace(1, pid)
    slots.hold_mount_namespace(0, pid)
    slots.hold_mount_namespace(0, os.getpid())
    assert mount_namespaces() == 1
    slots.free.clear()
    assert slots.release(0), "its process was gone, or had no namespace of its own"
    assert not slots.release(1)
    await slots.release_when_empty(1)
    assert slots.free == [0, 1]
    assert mount_namespaces() == 0
    assert slots.release(1)


@contextlib.contextmanager
def apart() -> Iterator[int]:
    """A process with mounts of its own."""
    try:
        child = subprocess.Popen(["unshare", "--mount", "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE)
    except FileNotFoundError:
        pytest.skip("needs unshare(1)")
    with child:
        assert child.stdout is not None
        if not child.stdout.readline():
            pytest.skip("this machine grants no mount namespace")
        yield child.pid
        child.kill()


def mount_namespaces() -> int:
    """Descriptors of such that this process holds."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith("mnt:") for link in links)
