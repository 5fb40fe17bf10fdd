"""An event loop with a virtual clock. The clock stands still while any task can run or a thread works; then it jumps to
the next timer."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    passed = 0.0
    threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.threads and timeout != 0:
            return super().select(None)
        ready = super().select(timeout and 0)
        if timeout and not ready:
            self.passed += timeout
        return ready


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Selector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.passed

    def run_in_executor(self, *args: Any) -> asyncio.Future[Any]:
        self._jumping.threads += 1
        future = super().run_in_executor(*args)
        future.add_done_callback(self._is_back)
        return future

    def _is_back(self, _: object) -> None:
        self._jumping.threads -= 1


def jumping(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in such a loop, for at most a week of virtual time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(asyncio.wait_for(test(*args, **kwargs), 7 * 24 * 3600.0))

    return run
