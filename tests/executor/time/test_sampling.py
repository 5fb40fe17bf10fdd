"""Tests of sampling, the reading of /proc for long calls.

It costs little CPU time for any number of calls, and yields to the event loop. If a sample fails, its call still ends
in time.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from sandbox.executor.executor import Executor
from sandbox.executor.time import monitor
from sandbox.executor.time.process_tree import ProcessTree
from sandbox.executor.time.virtual_clock import TreeSample
from sandbox.types import Status
from tests.executor.fake_scheduler import FIRST_PID, FakeScheduler
from tests.executor.fake_zygotes import ended_json

NO_OWNER: Any = None
"""The owner in tests whose monitors are all `ScriptedMonitor`, because these do not use their owner."""


@pytest.mark.trio
async def test_the_cost_of_sampling_does_not_grow_with_the_number_of_calls(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    samples = 0
    for calls_per_core in (1, 20 * monitor.CROWDED_CALLS_PER_CORE):
        scheduler, samples_before = FakeScheduler(monkeypatch, delay_share=0.0), samples

        def sample(_tree: ProcessTree, scheduler: FakeScheduler = scheduler) -> TreeSample:
            nonlocal samples
            samples += 1
            return scheduler.sample()

        with monkeypatch.context() as patch:
            patch.setattr(ProcessTree, "sample", sample)
            patch.setattr(Executor, "calls_per_core", calls_per_core)
            result = await scheduler.run(timeout_s=100.0)
        assert result.status is Status.TIMEOUT
        assert scheduler.killed_after == pytest.approx(100.0, rel=0.01)
        mean_interval_s = sum(monitor.SAMPLE_INTERVAL_S) / 2
        expected = 100 / mean_interval_s / max(1, calls_per_core / monitor.CROWDED_CALLS_PER_CORE)
        assert samples - samples_before == pytest.approx(expected, rel=0.3), "the intervals are random"


class ScriptedMonitor(monitor.CallMonitor):
    """A monitor whose steps return the given intervals, one interval per step. The step after the last interval ends
    the monitoring."""

    def __init__(self, intervals: Iterator[float], pidfd: int = -1) -> None:
        self.is_stopped = False
        self._intervals, self._pidfd, self._tree = intervals, pidfd, None

    def _step(self) -> float | None:
        return next(self._intervals, None)

    def stop(self) -> None:
        if self._pidfd >= 0:
            super().stop()


def one_step_until_the_process_ends() -> Iterator[float]:
    yield 0.1
    raise ProcessLookupError


@pytest.mark.trio
@pytest.mark.parametrize(
    "intervals",
    [iter([]), iter([0.1]), one_step_until_the_process_ends(), itertools.repeat(0.1)],
    ids=["no step", "one step", "the process ends", "the executor ends"],
)
async def test_a_stopped_monitor_holds_no_descriptor(intervals: Iterator[float], autojump_clock: MockClock) -> None:
    """A monitor stops after its last step, when the process has ended, or when the executor ends."""
    fd = os.open(os.devnull, os.O_RDONLY)
    monitors, call_monitor = monitor.Monitor(NO_OWNER), ScriptedMonitor(intervals, fd)
    monitors._schedule(trio.current_time(), call_monitor)
    with trio.move_on_after(10):
        await monitors.run()
    assert call_monitor.is_stopped
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    call_monitor.stop()  # has no effect


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
    assert 0 < max_steps <= 2 * 4, "four steps use up the budget; twice as many, since time.thread_time is coarse"


@pytest.mark.trio
@pytest.mark.parametrize(
    ("calls", "cost_s", "share"), [(1, 0.004, 0.08), (30, 0.002, 0.27), (500, 0.004, 0.23), (100, 0.0004, 0.8)]
)
async def test_costly_samples_take_a_bounded_share_of_a_core(
    calls: int, cost_s: float, share: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A call that starts a hundred threads must not delay the results of other calls. So the time of a sample beyond
    0.5 ms may use only 0.2 of a core. `share` is this part of a core plus that of the first 0.5 ms of each sample."""
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
async def test_monitoring_goes_on_after_a_sample_has_failed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Without the monitor, nothing would end the call before the hang deadline, at which its whole jail is killed."""
    scheduler, failures = FakeScheduler(monkeypatch, delay_share=0.0), iter([True, True, False, True])

    def pid_of_pidfd(*_: int) -> int:
        if next(failures, False):
            raise OSError(errno.ENFILE, "Too many open files in system")
        return FIRST_PID

    def sample(_tree: ProcessTree) -> TreeSample:
        if next(failures, False):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return scheduler.sample()

    monkeypatch.setattr(monitor, "pid_of_pidfd", pid_of_pidfd)
    monkeypatch.setattr(ProcessTree, "sample", sample)
    assert (await scheduler.run(timeout_s=2.0)).status is Status.TIMEOUT
    assert scheduler.killed_after == pytest.approx(2.0, rel=0.05)
    assert next(failures, None) is None, "all failures have happened"


@pytest.mark.trio
async def test_after_the_end_of_a_call_no_process_that_got_its_pid_is_changed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    scheduler, signals = FakeScheduler(monkeypatch, delay_share=0.0), []

    def end_the_call(_pidfd: int, signal_number: int) -> None:
        signals.append(signal_number)
        if scheduler.running:
            zygote, run_id = scheduler.running.pop(0)
            zygote.send(ended_json(run_id))
        raise ProcessLookupError

    monkeypatch.setattr(signal, "pidfd_send_signal", end_the_call)
    assert (await scheduler.run(timeout_s=2.0, demote_after_ms=1.0)).status is Status.OK
    assert scheduler.demotions == []
    assert {*signals} == {0}, "signal 0 only tests whether the process exists"


@pytest.mark.trio
async def test_a_crowded_call_is_killed_in_time_without_many_samples(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """960 calls share a core, so each call needs 960 s of wall time for one second of virtual time."""
    samples = 0
    for calls_per_core in (monitor.CROWDED_CALLS_PER_CORE, 20 * monitor.CROWDED_CALLS_PER_CORE):
        delay_share = 1 - 1 / calls_per_core
        scheduler, samples_before = FakeScheduler(monkeypatch, delay_share), samples

        def sample(_tree: ProcessTree, scheduler: FakeScheduler = scheduler) -> TreeSample:
            nonlocal samples
            samples += 1
            return scheduler.sample()

        with monkeypatch.context() as patch:
            patch.setattr(ProcessTree, "sample", sample)
            patch.setattr(Executor, "calls_per_core", calls_per_core)
            result = await scheduler.run(timeout_s=1.0)
        assert result.status is Status.TIMEOUT
        assert scheduler.killed_after == pytest.approx(1.0 / (1 - delay_share), rel=0.02)
        assert samples - samples_before < 1000
