"""Adds up the statistics of the workers of a server with several (`--workers`). Worker 0 does it, once a second.

- The counters of all workers together never fall: those of a worker that has died are kept.
- A worker that does not answer has no gauges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from sandbox.gateway.observe.history import Snapshot

MACHINE_GAUGES = ("machine_busy", "memory_used_bytes")
"""Gauges of the whole machine, which are the same for all workers."""

Body = Mapping[str, Any]
"""The body of a worker for `/v1/stats`, with its `snapshot`."""


class OtherWorkers:
    """The latest bodies of the other workers."""

    def __init__(self) -> None:
        self.bodies: dict[int, Body] = {}
        """Bodies of the workers that have answered last time, by worker."""
        self._last: dict[int, tuple[float, Snapshot]] = {}
        """The start of each worker, and its last snapshot."""
        self._ended: list[Snapshot] = []
        """The sum of the counters of workers that have died."""

    def update(self, bodies: Mapping[int, Body]) -> None:
        self.bodies = dict(bodies)
        for number, body in bodies.items():
            snapshot, started_at = Snapshot(**body["snapshot"]), body["service"]["started_at"]
            if number in self._last and self._last[number][0] != started_at:
                self._ended = [add([*self._ended, self._last[number][1]])]
            self._last[number] = started_at, snapshot

    def add_to(self, own: Snapshot) -> Snapshot:
        """Return the sum of this worker's snapshot and those of all others."""
        others = [
            snapshot if number in self.bodies else replace(snapshot, gauges={})
            for number, (_, snapshot) in self._last.items()
        ]
        return add([own, *others, *(replace(snapshot, gauges={}) for snapshot in self._ended)])


def add(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Return the sum of snapshots. The time and the gauges of the machine are those of the first."""
    first, *others = snapshots
    statuses, events, gauges = Counter(first.statuses), Counter(first.events), dict(first.gauges)
    latencies = {name: tuple(counts) for name, counts in first.latencies.items()}
    for other in others:
        statuses.update(other.statuses)
        events.update(other.events)
        for name, counts in other.latencies.items():
            latencies[name] = tuple(map(sum, zip_longest(latencies.get(name, ()), counts, fillvalue=0)))
        for name, value in other.gauges.items():
            gauges[name] = gauges.get(name, 0) + (0 if name in MACHINE_GAUGES else value)
    return Snapshot(first.at_s, dict(statuses), dict(events), latencies, gauges)


def merge_bodies(own: Body, others: Iterable[Body]) -> dict[str, Any]:
    """Add the other workers' executors, missed imports and queue limits to a body. Executors are numbered anew."""
    service, executors = dict(own["service"]), list(own["executors"])
    missed: Counter[str] = Counter(own["missed_imports"])
    for other in others:
        executors += other["executors"]
        missed.update(other["missed_imports"])
        for name in ("queue_calls", "queue_bytes"):
            service[name] += other["service"][name]
    rows = [{**row, "number": number} for number, row in enumerate(executors)]
    return {**own, "service": service, "executors": rows, "missed_imports": dict(missed.most_common())}
