"""The last ten minutes in steps of about a second: the growth of every counter, and the gauges at the end of the step.

Invariants:
- The history keeps at most `MAX_STEPS` steps and `RECENT_STEPS` snapshots.
- It reads no clock: the caller takes the snapshots.
- A step has its real length in seconds. A late snapshot therefore makes a longer step and not a higher rate.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from sandbox.gateway.metrics import quantiles_s

MAX_STEPS = 600
RECENT_STEPS = 10
"""Number of steps that `last_interval` covers. The calls of a single step are too few for percentiles."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters and gauges at one moment."""

    at_s: float
    """Seconds since the server started."""
    statuses: Mapping[str, int]
    """Finished calls, by status."""
    events: Mapping[str, int]
    """All other counters."""
    latencies: Mapping[str, tuple[int, ...]]
    """Counts of calls per bucket of each `metrics.Histogram`, by the histogram's name, such as "run_ms"."""
    gauges: Mapping[str, float]


Step = dict[str, object]
"""An interval in JSON form. A step of the history also has its `number`, from 1."""


class History:
    """Steps between snapshots that are added about once a second."""

    def __init__(self, first: Snapshot) -> None:
        self._steps: deque[str] = deque(maxlen=MAX_STEPS)
        """Steps as JSON text, less than 1 MiB together. As objects they would take five times as much."""
        self._recent: deque[Snapshot] = deque([first], maxlen=RECENT_STEPS)
        self._number = 0

    def add(self, snapshot: Snapshot) -> None:
        """Add the step that ends with this snapshot."""
        self._number += 1
        self._steps.append(json.dumps({"number": self._number, **interval(self._recent[-1], snapshot)}))
        self._recent.append(snapshot)

    def after(self, number: int) -> list[Step]:
        """Return the kept steps whose number is greater than `number`, oldest first. If `number` is higher than that of
        the last step, return all kept steps: such a number comes from another process, which had more steps."""
        # `count` is the number of steps after `number`. Some of these steps may no longer be kept.
        count = self._number - number if 0 <= number <= self._number else len(self._steps)
        return [json.loads(step) for step in islice(self._steps, max(0, len(self._steps) - count), None)]

    def last_interval(self, now: Snapshot) -> Step:
        """Return the interval from about `RECENT_STEPS` seconds ago to `now`."""
        return interval(self._recent[0], now)


def interval(before: Snapshot, after: Snapshot) -> Step:
    """Return how much each counter has grown between two snapshots, and the gauges of the later snapshot."""
    return {
        "at_s": round(after.at_s, 3),
        "seconds": round(after.at_s - before.at_s, 3),
        "statuses": _increments(before.statuses, after.statuses),
        "events": _increments(before.events, after.events),
        # The histograms and gauges are entries of the step itself, under their own names.
        **{name: _percentiles_ms(before.latencies[name], counts) for name, counts in after.latencies.items()},
        **after.gauges,
    }


def _increments(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the growth of each counter that has grown."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


def _percentiles_ms(before: tuple[int, ...], after: tuple[int, ...]) -> dict[str, float] | None:
    """Return percentiles in milliseconds, rounded to three digits. `before` and `after` are the counts of one histogram
    at two moments. The percentiles are over the calls between these moments. Return None if there are no calls."""
    counts = [late - early for early, late in zip(before, after, strict=True)]
    if not any(counts):
        return None
    quantiles = quantiles_s(counts, [percent / 100 for percent in PERCENTILES])
    return {f"p{percent}": float(f"{value * 1000:.3g}") for percent, value in zip(PERCENTILES, quantiles, strict=True)}
