"""Holds back signals while a child process starts, so that the code that starts the child can always kill it.

`Popen` returns some time after the child has begun to run. If a signal handler raises in this time (Ctrl-C), `Popen`
returns nothing, and its caller has no object with which it could kill the child.
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
    the handlers run for the signals that have come.

        with held_signals() as release:
            process = subprocess.Popen(command)
            try:
                release()
                process.wait()
            finally:
                process.kill()

    The signals are not blocked in the kernel, because the child would inherit the mask.
    """
    replaced: list[tuple[int, Handler]] = []
    received: list[tuple[int, Handler]] = []

    def hold(handler: Handler, number: int, _: FrameType | None) -> None:
        received.append((number, handler))

    def release() -> None:
        while replaced:
            signal.signal(*replaced[-1])
            # Only now: a signal may come here, and the restored handler may raise. Then the `release` at the end of the
            # block restores this handler again, and the rest.
            replaced.pop()
        while received:
            number, handler = received.pop(0)
            handler(number, None)  # no frame: the code that the signal interrupted has gone on

    try:
        if threading.current_thread() is threading.main_thread():  # Python runs handlers in no other thread
            for number in (signal.SIGINT, signal.SIGTERM):
                # SIG_DFL and SIG_IGN are not callable: they run no Python code, which could raise in `Popen`.
                if callable(handler := signal.getsignal(number)):
                    replaced.append((number, handler))
                    signal.signal(number, partial(hold, handler))
        yield release
    finally:
        release()
