"""The body of `GET /v1/stats`: the server's state now, and its history of ten minutes.

`Stats` has the clock, and a task that adds a step to the history each second. The numbers of the executors are about a
second old, because executors report them in "stats" frames, about once a second.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sandbox import machine
from sandbox.gateway.calls.dispatcher import Dispatcher, NodeRow
from sandbox.gateway.calls.executor_handle import ExecutorHandle
from sandbox.gateway.calls.executor_report import EXECUTOR_GAUGES
from sandbox.gateway.metrics import VERSION
from sandbox.gateway.observe.history import History, Snapshot, Step
from sandbox.gateway.observe.merged import Body, OtherWorkers, merge_bodies
from sandbox.settings.tenants import Tenant

log = logging.getLogger(__name__)

TICK_INTERVAL_S = 1.0
MAX_MISSED_MODULES = 20
"""Maximum number of modules in `missed_imports`."""


class Stats:
    """Call `start` and `stop` with the application; `build` returns the body of `GET /v1/stats`."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._started_at_clock = clock()
        self._started_at = time.time()
        self._executor_counters = _RestartSafeCounters()
        self._machine = _MachineUsage()
        self.ask_others: Callable[[], Awaitable[Mapping[int, Body]]] | None = None
        """Returns the bodies of the other workers. Only worker 0 of a server with several has it."""
        self._others = OtherWorkers()
        self._history = History(self._snapshot())
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Add a step every `TICK_INTERVAL_S` until `stop`."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def tick(self) -> None:
        """Add a step to the history."""
        self._machine.sample()
        self._history.add(self._snapshot_of_all())

    def build(self, after: int, owner: Tenant | None = None) -> dict[str, object]:
        """Return the body, with the steps of the history after the number `after`. With `owner`, the body has only the
        row of this tenant, and nothing about other tenants."""
        if owner is not None:
            at_s = round(self._clock() - self._started_at_clock, 3)
            return {"service": self._service(), "at_s": at_s, "tenants": [self._tenant_row(owner.name)]}
        now = self._snapshot_of_all()
        return merge_bodies(self._body(now, self._history.after(after)), self._others.bodies.values())

    def build_for_worker_0(self) -> dict[str, object]:
        """Return the body of this worker alone, with its counters."""
        now = self._snapshot()
        return {**self._body(now, []), "snapshot": asdict(now)}

    def _body(self, now: Snapshot, steps: list[Step]) -> dict[str, object]:
        return {
            "service": self._service(),
            "now": self._history.last_interval(now),
            "totals": {"statuses": dict(now.statuses), "events": dict(now.events)},
            "executors": [_executor_row(executor) for executor in self._dispatcher.executors],
            **self._nodes(),
            "missed_imports": self._missed_imports(),
            "tenants": [self._tenant_row(name) for name in self._dispatcher.used_tenants()],
            "steps": steps,
        }

    def _tenant_row(self, name: str) -> dict[str, object]:
        usage, table = self._dispatcher.counters.by_tenant[name], self._dispatcher.call_table
        outstanding, dispatched = table.outstanding_of(name), table.running_of(name)
        return {
            "name": name,
            "statuses": dict(usage.by_status),
            "waiting": outstanding.calls - dispatched,
            "dispatched": dispatched,
            "bytes": outstanding.bytes,
            "run_s": round(usage.run_s, 3),
            "cpu_s": round(usage.cpu_s, 3),
        }

    def _nodes(self) -> dict[str, object]:
        membership = self._dispatcher.membership
        return {} if membership is None else {"nodes": [_node_row(row) for row in membership.rows()]}

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + TICK_INTERVAL_S, loop.time())
            await asyncio.sleep(due - loop.time())
            try:
                if self.ask_others is not None:
                    self._others.update(await self.ask_others())
                self.tick()
            except Exception:  # for example, no descriptor is free: the history lacks this step and continues
                log.exception("the history of /v1/stats lacks a step")

    def _service(self) -> dict[str, object]:
        reports = [executor.ready_report for executor in self._dispatcher.executors if executor.ready_report]
        limits = self._dispatcher.call_table.limits
        return {
            "state": _state(self._dispatcher),
            "version": VERSION,
            **self._dispatcher.isolation,
            "python": reports[0].python if reports else "",
            "started_at": round(self._started_at, 3),
            "queue_calls": limits.max_calls,
            "queue_bytes": limits.max_bytes,
            "cores": self._machine.cores,
            "memory_bytes": self._machine.memory_bytes,
        }

    def _snapshot_of_all(self) -> Snapshot:
        """Return the counters and gauges of all workers. Those of the others are those of the last tick."""
        return self._others.add_to(self._snapshot())

    def _snapshot(self) -> Snapshot:
        dispatcher, counters = self._dispatcher, self._dispatcher.counters
        ready = [executor for executor in dispatcher.executors if executor.is_ready]
        gauges: dict[str, float] = {
            name: sum(executor.stats.gauges.get(name, 0) for executor in ready)
            for name in EXECUTOR_GAUGES
            if any(name in executor.stats.gauges for executor in ready)
        }
        return Snapshot(
            at_s=self._clock() - self._started_at_clock,
            statuses=dict(counters.by_status),
            events=dict(self._events()),
            latencies={
                "queue_ms": tuple(counters.queue_s.counts),
                "run_ms": tuple(counters.run_s.counts),
                "answer_ms": tuple(counters.answer_s.counts),
            },
            gauges={
                **gauges,
                "waiting": dispatcher.call_table.waiting,
                "dispatched": dispatcher.dispatched,
                "bytes": dispatcher.call_table.outstanding.bytes,
                "executors": len(dispatcher.executors),
                "executors_ready": len(ready),
                "slots": sum(executor.ready_report.slots for executor in ready if executor.ready_report),
                "zygotes": sum(executor.stats.zygotes.total() for executor in ready),
                **self._machine.gauges,
            },
        )

    def _events(self) -> Counter[str]:
        counters, executors = self._dispatcher.counters, self._dispatcher.executors
        events = Counter({f"refused_{http_status}": count for http_status, count in counters.refused.items()})
        events["retried"] = counters.retried
        events["cancelled"] = counters.cancelled
        events["executor_restarts"] = self._dispatcher.executor_restarts
        self._executor_counters.update(executors)
        return events + self._executor_counters.counts

    def _missed_imports(self) -> dict[str, int]:
        missed: Counter[str] = Counter()
        for executor in self._dispatcher.executors:
            missed += executor.stats.missed_imports
        return dict(missed.most_common(MAX_MISSED_MODULES))


