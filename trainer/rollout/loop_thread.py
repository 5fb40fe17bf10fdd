"""An event loop in a thread of its own, for synchronous code that owns asynchronous things: TRL's trainer does.

Invariants:
- One task does everything, one thing at a time: what it enters it leaves, last in first out, whatever ends the `with`.
- `run` returns or raises only when what it ran is over. Ctrl-C while it waits cancels that first.
- An exception in the loop surfaces where it was waited for, with its own traceback.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Background:
    """A context manager, for one thread and not for its own loop."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._jobs: asyncio.Queue[tuple[Future[Any], Callable[[], Awaitable[Any]]] | None] = asyncio.Queue()
        self._over: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, name="background", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._jobs.put_nowait, None)
        self._thread.join()
        self._over.result()

    def enter(self, manager: AbstractAsyncContextManager[T]) -> T:
        """Enter it in the loop, until the `with` block ends."""
        return self.run(self._stack.enter_async_context, manager)

    def run(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await `function(*args, **kwargs)` in the loop."""
        job: Future[T] = Future()
        self._call(self._jobs.put_nowait, (job, partial(function, *args, **kwargs)))
        ends: list[Future[Any]] = [job, self._over]
        try:
            wait(ends, return_when=FIRST_COMPLETED)
        except BaseException:  # Ctrl-C
            self._call(self._interrupt, job)
            wait(ends, return_when=FIRST_COMPLETED)
            raise
        if not job.done():
            self._over.result()
        return job.result()

    def _call(self, function: Callable[..., object], *args: Any) -> None:
        if not self._over.done():
            self._loop.call_soon_threadsafe(function, *args)

    # In the loop's thread

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._work())
        except BaseException as why:
            self._over.set_exception(why)
        else:
            self._over.set_result(None)

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task
        self._task = task
        async with self._stack:
            while entry := await self._jobs.get():
                job, function = entry
                if not job.set_running_or_notify_cancel():
                    continue
                try:
                    job.set_result(await function())
                except BaseException as why:  # whoever waits for it has to act on it
                    job.set_exception(why)
                    while task.cancelling():  # what was interrupted is over; the loop goes on
                        task.uncancel()

    def _interrupt(self, job: Future[Any]) -> None:
        if not job.cancel() and job.running():
            self._task.cancel()
