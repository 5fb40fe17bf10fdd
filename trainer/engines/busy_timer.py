"""A timer for overlapping work."""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyTimer:
    """A context manager that measures the wall time during which at least one task is inside it. Overlapping tasks
    count once."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock, self._num_inside, self._busy_since = clock, 0, 0.0

    def __enter__(self) -> None:
        if not self._num_inside:
            self._busy_since = self._clock()
        self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self.seconds += self._clock() - self._busy_since
