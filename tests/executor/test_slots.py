"""Tests of slots. A slot is a set of resources (uid, cgroup, scratch directory) that one call at a time uses.

The limits of the slot's cgroup are set before a call, and the usage of the cgroup is read after the call. The slot is
free again only once its cgroup is empty.
"""

from __future__ import annotations

import contextlib
import errno
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

INITIAL_FILES = {
    "memory.limit_in_bytes": "0",
    "memory.max_usage_in_bytes": "0",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
    "memory.failcnt": "0",
    "cpuacct.usage": "0",
    "pids.max": "",
    "pids.current": "0",
    "cgroup.procs": "",
}


class FakeCgroup:
    """Ordinary files in `path` that have the names of the files of a version 1 cgroup. The names in `missing` are left
    out."""

    def __init__(self, path: Path, *missing: str) -> None:
        self.path = path
        path.mkdir()
        for name, text in INITIAL_FILES.items():
            if name not in missing:
                self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def read(self, name: str) -> str:
        return (self.path / name).read_text()

    def cgroup(self) -> SlotCgroup:
        return SlotCgroup(V1, {name: str(self.path) for name in ("memory", "pids", "cpuacct")})

    def tree(self) -> CgroupTree:
        """A cgroup tree with this cgroup for every slot."""
        cgroups: list[SlotCgroup] = []

        def cgroup_of(_slot: int) -> SlotCgroup:
            if not cgroups:
                cgroups.append(self.cgroup())
            return cgroups[0]

        return cast(CgroupTree, SimpleNamespace(cgroup=cgroup_of, idle=None))


@pytest.fixture
def cgroup_files(tmp_path: Path) -> FakeCgroup:
    return FakeCgroup(tmp_path / "0")


def slots_with_one_used(cgroup_files: FakeCgroup) -> Slots:
    """One slot, number 0, which is in use and has this cgroup."""
    slots = Slots(1)
    slots.cgroups = cgroup_files.tree()
    slots.free.pop()
    return slots


def test_slots_without_cgroups_are_free_at_once_and_have_no_usage() -> None:
    slots = Slots(2)
    assert slots.free.pop() == 0
    slots.set_limits(0, memory_bytes=1, tasks=1)
    assert slots.read_usage(0) is None
    assert slots.release(0)
    assert slots.free == [1, 0]


def test_only_changed_limits_are_written(cgroup_files: FakeCgroup) -> None:
    slots = slots_with_one_used(cgroup_files)
    slots.set_limits(0, memory_bytes=1000, tasks=5)
    assert (cgroup_files.read("memory.limit_in_bytes"), cgroup_files.read("pids.max")) == ("1000", "5")
    cgroup_files.write("pids.max", "unchanged")
    slots.set_limits(0, memory_bytes=1000, tasks=5)
    assert cgroup_files.read("pids.max") == "unchanged"
    slots.set_limits(0, memory_bytes=1000, tasks=6)
    assert cgroup_files.read("pids.max").startswith("6"), "a plain file keeps the rest of a longer text"
    slots.set_limits(0, memory_bytes=1 << 100, tasks=1 << 100)
    assert cgroup_files.read("memory.limit_in_bytes") == str(1 << 62), "the largest limit that is written"


def test_a_limit_that_could_not_be_written_is_written_the_next_time(cgroup_files: FakeCgroup) -> None:
    slots = slots_with_one_used(cgroup_files)
    (cgroup_files.path / "pids.max").unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            slots.set_limits(0, memory_bytes=1000, tasks=5)
    cgroup_files.write("pids.max", "")
    slots.set_limits(0, memory_bytes=1000, tasks=5)
    assert cgroup_files.read("pids.max") == "5"


