"""Control groups end to end: a whole call is bounded and counted, and its end is told as it was."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import CgroupTree
from sandbox.jail.cgroup_tree import PREFIX, own_cgroup_dirs
from sandbox.types import Status
from tests.executor.calling import Caller, call, executor, wait_gone

MAX_PROCS_FILES = 3
"""Most descriptors that a zygote holds to enter the cgroup of one slot: one per hierarchy of version 1."""
LONG_S = 60
"""For what should end by itself: a time-out would be another verdict."""


@pytest.fixture(scope="module")
def grouped() -> Iterator[Caller]:
    try:
        CgroupTree().close()
    except IsolationError as why:
        pytest.skip(str(why))
    with executor() as caller:
        yield caller


@pytest.fixture
def resettable(grouped: Caller) -> None:
    """Version 1, or version 2 from Linux 6.12 on: the peak is each call's own."""
    tree = CgroupTree()
    can_reset = tree.cgroup(0)._can_reset_peak and tree.cgroup(0)._peak_fd >= 0
    tree.close()
    if not can_reset:
        pytest.skip("this kernel's peak of a group cannot be reset")


def trees(pid: int) -> list[Path]:
    """The groups that an executor has made."""
    return [path for home in {*own_cgroup_dirs().values()} for path in Path(home).glob(f"{PREFIX}{pid}-*")]


def most_held(pid: int) -> int:
    """Bytes of the slot that holds most."""
    names = ("memory.current", "memory.usage_in_bytes")
    return max(int(path.read_text()) for tree in trees(pid) for name in names for path in tree.glob(f"*/{name}"))


def test_many_processes_together_over_the_limit_are_a_memory_limit(grouped: Caller) -> None:
    """Each is within it. The first is the largest, and so the one that the kernel picks."""
    code = """
import os, time
for _ in range(12):
    if os.fork() == 0:
        held = bytearray(b"x") * (20 << 20)
        time.sleep(1000)
print("started")
held = bytearray(b"x") * (90 << 20)
time.sleep(1000)
"""
    result = grouped.run(code, memory_mb=128, disk_mb=1, timeout_s=LONG_S)
    assert (result.status, result.stdout, result.exit_code) == (Status.MEMORY_LIMIT, "started\n", None)
    assert result.error is not None
    assert result.error.type == "MemoryLimit"


@pytest.mark.parametrize(
    ("code", "numbers"),
    [
        ("os.abort()", {6, 11}),  # PID 1 of a namespace cannot send itself 6, and aborts by other means
        ("ctypes.string_at(0)", {11}),
        ("resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass", {9}),
    ],
)
def test_a_crash_is_no_memory_limit(code: str, numbers: set[int], grouped: Caller) -> None:
    result = grouped.run(f"import ctypes, os, resource\n{code}", timeout_s=LONG_S)
    assert result.status is Status.KILLED
    assert result.signal in numbers


def test_a_kill_by_the_codes_own_child_is_no_memory_limit(grouped: Caller) -> None:
    """PID 1 of a namespace cannot be killed from within; the call goes on, and its own end counts."""
    code = "import os\nif os.fork() == 0:\n    os.kill(os.getpid(), 9)\nos.waitstatus_to_exitcode(os.wait()[1])"
    result = grouped.run(code)
    assert (result.status, result.value) == (Status.OK, "-9")


def test_a_call_within_each_of_its_limits_is_not_killed_for_their_sum(grouped: Caller) -> None:
    code = """
import os
with open("x", "wb") as file:
    for _ in range(30):
        file.write(bytes(1 << 20))
print("x" * (4 << 20))
held = bytearray(b"x") * (56 << 20)
"""
    result = grouped.run(code, memory_mb=64, disk_mb=32, output_kb=5 << 10)
    assert result.status is Status.OK


def test_usage_counts_children_that_nobody_waited_for(grouped: Caller, resettable: None) -> None:
    code = """
import os
readable, writable = os.pipe()
if os.fork() == 0:
    held = bytearray(b"x") * (50 << 20)
    while sum(os.times()[:2]) < 0.3:
        pass
    os.write(writable, b".")
    os._exit(0)
os.read(readable, 1)
None
"""
    usage = grouped.run(code, timeout_s=LONG_S).usage
    assert usage.cpu_ms >= 290
    assert usage.peak_memory_mb >= 50


