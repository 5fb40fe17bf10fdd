"""Tests of the virtual clock on a simulated machine.

Virtual time is wall time minus run delay, the time that runnable threads waited for a core. Under load, the virtual
time of a call must equal the wall time that the call takes without load.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from sandbox.executor import call_state
from sandbox.executor.time.virtual_clock import ProcessSample, ThreadSample, VirtualClock
from tests.executor.simulated_machine import (
    Acquire,
    Fork,
    Join,
    Machine,
    Program,
    Release,
    Run,
    Sleep,
    Spawn,
    virtual_time,
)

LOADS = [(2, 0), (2, 3), (2, 20), (2, 60), (8, 100)]
"""Pairs of the number of cores and the number of busy threads besides the call."""


def computes(s: float) -> Program:
    yield Run(s)


def computes_and_sleeps() -> Program:
    for _ in range(8):
        yield Run(0.1)
        yield Sleep(0.1)
        yield Run(0.005)


def forks_in_turn(times: int, s: float, nap_s: float = 0.0) -> Program:
    """One child after the other computes for `s` seconds and then sleeps for `nap_s` seconds."""
    for _ in range(times):
        yield Run(0.005)
        yield Fork(computes_then_sleeps(s, nap_s))
        yield Join()
    yield Run(0.005)


def computes_then_sleeps(s: float, nap_s: float) -> Program:
    yield Run(s)
    if nap_s:
        yield Sleep(nap_s)


def forks_at_once(count: int, s: float) -> Program:
    for _ in range(count):
        yield Fork(computes(s))
    yield Join()


def computes_beside_a_child() -> Program:
    yield Run(0.5)
    yield Fork(computes(0.8))
    yield Run(0.8)
    yield Join()


def computes_beside_a_sleeper() -> Program:
    yield Fork(sleeps_and_computes_a_little())
    yield Run(1.0)


def sleeps_and_computes_a_little() -> Program:
    while True:
        yield Run(0.001)
        yield Sleep(0.01)


def forks_a_pool(workers: int, times: int, s: float) -> Program:
    for _ in range(workers):
        yield Fork(forks_in_turn(times, s))
    yield Join()


def computes_with_the_lock(times: int) -> Program:
    for _ in range(times):
        yield Acquire()
        yield Run(0.005)
        yield Release()


def starts_threads(count: int) -> Program:
    """`count` threads share one lock, and each computes only while it has the lock, as threads of Python do."""
    for _ in range(count):
        yield Spawn(computes_with_the_lock(60))
    yield Join()


@pytest.mark.parametrize(("cores", "load"), LOADS)
@pytest.mark.parametrize(
    ("call", "max_relative_error"),
    [
        (lambda: computes(1.0), 0.02),
        (computes_and_sleeps, 0.06),
        (lambda: forks_in_turn(3, 0.4), 0.03),
        (lambda: forks_in_turn(12, 0.1), 0.03),
        (lambda: forks_in_turn(60, 0.02), 0.03),
        (lambda: forks_in_turn(80, 0.005), 0.03),
        (lambda: forks_at_once(2, 0.8), 0.03),
        (lambda: forks_at_once(4, 0.4), 0.03),
        (lambda: forks_at_once(16, 0.2), 0.03),
        (computes_beside_a_child, 0.05),
        (computes_beside_a_sleeper, 0.02),
        (lambda: forks_a_pool(2, 8, 0.1), 0.06),
        (lambda: starts_threads(4), 0.08),
        (lambda: forks_in_turn(4, 0.3, 0.3), 0.1),
    ],
)
def test_virtual_time_under_load_is_the_time_on_an_idle_machine(
    call: Callable[[], Program], max_relative_error: float, cores: int, load: int
) -> None:
    for seed in range(2):
        idle, wall, virtual = virtual_time(call, cores=cores, load=load, seed=seed)
        assert virtual == pytest.approx(idle, rel=max_relative_error), f"{wall:.2f} s of wall time"
        assert load == 0 or wall > 1.15 * idle, "the load has not slowed the call, so the test has tested nothing"


def test_the_sleep_of_a_child_counts_while_its_parent_waits() -> None:
    def children_sleep() -> Program:
        for _ in range(10):
            yield Fork(computes_then_sleeps(0.001, 0.1))
            yield Join()
        yield Run(0.001)

    for load in (0, 20):
        idle, wall, virtual = virtual_time(children_sleep, cores=2, load=load, seed=0)
        assert idle > 1.0
        assert virtual == pytest.approx(idle, rel=0.1), f"{wall:.2f} s of wall time"


@pytest.mark.parametrize("mean_wait_s", [0.0, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("mean_sleep_s", [0.0, 0.0005, 0.004, 0.05])
@pytest.mark.parametrize("seed", range(3))
def test_the_time_of_one_thread_is_exact_for_any_waits(mean_wait_s: float, mean_sleep_s: float, seed: int) -> None:
    """The thread sleeps, waits for a core and computes, again and again. The times are random. It computes for 4 ms on
    average. The samples come at random moments."""
    rng = random.Random(seed)
    clock = VirtualClock(cores=2)
    now = cpu_s = delay_s = true_s = 0.0
    sample_at = 0.1
    for turns in range(200):
        for state, mean_s in (("sleeps", mean_sleep_s), ("waits", mean_wait_s), ("computes", 0.004)):
            end = now + (rng.expovariate(1 / mean_s) if mean_s else 0.0)
            while sample_at < end:
                part_s = sample_at - now
                sampled_cpu_s = cpu_s + (part_s if state == "computes" else 0.0)
                timeslices, switches = turns + (state == "computes"), turns + 1 if mean_sleep_s else 0
                # The kernel adds a wait to `delay_s` only when the wait is over.
                advance(clock, sample_at, sampled_cpu_s, delay_s, timeslices, switches, is_runnable=state != "sleeps")
                assert clock.elapsed_s <= true_s + (part_s if state != "waits" else 0.0) + 1e-6
                sample_at += rng.uniform(0.05, 0.25)
            cpu_s += end - now if state == "computes" else 0.0
            delay_s += end - now if state == "waits" else 0.0
            true_s += end - now if state != "waits" else 0.0
            now = end
    advance(clock, now, cpu_s, delay_s, timeslices=200, switches=200, is_runnable=False)
    assert clock.elapsed_s == pytest.approx(true_s, abs=1e-6)


def advance(
    clock: VirtualClock,
    wall_s: float,
    cpu_s: float,
    delay_s: float,
    timeslices: int,
    switches: int,
    is_runnable: bool,
    is_exiting: bool = False,
) -> None:
    """Advance a clock with a sample of one thread."""
    pid = 7
    thread = ThreadSample(cpu_s, delay_s, timeslices, switches, is_runnable=is_runnable, is_exiting=is_exiting)
    clock.advance(wall_s, {pid: ProcessSample(1, wall_s, cpu_s, {pid: thread})}, cpu_s)


def test_virtual_time_is_exact_for_a_thread_that_has_not_slept() -> None:
    """If the thread has not slept, virtual time is exact at every sample, also during a wait. If the thread sleeps,
    virtual time is a lower bound.

    In the first half of each second the thread computes or sleeps. In the second half it waits for a core. At a sample,
    the kernel has not yet counted the last 0.2 s of the wait.
    """
    for sleeps in (False, True):
        clock = VirtualClock(cores=2)
        for n in range(1, 50):
            true_s, switches = n / 2, n if sleeps else 0
            cpu_s, delay_s = 0.0 if sleeps else n / 2, n / 2 - 0.2
            advance(clock, float(n), cpu_s, delay_s, timeslices=n, switches=switches, is_runnable=True)
            assert clock.elapsed_s <= true_s + 1e-9
            assert clock.elapsed_s + clock.uncertain_s >= true_s - 1e-9
            assert clock.is_exact != sleeps
            assert sleeps or clock.elapsed_s == pytest.approx(true_s)


def test_time_that_a_hypervisor_takes_from_a_running_thread_is_no_sleep() -> None:
    """The kernel counts this time neither as CPU time nor as run delay."""
    clock = VirtualClock(cores=2)
    for n in range(1, 100):
        advance(clock, 0.1 * n, cpu_s=0.06 * n, delay_s=0.02 * n, timeslices=n, switches=0, is_runnable=True)
    assert clock.elapsed_s == pytest.approx(0.06 * 99)


def test_a_wait_that_has_not_ended_counts_as_run_delay() -> None:
    """The kernel adds a wait to run_delay only when it ends, which may take minutes on an overloaded machine."""
    clock = VirtualClock(cores=2)
    for n in range(1, 100):
        advance(clock, float(n), cpu_s=0.2, delay_s=0.1, timeslices=5, switches=5, is_runnable=True)
    assert clock.elapsed_s < 1.0


def test_the_last_wait_of_a_child_is_no_sleep() -> None:
    """Each child is sampled once, while it waits for a core, and ends within the next 0.3 s. The kernel then no longer
    tells how long it has waited, and its CPU time hardly grows."""
    clock = VirtualClock(cores=2)
    for n in range(1, 21):
        parent = ProcessSample(1, 0.3 * n, 0.001, {7: ThreadSample(0.001, 0.0, 2, 2, is_runnable=False)})
        child = ProcessSample(7, 0.1, 0.0005, {100 + n: ThreadSample(0.0005, 0.09, 3, 0, is_runnable=True)})
        clock.advance(0.3 * n, {7: parent, 100 + n: child}, 0.001 + 0.0006 * n)
    assert clock.elapsed_s < 0.3


def test_the_exit_of_a_thread_takes_no_virtual_time_but_its_cpu_time() -> None:
    """An exiting thread waits for locks of the kernel. The kernel does not add these waits to its run delay, not even
    after the thread has run again (more timeslices)."""
    clock = VirtualClock(cores=2)
    advance(clock, 1.0, cpu_s=0.4, delay_s=0.1, timeslices=5, switches=1, is_runnable=False)
    assert clock.elapsed_s == pytest.approx(0.9)
    for n in range(2, 30):
        advance(clock, float(n), 0.4, delay_s=0.1, timeslices=5, switches=1, is_runnable=True, is_exiting=True)
    advance(clock, 30.0, cpu_s=0.5, delay_s=0.3, timeslices=7, switches=3, is_runnable=True, is_exiting=True)
    advance(clock, 31.0, cpu_s=0.5, delay_s=0.3, timeslices=8, switches=3, is_runnable=True, is_exiting=True)
    assert clock.elapsed_s == pytest.approx(1.0)


def test_all_cpu_time_counts_even_of_hidden_processes() -> None:
    """The sampled threads only wait. Processes that are not sampled use two seconds of CPU time per second. The virtual
    time is at least this CPU time divided by the number of cores."""
    clock = VirtualClock(cores=4)
    for n in range(1, 100):
        threads = {tid: ThreadSample(0.0, 0.9 * n, n, n, is_runnable=True) for tid in range(7, 50)}
        clock.advance(float(n), {7: ProcessSample(1, float(n), 0.0, threads)}, 2.0 * n)
    assert clock.elapsed_s >= 99 * 2.0 / 4


def test_without_a_sample_the_clock_follows_wall_time_from_then_on() -> None:
    clock = VirtualClock(cores=2)
    sample = {7: ProcessSample(1, 1.0, 0.0, {7: ThreadSample(0.0, 0.9, 1, 1, is_runnable=True)})}
    clock.advance(1.0, sample, 0.0)
    before = clock.elapsed_s
    assert clock.is_single_threaded
    clock.advance(2.0, None, 0.0)
    clock.advance(5.0, sample, 0.0)
    assert clock.elapsed_s == before + 4.0
    assert not clock.is_single_threaded


def test_virtual_time_is_never_ahead_of_wall_time() -> None:
    def threads_without_a_lock() -> Program:
        for _ in range(4):
            yield Spawn(computes(0.5))
        yield Join()

    for load in (0, 10):
        _idle, wall, virtual = virtual_time(threads_without_a_lock, cores=4, load=load, seed=1)
        assert virtual <= wall + 1e-9


def test_a_call_that_once_had_two_processes_is_not_single_threaded() -> None:
    clock = VirtualClock(cores=2)
    Machine(cores=2, load=0).run(forks_in_turn(1, 0.3), clock)
    assert not clock.is_single_threaded
    clock = VirtualClock(cores=2)
    Machine(cores=2, load=0).run(computes(0.5), clock)
    assert clock.is_single_threaded


def test_the_wall_cap_is_ten_times_the_limit_and_at_least_a_minute() -> None:
    assert call_state.wall_cap_s(0.5) == 60.0
    assert call_state.wall_cap_s(10.0) == 100.0


def test_the_wall_cap_is_used_up_more_slowly_on_crowded_cores() -> None:
    assert call_state.wall_cap_rate(0.0) == call_state.wall_cap_rate(call_state.UNCROWDED_CALLS_PER_CORE) == 1.0
    assert call_state.wall_cap_rate(4 * call_state.UNCROWDED_CALLS_PER_CORE) == 0.25