def test_the_usage_of_a_call_is_the_increase_since_the_last_call(cgroup_files: FakeCgroup) -> None:
    slots = slots_with_one_used(cgroup_files)
    for cpu_ns, oom_kills, limit_hits, expected in (
        (5_000_000, 0, 3, CgroupUsage(cpu_ms=5.0, peak_bytes=4096)),
        (12_500_000, 1, 7, CgroupUsage(cpu_ms=7.5, peak_bytes=4096, hit_own_limit=True)),
        (12_500_000, 1, 8, CgroupUsage(cpu_ms=0.0, peak_bytes=4096)),
        (13_500_000, 2, 8, CgroupUsage(cpu_ms=1.0, peak_bytes=4096, hit_outer_limit=True)),
    ):
        cgroup_files.write("memory.max_usage_in_bytes", "1")
        slots.set_limits(0, memory_bytes=1, tasks=1)
        cgroup_files.write("memory.max_usage_in_bytes", "4096\n")
        cgroup_files.write("cpuacct.usage", f"{cpu_ns}\n")
        cgroup_files.write("memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {oom_kills}\n")
        cgroup_files.write("memory.failcnt", f"{limit_hits}\n")
        assert slots.read_usage(0) == expected


def test_a_peak_that_cannot_be_reset_is_known_only_for_a_call_that_exceeds_it(
    cgroup_files: FakeCgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_fd: int, _text: bytes, _offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("os.pwrite", refuse)  # the peak is reset with os.pwrite
    cgroup_files.write("memory.max_usage_in_bytes", "10")
    slots = slots_with_one_used(cgroup_files)
    for peak_bytes, expected in ((10, None), (50, 50), (50, None), (60, 60)):
        slots.set_limits(0, memory_bytes=1, tasks=1)
        cgroup_files.write("memory.max_usage_in_bytes", str(peak_bytes))
        usage = slots.read_usage(0)
        assert usage is not None
        assert usage.peak_bytes == expected


def test_a_peak_that_may_only_be_read_is_known_for_a_call_that_exceeds_it(
    cgroup_files: FakeCgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In version 2 before Linux 6.12, an ordinary user may not open the file for writing."""
    open_file = os.open

    def refuse_writing(path: str, flags: int, mode: int = 0o777) -> int:
        if path.endswith("memory.max_usage_in_bytes") and flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return open_file(path, flags, mode)

    monkeypatch.setattr("os.open", refuse_writing)
    slots = slots_with_one_used(cgroup_files)
    slots.set_limits(0, memory_bytes=1, tasks=1)
    monkeypatch.undo()
    cgroup_files.write("memory.max_usage_in_bytes", "50")
    usage = slots.read_usage(0)
    assert usage is not None
    assert usage.peak_bytes == 50


@pytest.mark.parametrize("missing", ["memory.max_usage_in_bytes", "cpuacct.usage", "memory.failcnt"])
def test_a_usage_that_the_kernel_does_not_count_is_none(missing: str, tmp_path: Path) -> None:
    slots = slots_with_one_used(FakeCgroup(tmp_path / "0", missing))
    slots.set_limits(0, memory_bytes=1, tasks=1)
    usage = slots.read_usage(0)
    assert usage is not None
    assert (usage.peak_bytes is None) == ("usage_in" in missing)
    assert (usage.cpu_ms is None) == ("cpuacct" in missing)


@pytest.mark.trio
async def test_a_slot_is_free_only_when_its_cgroup_is_empty(
    cgroup_files: FakeCgroup, autojump_clock: MockClock
) -> None:
    slots = slots_with_one_used(cgroup_files)
    cgroup_files.write("pids.current", "3")
    assert not slots.release(0)
    assert slots.free == []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slots.release_when_empty, 0)
        await trio.sleep(KILL_AFTER_S)
        assert slots.free == []
        cgroup_files.write("pids.current", "0")
    assert slots.free == [0]


@pytest.mark.trio
async def test_processes_left_in_a_slot_are_killed(
    cgroup_files: FakeCgroup, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = slots_with_one_used(cgroup_files)
    cgroup_files.write("pids.current", "1")
    monkeypatch.setattr(SlotCgroup, "kill", lambda _group: cgroup_files.write("pids.current", "0"))
    before = trio.current_time()
    await slots.release_when_empty(0)
    assert slots.free == [0]
    assert KILL_AFTER_S < trio.current_time() - before < 10 * KILL_AFTER_S


@pytest.mark.trio
async def test_a_slot_whose_cgroup_cannot_be_opened_is_released_once_opening_succeeds(
    cgroup_files: FakeCgroup, autojump_clock: MockClock
) -> None:
    slots = Slots(1)
    tree, calls = cgroup_files.tree(), 0
    open_cgroup = tree.cgroup

    def fail_three_times(slot: int) -> SlotCgroup:
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_cgroup(slot)

    tree.cgroup = fail_three_times  # type: ignore[method-assign]
    slots.cgroups = tree
    slots.free.pop()
    with pytest.raises(OSError, match="Too many"):
        slots.set_limits(0, memory_bytes=1, tasks=1)
    await slots.release_when_empty(0)
    assert slots.free == [0]
    slots.set_limits(0, memory_bytes=1, tasks=1)


@pytest.mark.trio
async def test_a_held_mount_namespace_is_closed_before_the_slot_is_free(
    process_with_mount_namespace: subprocess.Popen[bytes],
) -> None:
    held_before = held_mount_namespaces()  # earlier tests may have left some open
    slots, pid = Slots(2), process_with_mount_namespace.pid
    for _ in range(2):  # the second time, the slot already holds the namespace
        slots.hold_mount_namespace(1, pid)
    process_with_mount_namespace.kill()
    process_with_mount_namespace.wait()
    slots.hold_mount_namespace(0, pid)  # this process has ended
    slots.hold_mount_namespace(0, os.getpid())  # this test's own process, whose mount namespace must not be held
    assert held_mount_namespaces() == held_before + 1
    slots.free.clear()
    assert slots.release(0), "slot 0 holds no namespace"
    assert not slots.release(1)
    await slots.release_when_empty(1)
    assert slots.free == [0, 1]
    assert held_mount_namespaces() == held_before
    assert slots.release(1)


@pytest.mark.trio
async def test_a_slot_becomes_free_although_no_thread_can_be_started(
    process_with_mount_namespace: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")  # Python raises this error when calls have taken all processes

    held_before = held_mount_namespaces()
    slots = Slots(1)
    slots.hold_mount_namespace(0, process_with_mount_namespace.pid)
    process_with_mount_namespace.kill()
    process_with_mount_namespace.wait()
    slots.free.clear()
    monkeypatch.setattr(trio.to_thread, "run_sync", refuse)
    await slots.release_when_empty(0)
    assert (slots.free, held_mount_namespaces()) == ([0], held_before)


@pytest.fixture
def process_with_mount_namespace() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a new mount namespace."""
    user_namespace = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    argv = ["unshare", *user_namespace, "--mount", "sh", "-c", "echo; exec sleep 1000"]
    try:
        child = subprocess.Popen(argv, stdout=subprocess.PIPE)
    except FileNotFoundError:
        pytest.skip("needs unshare(1)")
    with child:
        assert child.stdout is not None
        if not child.stdout.readline():
            pytest.skip("this machine grants no mount namespace")
        yield child
        child.kill()


def held_mount_namespaces() -> int:
    """Number of descriptors of mount namespaces that this process has."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listdir itself used
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith("mnt:") for link in links)


def test_a_reserved_slot_counts_neither_as_short_nor_as_long_until_its_call_is_long() -> None:
    slots = Slots(short=8, long=2)
    for _ in range(8):
        slots.acquire()
    assert (slots.free_short, slots.free_reserved) == (0, 1)
    reserved = slots.acquire(reserved=True)
    assert (slots.free_short, slots.free_reserved) == (0, 0)
    assert slots.try_mark_long(reserved)
    assert (slots.free_short, slots.free_reserved) == (0, 1)
    assert slots.release(reserved) and (slots.free_short, slots.free_reserved) == (0, 1)


def test_there_is_no_reserved_slot_while_all_long_slots_are_used() -> None:
    slots = Slots(short=8, long=1)
    long = slots.acquire()
    assert slots.try_mark_long(long) and slots.free_reserved == 0
    slots.release(long)
    reserved = slots.acquire(reserved=True)
    assert not slots.try_mark_long(slots.acquire()), "a reserved slot is one of the unused long slots"
    assert slots.try_mark_long(reserved)
