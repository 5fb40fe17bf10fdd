"""Calls that last: their own clock ends them, they make room for short ones, and come to a verdict all the same."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import trio
from trio.testing import MockClock

from sandbox.executor import call_state, monitor
from sandbox.executor.executor import Executor
from sandbox.executor.monitor import lag_s
from sandbox.executor.process_tree import CpuPriority, ProcessTree
from sandbox.executor.virtual_clock import ProcessSample, ThreadSample, TreeSample
from sandbox.jail import CgroupTree
from sandbox.types import Limits, Result, Status
from tests.executor.calling import Caller, call, executor
from tests.executor.zygotes import Driven, FakeZygote, driven, ended_json

T = TypeVar("T")
ENDLESS = "while True: pass"
NOBODY: Any = None


class Machine:
    """A scheduler that keeps each call waiting for a share of the time, and what becomes of the calls."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, share: float, *, alone: Callable[[], bool] = lambda: True
    ) -> None:
        self.killed_after: float | None = None
        self.idle: list[bool] = []
        self._share, self._alone, self._patch = share, alone, monkeypatch
        self._started = 0.0
        self._running: list[tuple[FakeZygote, int]] = []
        monkeypatch.setattr(monitor, "pid_of_pidfd", lambda *_: 77)
        monkeypatch.setattr(ProcessTree, "sample", lambda _tree: self._look())
        monkeypatch.setattr(
            CpuPriority, "apply", lambda _self, _tree, _cgroup, is_demoted: self.idle.append(is_demoted)
        )
        monkeypatch.setattr(signal, "pidfd_send_signal", self._kill)

        async def outlast(peer: FakeZygote, ticket: int) -> None:
            self._running.append((peer, ticket))
            await trio.sleep(0.1)
            peer.send_still_running(ticket, 100.0)

        monkeypatch.setattr(FakeZygote, "outlast", outlast, raising=False)

    async def run(self, timeout_s: float, **settings: Any) -> Result:
        """A call that never ends by itself."""
        settings = {"zygote_pools": 1, "slots": 1, "profiles": ("bare",), **settings}
        async with driven(self._patch, **settings) as driver:
            self._started = trio.current_time()
            (result,) = await driver.run("outlast", limits=Limits(timeout_s=timeout_s))
            assert driver.executor.running_long == 0
            return result

    def _look(self) -> TreeSample:
        wall = trio.current_time() - self._started
        waited = self._share * wall
        threads = {
            tid: ThreadSample(wall - waited, waited, 9, 9, is_runnable=True)
            for tid in ((77,) if self._alone() else (77, 78))
        }
        return {77: ProcessSample(1, wall, wall - waited, threads)}

    def _kill(self, _fd: int, number: int) -> None:
        if not number:  # only asks whether it is there
            return
        self.killed_after = trio.current_time() - self._started
        peer, ticket = self._running.pop(0)
        peer.send(ended_json(ticket, exit_code=None, signal=number))

    async def demoted_after_s(self, calls: int, short: str | None = None) -> float:
        """Wall time after which half of some endless calls are long. Calls of `short` keep one more slot busy, and one
        of them always waits for it."""
        settings = {"zygote_pools": 1, "slots": calls + (short is not None), "cores": 1, "profiles": ("bare",)}
        async with driven(self._patch, **settings) as driver:
            self._started = trio.current_time()
            driver.submit(*["outlast"] * calls, limits=Limits(timeout_s=60.0))
            if short is not None:
                driver.submit(*[short] * 100)
            while driver.executor.running_long < calls / 2:  # noqa: ASYNC110  there is no event for it
                await trio.sleep(0.001)
            return trio.current_time() - self._started


