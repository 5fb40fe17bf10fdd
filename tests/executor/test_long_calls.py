"""Tests of long calls on a real executor.

A long call has used `demote_after_ms` of virtual time. All its threads are demoted (to SCHED_IDLE), and the call ends
at its limit, also on kernels that do not count run delay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from sandbox.errors import IsolationError
from sandbox.executor.time import process_tree
from sandbox.executor.time.process_tree import CpuPriority, nice_of_long_calls
from sandbox.jail import CgroupTree, Level, choose_level
from sandbox.types import Status
from tests.executor.calling import NO_CGROUPS, Caller, call, executor, executor_after

T = TypeVar("T")
ENDLESS = "while True: pass"
base_pids: dict[Caller, set[int]] = {}
"""For each executor, the pids before its first call: its own, and those of its jails and zygotes."""
NO_PROMOTION = "from sandbox.executor.time import monitor\nmonitor.MIN_SHARE_DIVISOR = 1e9"
"""Code for `executor_after`. Long calls are never promoted, so a loaded machine does not change the results of the
tests."""


@pytest.fixture(scope="module")
def one_slot() -> Iterator[Caller]:
    """An executor with one short slot. A call has to leave it before the next call can start."""
    with executor(server=executor_after(NO_PROMOTION), slots=1, long_slots=6, demote_after_ms=50.0) as caller:
        base_pids[caller] = {*caller.processes()}
        yield caller


NO_CAP_SYS_NICE = """
import ctypes
libc, header, sets = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
sets[0], sets[1] = (mask & ~(1 << 23) for mask in sets[:2])
assert libc.capset(header, sets) == 0
"""
"""Code for `executor_after`. The effective and permitted capabilities of the executor lack CAP_SYS_NICE."""
EVADERS = {
    "loops": ENDLESS,
    "forks": "import os\nos.fork()\nos.fork()\n" + ENDLESS,
    "sets a session": "import os\nif os.fork() == 0:\n    os.setsid()\n" + ENDLESS,
    "starts threads": f"import threading\ndef f():\n    {ENDLESS}\nfor _ in '123': threading.Thread(target=f).start()",
    "forks for ever": "import os\nwhile True:\n    if os.fork() == 0:\n        while sum(os.times()[:2]) < 0.05: pass\n"
    "        os._exit(0)\n    os.wait()",
    "starts and ends threads without pause": "import _thread, time\n_thread.stack_size(1 << 16)\nfor _ in range(40):\n"
    "    _thread.start_new_thread(time.sleep, (1000,))\nwhile True:\n"
    "    try: _thread.start_new_thread(time.sleep, (0.003,))\n    except RuntimeError: pass",
    "hides among many threads": "import _thread, os, time\n_thread.stack_size(1 << 16)\nfor _ in range(130):\n"
    f"    _thread.start_new_thread(time.sleep, (1000,))\nif os.fork() == 0:\n    {ENDLESS}\ntime.sleep(1000)",
    "leaves its parents": "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n" + ENDLESS,
}


@pytest.mark.parametrize("code", EVADERS.values(), ids=EVADERS)
def test_no_long_call_evades_demotion(code: str, one_slot: Caller) -> None:
    skip_if_orphans_are_missed(code)
    seq = one_slot.submit(call(code, timeout_s=60, processes=400))
    assert one_slot.run("1", timeout_s=60).value == "1", "the call has left the only short slot"
    one_slot.until(lambda: map_call_threads(one_slot, is_demoted) == {True})
    one_slot.send("cancel", [seq])
    one_slot.until(lambda: one_slot.stats.get("running") == 0)


def test_calls_are_demoted_by_their_nice_values_without_cap_sys_nice() -> None:
    with executor(server=executor_after(NO_CAP_SYS_NICE), slots=1, long_slots=1, demote_after_ms=50.0) as caller:
        base_pids[caller] = {*caller.processes()}
        seq = caller.submit(call(ENDLESS, timeout_s=60))
        caller.until(lambda: map_call_threads(caller, nice_step) in ({nice_of_long_calls(1)}, {process_tree.MAX_NICE}))
        assert map_call_threads(caller, os.sched_getscheduler) == {os.SCHED_OTHER}
        caller.send("cancel", [seq])
        caller.until(lambda: caller.stats.get("running") == 0)


def skip_if_orphans_are_missed(code: str) -> None:
    """Skip a test whose code has processes that lose their parents, if calls run at level landlock. At this level, only
    the parents of a process show which call the process belongs to."""
    if code == EVADERS["leaves its parents"] and choose_level("auto").level is Level.LANDLOCK:
        pytest.skip("level landlock: orphans belong to the zygote")


def nice_step(tid: int) -> int:
    """Return the nice value of a thread minus the nice value of this process."""
    return os.getpriority(os.PRIO_PROCESS, tid) - os.getpriority(os.PRIO_PROCESS, 0)


def is_demoted(tid: int) -> bool:
    return os.sched_getscheduler(tid) == os.SCHED_IDLE or nice_step(tid) > 0


def cpu_cgroup(tid: int) -> str:
    """The line of /proc that names a thread's cgroup for the cpu controller."""
    with open(f"/proc/{tid}/cgroup") as file:
        return next(line.strip() for line in file if "cpu" in line.split(":")[1].split(","))


