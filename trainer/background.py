"""An event loop in a thread of its own, for synchronous code that owns asynchronous things: TRL's, and the recipe's.

Invariants:
- What is entered is left in the same task, last in first out, whatever ends the `with` block.
- `run` returns or raises only when what it ran is over, also when Ctrl-C interrupts the wait.
- An exception in the loop surfaces where it was waited for, with its own traceback.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from anyio.from_thread import start_blocking_portal

P = ParamSpec("P")
T = TypeVar("T")


class Background:
    """A context manager; no method may be called from its own loop."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal("asyncio", name="trainer-background"))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def enter(self, manager: AbstractAsyncContextManager[T]) -> T:
        """Enter it in the loop, until the `with` block ends."""
        return self._stack.enter_context(self._portal.wrap_async_context_manager(manager))

    def run(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await `function(*args, **kwargs)` in the loop."""
        is_over = threading.Event()

        async def work() -> T:
            try:
                return await function(*args, **kwargs)
            finally:
                is_over.set()

        future = self._portal.start_task_soon(work)
        try:
            return future.result()
        except BaseException:
            if future.cancel():  # it was the wait that was interrupted
                is_over.wait()
            raise
