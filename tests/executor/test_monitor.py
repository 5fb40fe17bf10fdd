"""Monitored calls: they end at their limit in virtual time, leave short slots to short calls, and are never starved."""

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
NO_OWNER: Any = None
FIRST_PID = 77
"""The pid of every call's first process on a `Machine`."""


class Machine:
    """A fake scheduler on which every call waits for a core for `delay_share` of the time.

    Calls with the code "outlast" run until they are killed; their zygote reports them as still running after 0.1 s.
    `is_single_threaded` is asked at each sample; otherwise the call has two threads.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        delay_share: float,
        *,
        is_single_threaded: Callable[[], bool] = lambda: True,
    ) -> None:
        self.killed_after: float | None = None
        """Seconds after which a call was killed."""
        self.demotions: list[bool] = []
        """Whether the call was to be demoted, at each change of its priority."""
        self.started = 0.0
        self.running: list[tuple[FakeZygote, int]] = []
        """Zygote and run id of the running calls."""
        self._delay_share, self._is_single_threaded, self._patch = delay_share, is_single_threaded, monkeypatch
        monkeypatch.setattr(monitor, "pid_of_pidfd", lambda *_: FIRST_PID)
        monkeypatch.setattr(ProcessTree, "sample", lambda _tree: self.sample())
        monkeypatch.setattr(
            CpuPriority, "apply", lambda _self, _tree, _cgroup, is_demoted: self.demotions.append(is_demoted)
        )
        monkeypatch.setattr(signal, "pidfd_send_signal", self._kill)

        async def outlast(zygote: FakeZygote, run_id: int) -> None:
            self.running.append((zygote, run_id))
            await trio.sleep(0.1)
            zygote.send_still_running(run_id, 100.0)

        monkeypatch.setattr(FakeZygote, "outlast", outlast, raising=False)

    async def run(self, timeout_s: float, **settings: Any) -> Result:
        """Run a call that never ends by itself."""
        settings = {"zygote_pools": 1, "slots": 1, "profiles": ("bare",), **settings}
        async with driven(self._patch, **settings) as driver:
            self.started = trio.current_time()
            (result,) = await driver.run("outlast", limits=Limits(timeout_s=timeout_s))
            assert driver.executor.running_long == 0
            return result

    def sample(self) -> TreeSample:
        wall_s = trio.current_time() - self.started
        delay_s = self._delay_share * wall_s
        tids = (FIRST_PID,) if self._is_single_threaded() else (FIRST_PID, FIRST_PID + 1)
        threads = {tid: ThreadSample(wall_s - delay_s, delay_s, 9, 9, is_runnable=True) for tid in tids}
        return {FIRST_PID: ProcessSample(1, wall_s, wall_s - delay_s, threads)}

    def _kill(self, _pidfd: int, number: int) -> None:
        if not number:  # signal 0 only tests whether the process exists
            return
        self.killed_after = trio.current_time() - self.started
        zygote, run_id = self.running.pop(0)
        zygote.send(ended_json(run_id, exit_code=None, signal=number))

    async def demoted_after_s(self, calls: int, short: str | None = None) -> float:
        """Wall time after which half of some endless calls are long. Calls of `short` keep one more slot busy, and one
        of them always waits for it."""
        settings: dict[str, Any] = {"zygote_pools": 1, "slots": calls + (short is not None), "profiles": ("bare",)}
        async with driven(self._patch, cores=1, **settings) as driver:
            self.started = trio.current_time()
            driver.submit(*["outlast"] * calls, limits=Limits(timeout_s=60.0))
            if short is not None:
                driver.submit(*[short] * 100)
            while driver.executor.running_long < calls / 2:  # noqa: ASYNC110  there is no event for it
                await trio.sleep(0.001)
            return trio.current_time() - self.started


@pytest.mark.trio
async def test_crowded_calls_are_demoted_when_they_are_first_sampled(
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
@pytest.mark.parametrize("delay_share", [0.0, 0.5, 0.75, 0.89])
async def test_run_delay_does_not_count_towards_the_time_limit(
    delay_share: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    machine = Machine(monkeypatch, delay_share)
    result = await machine.run(2.0)
    assert result.status is Status.TIMEOUT
    assert machine.killed_after == pytest.approx(2.0 / (1 - delay_share), rel=0.05)


@pytest.mark.trio
async def test_a_call_that_gets_no_core_is_unavailable_at_the_wall_cap(
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
@pytest.mark.parametrize("is_single_threaded", [lambda: False, iter([True, False, *[True] * 10_000]).__next__])
async def test_a_call_that_ever_had_several_threads_is_timed_out_at_the_wall_cap(
    is_single_threaded: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The processes of a fork bomb wait for each other. If that counted as the server's fault, a fork bomb would be
    retried, and also one that hides its children from later samples."""
    machine = Machine(monkeypatch, 0.999, is_single_threaded=is_single_threaded)
    assert (await machine.run(2.0)).status is Status.TIMEOUT
    assert machine.killed_after is not None
    assert machine.killed_after < call_state.wall_cap_s(2.0) + 3.0


