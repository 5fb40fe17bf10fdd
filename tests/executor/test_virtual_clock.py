"""A call's own clock says the same beside any load: on a made-up machine, what it says is compared with an idle one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from sandbox.executor import call_state
from sandbox.executor.virtual_clock import ProcessSample, ThreadSample, VirtualClock
from tests.executor.machine import Fork, Give, Join, Machine, Program, Run, Sleep, Spawn, Take, own_time

LOADS = [(2, 0), (2, 3), (2, 20), (2, 60), (8, 100)]
"""Cores, and threads of others."""


def works(s: float) -> Program:
    yield Run(s)


def works_and_sleeps() -> Program:
    for _ in range(8):
        yield Run(0.1)
        yield Sleep(0.1)
        yield Run(0.005)


def has_children_in_turn(times: int, s: float, nap_s: float = 0.0) -> Program:
    for _ in range(times):
        yield Run(0.005)
        yield Fork(works_then_sleeps(s, nap_s))
        yield Join()
    yield Run(0.005)


def works_then_sleeps(s: float, nap_s: float) -> Program:
    yield Run(s)
    if nap_s:
        yield Sleep(nap_s)


def has_children_at_once(count: int, s: float) -> Program:
    for _ in range(count):
        yield Fork(works(s))
    yield Join()


def works_beside_a_child() -> Program:
    yield Run(0.5)
    yield Fork(works(0.8))
    yield Run(0.8)
    yield Join()


def has_a_pool(workers: int, times: int, s: float) -> Program:
    for _ in range(workers):
        yield Fork(has_children_in_turn(times, s))
    yield Join()


def takes_turns(times: int) -> Program:
    for _ in range(times):
        yield Take()
        yield Run(0.005)
        yield Give()


def has_threads(count: int) -> Program:
    """Which fight for one lock, as Python's do."""
    for _ in range(count):
        yield Spawn(takes_turns(60))
    yield Join()


@pytest.mark.parametrize(("cores", "load"), LOADS)
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: works(1.0), 0.02),
        (works_and_sleeps, 0.06),
        (lambda: has_children_in_turn(3, 0.4), 0.03),
        (lambda: has_children_in_turn(12, 0.1), 0.03),
        (lambda: has_children_in_turn(60, 0.02), 0.03),
        (lambda: has_children_in_turn(80, 0.005), 0.03),
        (lambda: has_children_at_once(2, 0.8), 0.03),
        (lambda: has_children_at_once(4, 0.4), 0.03),
        (lambda: has_children_at_once(16, 0.2), 0.03),
        (works_beside_a_child, 0.05),
        (lambda: has_a_pool(2, 8, 0.1), 0.06),
        (lambda: has_threads(4), 0.08),
        (lambda: has_children_in_turn(4, 0.3, 0.3), 0.1),
    ],
)
def test_own_time_is_that_of_an_idle_machine(call: Callable[[], Program], error: float, cores: int, load: int) -> None:
    for seed in range(2):
        idle, wall, own = own_time(call, cores=cores, load=load, seed=seed)
        assert own == pytest.approx(idle, rel=error), f"{wall:.2f} s of wall time"
        assert load == 0 or wall > 1.15 * idle, "or this shows nothing"


def test_sleep_is_own_time_whoever_sleeps() -> None:
    def sleeps_by_proxy() -> Program:
        for _ in range(10):
            yield Fork(works_then_sleeps(0.001, 0.1))
            yield Join()
        yield Run(0.001)

    for load in (0, 20):
        idle, wall, own = own_time(sleeps_by_proxy, cores=2, load=load, seed=0)
        assert idle > 1.0
        assert own == pytest.approx(idle, rel=0.1), f"{wall:.2f} s of wall time"