def test_a_bomb_of_processes_ends_and_its_neighbours_live(grouped: Caller) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    bombs = [grouped.submit(call(bomb, timeout_s=0.3, processes=16)) for _ in range(2)]
    assert grouped.run("import os\nif os.fork() == 0: os._exit(0)\nos.wait()[1]", timeout_s=LONG_S).value == "0"
    assert [grouped.answer(seq).status for seq in bombs] == [Status.TIMEOUT] * 2
    results = grouped.run_all([call(f"{n}") for n in range(20)])
    assert [(result.value, result.attempts) for result in results] == [(str(n), 1) for n in range(20)]


def test_usage_counts_files_and_output(grouped: Caller, resettable: None) -> None:
    code = "open('x', 'wb').write(bytes(30 << 20))\nprint('x' * (4 << 20))"
    assert grouped.run(code, disk_mb=32, output_kb=5 << 10).usage.peak_memory_mb > 34


def test_slots_are_used_again_and_what_they_counted_is_not(grouped: Caller, resettable: None) -> None:
    large = grouped.run_all([call("x = bytearray(b'x') * (80 << 20)\nNone") for _ in range(8)])
    assert all(result.usage.peak_memory_mb >= 80 for result in large)
    end = time.monotonic() + LONG_S
    while (held := most_held(grouped.process.pid)) > 20 << 20 and time.monotonic() < end:  # the kernel may free it late
        time.sleep(0.01)
    assert held <= 20 << 20
    small = grouped.run_all([call("1") for _ in range(8)])
    assert all(result.usage.peak_memory_mb < 40 for result in small)


def test_a_call_sees_nothing_of_its_groups(grouped: Caller) -> None:
    code = "import os\ns = []\nfor fd in range(4096):\n  try: s += [os.fstat(fd) and fd]\n  except OSError: pass\ns"
    assert grouped.run(code).value == "[0, 1, 2, 3]"
    looked = (
        "import os\n[path for path in ('/proc', '/sys', '/sys/fs/cgroup') if os.path.isdir(path) and os.listdir(path)]"
    )
    assert grouped.run(looked).value == "[]"


def test_a_zygote_has_the_ways_into_the_groups_that_its_calls_were_in(grouped: Caller) -> None:
    with executor(slots=64) as caller:
        before = doors_of(caller)
        for _ in range(3):
            assert caller.run("1").value == "1"
        one = doors_of(caller) - before
        assert 0 < one <= MAX_PROCS_FILES, "the slot that was given back last is the next one taken"
        assert all(result.value == "1" for result in caller.run_all([call("import time; time.sleep(0.3)\n1")] * 8))
        assert one < doors_of(caller) - before <= 8 * one


def doors_of(caller: Caller) -> int:
    """Of all zygotes."""
    found = 0
    for pid in caller.processes():
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                found += bool(
                    re.search(rf"/{PREFIX}{caller.process.pid}-[^/]*/\d+(/tasks|/cgroup.procs)?$", str(fd.readlink()))
                )
    return found


def test_nothing_is_left_when_an_executor_ends(grouped: Caller) -> None:
    with executor() as caller:
        seq = caller.submit(call("import time\ntime.sleep(1000)"))
        assert caller.run("1").value == "1"
        made = trees(caller.process.pid)
        assert made
        del seq
    assert not any(path.exists() for path in made)


def test_what_a_killed_executor_left_the_next_one_removes(grouped: Caller) -> None:
    left: list[Path] = []
    with pytest.raises(AssertionError):  # an executor is expected to end by itself
        kill_one(left)
    assert left
    with executor() as caller:
        assert caller.run("1").value == "1"
        assert not any(path.exists() for path in left)
        assert trees(grouped.process.pid), "that of a living one stays"


def kill_one(left: list[Path]) -> None:
    with executor() as caller:
        left += trees(caller.process.pid)
        below = caller.processes()
        caller.process.kill()
        wait_gone(below)
