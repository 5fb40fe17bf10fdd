"""A fake scheduler for monitored calls, which replaces the samples of their processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import trio

from sandbox.executor.time import monitor, process_tree
from sandbox.executor.time.process_tree import CpuPriority, ProcessTree
from sandbox.executor.time.virtual_clock import ProcessSample, ThreadSample, TreeSample
from sandbox.types import Limits, Result
from tests.executor.fake_zygotes import FakeZygote, driven_executor, ended_json

FIRST_PID = 77
"""The pid of every call's first process on a `FakeScheduler`."""


class FakeScheduler:
    """A fake scheduler on which every call waits for a core for `delay_share` of the time.

    A new `FakeScheduler` replaces the samples of all calls, for as long as `monkeypatch` lasts. Calls with the code
    "outlast" run until they are killed. Their zygote reports them as still running after 0.1 s.

    `is_single_threaded` is called at each sample. If it returns False, the call has two threads. `can_promote` says
    whether the executor may promote calls.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        delay_share: float,
        *,
        is_single_threaded: Callable[[], bool] = lambda: True,
        can_promote: bool = True,
    ) -> None:
        self.killed_after: float | None = None
        """Seconds from `started` after which the last killed call was killed."""
        self.demotions: list[bool] = []
        """The argument `is_demoted` of each use of `CpuPriority.apply`."""
        self.started = 0.0
        """Time of Trio's clock at which the calls were submitted."""
        self.starts: list[float] = []
        """Times of Trio's clock at which zygotes have started a call."""
        self.running: list[tuple[FakeZygote, int]] = []
        """Zygote and run id of the running calls."""
        self._delay_share, self._is_single_threaded, self._patch = delay_share, is_single_threaded, monkeypatch
        monkeypatch.setattr(process_tree, "can_restore_priority", lambda: can_promote)
        monkeypatch.setattr(monitor, "pid_of_pidfd", lambda *_: FIRST_PID)
        monkeypatch.setattr(ProcessTree, "sample", lambda _tree: self.sample())
        monkeypatch.setattr(
            CpuPriority, "apply", lambda _self, _tree, _cgroup, is_demoted: self.demotions.append(is_demoted)
        )
        monkeypatch.setattr(signal, "pidfd_send_signal", self._kill)

        async def outlast(zygote: FakeZygote, run_id: int) -> None:
            self.starts.append(trio.current_time())
            self.running.append((zygote, run_id))
            await trio.sleep(0.1)
            zygote.send_still_running(run_id, 100.0)

        monkeypatch.setattr(FakeZygote, "outlast", outlast, raising=False)

    async def run(self, timeout_s: float, **settings: Any) -> Result:
        """Run a call that never ends by itself, on an executor with one slot and these `settings`."""
        settings = {"zygote_pools": 1, "slots": 1, "profiles": ("bare",), **settings}
        async with driven_executor(self._patch, **settings) as driver:
            self.started = trio.current_time()
            (result,) = await driver.run("outlast", limits=Limits(timeout_s=timeout_s))
            assert driver.executor.running_long == 0
            return result

    def sample(self) -> TreeSample:
        wall_s = trio.current_time() - self.started
        delay_s = self._delay_share * wall_s
        tids = (FIRST_PID,) if self._is_single_threaded() else (FIRST_PID, FIRST_PID + 1)
        cpu_s = wall_s - delay_s
        # Equal counts of timeslices and voluntary switches in each sample: the call has not slept.
        threads = {
            tid: ThreadSample(cpu_s, delay_s, timeslices=9, voluntary_switches=9, is_runnable=True) for tid in tids
        }
        return {FIRST_PID: ProcessSample(1, wall_s, cpu_s, threads)}

    def _kill(self, _pidfd: int, signal_number: int) -> None:
        if not signal_number:  # signal 0 only tests whether the process exists
            return
        self.killed_after = trio.current_time() - self.started
        zygote, run_id = self.running.pop(0)
        zygote.send(ended_json(run_id, exit_code=None, signal=signal_number))

    async def demoted_after_s(self, calls: int, other_code: str | None = None) -> float:
        """Run `calls` endless calls on one core; return the wall time after which half of them are long.

        `other_code` is the code of 100 further calls, which share one more slot, so that calls wait at all times.
        """
        slots = calls + (other_code is not None)
        settings: dict[str, Any] = {"zygote_pools": 1, "slots": slots, "profiles": ("bare",)}
        async with driven_executor(self._patch, cores=1, **settings) as driver:
            self.started = trio.current_time()
            driver.submit(*["outlast"] * calls, limits=Limits(timeout_s=60.0))
            if other_code is not None:
                driver.submit(*[other_code] * 100)
            while driver.executor.running_long < calls / 2:  # noqa: ASYNC110  there is no event for it
                await trio.sleep(0.001)
            return trio.current_time() - self.started
