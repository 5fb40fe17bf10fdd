"""Samples of a running server, taken by a thread at a rate that does not disturb the server.

To add up the memory of a process tree (PSS), the kernel walks page tables under a lock, and the next fork of a zygote
needs this lock. So after each sample the sampler rests for at least `REST_FACTOR` times the duration of the sample. It
uses at most 2 % of one core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

REST_FACTOR = 50
INTERVAL_S = 1.0

Sample = TypeVar("Sample")


class PeriodicSampler(Generic[Sample]):
    """A context manager that calls `take_sample` on entry, periodically, and on exit; `samples` has all in order."""

    def __init__(self, take_sample: Callable[[], Sample], interval_s: float = INTERVAL_S) -> None:
        self.samples: list[Sample] = []
        self._take_sample = take_sample
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> PeriodicSampler[Sample]:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        if kind is None:
            self._sample()

    def _run(self) -> None:
        while not self._stopped.wait(max(self._interval_s, REST_FACTOR * self._last_s)):
            self._sample()

    def _sample(self) -> None:
        start = time.monotonic()
        self.samples.append(self._take_sample())
        self._last_s = time.monotonic() - start