def map_call_threads(caller: Caller, function: Callable[[int], T]) -> set[T]:
    """The values of `function(tid)` for all threads of all calls."""
    values: set[T] = set()
    for pid in {*caller.processes()} - base_pids[caller]:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] not in "ZX":  # neither a zombie nor dead
                    values |= {function(int(tid)) for tid in os.listdir(f"/proc/{pid}/task")}
        except OSError:
            continue
    return values


def test_short_calls_run_while_every_long_slot_is_used(one_slot: Caller) -> None:
    seqs = [one_slot.submit(call(ENDLESS, timeout_s=60)) for _ in range(6)]
    for n in range(8):
        assert one_slot.run(f"{n}", timeout_s=60).value == str(n)
    one_slot.until(lambda: one_slot.stats.get("running_long") == 6)
    assert one_slot.window == 2 + 6, "two calls for the short slot, and one for each long call"
    one_slot.send("cancel", seqs)
    one_slot.until(lambda: one_slot.stats.get("running") == 0)
    one_slot.until(lambda: one_slot.window == 2)


def test_a_long_call_ends_with_the_same_status_as_a_short_one() -> None:
    with executor(demote_after_ms=10.0) as caller:
        assert caller.run(ENDLESS, timeout_s=0.5).status is Status.TIMEOUT
        code = "import time\nwhile time.process_time() < 0.3: pass\nprint('done')"
        assert caller.run(code, timeout_s=60).stdout == "done\n"
        caller.until(lambda: caller.stats.get("demoted_total") == 2)


def test_all_threads_of_a_long_call_are_moved_to_the_idle_cgroup(one_slot: Caller) -> None:
    """Where the kernel divides the cores between sessions (autogroup), the scheduling policy of a thread counts only
    within its session. So the threads are moved to a cgroup instead."""
    if not CpuPriority().can_promote:
        pytest.skip("needs CAP_SYS_NICE in the initial user namespace")
    try:
        tree = CgroupTree()
    except IsolationError as error:
        pytest.skip(str(error))
    has_idle_cgroup = tree.idle is not None
    tree.close()
    if not has_idle_cgroup:
        pytest.skip("needs the cpu controller of cgroup version 1")
    seq = one_slot.submit(call(EVADERS["leaves its parents"], timeout_s=60))

    def cgroup_prefixes() -> set[str]:
        return {path.rpartition("/")[2].partition("-")[0] for path in map_call_threads(one_slot, cpu_cgroup)}

    one_slot.until(lambda: cgroup_prefixes() == {"rstar"})  # the idle cgroup's name is "rstar-..."
    one_slot.send("cancel", [seq])
    one_slot.until(lambda: one_slot.stats.get("running") == 0)


NO_SCHEDSTAT = """
import errno
from sandbox.executor.time import process_tree
read = process_tree._read
def read_without_schedstat(path):
    if path.endswith("/schedstat"):
        raise FileNotFoundError(errno.ENOENT, "no such file", path)
    return read(path)
process_tree._read = read_without_schedstat
"""
"""Code for `executor_after`. The executor cannot read schedstat."""
ENDLESS_CODES = {
    "loops": ENDLESS,
    "sleeps": "import time\ntime.sleep(1000)",
    "has a child loop": f"import os\nif os.fork() == 0:\n    {ENDLESS}\nos.wait()",
    "has a thread loop": f"import threading\ndef f():\n    {ENDLESS}\nthreading.Thread(target=f).start()",
}


@pytest.mark.parametrize("cgroups", ["cgroups", "no cgroups"])
def test_an_endless_call_is_timed_out_if_the_kernel_does_not_count_run_delay(cgroups: str) -> None:
    server = executor_after(NO_SCHEDSTAT, *([] if cgroups == "cgroups" else [NO_CGROUPS]))
    with executor(server=server, slots=len(ENDLESS_CODES), demote_after_ms=50.0) as caller:
        results = caller.run_all([call(code, timeout_s=0.5) for code in ENDLESS_CODES.values()])
        assert [(result.status, result.attempts) for result in results] == [(Status.TIMEOUT, 1)] * len(ENDLESS_CODES)
        assert all(result.usage.run_ms < 20_000 for result in results), "long before the wall cap of 60 s"
        assert caller.run("1").value == "1"
        assert caller.stats.get("zygote_restarts_total", 0) == 0
