"""Tests of the monitor, the part of the executor that samples long calls.

Virtual time is the time that a call would have taken on an idle machine. A call is long when it has used
`demote_after_ms` of virtual time. It is then demoted (SCHED_IDLE) and leaves its short slot to other calls. A monitored
call ends at its limit in virtual time. If a demoted call gets too little CPU time, it is promoted.

The code of a call selects what its fake zygote does: "ok" ends at once, "slow" after up to 0.06 s, "hang" and "outlast"
run until they are killed. Only "outlast" is reported as still running, so only these calls are monitored.
"""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from sandbox.executor import call_state
from sandbox.executor.executor import Executor
from sandbox.executor.time import monitor
from sandbox.executor.time.monitor import lag_s
from sandbox.executor.time.process_tree import CpuPriority, ProcessTree
from sandbox.executor.time.virtual_clock import ProcessSample, ThreadSample, TreeSample
from sandbox.types import Limits, Status
from tests.executor.fake_scheduler import FIRST_PID, FakeScheduler
from tests.executor.fake_zygotes import ExecutorDriver, driven_executor, ended_json


@pytest.mark.trio
async def test_crowded_calls_are_demoted_when_they_are_first_sampled(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Eight calls on one core get an eighth of the core each. So they would reach `demote_after_ms` (100 ms of virtual
    time) after 800 ms of wall time. But no call waits, so this limit is divided by the number of calls per core."""
    assert await FakeScheduler(monkeypatch, delay_share=7 / 8).demoted_after_s(calls=8) < 0.2


@pytest.mark.trio
async def test_calls_that_hold_all_short_slots_are_demoted_early_while_others_wait(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    assert await FakeScheduler(monkeypatch, delay_share=7 / 8).demoted_after_s(calls=8, other_code="hang") < 0.2


@pytest.mark.trio
async def test_calls_are_not_demoted_early_while_others_wait_and_end(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    assert await FakeScheduler(monkeypatch, delay_share=7 / 8).demoted_after_s(calls=8, other_code="slow") >= 0.8


@pytest.mark.trio
@pytest.mark.parametrize("delay_share", [0.0, 0.5, 0.75, 0.9])
async def test_run_delay_does_not_count_towards_the_time_limit(
    delay_share: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    scheduler = FakeScheduler(monkeypatch, delay_share)
    result = await scheduler.run(timeout_s=2.0)
    assert result.status is Status.TIMEOUT
    assert scheduler.killed_after == pytest.approx(2.0 / (1 - delay_share), rel=0.05)


@pytest.mark.trio
async def test_a_call_that_gets_no_core_is_unavailable_at_the_wall_cap(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    scheduler = FakeScheduler(monkeypatch, delay_share=0.999)
    result = await scheduler.run(timeout_s=2.0)
    assert result.status is Status.UNAVAILABLE
    assert result.error is not None
    assert result.error.type == "Starved"
    assert scheduler.killed_after is not None
    cap_s = call_state.wall_cap_s(2.0)
    assert cap_s <= scheduler.killed_after < cap_s + 3.0, "a few sample intervals"


@pytest.mark.trio
@pytest.mark.parametrize("only_in_second_sample", [False, True])
async def test_a_call_that_ever_had_several_threads_is_timed_out_at_the_wall_cap(
    only_in_second_sample: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The processes of a fork bomb wait for each other. If such a call ended as starved (`unavailable`), a
    client would send it again. In the second case, only one sample finds the children of the fork bomb."""
    sample_numbers = itertools.count(1)

    def is_single_threaded() -> bool:
        return only_in_second_sample and next(sample_numbers) != 2

    scheduler = FakeScheduler(monkeypatch, delay_share=0.999, is_single_threaded=is_single_threaded)
    assert (await scheduler.run(timeout_s=2.0)).status is Status.TIMEOUT
    assert scheduler.killed_after is not None
    assert scheduler.killed_after < call_state.wall_cap_s(2.0) + 3.0


@pytest.mark.trio
async def test_a_call_is_demoted_after_virtual_time_and_not_after_wall_time(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    for delay_share in (0.0, 0.9):
        scheduler = FakeScheduler(monkeypatch, delay_share)
        applied_at: list[float] = []

        def record_time(*_: Any, is_demoted: bool, applied_at: list[float] = applied_at) -> None:
            applied_at.append(trio.current_time())

        with monkeypatch.context() as patch:
            patch.setattr(CpuPriority, "apply", record_time)
            await scheduler.run(timeout_s=5.0, demote_after_ms=1000.0)
        assert applied_at[0] - scheduler.started == pytest.approx(1.0 / (1 - delay_share), rel=0.1)


def busy_process(cpu_s: float, wall_s: float) -> TreeSample:
    """Return a sample of a call that has computed for `cpu_s` and waited for a core at all other times. The numbers of
    timeslices and voluntary switches are the same in each sample, so the call has not slept."""
    thread = ThreadSample(cpu_s, wall_s - cpu_s, timeslices=9, voluntary_switches=9, is_runnable=True)
    return {FIRST_PID: ProcessSample(1, wall_s, cpu_s, {FIRST_PID: thread})}


@pytest.mark.trio
async def test_a_starving_call_is_promoted_and_reaches_its_time_limit(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The call gets no core at all while it is demoted, and 0.8 of a core at all other times."""
    scheduler = FakeScheduler(monkeypatch, delay_share=0.0)
    cpu_s, last_wall_s = 0.0, 0.0

    def sample() -> TreeSample:
        nonlocal cpu_s, last_wall_s
        wall_s = trio.current_time() - scheduler.started
        is_demoted = bool(scheduler.demotions) and scheduler.demotions[-1]
        cpu_s += (wall_s - last_wall_s) * (0.0 if is_demoted else 0.8)
        last_wall_s = wall_s
        return busy_process(cpu_s, wall_s)

    monkeypatch.setattr(scheduler, "sample", sample)
    result = await scheduler.run(timeout_s=10.0)
    assert result.status is Status.TIMEOUT
    assert scheduler.demotions[0] is True
    assert False in scheduler.demotions
    assert scheduler.killed_after is not None
    assert scheduler.killed_after < call_state.wall_cap_s(10.0)


@pytest.mark.trio
async def test_a_long_call_exits_at_normal_priority(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    """An exiting process holds locks of the kernel that all forks of its zygote need for their own exits."""
    scheduler = FakeScheduler(monkeypatch, delay_share=0.0)

    def sample(tree: ProcessTree) -> TreeSample:
        tree.is_exiting = trio.current_time() - scheduler.started > 2.0
        return scheduler.sample()

    monkeypatch.setattr(ProcessTree, "sample", sample)
    await scheduler.run(timeout_s=4.0)
    assert scheduler.demotions[0] is True
    assert scheduler.demotions[-2:] == [False, False]  # promoted because it exits, and again when it is killed


@pytest.mark.trio
async def test_a_call_that_starves_and_cannot_be_promoted_runs_again_at_normal_priority(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """In its first run the call gets a hundredth of a core after its demotion. In its second run it has the core
    alone."""
    scheduler = FakeScheduler(monkeypatch, delay_share=0.0, can_promote=False)

    def sample() -> TreeSample:
        wall_s = trio.current_time() - scheduler.starts[-1]
        cpu_s = wall_s if len(scheduler.starts) == 2 else min(wall_s, 0.2) + 0.01 * max(0.0, wall_s - 0.2)
        return busy_process(cpu_s, wall_s)

    monkeypatch.setattr(scheduler, "sample", sample)
    result = await scheduler.run(timeout_s=10.0)
    assert (result.status, result.attempts) == (Status.TIMEOUT, 1), "the second run was counted as an attempt"
    first_start, second_start = scheduler.starts
    half_cap_s = call_state.wall_cap_s(10.0) / 2
    assert half_cap_s <= second_start - first_start < half_cap_s + 3.0, "a few sample intervals"
    assert scheduler.killed_after == pytest.approx(second_start - scheduler.started + 10.0, abs=1.0)
    assert scheduler.demotions[0] is True
    assert scheduler.demotions[-1] is False, "the call was demoted again"


def test_the_lag_of_a_long_call_is_its_distance_to_a_quarter_of_its_fair_share() -> None:
    assert lag_s(virtual_s=1.0, wall_s=1.0, calls_per_core=0.5) < 0
    assert lag_s(virtual_s=0.25, wall_s=1.0, calls_per_core=1.0) == 0
    at_most_a_core = lag_s(virtual_s=0.24, wall_s=1.0, calls_per_core=0.1)
    assert at_most_a_core == pytest.approx(1.0 / 4 - 0.24), "the fair share is at most a whole core"
    a_tenth = lag_s(virtual_s=0.01, wall_s=1.0, calls_per_core=10.0)
    assert a_tenth == pytest.approx(1.0 / 10 / 4 - 0.01), "the fair share is a tenth of a core"
    assert lag_s(virtual_s=1.0, wall_s=100.0, calls_per_core=10.0) == 100.0 / 10 / 4 - 1.0


@pytest.mark.parametrize("calls_per_core", [0.5, 10.0, 200.0])
@pytest.mark.parametrize("left_s", [0.01, 0.1, 1.0])
def test_a_call_with_uncertain_virtual_time_is_sampled_before_its_limit(calls_per_core: float, left_s: float) -> None:
    max_uncertain_interval_s = monitor.MIN_UNCERTAIN_INTERVAL_S * monitor.crowding_factor(calls_per_core)

    def next_sample_in_s(uncertain_s: float, is_promoted: bool) -> float:
        slowness = 1.0  # wall seconds per virtual second: the call has its core alone
        return monitor.next_sample_in_s(
            left_s, uncertain_s, slowness, calls_per_core, is_promoted=is_promoted, is_single_threaded=True
        )

    for is_promoted in (False, True):
        for _ in range(20):  # the interval is random
            assert next_sample_in_s(0.0, is_promoted) <= left_s
            min_left_s = 0.1 * left_s + 1e-9  # if all of the uncertain 0.9 * left_s has passed; 1e-9 is for rounding
            # The interval exceeds this time only where it is as short as intervals may be.
            max_interval_s = max(min_left_s, min(max_uncertain_interval_s, left_s), monitor.MIN_SAMPLE_INTERVAL_S)
            assert next_sample_in_s(0.9 * left_s, is_promoted) <= max_interval_s


def test_with_the_minimum_share_a_call_reaches_its_time_limit_before_the_wall_cap() -> None:
    for calls_per_core in (0.1, 1.0, 4.0, 8.0, 40.0):
        for timeout_s in (0.1, 10.0, 1000.0):
            # `wall_cap_rate` is the seconds of the wall cap that a second of wall time uses up: less than 1 in a crowd.
            max_wall_s = timeout_s * monitor.MIN_SHARE_DIVISOR * max(1.0, calls_per_core)
            assert max_wall_s < call_state.wall_cap_s(timeout_s) / call_state.wall_cap_rate(calls_per_core)


@pytest.mark.trio
async def test_long_calls_leave_short_slots_until_the_long_slots_are_used_up(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    FakeScheduler(monkeypatch, delay_share=0.0)  # replaces the samples of /proc from now on
    async with driven_executor(monkeypatch, zygote_pools=1, slots=2, long_slots=3, profiles=("bare",)) as driver:
        endless = driver.submit(*["outlast"] * 3, limits=Limits(timeout_s=1000.0))
        assert [result.status for result in await driver.run("ok", "ok", "ok")] == [Status.OK] * 3
        await trio.sleep(10)
        assert short_and_long(driver) == (0, 3)
        # The window is the number of calls that the executor accepts: two for each short slot, one for each long call.
        assert driver.windows == [5, 6, 7]
        demoted: set[ProcessTree] = set()

        def record_demotion(_self: CpuPriority, tree: ProcessTree, _cgroup: object, is_demoted: bool) -> None:
            if is_demoted:
                demoted.add(tree)

        monkeypatch.setattr(CpuPriority, "apply", record_demotion)
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
        assert driver.windows[-1] == driver.executor.window == 4


def short_and_long(driver: ExecutorDriver) -> tuple[int, int]:
    """Return the numbers of used short and used long slots."""
    stats = driver.executor.stats()
    return stats["running"] - stats["running_long"], stats["running_long"]


@pytest.mark.trio
async def test_without_available_memory_long_calls_keep_their_short_slots(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    FakeScheduler(monkeypatch, delay_share=0.0)  # replaces the samples of /proc from now on
    available_bytes = 0
    monkeypatch.setattr("sandbox.machine.memory_available", lambda: available_bytes)
    async with driven_executor(monkeypatch, zygote_pools=1, slots=2, profiles=("bare",)) as driver:
        seqs = driver.submit("outlast", limits=Limits(timeout_s=1000.0))
        await trio.sleep(5)
        assert short_and_long(driver) == (1, 0)
        available_bytes = 1 << 60
        await trio.sleep(5)
        assert short_and_long(driver) == (0, 1)
        driver.executor.cancel(seqs[0])
        await driver.run("ok")


@pytest.mark.trio
@pytest.mark.parametrize(("cpu_s", "status"), [(0.9, Status.OK), (1.1, Status.TIMEOUT)])
async def test_a_call_that_ends_between_two_samples_is_judged_by_its_cpu_time(
    cpu_s: float, status: Status, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The call has shared its core with 960 other calls. The other calls end before the next sample of the call. From
    then on the call has the core alone, and computes more than its last samples show."""
    calls_per_core = 960
    scheduler = FakeScheduler(monkeypatch, delay_share=1 - 1 / calls_per_core)

    def sample(tree: ProcessTree) -> TreeSample:
        processes = scheduler.sample()
        tree.cpu_s = processes[FIRST_PID].cpu_s
        return processes

    monkeypatch.setattr(ProcessTree, "sample", sample)
    monkeypatch.setattr(Executor, "calls_per_core", calls_per_core)
    async with driven_executor(monkeypatch, zygote_pools=1, slots=1, profiles=("bare",)) as driver:
        scheduler.started = trio.current_time()
        seqs = driver.submit("outlast", limits=Limits(timeout_s=1.0))
        await trio.sleep(500)  # about half of the limit in virtual time
        zygote, run_id = scheduler.running.pop(0)
        wall_s = trio.current_time() - scheduler.started
        zygote.send(ended_json(run_id, cpu_ms=1e3 * cpu_s, wall_ms=1e3 * wall_s))
        await driver.wait_for(seqs)
        result = driver.results[seqs[0]]
        assert result.status is status
        assert (result.exit_code, result.signal) == ((0, None) if status is Status.OK else (None, signal.SIGKILL))


@pytest.mark.trio
async def test_a_call_that_ends_before_its_limit_in_wall_time_is_not_timed_out(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The last sample of the call has shown a single thread. Since then the call has computed on 16 cores, so its CPU
    time exceeds the limit although its wall time does not."""
    scheduler = FakeScheduler(monkeypatch, delay_share=0.0)
    async with driven_executor(monkeypatch, zygote_pools=1, slots=1, profiles=("bare",)) as driver:
        scheduler.started = trio.current_time()
        seqs = driver.submit("outlast", limits=Limits(timeout_s=2.0))
        await trio.sleep(1.4)
        zygote, run_id = scheduler.running.pop(0)
        cpu_s = 1.3 + 16 * 0.1  # 1.3 s on one core, then 0.1 s on 16 cores
        zygote.send(ended_json(run_id, cpu_ms=1e3 * cpu_s, wall_ms=1.4e3))
        await driver.wait_for(seqs)
        assert driver.results[seqs[0]].status is Status.OK