@pytest.mark.trio
async def test_calls_of_a_crowd_are_demoted_when_they_are_first_sampled(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Eight calls on a core have an eighth of it each: 100 ms of virtual time would take them 800 ms."""
    assert await Machine(monkeypatch, 7 / 8).demoted_after_s(8) < 0.2


@pytest.mark.trio
async def test_calls_that_hold_all_short_slots_are_demoted_early_while_others_wait(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    assert await Machine(monkeypatch, 7 / 8).demoted_after_s(8, short="hang") < 0.2


@pytest.mark.trio
async def test_calls_are_not_demoted_early_while_others_wait_and_end(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    assert await Machine(monkeypatch, 7 / 8).demoted_after_s(8, short="slow") >= 0.8


@pytest.mark.trio
@pytest.mark.parametrize("share", [0.0, 0.5, 0.75, 0.89])
async def test_waiting_for_a_core_is_not_the_calls_time(
    share: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    machine = Machine(monkeypatch, share)
    result = await machine.run(2.0)
    assert result.status is Status.TIMEOUT
    assert machine.killed_after == pytest.approx(2.0 / (1 - share), rel=0.05)


@pytest.mark.trio
async def test_a_call_without_a_core_is_no_verdict_in_the_end(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    machine = Machine(monkeypatch, 0.999)
    result = await machine.run(2.0)
    assert result.status is Status.UNAVAILABLE
    assert result.error is not None
    assert result.error.type == "Starved"
    assert machine.killed_after is not None
    cap_s = call_state.wall_cap_s(2.0)
    assert cap_s <= machine.killed_after < cap_s + 3.0


@pytest.mark.trio
@pytest.mark.parametrize("alone", [lambda: False, iter([True, False, *[True] * 10_000]).__next__])
async def test_a_call_that_starves_itself_is_timed_out(
    alone: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Else a fork bomb would be our fault, and free of charge; also one that hides its children later."""
    machine = Machine(monkeypatch, 0.999, alone=alone)
    assert (await machine.run(2.0)).status is Status.TIMEOUT
    assert machine.killed_after is not None
    assert machine.killed_after < call_state.wall_cap_s(2.0) + 3.0


@pytest.mark.trio
async def test_a_call_gives_way_after_a_while_of_its_own_time_and_not_of_wall_time(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    for share in (0.0, 0.9):
        machine = Machine(monkeypatch, share)
        gave_way: list[float] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                CpuPriority, "apply", lambda *_, is_demoted, gave_way=gave_way: gave_way.append(trio.current_time())
            )
            await machine.run(5.0, demote_after_ms=1000.0)
        assert gave_way[0] - machine._started == pytest.approx(1.0 / (1 - share), rel=0.1)


@pytest.mark.trio
async def test_a_starving_call_is_given_its_share_and_comes_to_its_verdict(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """While it gives way, it gets nothing at all; with its share, most of a core."""
    machine = Machine(monkeypatch, 0.0)
    ran, before = 0.0, 0.0

    def look() -> TreeSample:
        nonlocal ran, before
        wall = trio.current_time() - machine._started
        ran += (wall - before) * (0.0 if machine.idle and machine.idle[-1] else 0.8)
        before = wall
        return {77: ProcessSample(1, wall, ran, {77: ThreadSample(ran, wall - ran, 9, 9, is_runnable=True)})}

    monkeypatch.setattr(machine, "_look", look)
    result = await machine.run(10.0)
    assert result.status is Status.TIMEOUT
    assert machine.idle[0] is True
    assert False in machine.idle
    assert machine.killed_after is not None
    assert machine.killed_after < call_state.wall_cap_s(10.0)


def test_a_call_that_gives_way_has_a_quarter_of_its_share() -> None:
    assert lag_s(1.0, 1.0, 0.5) < 0
    assert lag_s(0.25, 1.0, 1.0) == 0
    assert lag_s(0.24, 1.0, 0.1) == pytest.approx(0.01), "nobody gets more than a core"
    assert lag_s(0.01, 1.0, 10.0) == pytest.approx(0.015), "ten calls share a core"
    assert lag_s(1.0, 100.0, 10.0) == 1.5


@pytest.mark.parametrize("crowd", [0.5, 10.0, 200.0])
@pytest.mark.parametrize("left_s", [0.01, 0.1, 1.0])
def test_who_sleeps_or_may_have_slept_is_looked_at_before_its_time_is_over(crowd: float, left_s: float) -> None:
    rarest_s = monitor.MIN_GUESS_INTERVAL_S * monitor.crowding_factor(crowd)
    for is_promoted in (False, True):
        for _ in range(20):
            assert (
                monitor.next_sample_in_s(left_s, 0.0, 1.0, crowd, is_promoted=is_promoted, is_single_threaded=True)
                <= left_s
            )
            guess = monitor.next_sample_in_s(
                left_s, 0.9 * left_s, 1.0, crowd, is_promoted=is_promoted, is_single_threaded=True
            )
            assert guess <= max(0.1 * left_s + 1e-9, min(rarest_s, left_s), monitor.MIN_SAMPLE_INTERVAL_S)


def test_at_the_slowest_a_call_comes_to_its_verdict_before_the_hard_cap() -> None:
    for calls_per_core in (0.1, 1.0, 4.0, 8.0, 40.0):
        for timeout_s in (0.1, 10.0, 1000.0):
            slowest_s = timeout_s * monitor.MIN_SHARE_DIVISOR * max(1.0, calls_per_core)
            assert slowest_s < call_state.wall_cap_s(timeout_s) / call_state.wall_cap_rate(calls_per_core)


@pytest.mark.trio
async def test_long_calls_leave_the_short_places_until_the_long_ones_are_taken(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    Machine(monkeypatch, 0.0)
    windows: list[int] = []
    async with driven(monkeypatch, zygote_pools=1, slots=2, long_slots=3, profiles=("bare",)) as driver:
        driver.executor.on_window_changed = windows.append
        endless = driver.submit(*["outlast"] * 3, limits=Limits(timeout_s=1000.0))
        assert [result.status for result in await driver.run("ok", "ok", "ok")] == [Status.OK] * 3
        await trio.sleep(10)
        assert counts(driver) == (0, 3)
        assert windows == [5, 6, 7]
        gave_way: set[ProcessTree] = set()
        monkeypatch.setattr(
            CpuPriority, "apply", lambda _self, tree, _cgroup, is_demoted: is_demoted and gave_way.add(tree)
        )
        endless += driver.submit("outlast", limits=Limits(timeout_s=1000.0))
        await trio.sleep(10)
        assert counts(driver) == (1, 3), "a fourth one keeps its short place"
        assert len(gave_way) == 4, "and gives way all the same"
        endless += driver.submit("outlast", limits=Limits(timeout_s=1000.0))
        (waiting,) = driver.submit("ok")
        await trio.sleep(10)
        assert counts(driver) == (2, 3)
        assert waiting not in driver.results
        driver.executor.cancel(endless[0])
        await driver.wait_for([waiting])
        assert counts(driver) == (1, 3)
        assert driver.executor.stats()["demoted_total"] == 4
        for seq in endless[1:]:
            driver.executor.cancel(seq)
        await driver.run("ok")
        await trio.testing.wait_all_tasks_blocked()
        assert windows[-1] == driver.executor.window == 4


def counts(driver: Driven) -> tuple[int, int]:
    stats = driver.executor.stats()
    return stats["running"] - stats["running_long"], stats["running_long"]


@pytest.mark.trio
async def test_without_memory_to_spare_long_calls_keep_their_places(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    Machine(monkeypatch, 0.0)
    available = 0
    monkeypatch.setattr("sandbox.machine.memory_available", lambda: available)
    async with driven(monkeypatch, zygote_pools=1, slots=2, profiles=("bare",)) as driver:
        seqs = driver.submit("outlast", limits=Limits(timeout_s=1000.0))
        await trio.sleep(5)
        assert counts(driver) == (1, 0)
        available = 1 << 60
        await trio.sleep(5)
        assert counts(driver) == (0, 1)
        driver.executor.cancel(seqs[0])
        await driver.run("ok")


@pytest.mark.trio
async def test_looks_cost_no_more_however_many_calls_last(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    looks: list[float] = []
    for running in (1, 20 * monitor.CROWDED_CALLS_PER_CORE):
        machine = Machine(monkeypatch, 0.0)
        before = len(looks)

        def look(_tree: ProcessTree, machine: Machine = machine) -> TreeSample:
            looks.append(trio.current_time())
            return machine._look()

        with monkeypatch.context() as patch:
            patch.setattr(ProcessTree, "sample", look)
            patch.setattr(Executor, "calls_per_core", running)
            result = await machine.run(100.0)
        assert result.status is Status.TIMEOUT
        assert machine.killed_after == pytest.approx(100.0, rel=0.01)
        least_s, most_s = monitor.SAMPLE_INTERVAL_S
        expected = 100 / ((least_s + most_s) / 2) / max(1, running / monitor.CROWDED_CALLS_PER_CORE)
        assert len(looks) - before == pytest.approx(expected, rel=0.3)


class Watch(monitor.CallMonitor):
    """One whose looks are told beforehand."""

    def __init__(self, looks: Iterator[float], pidfd: int = -1) -> None:
        self.is_stopped = False
        self._looks, self._pidfd = looks, pidfd

    def _step(self) -> float | None:
        return next(self._looks, None)

    def stop(self) -> None:
        if self._pidfd >= 0:
            super().stop()


def no_process() -> Iterator[float]:
    yield 0.1
    raise ProcessLookupError


@pytest.mark.trio
@pytest.mark.parametrize("looks", [iter([]), iter([0.1]), no_process(), itertools.repeat(0.1)])
async def test_what_is_watched_no_more_holds_no_descriptor(looks: Iterator[float], autojump_clock: MockClock) -> None:
    """It is out of time, has ended by itself, or the executor has."""
    fd = os.open(os.devnull, os.O_RDONLY)
    watches, watch = monitor.Monitor(NOBODY), Watch(looks, fd)
    watches._schedule(trio.current_time(), watch)
    with trio.move_on_after(10):
        await watches.run()
    assert watch.is_stopped
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    watch.stop()


@pytest.mark.trio
async def test_a_crowd_that_is_due_leaves_others_their_turn() -> None:
    at_once = most = 0

    def looks() -> Iterator[float]:
        nonlocal at_once, most
        while True:
            at_once += 1
            most = max(most, at_once)
            until = time.thread_time() + monitor.POLL_BUDGET_S / 4
            while time.thread_time() < until:
                pass
            yield 0.01

    watches = monitor.Monitor(NOBODY)
    for _ in range(40):
        watches._schedule(trio.current_time(), Watch(looks()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watches.run)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
            at_once = 0
        nursery.cancel_scope.cancel()
    assert 0 < most <= 2 * 4


@pytest.mark.trio
@pytest.mark.parametrize(
    ("calls", "cost_s", "share"), [(1, 0.004, 0.08), (30, 0.002, 0.27), (500, 0.004, 0.23), (100, 0.0004, 0.8)]
)
async def test_looks_that_take_long_are_rare(
    calls: int, cost_s: float, share: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Who starts a hundred threads must not keep all others from their answers."""
    spent = 0.0

    def looks() -> Iterator[float]:
        nonlocal spent
        while True:
            spent += cost_s
            yield 0.05

    monkeypatch.setattr(time, "thread_time", lambda: spent)
    watches = monitor.Monitor(NOBODY)
    for _ in range(calls):
        watches._schedule(trio.current_time(), Watch(looks()))
    with trio.move_on_after(100):
        await watches.run()
    assert spent / 100 == pytest.approx(share, rel=0.15)


@pytest.mark.trio
async def test_what_the_machine_lacks_for_a_moment_is_no_end_of_a_watch(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A table of files that is full: were nobody to look any more, the call would end with all its jail."""
    machine, missing_modules = Machine(monkeypatch, 0.0), iter([True, True, False, True])

    def found(*_: int) -> int:
        if next(missing_modules, False):
            raise OSError(errno.ENFILE, "Too many open files in system")
        return 77

    def look(_tree: ProcessTree) -> TreeSample:
        if next(missing_modules, False):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return machine._look()

    monkeypatch.setattr(monitor, "pid_of_pidfd", found)
    monkeypatch.setattr(ProcessTree, "sample", look)
    assert (await machine.run(2.0)).status is Status.TIMEOUT
    assert machine.killed_after == pytest.approx(2.0, rel=0.05)
    assert next(missing_modules, None) is None


@pytest.mark.trio
async def test_a_look_at_who_has_just_gone_changes_nobody_who_has_its_number_now(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    machine, signals = Machine(monkeypatch, 0.0), []

    def gone(_fd: int, number: int) -> None:
        signals.append(number)
        if machine._running:
            peer, ticket = machine._running.pop(0)
            peer.send(ended_json(ticket))
        raise ProcessLookupError

    monkeypatch.setattr(signal, "pidfd_send_signal", gone)
    assert (await machine.run(2.0, demote_after_ms=1.0)).status is Status.OK
    assert machine.idle == []
    assert {*signals} == {0}


@pytest.mark.trio
async def test_the_end_of_a_call_among_many_takes_no_more_looks_and_comes_when_it_should(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """One that gets a thousandth of a core must not be looked at a thousand times to see its last second end."""
    looks = 0
    for running, share in (
        (monitor.CROWDED_CALLS_PER_CORE, 1 - 1 / monitor.CROWDED_CALLS_PER_CORE),
        (20 * monitor.CROWDED_CALLS_PER_CORE, 1 - 1 / 960),
    ):
        machine, before = Machine(monkeypatch, share), looks

        def look(_tree: ProcessTree, machine: Machine = machine) -> TreeSample:
            nonlocal looks
            looks += 1
            return machine._look()

        with monkeypatch.context() as patch:
            patch.setattr(ProcessTree, "sample", look)
            patch.setattr(Executor, "calls_per_core", running)
            result = await machine.run(1.0)
        assert result.status is Status.TIMEOUT
        assert machine.killed_after == pytest.approx(1.0 / (1 - share), rel=0.02)
        assert looks - before < 1000


@pytest.mark.trio
@pytest.mark.parametrize(("cpu_s", "status"), [(0.9, Status.OK), (1.1, Status.TIMEOUT)])
async def test_a_call_that_ends_between_two_looks_is_judged_by_what_it_computed(
    cpu_s: float, status: Status, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Many end at once, and one that had next to nothing of a core has a whole one until the next look at it."""
    machine = Machine(monkeypatch, 1 - 1 / 960)

    def look(tree: ProcessTree) -> TreeSample:
        seen = machine._look()
        tree.cpu_s = seen[77].cpu_s
        return seen

    monkeypatch.setattr(ProcessTree, "sample", look)
    monkeypatch.setattr(Executor, "calls_per_core", 960)
    async with driven(monkeypatch, zygote_pools=1, slots=1, profiles=("bare",)) as driver:
        machine._started = trio.current_time()
        seqs = driver.submit("outlast", limits=Limits(timeout_s=1.0))
        await trio.sleep(500)
        peer, ticket = machine._running.pop(0)
        peer.send(ended_json(ticket, cpu_ms=1e3 * cpu_s, wall_ms=1e3 * (trio.current_time() - machine._started)))
        await driver.wait_for(seqs)
        result = driver.results[seqs[0]]
        assert result.status is status
        assert (result.exit_code, result.signal) == ((0, None) if status is Status.OK else (None, signal.SIGKILL))


@pytest.mark.trio
async def test_what_many_compute_together_before_the_limit_by_the_wall_is_in_time(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Alone at the last look, it has started sixteen since."""
    machine = Machine(monkeypatch, 0.0)
    async with driven(monkeypatch, zygote_pools=1, slots=1, profiles=("bare",)) as driver:
        machine._started = trio.current_time()
        seqs = driver.submit("outlast", limits=Limits(timeout_s=2.0))
        await trio.sleep(1.4)
        peer, ticket = machine._running.pop(0)
        peer.send(ended_json(ticket, cpu_ms=1e3 * (1.3 + 16 * 0.1), wall_ms=1.4e3))
        await driver.wait_for(seqs)
        assert driver.results[seqs[0]].status is Status.OK


standing: dict[Caller, set[int]] = {}
"""The executor's own processes, jails and zygotes."""
PATIENT = """
import runpy, sys
from sandbox.executor import monitor
monitor.MIN_SHARE_DIVISOR = 1e9
del sys.argv[:2]
runpy.run_module("sandbox.executor", run_name="__main__", alter_sys=True)
"""
"""An executor in which long calls give way for ever, whatever else the machine does meanwhile."""


@pytest.fixture(scope="module")
def narrow() -> Iterator[Caller]:
    """One short place, so that whatever does not leave it is in the way."""
    with executor(server=(sys.executable, "-c", PATIENT), slots=1, long_slots=6, demote_after_ms=50.0) as caller:
        standing[caller] = {*caller.processes()}
        yield caller


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
    "hides in a crowd": "import _thread, os, time\n_thread.stack_size(1 << 16)\nfor _ in range(130):\n"
    f"    _thread.start_new_thread(time.sleep, (1000,))\nif os.fork() == 0:\n    {ENDLESS}\ntime.sleep(1000)",
    "leaves its parents": "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n" + ENDLESS,
}


@pytest.mark.parametrize("how", EVADERS)
def test_what_lasts_gives_way_however_it_goes_about_it(how: str, narrow: Caller) -> None:
    if not CpuPriority().can_change:
        pytest.skip("needs CAP_SYS_NICE in the machine's own user namespace")
    seq = narrow.submit(call(EVADERS[how], timeout_s=60, processes=400))
    assert narrow.run("1", timeout_s=60).value == "1", "there is but one short place"
    narrow.until(lambda: policies(narrow) == {os.SCHED_IDLE})
    narrow.send("cancel", [seq])
    narrow.until(lambda: narrow.stats.get("running") == 0)


def policies(caller: Caller) -> set[int]:
    return seen_of_calls(caller, os.sched_getscheduler)


def cpu_group(tid: int) -> str:
    with open(f"/proc/{tid}/cgroup") as file:
        return next(line.strip() for line in file if "cpu" in line.split(":")[1].split(","))


def seen_of_calls(caller: Caller, what: Callable[[int], T]) -> set[T]:
    """Of all threads that have not been there since the executor was ready."""
    found: set[T] = set()
    for pid in {*caller.processes()} - standing[caller]:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] not in "ZX":
                    found |= {what(int(tid)) for tid in os.listdir(f"/proc/{pid}/task")}
        except OSError:
            continue
    return found


def test_short_calls_are_answered_while_every_long_place_is_taken(narrow: Caller) -> None:
    seqs = [narrow.submit(call(ENDLESS, timeout_s=60)) for _ in range(6)]
    for n in range(8):
        assert narrow.run(f"{n}", timeout_s=60).value == str(n)
    narrow.until(lambda: narrow.stats.get("running_long") == 6)
    assert narrow.window == 2 + 6
    narrow.send("cancel", seqs)
    narrow.until(lambda: narrow.stats.get("running") == 0)
    narrow.until(lambda: narrow.window == 2)


def test_a_long_call_is_judged_as_ever() -> None:
    with executor(demote_after_ms=10.0) as caller:
        assert caller.run(ENDLESS, timeout_s=0.5).status is Status.TIMEOUT
        code = "import time\nwhile time.process_time() < 0.3: pass\nprint('done')"
        assert caller.run(code, timeout_s=60).stdout == "done\n"
        caller.until(lambda: caller.stats.get("demoted_total") == 2)


def test_what_lasts_gives_way_to_everything_and_not_only_in_its_session(narrow: Caller) -> None:
    """Where the kernel divides cores between sessions, a policy says nothing to those of another one."""
    tree = CgroupTree()
    has_group = tree.idle is not None
    tree.close()
    if not has_group or not CpuPriority().can_change:
        pytest.skip("needs version 1 of control groups to divide the cores, and CAP_SYS_NICE")
    seq = narrow.submit(call(EVADERS["leaves its parents"], timeout_s=60))

    def groups() -> set[str]:
        return {group.rpartition("/")[2].partition("-")[0] for group in seen_of_calls(narrow, cpu_group)}

    narrow.until(lambda: groups() == {"rstar"})
    narrow.send("cancel", [seq])
    narrow.until(lambda: narrow.stats.get("running") == 0)


BARE_PROC = """
import errno, runpy, sys
from sandbox import errors, jail
from sandbox.executor import process_tree
hidden, has_groups = sys.argv.pop(1), sys.argv.pop(1) == "groups"
read = process_tree._read
def bare(path):
    if "schedstat" in hidden and path.endswith("/schedstat"):
        raise FileNotFoundError(errno.ENOENT, "no such file", path)
    data = read(path)
    return b"".join(
        line
        for line in data.splitlines(keepends=True)
        if not ("Pid" in hidden and line.startswith(b"Pid:") or "NSpid" in hidden and line.startswith(b"NSpid:"))
    )
process_tree._read = bare
class Nothing:
    def __init__(self): raise errors.IsolationError("cgroups: hidden")
if not has_groups: jail.CgroupTree = Nothing
del sys.argv[:2]
runpy.run_module("sandbox.executor", run_name="__main__", alter_sys=True)
"""
"""An executor for which the kernel does not have some files of /proc, or lines in them, nor control groups."""
LOOPS = {
    "loops": ENDLESS,
    "sleeps": "import time\ntime.sleep(1000)",
    "has a child loop": f"import os\nif os.fork() == 0:\n    {ENDLESS}\nos.wait()",
    "has a thread loop": f"import threading\ndef f():\n    {ENDLESS}\nthreading.Thread(target=f).start()",
}


@pytest.mark.parametrize("groups", ["groups", "no groups"])
@pytest.mark.parametrize("hidden", ["schedstat", "Pid", "schedstat Pid NSpid"])
def test_an_endless_call_is_timed_out_whatever_the_kernel_does_not_count(hidden: str, groups: str) -> None:
    server = (sys.executable, "-c", BARE_PROC, hidden, groups)
    with executor(server=server, slots=len(LOOPS), demote_after_ms=50.0) as caller:
        results = caller.run_all([call(code, timeout_s=0.5) for code in LOOPS.values()])
        assert [(one.status, one.attempts) for one in results] == [(Status.TIMEOUT, 1)] * len(LOOPS)
        assert all(one.usage.run_ms < 20_000 for one in results)
        assert caller.run("1").value == "1"
        assert caller.stats.get("zygote_restarts_total", 0) == 0
