"""Tests of real executors with cgroups. The cgroup of a call limits and counts all its processes, and decides its
status."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import CgroupTree
from sandbox.jail.cgroup_tree import PREFIX, SERVER_LEAF, own_cgroup_dirs
from sandbox.types import Status
from tests.executor.calling import Caller, call, executor, wait_gone

MAX_PROCS_FILES = 3
"""A zygote has at most this many descriptors of one slot's cgroup. It has one per hierarchy of version 1."""
LONG_TIMEOUT_S = 60
"""Time limit of calls that should end by themselves."""


@pytest.fixture(scope="module")
def with_cgroups() -> Iterator[Caller]:
    try:
        CgroupTree().close()
    except IsolationError as error:
        pytest.skip(str(error))
    with executor() as caller:
        yield caller


@pytest.fixture
def resettable_peak(with_cgroups: Caller) -> None:
    """Skip the test if the peak memory of a cgroup cannot be reset. It can be reset with version 1, and with version 2
    since Linux 6.12."""
    tree = CgroupTree()
    can_reset = tree.cgroup(0)._can_reset_peak and tree.cgroup(0)._peak_fd >= 0  # no public attribute shows it
    tree.close()
    if not can_reset:
        pytest.skip("the peak of a cgroup cannot be reset on this kernel")


def cgroup_trees_of(pid: int) -> list[Path]:
    """The cgroup trees that an executor has created."""
    own = {Path(directory) for directory in own_cgroup_dirs().values()}
    # In version 2, the executor has moved all processes of its cgroup, this one included, into a leaf.
    parents = {path.parent if path.name == SERVER_LEAF else path for path in own}
    return [path for parent in parents for path in parent.glob(f"{PREFIX}{pid}-*")]


def max_slot_memory_bytes(pid: int) -> int:
    """The memory that the kernel counts for the slot with the most memory."""
    names = ("memory.current", "memory.usage_in_bytes")  # of version 2 and of version 1
    files = [path for tree in cgroup_trees_of(pid) for name in names for path in tree.glob(f"*/{name}")]
    return max(int(path.read_text()) for path in files)


def test_processes_that_exceed_the_memory_limit_together_end_as_memory_limit(with_cgroups: Caller) -> None:
    """Each process is within the limit. The first is the largest, so the kernel kills it."""
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
    result = with_cgroups.run(code, memory_mb=128, disk_mb=1, timeout_s=LONG_TIMEOUT_S)
    assert (result.status, result.stdout, result.exit_code) == (Status.MEMORY_LIMIT, "started\n", None)
    assert result.error is not None
    assert result.error.type == "MemoryLimit"


@pytest.mark.parametrize(
    ("code", "signals"),
    [
        ("os.abort()", {6, 11}),  # PID 1 of a namespace cannot send itself SIGABRT (6), so abort(3) causes SIGSEGV (11)
        ("ctypes.string_at(0)", {11}),
        ("resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass", {9}),
    ],
)
def test_a_crash_does_not_end_as_memory_limit(code: str, signals: set[int], with_cgroups: Caller) -> None:
    result = with_cgroups.run(f"import ctypes, os, resource\n{code}", timeout_s=LONG_TIMEOUT_S)
    assert result.status is Status.KILLED
    assert result.signal in signals


def test_a_child_that_kills_itself_does_not_end_the_call(with_cgroups: Caller) -> None:
    """The call goes on. The end of its first process decides its status."""
    code = "import os\nif os.fork() == 0:\n    os.kill(os.getpid(), 9)\nos.waitstatus_to_exitcode(os.wait()[1])"
    result = with_cgroups.run(code)
    assert (result.status, result.value) == (Status.OK, "-9")


def test_a_call_within_each_of_its_limits_is_not_killed_for_their_sum(with_cgroups: Caller) -> None:
    code = """
import os
with open("x", "wb") as file:
    for _ in range(30):
        file.write(bytes(1 << 20))
print("x" * (4 << 20))
held = bytearray(b"x") * (56 << 20)
"""
    result = with_cgroups.run(code, memory_mb=64, disk_mb=32, output_kb=5 << 10)
    assert result.status is Status.OK


def test_usage_includes_children_that_were_not_waited_for(with_cgroups: Caller, resettable_peak: None) -> None:
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
    usage = with_cgroups.run(code, timeout_s=LONG_TIMEOUT_S).usage
    assert usage.cpu_ms >= 290
    assert usage.peak_memory_mb >= 50