@pytest.mark.parametrize("waits_s", [0.0, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("sleeps_s", [0.0, 0.0005, 0.004, 0.05])
@pytest.mark.parametrize("seed", range(3))
def test_one_thread_is_timed_exactly_however_uneven_its_waits(waits_s: float, sleeps_s: float, seed: int) -> None:
    """Turns of sleep, wait and work, each as long as chance will have it, looked at when chance will have it."""
    rng = random.Random(seed)
    own = VirtualClock(2)
    now = ran_s = waited_s = true_s = 0.0
    due = 0.1
    for turns in range(200):
        for what, mean_s in (("sleep", sleeps_s), ("wait", waits_s), ("work", 0.004)):
            end = now + (rng.expovariate(1 / mean_s) if mean_s else 0.0)
            while due < end:  # a wait is counted when it is over
                so_far = ran_s + (due - now if what == "work" else 0.0)
                done = turns + (what == "work")
                thread = ThreadSample(
                    so_far, waited_s, done, (turns + 1 if sleeps_s else 0), is_runnable=what != "sleep"
                )
                own.advance(due, {7: ProcessSample(1, due, so_far, {7: thread})}, so_far)
                assert own.elapsed_s <= true_s + (due - now if what != "wait" else 0.0) + 1e-6
                due += rng.uniform(0.05, 0.25)
            ran_s += end - now if what == "work" else 0.0
            waited_s += end - now if what == "wait" else 0.0
            true_s += end - now if what != "wait" else 0.0
            now = end
    own.advance(
        now, {7: ProcessSample(1, now, ran_s, {7: ThreadSample(ran_s, waited_s, 200, 200, is_runnable=False)})}, ran_s
    )
    assert own.elapsed_s == pytest.approx(true_s, abs=1e-6)


def test_nothing_is_a_guess_of_who_has_not_slept() -> None:
    """Alone it is exact at every look, not only at the end of a wait."""
    for asleep in (False, True):
        own = VirtualClock(2)
        for n in range(1, 50):  # half of the time it has a core, or sleeps, and then it waits
            ran_s = 0.0 if asleep else n / 2
            thread = ThreadSample(ran_s, n / 2 - 0.2, n, n if asleep else 0, is_runnable=True)
            own.advance(float(n), {7: ProcessSample(1, float(n), ran_s, {7: thread})})
            assert own.elapsed_s <= n / 2 + 1e-9
            assert own.elapsed_s + own.uncertain_s >= n / 2 - 1e-9
            assert own.is_exact != asleep
            assert asleep or own.elapsed_s == pytest.approx(n / 2)


def test_a_wait_that_is_not_over_counts() -> None:
    """The kernel counts waits when they end, and one behind others' calls may take very long."""
    own = VirtualClock(2)
    for n in range(1, 100):
        own.advance(float(n), {7: ProcessSample(1, float(n), 0.2, {7: ThreadSample(0.2, 0.1, 5, 5, is_runnable=True)})})
    assert own.elapsed_s < 1.0


def test_all_cpu_time_counts_whatever_the_call_hides() -> None:
    """Of processes that are never seen, and waits that are pretended: the rest is bounded by the cores."""
    own = VirtualClock(4)
    for n in range(1, 100):
        threads = {tid: ThreadSample(0.0, 0.9 * n, n, n, is_runnable=True) for tid in range(7, 50)}
        own.advance(float(n), {7: ProcessSample(1, float(n), 0.0, threads)}, 2.0 * n)
    assert own.elapsed_s >= 99 * 2.0 / 4


def test_a_crowd_is_on_the_wall_clock_from_then_on() -> None:
    own = VirtualClock(2)
    alone = {7: ProcessSample(1, 1.0, 0.0, {7: ThreadSample(0.0, 0.9, 1, 1, is_runnable=True)})}
    own.advance(1.0, alone)
    before = own.elapsed_s
    assert own.is_single_threaded
    own.advance(2.0, None)
    own.advance(5.0, alone)
    assert own.elapsed_s == before + 4.0
    assert not own.is_single_threaded


def test_own_time_is_never_ahead_of_the_wall() -> None:
    def threads_without_a_lock() -> Program:
        for _ in range(4):
            yield Spawn(works(0.5))
        yield Join()

    for load in (0, 10):
        _, wall, own = own_time(threads_without_a_lock, cores=4, load=load, seed=1)
        assert own <= wall + 1e-9


def test_who_was_once_not_alone_never_was() -> None:
    call = VirtualClock(2)
    Machine(2, 0).timed(has_children_in_turn(1, 0.3), call)
    assert not call.is_single_threaded
    call = VirtualClock(2)
    Machine(2, 0).timed(works(0.5), call)
    assert call.is_single_threaded


def test_the_hard_cap_is_ten_times_and_a_minute_and_further_where_many_share_a_core() -> None:
    assert call_state.wall_cap_s(0.5) == 60.0
    assert call_state.wall_cap_s(10.0) == 100.0
    assert call_state.wall_cap_rate(0.0) == call_state.wall_cap_rate(call_state.UNCROWDED_CALLS_PER_CORE) == 1.0
    assert call_state.wall_cap_rate(4 * call_state.UNCROWDED_CALLS_PER_CORE) == 0.25