class _RestartSafeCounters:
    """Sums of the executors' counters. An executor that restarts counts from 0 again, but these sums never fall."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._last: dict[tuple[int, str], int] = {}
        """The last value, by executor and name."""

    def update(self, executors: Sequence[ExecutorHandle]) -> None:
        """Add the growth since the last update. Executors that have been removed are forgotten."""
        previous, self._last = self._last, {}
        for executor in executors:
            for name, value in executor.stats.totals.items():
                last = previous.get((executor.number, name), 0)
                self.counts[name] += value - last if value >= last else value
                self._last[executor.number, name] = value


class _MachineUsage:
    """CPU and memory of the machine and of the gateway process."""

    def __init__(self) -> None:
        self.cores = machine.granted_cores()
        self.memory_bytes = machine.memory_limit()
        self.gauges: dict[str, float] = {}
        self._busy_ticks, self._all_ticks = _cpu_ticks()
        self._cpu_s, self._sampled_at = time.process_time(), time.monotonic()
        self.sample()

    def sample(self) -> None:
        """Update `gauges`. The shares of CPU time are those since the last sample."""
        cpu_s, now = time.process_time(), time.monotonic()
        busy_ticks, all_ticks = _cpu_ticks()
        self.gauges = {
            "machine_busy": round((busy_ticks - self._busy_ticks) / max(1, all_ticks - self._all_ticks), 3),
            "memory_used_bytes": self.memory_bytes - machine.memory_available(),
            "gateway_cpu": round((cpu_s - self._cpu_s) / max(1e-3, now - self._sampled_at), 3),
            "gateway_rss_bytes": _rss_bytes(),
        }
        self._busy_ticks, self._all_ticks, self._cpu_s, self._sampled_at = busy_ticks, all_ticks, cpu_s, now


def _state(dispatcher: Dispatcher) -> str:
    if dispatcher.is_draining:
        return "draining"
    if dispatcher.is_ready:
        return "ready"
    return "no executor" if any(executor.started.done() for executor in dispatcher.executors) else "starting"


def _executor_row(executor: ExecutorHandle) -> dict[str, object]:
    return {
        "number": executor.number,
        "ready": executor.is_ready,
        "restarts": executor.restarts,
        "zygotes": dict(executor.stats.zygotes),
        **executor.stats.gauges,
        "slots": executor.ready_report.slots if executor.ready_report else 0,
    }


def _node_row(row: NodeRow) -> dict[str, object]:
    ready = [executor for executor in row.executors if executor.is_ready]
    return {
        "name": row.name,
        "address": row.address,
        "state": row.state,
        "reason": row.reason,
        "isolation": row.isolation,
        "executors": [executor.number for executor in row.executors],
        "slots": sum(executor.ready_report.slots for executor in ready if executor.ready_report),
        "running": sum(executor.stats.gauges.get("running", 0) for executor in ready),
        "restarts": row.restarts,
    }


def _cpu_ticks() -> tuple[int, int]:
    """Return the busy ticks and all ticks of the machine's cores since boot (proc_stat(5))."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