def test_a_fork_bomb_is_timed_out_and_changes_no_other_result(with_cgroups: Caller) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    bombs = [with_cgroups.submit(call(bomb, timeout_s=0.3, processes=16)) for _ in range(2)]
    assert (
        with_cgroups.run("import os\nif os.fork() == 0: os._exit(0)\nos.wait()[1]", timeout_s=LONG_TIMEOUT_S).value
        == "0"
    )
    assert [with_cgroups.result_of(seq).status for seq in bombs] == [Status.TIMEOUT] * 2
    results = with_cgroups.run_all([call(f"{n}") for n in range(20)])
    assert [(result.value, result.attempts) for result in results] == [(str(n), 1) for n in range(20)]


def test_the_peak_includes_files_and_output(with_cgroups: Caller, resettable_peak: None) -> None:
    code = "open('x', 'wb').write(bytes(30 << 20))\nprint('x' * (4 << 20))"
    assert with_cgroups.run(code, disk_mb=32, output_kb=5 << 10).usage.peak_memory_mb > 34


def test_usage_does_not_include_earlier_calls_of_the_slot(with_cgroups: Caller, resettable_peak: None) -> None:
    large = with_cgroups.run_all([call("x = bytearray(b'x') * (80 << 20)\nNone") for _ in range(8)])
    assert all(result.usage.peak_memory_mb >= 80 for result in large)
    end = time.monotonic() + LONG_TIMEOUT_S
    # The kernel may free the memory some time after the end of the calls.
    while (memory_bytes := max_slot_memory_bytes(with_cgroups.process.pid)) > 20 << 20 and time.monotonic() < end:
        time.sleep(0.01)
    assert memory_bytes <= 20 << 20
    small = with_cgroups.run_all([call("1") for _ in range(8)])
    assert all(result.usage.peak_memory_mb < 40 for result in small)


def test_a_call_does_not_see_its_cgroups(with_cgroups: Caller) -> None:
    open_fds = "import os\ns = []\nfor fd in range(4096):\n  try: s += [os.fstat(fd) and fd]\n  except OSError: pass\ns"
    assert with_cgroups.run(open_fds).value == "[0, 1, 2, 3]", "a descriptor of a cgroup would be another one"
    visible_dirs = (
        "import os\n[path for path in ('/proc', '/sys', '/sys/fs/cgroup') if os.path.isdir(path) and os.listdir(path)]"
    )
    assert with_cgroups.run(visible_dirs).value == "[]"


def test_a_zygote_has_cgroup_descriptors_only_of_the_slots_it_has_used(with_cgroups: Caller) -> None:
    with executor(slots=64) as caller:
        before = cgroup_fds_of(caller)
        for _ in range(3):
            assert caller.run("1").value == "1"
        per_slot = cgroup_fds_of(caller) - before
        assert 0 < per_slot <= 2 * MAX_PROCS_FILES, "the three calls had the same slot, which was released last"
        assert all(result.value == "1" for result in caller.run_all([call("import time; time.sleep(0.3)\n1")] * 8))
        assert per_slot < cgroup_fds_of(caller) - before <= 8 * per_slot


def cgroup_fds_of(caller: Caller) -> int:
    """Number of descriptors of slots' cgroups that the executor and all its descendants have. Those of a zygote count
    twice, because its template has them, too."""
    cgroup_file = re.compile(rf"/{PREFIX}{caller.process.pid}-[^/]*/\d+(/tasks|/cgroup.procs)?$")
    count = 0
    for pid in caller.processes():
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                count += bool(cgroup_file.search(str(fd.readlink())))
    return count


def test_an_executor_that_ends_removes_its_cgroups(with_cgroups: Caller) -> None:
    with executor() as caller:
        caller.submit(call("import time\ntime.sleep(1000)"))
        assert caller.run("1").value == "1"
        created = cgroup_trees_of(caller.process.pid)
        assert created
    assert not any(path.exists() for path in created)


def test_the_next_executor_removes_the_cgroups_of_a_killed_one(with_cgroups: Caller) -> None:
    left_behind: list[Path] = []
    with pytest.raises(AssertionError):  # `executor` asserts that the process exits by itself
        kill_an_executor(left_behind)
    assert left_behind
    with executor() as caller:
        assert caller.run("1").value == "1"
        assert not any(path.exists() for path in left_behind)
        assert cgroup_trees_of(with_cgroups.process.pid), "the cgroups of a running executor stay"


def kill_an_executor(left_behind: list[Path]) -> None:
    """Start and kill an executor; add its cgroup trees to `left_behind`."""
    with executor() as caller:
        left_behind += cgroup_trees_of(caller.process.pid)
        pids = caller.processes()
        caller.process.kill()
        wait_gone(pids)
