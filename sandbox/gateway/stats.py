"""What the dashboard shows: the service now, and the last ten minutes of it, as `GET /v1/stats` answers.

`Stats` has the clock and the one task; the steps themselves are `history`'s. Executors' own numbers come with their
stats frames, about a second old; numbers only are taken from them, and names of a bounded length. Where there are
several gateways, each keeps the history of all of them together, by what its siblings tell it each second.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sandbox import machine
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.calls.executor_handle import Node
from sandbox.gateway.history import History, Snapshot
from sandbox.gateway.metrics import VERSION
from sandbox.gateway.siblings import Siblings, State

Others = Mapping[int, State]
NOBODY: Others = {}

TICK_S = 1.0
NAME_CHARS = 60
NAMES = 20

EXECUTOR_GAUGES = ("queued", "running", "running_short", "running_long", "long_slots")
"""Of the executors' numbers, those that rise and fall; one that no executor tells is not there."""


MACHINE_GAUGES = ("machine_busy", "memory_used_bytes", "gateway_cpu", "gateway_rss_bytes")
"""Of the machine, or of the gateway that is asked; not to be added up."""


class Stats:
    """Use `start` and `stop` around the life of the application; `tell` has the body of `GET /v1/stats`.

    `others` is what the siblings say (`own`), by number.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        siblings: Siblings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._siblings = siblings or Siblings()
        self._clock = clock
        self._began = clock()
        self._started_at = time.time()
        self._lasting = _LastingCounts()
        self._machine = _Machine()
        self._whole = _Whole()
        self._history = History(self._snapshot())
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take a snapshot every `TICK_S` from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def tick(self, others: Others = NOBODY) -> None:
        """End a step of the history."""
        self._machine.look()
        self._history.add(self._whole.sum(self._snapshot(), others))

    def own(self) -> State:
        """What this gateway alone has, for its siblings."""
        return {
            "snapshot": asdict(self._snapshot()),
            "service": self._service(),
            "executors": [_executor(node) for node in self._dispatcher.nodes],
            "missed_imports": self._missed_imports(),
        }

    async def tell(self, after: int) -> dict[str, Any]:
        """`answer`, after a word with the siblings."""
        return self.answer(after, await self._others())

    def answer(self, after: int, others: Others = NOBODY) -> dict[str, Any]:
        """Everything, with the history's steps after number `after`."""
        now = self._whole.sum(self._snapshot(), others)
        parts = sorted([(self._siblings.number, self.own()), *others.items()])
        missed: Counter[str] = sum((Counter(part["missed_imports"]) for _, part in parts), Counter())
        return {
            "service": self._service_of([part["service"] for _, part in parts]),
            "now": self._history.recent(now),
            "totals": {"statuses": dict(now.statuses), "events": dict(now.events)},
            "executors": [
                {**row, "gateway": number} if others else row for number, part in parts for row in part["executors"]
            ],
            "missed_imports": dict(missed.most_common(NAMES)),
            "steps": self._history.after(after),
        }

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        if others := await self._others():  # what they counted before this one began is no growth
            self._history = History(self._whole.sum(self._snapshot(), others))
        while True:
            due = max(due + TICK_S, loop.time())
            await asyncio.sleep(due - loop.time())
            self.tick(await self._others())

    async def _others(self) -> Others:
        return {number: state["stats"] for number, state in (await self._siblings.ask()).items()}

    def _service_of(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """What holds for all gateways together: any that is not ready is said."""
        states = {part["state"] for part in parts}
        return {
            **self._service(),
            "state": next(state for state in STATES if state in states),
            "queue_calls": sum(part["queue_calls"] for part in parts),
            "queue_bytes": sum(part["queue_bytes"] for part in parts),
            "gateways": self._siblings.count,
            "gateways_up": len(parts),
        }

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


class _Whole:
    """Sums over gateways. What one had counted lasts when it is gone, and another in its place counts from 0."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, Snapshot]] = {}
        """When each sibling began, and its latest; also of those that are down."""
        self._gone: list[Snapshot] = []
        """One at most: the sum of those that were replaced."""

    def sum(self, own: Snapshot, others: Others) -> Snapshot:
        """`own`, and all that the siblings have counted; what there is now, of those that are up."""
        told = {number: Snapshot(**state["snapshot"]) for number, state in others.items()}
        for number, snapshot in told.items():
            began = others[number]["service"]["started_at"]
            last_began, last = self._last.get(number, (began, snapshot))
            if began != last_began:
                self._gone = [_added([last, *self._gone])]
            elif snapshot.at_s < last.at_s:  # two asked at once, and the later answer came first
                continue
            self._last[number] = began, snapshot
        counted = _added([own, *(last for _, last in self._last.values()), *self._gone])
        gauges = Counter(own.gauges)
        for snapshot in told.values():
            gauges.update({name: value for name, value in snapshot.gauges.items() if name not in MACHINE_GAUGES})
        return replace(counted, gauges=dict(gauges))


def _added(parts: list[Snapshot]) -> Snapshot:
    """All that was counted; what there is now, of the first."""
    return replace(
        parts[0],
        statuses=dict(sum((Counter(part.statuses) for part in parts), Counter[str]())),
        events=dict(sum((Counter(part.events) for part in parts), Counter[str]())),
        latencies={
            name: tuple(map(sum, zip(*(part.latencies[name] for part in parts), strict=True)))
            for name in parts[0].latencies
        },
    )


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


STATES = ("draining", "no executor", "starting", "ready")
"""From what an operator should know first."""


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
