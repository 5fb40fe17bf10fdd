"""Holds back signals while a child process starts, so that no signal can separate the child from its owner.

`Popen` returns some time after the child runs. A signal handler that raises in this time (Ctrl-C) ends `Popen`, and the
caller has no process that it could kill.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """Hold back the Python handlers of SIGINT and SIGTERM until the yielded function is called, or the block ends. Then
    they run for the signals that have come.

        with held_signals() as release:
            process = subprocess.Popen(command)
            try:
                release()
                process.wait()
            finally:
                process.kill()

    The signals are not blocked in the kernel, because the child would inherit the mask.
    """
    held: list[tuple[int, Handler]] = []
    received: list[tuple[int, Handler]] = []

    def hold(handler: Handler, number: int, _: FrameType | None) -> None:
        received.append((number, handler))

    def release() -> None:
        while held:
            signal.signal(*held[-1])
            held.pop()  # last: if a restored handler raises here, the next `release` restores the rest
        while received:
            number, handler = received.pop(0)
            handler(number, None)

    try:
        if threading.current_thread() is threading.main_thread():  # Python runs handlers in no other thread
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handler := signal.getsignal(number)):
                    held.append((number, handler))
                    signal.signal(number, partial(hold, handler))
        yield release
    finally:
        release()