@pytest.mark.trio
async def test_a_call_is_demoted_after_virtual_time_and_not_after_wall_time(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    for delay_share in (0.0, 0.9):
        machine = Machine(monkeypatch, delay_share)
        applied_at: list[float] = []

        def note(*_: Any, is_demoted: bool, applied_at: list[float] = applied_at) -> None:
            applied_at.append(trio.current_time())

        with monkeypatch.context() as patch:
            patch.setattr(CpuPriority, "apply", note)
            await machine.run(5.0, demote_after_ms=1000.0)
        assert applied_at[0] - machine.started == pytest.approx(1.0 / (1 - delay_share), rel=0.1)


@pytest.mark.trio
async def test_a_starving_call_is_promoted_and_reaches_its_time_limit(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """While it is demoted it gets no core at all; otherwise 0.8 of one."""
    machine = Machine(monkeypatch, 0.0)
    cpu_s, before_s = 0.0, 0.0

    def sample() -> TreeSample:
        nonlocal cpu_s, before_s
        wall_s = trio.current_time() - machine.started
        is_demoted = bool(machine.demotions) and machine.demotions[-1]
        cpu_s += (wall_s - before_s) * (0.0 if is_demoted else 0.8)
        before_s = wall_s
        thread = ThreadSample(cpu_s, wall_s - cpu_s, 9, 9, is_runnable=True)
        return {FIRST_PID: ProcessSample(1, wall_s, cpu_s, {FIRST_PID: thread})}

    monkeypatch.setattr(machine, "sample", sample)
    result = await machine.run(10.0)
    assert result.status is Status.TIMEOUT
    assert machine.demotions[0] is True
    assert False in machine.demotions
    assert machine.killed_after is not None
    assert machine.killed_after < call_state.wall_cap_s(10.0)


def test_a_long_call_lags_below_a_quarter_of_its_fair_share() -> None:
    assert lag_s(1.0, 1.0, 0.5) < 0
    assert lag_s(0.25, 1.0, 1.0) == 0
    assert lag_s(0.24, 1.0, 0.1) == pytest.approx(0.01), "the fair share is at most a whole core"
    assert lag_s(0.01, 1.0, 10.0) == pytest.approx(0.015), "ten calls share a core"
    assert lag_s(1.0, 100.0, 10.0) == 1.5


@pytest.mark.parametrize("calls_per_core", [0.5, 10.0, 200.0])
@pytest.mark.parametrize("left_s", [0.01, 0.1, 1.0])
def test_a_call_that_may_have_slept_is_sampled_before_its_time_is_up(calls_per_core: float, left_s: float) -> None:
    max_guess_interval_s = monitor.MIN_GUESS_INTERVAL_S * monitor.crowding_factor(calls_per_core)

    def next_sample_in_s(uncertain_s: float, is_promoted: bool) -> float:
        return monitor.next_sample_in_s(
            left_s, uncertain_s, 1.0, calls_per_core, is_promoted=is_promoted, is_single_threaded=True
        )

    for is_promoted in (False, True):
        for _ in range(20):  # the interval is random
            assert next_sample_in_s(0.0, is_promoted) <= left_s
            max_interval_s = max(0.1 * left_s + 1e-9, min(max_guess_interval_s, left_s), monitor.MIN_SAMPLE_INTERVAL_S)
            assert next_sample_in_s(0.9 * left_s, is_promoted) <= max_interval_s


def test_with_the_minimum_share_a_call_reaches_its_time_limit_before_the_wall_cap() -> None:
    for calls_per_core in (0.1, 1.0, 4.0, 8.0, 40.0):
        for timeout_s in (0.1, 10.0, 1000.0):
            max_wall_s = timeout_s * monitor.MIN_SHARE_DIVISOR * max(1.0, calls_per_core)
            assert max_wall_s < call_state.wall_cap_s(timeout_s) / call_state.wall_cap_rate(calls_per_core)


@pytest.mark.trio
async def test_long_calls_leave_short_slots_until_the_long_slots_are_used_up(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    Machine(monkeypatch, 0.0)
    windows: list[int] = []
    async with driven(monkeypatch, zygote_pools=1, slots=2, long_slots=3, profiles=("bare",)) as driver:
        driver.executor.on_window_changed = windows.append
        endless = driver.submit(*["outlast"] * 3, limits=Limits(timeout_s=1000.0))
        assert [result.status for result in await driver.run("ok", "ok", "ok")] == [Status.OK] * 3
        await trio.sleep(10)
        assert short_and_long(driver) == (0, 3)
        assert windows == [5, 6, 7], "two calls per short slot, and the long ones"
        demoted: set[ProcessTree] = set()

        def note(_self: CpuPriority, tree: ProcessTree, _cgroup: object, is_demoted: bool) -> None:
            if is_demoted:
                demoted.add(tree)

        monkeypatch.setattr(CpuPriority, "apply", note)
        endless += driver.submit("outlast", limits=Limits(timeout_s=1000.0))
        await trio.sleep(10)
        assert short_and_long(driver) == (1, 3), "a fourth long call keeps its short slot"
        assert len(demoted) == 4, "and is demoted like the others"
        endless += driver.submit("outlast", limits=Limits(timeout_s=1000.0))
        (queued,) = driver.submit("ok")
        await trio.sleep(10)
        assert short_and_long(driver) == (2, 3)
        assert queued not in driver.results
        driver.executor.cancel(endless[0])
        await driver.wait_for([queued])
        assert short_and_long(driver) == (1, 3)
        assert driver.executor.stats()["demoted_total"] == 4
        for seq in endless[1:]:
            driver.executor.cancel(seq)
        await driver.run("ok")
        await trio.testing.wait_all_tasks_blocked()
        assert windows[-1] == driver.executor.window == 4


def short_and_long(driver: Driven) -> tuple[int, int]:
    """Used short and long slots."""
    stats = driver.executor.stats()
    return stats["running"] - stats["running_long"], stats["running_long"]


@pytest.mark.trio
async def test_without_available_memory_long_calls_keep_their_short_slots(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    Machine(monkeypatch, 0.0)
    available_bytes = 0
    monkeypatch.setattr("sandbox.machine.memory_available", lambda: available_bytes)
    async with driven(monkeypatch, zygote_pools=1, slots=2, profiles=("bare",)) as driver:
        seqs = driver.submit("outlast", limits=Limits(timeout_s=1000.0))
        await trio.sleep(5)
        assert short_and_long(driver) == (1, 0)
        available_bytes = 1 << 60
        await trio.sleep(5)
        assert short_and_long(driver) == (0, 1)
        driver.executor.cancel(seqs[0])
        await driver.run("ok")


@pytest.mark.trio
async def test_the_cost_of_sampling_does_not_grow_with_the_number_of_calls(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    samples = 0
    for calls_per_core in (1, 20 * monitor.CROWDED_CALLS_PER_CORE):
        machine, before = Machine(monkeypatch, 0.0), samples

        def sample(_tree: ProcessTree, machine: Machine = machine) -> TreeSample:
            nonlocal samples
            samples += 1
            return machine.sample()

        with monkeypatch.context() as patch:
            patch.setattr(ProcessTree, "sample", sample)
            patch.setattr(Executor, "calls_per_core", calls_per_core)
            result = await machine.run(100.0)
        assert result.status is Status.TIMEOUT
        assert machine.killed_after == pytest.approx(100.0, rel=0.01)
        mean_interval_s = sum(monitor.SAMPLE_INTERVAL_S) / 2
        expected = 100 / mean_interval_s / max(1, calls_per_core / monitor.CROWDED_CALLS_PER_CORE)
        assert samples - before == pytest.approx(expected, rel=0.3)


class ScriptedMonitor(monitor.CallMonitor):
    """A monitor whose steps return the given intervals; it ends with them."""

    def __init__(self, intervals: Iterator[float], pidfd: int = -1) -> None:
        self.is_stopped = False
        self._intervals, self._pidfd = intervals, pidfd

    def _step(self) -> float | None:
        return next(self._intervals, None)

    def stop(self) -> None:
        if self._pidfd >= 0:
            super().stop()


def process_ends() -> Iterator[float]:
    yield 0.1
    raise ProcessLookupError


@pytest.mark.trio
@pytest.mark.parametrize("intervals", [iter([]), iter([0.1]), process_ends(), itertools.repeat(0.1)])
async def test_a_stopped_monitor_holds_no_descriptor(intervals: Iterator[float], autojump_clock: MockClock) -> None:
    """It stops after its last step, when the process has ended, or when the executor ends."""
    fd = os.open(os.devnull, os.O_RDONLY)
    monitors, call_monitor = monitor.Monitor(NO_OWNER), ScriptedMonitor(intervals, fd)
    monitors._schedule(trio.current_time(), call_monitor)
    with trio.move_on_after(10):
        await monitors.run()
    assert call_monitor.is_stopped
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    call_monitor.stop()


@pytest.mark.trio
async def test_many_due_calls_are_stepped_in_several_passes_of_the_event_loop() -> None:
    steps_in_pass = max_steps = 0
    step_cpu_s = monitor.POLL_BUDGET_S / 4

    def steps() -> Iterator[float]:
        nonlocal steps_in_pass, max_steps
        while True:
            steps_in_pass += 1
            max_steps = max(max_steps, steps_in_pass)
            end = time.thread_time() + step_cpu_s
            while time.thread_time() < end:
                pass
            yield 0.01

    monitors = monitor.Monitor(NO_OWNER)
    for _ in range(40):
        monitors._schedule(trio.current_time(), ScriptedMonitor(steps()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitors.run)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
            steps_in_pass = 0
        nursery.cancel_scope.cancel()
    assert 0 < max_steps <= 2 * 4, "at most twice the budget, since time.thread_time is coarse"


@pytest.mark.trio
@pytest.mark.parametrize(
    ("calls", "cost_s", "share"), [(1, 0.004, 0.08), (30, 0.002, 0.27), (500, 0.004, 0.23), (100, 0.0004, 0.8)]
)
async def test_costly_samples_take_a_bounded_share_of_a_core(
    calls: int, cost_s: float, share: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A call that starts a hundred threads must not delay the results of others. `share` is 0.2 for what each sample
    takes beyond 0.5 ms, plus the free part; samples below 0.5 ms are not limited."""
    cpu_s = 0.0

    def steps() -> Iterator[float]:
        nonlocal cpu_s
        while True:
            cpu_s += cost_s
            yield 0.05

    monkeypatch.setattr(time, "thread_time", lambda: cpu_s)
    monitors = monitor.Monitor(NO_OWNER)
    for _ in range(calls):
        monitors._schedule(trio.current_time(), ScriptedMonitor(steps()))
    with trio.move_on_after(100):
        await monitors.run()
    assert cpu_s / 100 == pytest.approx(share, rel=0.15)


@pytest.mark.trio
async def test_a_temporary_failure_to_sample_does_not_end_the_monitoring(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Without the monitor, a call would end only with its whole jail, at the hang deadline."""
    machine, fails = Machine(monkeypatch, 0.0), iter([True, True, False, True])

    def pid_of_pidfd(*_: int) -> int:
        if next(fails, False):
            raise OSError(errno.ENFILE, "Too many open files in system")
        return FIRST_PID

    def sample(_tree: ProcessTree) -> TreeSample:
        if next(fails, False):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return machine.sample()

    monkeypatch.setattr(monitor, "pid_of_pidfd", pid_of_pidfd)
    monkeypatch.setattr(ProcessTree, "sample", sample)
    assert (await machine.run(2.0)).status is Status.TIMEOUT
    assert machine.killed_after == pytest.approx(2.0, rel=0.05)
    assert next(fails, None) is None, "all failures have happened"


@pytest.mark.trio
async def test_a_sample_after_the_end_of_a_call_changes_no_other_process_with_its_pid(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    machine, signals = Machine(monkeypatch, 0.0), []

    def send_signal(_pidfd: int, number: int) -> None:
        signals.append(number)
        if machine.running:
            zygote, run_id = machine.running.pop(0)
            zygote.send(ended_json(run_id))
        raise ProcessLookupError

    monkeypatch.setattr(signal, "pidfd_send_signal", send_signal)
    assert (await machine.run(2.0, demote_after_ms=1.0)).status is Status.OK
    assert machine.demotions == []
    assert {*signals} == {0}, "only the tests whether the process exists"


@pytest.mark.trio
async def test_a_crowded_call_is_killed_in_time_without_many_samples(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A call with a thousandth of a core needs 960 s of wall time for its last second of virtual time."""
    samples = 0
    many = 20 * monitor.CROWDED_CALLS_PER_CORE
    for calls_per_core in (monitor.CROWDED_CALLS_PER_CORE, many):
        delay_share = 1 - 1 / calls_per_core
        machine, before = Machine(monkeypatch, delay_share), samples

        def sample(_tree: ProcessTree, machine: Machine = machine) -> TreeSample:
            nonlocal samples
            samples += 1
            return machine.sample()

        with monkeypatch.context() as patch:
            patch.setattr(ProcessTree, "sample", sample)
            patch.setattr(Executor, "calls_per_core", calls_per_core)
            result = await machine.run(1.0)
        assert result.status is Status.TIMEOUT
        assert machine.killed_after == pytest.approx(1.0 / (1 - delay_share), rel=0.02)
        assert samples - before < 1000


@pytest.mark.trio
@pytest.mark.parametrize(("cpu_s", "status"), [(0.9, Status.OK), (1.1, Status.TIMEOUT)])
async def test_a_call_that_ends_between_two_samples_is_judged_by_its_cpu_time(
    cpu_s: float, status: Status, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """When many calls end at once, one that had a thousandth of a core may have a whole core until its next sample."""
    calls_per_core = 960
    machine = Machine(monkeypatch, 1 - 1 / calls_per_core)

    def sample(tree: ProcessTree) -> TreeSample:
        processes = machine.sample()
        tree.cpu_s = processes[FIRST_PID].cpu_s
        return processes

    monkeypatch.setattr(ProcessTree, "sample", sample)
    monkeypatch.setattr(Executor, "calls_per_core", calls_per_core)
    async with driven(monkeypatch, zygote_pools=1, slots=1, profiles=("bare",)) as driver:
        machine.started = trio.current_time()
        seqs = driver.submit("outlast", limits=Limits(timeout_s=1.0))
        await trio.sleep(500)
        zygote, run_id = machine.running.pop(0)
        wall_s = trio.current_time() - machine.started
        zygote.send(ended_json(run_id, cpu_ms=1e3 * cpu_s, wall_ms=1e3 * wall_s))
        await driver.wait_for(seqs)
        result = driver.results[seqs[0]]
        assert result.status is status
        assert (result.exit_code, result.signal) == ((0, None) if status is Status.OK else (None, signal.SIGKILL))


@pytest.mark.trio
async def test_a_call_that_ends_before_its_limit_in_wall_time_is_not_timed_out(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """It was single-threaded in the last sample and has computed on many cores since then: more CPU time than the limit
    in less wall time."""
    machine = Machine(monkeypatch, 0.0)
    async with driven(monkeypatch, zygote_pools=1, slots=1, profiles=("bare",)) as driver:
        machine.started = trio.current_time()
        seqs = driver.submit("outlast", limits=Limits(timeout_s=2.0))
        await trio.sleep(1.4)
        zygote, run_id = machine.running.pop(0)
        zygote.send(ended_json(run_id, cpu_ms=1e3 * (1.3 + 16 * 0.1), wall_ms=1.4e3))
        await driver.wait_for(seqs)
        assert driver.results[seqs[0]].status is Status.OK


base_pids: dict[Caller, set[int]] = {}
"""Processes of each executor before its first call: its own, its jails, its zygotes."""
NEVER_PROMOTES = """
import runpy, sys
from sandbox.executor import monitor
monitor.MIN_SHARE_DIVISOR = 1e9
del sys.argv[:2]
runpy.run_module("sandbox.executor", run_name="__main__", alter_sys=True)
"""
"""Starts an executor that never promotes a long call, whatever else runs on the machine."""


@pytest.fixture(scope="module")
def one_slot() -> Iterator[Caller]:
    """An executor with one short slot, which every call has to leave before another can start."""
    with executor(server=(sys.executable, "-c", NEVER_PROMOTES), slots=1, long_slots=6, demote_after_ms=50.0) as caller:
        base_pids[caller] = {*caller.processes()}
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
    "hides among many threads": "import _thread, os, time\n_thread.stack_size(1 << 16)\nfor _ in range(130):\n"
    f"    _thread.start_new_thread(time.sleep, (1000,))\nif os.fork() == 0:\n    {ENDLESS}\ntime.sleep(1000)",
    "leaves its parents": "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n" + ENDLESS,
}


@pytest.mark.parametrize("code", EVADERS.values(), ids=EVADERS)
def test_no_long_call_evades_its_demotion(code: str, one_slot: Caller) -> None:
    if not CpuPriority().can_change:
        pytest.skip("needs CAP_SYS_NICE in the initial user namespace")
    seq = one_slot.submit(call(code, timeout_s=60, processes=400))
    assert one_slot.run("1", timeout_s=60).value == "1", "the call has left the only short slot"
    one_slot.until(lambda: policies(one_slot) == {os.SCHED_IDLE})
    one_slot.send("cancel", [seq])
    one_slot.until(lambda: one_slot.stats.get("running") == 0)


def policies(caller: Caller) -> set[int]:
    return map_call_threads(caller, os.sched_getscheduler)


def cpu_cgroup(tid: int) -> str:
    with open(f"/proc/{tid}/cgroup") as file:
        return next(line.strip() for line in file if "cpu" in line.split(":")[1].split(","))


def map_call_threads(caller: Caller, function: Callable[[int], T]) -> set[T]:
    """The values of a function over the threads of all calls."""
    values: set[T] = set()
    for pid in {*caller.processes()} - base_pids[caller]:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] not in "ZX":
                    values |= {function(int(tid)) for tid in os.listdir(f"/proc/{pid}/task")}
        except OSError:
            continue
    return values


def test_short_calls_run_while_every_long_slot_is_used(one_slot: Caller) -> None:
    seqs = [one_slot.submit(call(ENDLESS, timeout_s=60)) for _ in range(6)]
    for n in range(8):
        assert one_slot.run(f"{n}", timeout_s=60).value == str(n)
    one_slot.until(lambda: one_slot.stats.get("running_long") == 6)
    assert one_slot.window == 2 + 6, "two calls for the short slot, and the long ones"
    one_slot.send("cancel", seqs)
    one_slot.until(lambda: one_slot.stats.get("running") == 0)
    one_slot.until(lambda: one_slot.window == 2)


def test_a_long_call_has_the_status_of_a_short_one() -> None:
    with executor(demote_after_ms=10.0) as caller:
        assert caller.run(ENDLESS, timeout_s=0.5).status is Status.TIMEOUT
        code = "import time\nwhile time.process_time() < 0.3: pass\nprint('done')"
        assert caller.run(code, timeout_s=60).stdout == "done\n"
        caller.until(lambda: caller.stats.get("demoted_total") == 2)


def test_all_threads_of_a_long_call_are_moved_to_the_idle_cgroup(one_slot: Caller) -> None:
    """Where the kernel divides the cores between sessions (autogroup), a scheduling policy has no effect on threads of
    other sessions."""
    tree = CgroupTree()
    has_idle_cgroup = tree.idle is not None
    tree.close()
    if not has_idle_cgroup or not CpuPriority().can_change:
        pytest.skip("needs the cpu controller of cgroup version 1, and CAP_SYS_NICE")
    seq = one_slot.submit(call(EVADERS["leaves its parents"], timeout_s=60))

    def cgroup_prefixes() -> set[str]:
        return {path.rpartition("/")[2].partition("-")[0] for path in map_call_threads(one_slot, cpu_cgroup)}

    one_slot.until(lambda: cgroup_prefixes() == {"rstar"})
    one_slot.send("cancel", [seq])
    one_slot.until(lambda: one_slot.stats.get("running") == 0)


BARE_PROC = """
import errno, runpy, sys
from sandbox import errors, jail
from sandbox.executor import process_tree
hidden, has_cgroups = sys.argv.pop(1), sys.argv.pop(1) == "cgroups"
read = process_tree._read
def read_without_hidden(path):
    if "schedstat" in hidden and path.endswith("/schedstat"):
        raise FileNotFoundError(errno.ENOENT, "no such file", path)
    data = read(path)
    return b"".join(
        line
        for line in data.splitlines(keepends=True)
        if not ("Pid" in hidden and line.startswith(b"Pid:") or "NSpid" in hidden and line.startswith(b"NSpid:"))
    )
process_tree._read = read_without_hidden
class NoCgroups:
    def __init__(self): raise errors.IsolationError("cgroups: hidden")
if not has_cgroups: jail.CgroupTree = NoCgroups
del sys.argv[:2]
runpy.run_module("sandbox.executor", run_name="__main__", alter_sys=True)
"""
"""Starts an executor that cannot read some files or lines of /proc (first argument) and that has no cgroups unless
the second argument is "cgroups"."""
LOOPS = {
    "loops": ENDLESS,
    "sleeps": "import time\ntime.sleep(1000)",
    "has a child loop": f"import os\nif os.fork() == 0:\n    {ENDLESS}\nos.wait()",
    "has a thread loop": f"import threading\ndef f():\n    {ENDLESS}\nthreading.Thread(target=f).start()",
}


@pytest.mark.parametrize("cgroups", ["cgroups", "no cgroups"])
@pytest.mark.parametrize("hidden", ["schedstat", "Pid", "schedstat Pid NSpid"])
def test_an_endless_call_is_timed_out_with_whatever_the_kernel_counts(hidden: str, cgroups: str) -> None:
    server = (sys.executable, "-c", BARE_PROC, hidden, cgroups)
    with executor(server=server, slots=len(LOOPS), demote_after_ms=50.0) as caller:
        results = caller.run_all([call(code, timeout_s=0.5) for code in LOOPS.values()])
        assert [(result.status, result.attempts) for result in results] == [(Status.TIMEOUT, 1)] * len(LOOPS)
        assert all(result.usage.run_ms < 20_000 for result in results)
        assert caller.run("1").value == "1"
        assert caller.stats.get("zygote_restarts_total", 0) == 0
