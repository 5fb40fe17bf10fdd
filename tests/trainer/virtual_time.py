"""An event loop with a virtual clock. The clock stands still while a task can run or a thread works. When neither is
the case, the clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

MAX_TEST_S = 7 * 24 * 3600.0
"""Virtual seconds after which a test fails."""


class _VirtualSelector(selectors.DefaultSelector):
    now = 0.0
    num_threads_working = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.num_threads_working and timeout != 0:
            return super().select(None)
        ready = super().select(timeout and 0)
        if timeout and not ready:
            self.now += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual_selector = _VirtualSelector()
        super().__init__(self._virtual_selector)

    def time(self) -> float:
        return self._virtual_selector.now

    def run_in_executor(self, *args: Any) -> asyncio.Future[Any]:
        self._virtual_selector.num_threads_working += 1
        future = super().run_in_executor(*args)
        future.add_done_callback(self._on_thread_done)
        return future

    def _on_thread_done(self, _: object) -> None:
        self._virtual_selector.num_threads_working -= 1


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in an event loop with a virtual clock."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
            runner.run(asyncio.wait_for(test(*args, **kwargs), MAX_TEST_S))

    return run
