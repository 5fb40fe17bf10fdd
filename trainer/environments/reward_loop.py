"""An event loop in a thread of its own, for reward functions of the user with `async def`.

A function that blocks, for example in `time.sleep`, blocks this loop only, and not the one that collects episodes. All
calls share one loop. So a function may keep a client for later calls, although a client works in one loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from threading import Thread
from typing import Any

BLOCKED_S = 1.0
"""Seconds without an answer after which a loop counts as blocked."""


class RewardLoop:
    """An event loop in its own thread. Only one other event loop may use it: the loop that ran when it was created."""

    def __init__(self, on_end: Callable[[], object]) -> None:
        """`on_end` is called in the thread of this loop when the loop has ended."""
        self._loop, self._on_end = asyncio.new_event_loop(), on_end
        Thread(target=self._run, name="rewards", daemon=True).start()  # a call may never return

    async def call(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Await `function()` in this loop. Raises every exception of the function, also `SystemExit` and
        `KeyboardInterrupt`. If the caller is cancelled, the function is cancelled too."""

        async def outcome() -> tuple[Any, BaseException | None]:
            try:
                return await function(), None
            except BaseException as error:  # `SystemExit` and `KeyboardInterrupt` would end this loop
                return None, error

        value, failure = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(outcome(), self._loop))
        if failure:
            raise failure
        return value

    async def is_blocked(self) -> bool:
        """Return whether this loop does not answer within `BLOCKED_S`."""
        callers_loop = asyncio.get_running_loop()
        answered = asyncio.Event()

        def answer() -> None:  # runs in this loop, but only the caller's loop may set its event
            callers_loop.call_soon_threadsafe(answered.set)

        self._loop.call_soon_threadsafe(answer)
        try:
            async with asyncio.timeout(BLOCKED_S):
                await answered.wait()
        except TimeoutError:
            return True
        return False

    def stop(self) -> None:
        """End this loop as soon as it is not blocked."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()
        self._on_end()
