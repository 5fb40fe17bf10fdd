"""A fake scheduler for monitored calls, which replaces the samples of their processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import trio

from sandbox.executor import monitor
from sandbox.executor.process_tree import CpuPriority, ProcessTree
from sandbox.executor.virtual_clock import ProcessSample, ThreadSample, TreeSample
from sandbox.types import Limits, Result
from tests.executor.zygotes import FakeZygote, driven, ended_json

FIRST_PID = 77
"""The pid of every call's first process on a `FakeScheduler`."""


class FakeScheduler:
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
