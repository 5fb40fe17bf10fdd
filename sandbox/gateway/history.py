"""The last ten minutes in steps of about a second: how much each counted, and what there was at its end.

Invariants:
- Pure and bounded: `STEPS` steps, `RECENT` snapshots; whoever has the clock takes a snapshot and adds it.
- What a step counted is the difference of two snapshots of what only grows, over its real length: a late tick makes a
  longer step, not a higher rate.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sandbox.gateway.metrics import quantiles_s

STEPS = 600
RECENT = 10
"""Steps that "now" looks back over: one alone is too short for a percentile."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was counted until `at_s`, and what there was then."""

    at_s: float
    statuses: Mapping[str, int]
    """Calls answered, by status."""
    events: Mapping[str, int]
    """Whatever else only grows."""
    latencies: Mapping[str, tuple[int, ...]]
    """The counts of `metrics.Histogram`s."""
    gauges: Mapping[str, float]
    """What rises and falls."""


Step = dict[str, Any]
"""`between` two snapshots, and its `number`, from 1."""


class History:
    """Steps between snapshots that are added about once a second."""

    def __init__(self, first: Snapshot) -> None:
        self._steps: deque[str] = deque(maxlen=STEPS)
        """As JSON: as objects they take five times the memory, about 2 MB when all are there."""
        self._recent: deque[Snapshot] = deque([first], maxlen=RECENT)
        self._number = 0

    def add(self, snapshot: Snapshot) -> None:
        """End a step."""
        self._number += 1
        self._steps.append(json.dumps({"number": self._number, **between(self._recent[-1], snapshot)}))
        self._recent.append(snapshot)

    def after(self, number: int) -> list[Step]:
        """The steps that are kept and come after step `number`, oldest first; all of them if it was never taken."""
        fresh = self._number - number if 0 <= number <= self._number else len(self._steps)
        return [json.loads(step) for step in islice(self._steps, max(0, len(self._steps) - fresh), None)]

    def recent(self, now: Snapshot) -> dict[str, Any]:
        """One long step, from about `RECENT` s ago to `now`."""
        return between(self._recent[0], now)


def between(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """What was counted from `before` to `after`, and what there was in the end."""
    return {
        "at_s": round(after.at_s, 3),
        "seconds": round(after.at_s - before.at_s, 3),
        "statuses": _grown(before.statuses, after.statuses),
        "events": _grown(before.events, after.events),
        **{name: _percentiles_ms(before.latencies[name], counts) for name, counts in after.latencies.items()},
        **after.gauges,
    }


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """By how much, for those that have grown."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


def _percentiles_ms(before: tuple[int, ...], after: tuple[int, ...]) -> dict[str, float] | None:
    counts = [late - early for early, late in zip(before, after, strict=True)]
    if not any(counts):
        return None
    found = quantiles_s(counts, [percent / 100 for percent in PERCENTILES])
    return {f"p{percent}": float(f"{seconds * 1000:.3g}") for percent, seconds in zip(PERCENTILES, found, strict=True)}
