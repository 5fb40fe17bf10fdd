"""What the dashboard shows: the service now, and the last ten minutes of it, as `GET /v1/stats` answers.

`Stats` has the clock and the one task; the steps themselves are `history`'s. Executors' own numbers come with their
stats frames, about a second old; numbers only are taken from them, and names of a bounded length.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sandbox import machine
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.calls.executor_handle import Node
from sandbox.gateway.history import History, Snapshot
from sandbox.gateway.metrics import VERSION

TICK_S = 1.0
NAME_CHARS = 60
NAMES = 20

EXECUTOR_GAUGES = ("queued", "running", "running_long", "long_slots")
"""Of the executors' numbers, those that rise and fall; one that no executor tells is not there."""


class Stats:
    """Use `start` and `stop` around the life of the application; `build` returns the body of `GET /v1/stats`."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._began = clock()
        self._started_at = time.time()
        self._lasting = _LastingCounts()
        self._machine = _Machine()
        self._history = History(self._snapshot())
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take a snapshot every `TICK_S` from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def tick(self) -> None:
        """End a step of the history."""
        self._machine.look()
        self._history.add(self._snapshot())

    def build(self, after: int) -> dict[str, Any]:
        """The body of `GET /v1/stats`, with the history's steps after number `after`."""
        now = self._snapshot()
        return {
            "service": self._service(),
            "now": self._history.recent(now),
            "totals": {"statuses": dict(now.statuses), "events": dict(now.events)},
            "executors": [_executor(node) for node in self._dispatcher.nodes],
            "missed_imports": self._missed_imports(),
            "steps": self._history.after(after),
        }

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + TICK_S, loop.time())
            await asyncio.sleep(due - loop.time())
            self.tick()

    def _service(self) -> dict[str, Any]:
        about = next((node.about for node in self._dispatcher.nodes if node.about), {})
        bounds = self._dispatcher.ledger.bounds
        return {
            "state": _state(self._dispatcher),
            "version": VERSION,
            **self._dispatcher.isolation,
            "python": _name(about.get("python", "")),
            "started_at": round(self._started_at, 3),
            "queue_calls": bounds.calls,
            "queue_bytes": bounds.bytes,
            "cores": self._machine.cores,
            "memory_bytes": self._machine.memory_bytes,
        }

    def _snapshot(self) -> Snapshot:
        dispatcher, counters = self._dispatcher, self._dispatcher.counters
        ready = [node for node in dispatcher.nodes if node.is_ready]
        gauges = {
            "waiting": dispatcher.ledger.waiting,
            "in_hand": sum(dispatcher.ledger.running(node.number) for node in dispatcher.nodes),
            "bytes": dispatcher.ledger.bytes,
            "executors": len(dispatcher.nodes),
            "executors_ready": len(ready),
            "slots": sum(_count(node.about.get("slots")) for node in ready),
            "zygotes": sum(_counts(node.stats.get("zygotes")).total() for node in ready),
        }
        for name in EXECUTOR_GAUGES:
            if any(name in node.stats for node in ready):
                gauges[name] = sum(_count(node.stats.get(name)) for node in ready)
        return Snapshot(
            at_s=self._clock() - self._began,
            statuses=dict(counters.by_status),
            events=dict(self._events()),
            latencies={
                "queue_ms": tuple(counters.queue_s.counts),
                "run_ms": tuple(counters.run_s.counts),
                "answer_ms": tuple(counters.answer_s.counts),
            },
            gauges={**gauges, **self._machine.gauges},
        )

    def _events(self) -> Counter[str]:
        counters, nodes = self._dispatcher.counters, self._dispatcher.nodes
        events = Counter({f"refused_{code}": count for code, count in counters.refused.items()})
        events["retried"] = counters.retried
        events["cancelled"] = counters.cancelled
        events["executor_restarts"] = sum(node.restarts for node in nodes)
        for node in nodes:
            self._lasting.see(node.number, node.stats)
        return events + self._lasting.counts

    def _missed_imports(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for node in self._dispatcher.nodes:
            found += _counts(node.stats.get("missed_imports"))
        return dict(found.most_common(NAMES))


class _LastingCounts:
    """Sums of the executors' counters, which outlive the executors: one that starts again counts from 0."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._last: dict[tuple[int, str], int] = {}

    def see(self, number: int, stats: Mapping[str, Any]) -> None:
        for key, value in stats.items():
            if isinstance(key, str) and key.endswith("_total") and isinstance(value, int):
                last = self._last.get((number, key), 0)
                self.counts[_name(key.removesuffix("_total"))] += value - last if value >= last else value
                self._last[number, key] = value


class _Machine:
    """What is cheap to know of the machine, and of the gateway's own process."""

    def __init__(self) -> None:
        self.cores = machine.granted_cores()
        self.memory_bytes = machine.memory_limit()
        self.gauges: dict[str, float] = {}
        self._busy, self._all = _ticks()
        self._cpu_s, self._at_s = time.process_time(), time.monotonic()
        self.look()

    def look(self) -> None:
        """Read it all again: shares of CPU are since the last look."""
        cpu_s, at_s = time.process_time(), time.monotonic()
        busy, whole = _ticks()
        self.gauges = {
            "machine_busy": round((busy - self._busy) / max(1, whole - self._all), 3),
            "memory_used_bytes": self.memory_bytes - machine.memory_available(),
            "gateway_cpu": round((cpu_s - self._cpu_s) / max(1e-3, at_s - self._at_s), 3),
            "gateway_rss_bytes": _rss_bytes(),
        }
        self._busy, self._all, self._cpu_s, self._at_s = busy, whole, cpu_s, at_s


def _state(dispatcher: Dispatcher) -> str:
    if dispatcher.is_draining:
        return "draining"
    if dispatcher.is_ready:
        return "ready"
    return "no executor" if any(node.started.done() for node in dispatcher.nodes) else "starting"


def _executor(node: Node) -> dict[str, Any]:
    """One row of the table."""
    return {
        "number": node.number,
        "ready": node.is_ready,
        "restarts": node.restarts,
        "slots": _count(node.about.get("slots")),
        "zygotes": dict(_counts(node.stats.get("zygotes"))),
        **{name: _count(node.stats[name]) for name in EXECUTOR_GAUGES if name in node.stats},
    }


def _counts(value: Any) -> Counter[str]:
    """The numbers of a mapping that an executor sent, by name."""
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
    return Counter({_name(name): number for name, number in items if isinstance(number, int)})


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _name(value: Any) -> str:
    return f"{value:.{NAME_CHARS}}" if isinstance(value, str) else ""


def _ticks() -> tuple[int, int]:
    """Ticks in which the machine's cores worked, and all of them, since it booted (proc_stat(5))."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
