"""An event loop in its own thread, for synchronous code that uses asynchronous objects, as TRL's trainer does.

Invariants:
- One task runs all jobs, one after the other, and leaves the entered context managers in reverse order.
- `run` returns or raises only after its job has ended. If Ctrl-C interrupts the wait, the job is cancelled first.
- An exception of a job is raised by the `run` or `result` that waits for the job, with the traceback of the job.
- When the `with` block ends, a job that is still running is cancelled, and jobs that have not begun never begin.
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


class LoopThread:
    """A context manager that one thread enters and uses. It must not be used in the loop's own thread."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._jobs: asyncio.Queue[tuple[Future[Any], Callable[[], Awaitable[Any]]] | None] = asyncio.Queue()
        """Each job with the future of its result. None ends the loop."""
        self._job: Future[Any] | None = None
        """The last job that was begun."""
        self._exited: Future[None] = Future()
        self._thread = threading.Thread(target=self._thread_main, name="loop-thread", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._end)
        self._thread.join()
        self._exited.result()

    def enter(self, manager: AbstractAsyncContextManager[T]) -> T:
        """Enter `manager` in the loop until the `with` block ends."""
        return self.run(self._stack.enter_async_context, manager)

    def run(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await `function(*args, **kwargs)` in the loop and return its result."""
        return self.result(self.start(function, *args, **kwargs))

    def start(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Await `function(*args, **kwargs)` in the loop, after the jobs before it. `result` waits for the end."""
        job: Future[T] = Future()
        self._call(self._jobs.put_nowait, (job, partial(function, *args, **kwargs)))
        return job

    def result(self, job: Future[T]) -> T:
        """Wait until a started job has ended, and return its result."""
        futures: list[Future[Any]] = [job, self._exited]
        try:
            wait(futures, return_when=FIRST_COMPLETED)
        except BaseException:  # Ctrl-C
            self._call(self._cancel, job)
            wait(futures, return_when=FIRST_COMPLETED)
            raise
        if not job.done():
            self._exited.result()
        return job.result()

    def _call(self, function: Callable[..., object], *args: Any) -> None:
        if not self._exited.done():
            self._loop.call_soon_threadsafe(function, *args)

    # All methods below run in the loop's thread.

    def _thread_main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run_jobs())
        except BaseException as error:
            self._exited.set_exception(error)
        else:
            self._exited.set_result(None)

    async def _run_jobs(self) -> None:
        task = asyncio.current_task()
        assert task
        self._task = task
        async with self._stack:
            while entry := await self._jobs.get():
                job, function = entry
                self._job = job
                if not job.set_running_or_notify_cancel():
                    continue
                try:
                    job.set_result(await function())
                except BaseException as error:  # boundary: `run` raises it in the caller's thread
                    job.set_exception(error)
                    while task.cancelling():  # only the job was cancelled; the loop continues
                        task.uncancel()

    def _end(self) -> None:
        while not self._jobs.empty():
            if entry := self._jobs.get_nowait():
                entry[0].cancel()
        if self._job and self._job.running():
            self._task.cancel()
        self._jobs.put_nowait(None)

    def _cancel(self, job: Future[Any]) -> None:
        if not job.cancel() and job.running():
            self._task.cancel()
