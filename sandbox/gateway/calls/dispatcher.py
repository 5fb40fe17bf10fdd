"""Carries calls from the ledger to the executors and answers back, and owns both.

Invariants:
- All work on one turn of the event loop goes out together: one `_pump` per turn, frames of up to `MAX_FRAME_CALLS`.
- Once the service stops, no call is handed out: those that wait, and those that an executor loses, are answered
  `unavailable` with `Stopped` at once, so that their clients can send them to another service.
- No task, timer or future belongs to a single call; a batch has one of each at most.
- What happens to a call is decided in `admission.Ledger`; this file has the clock, the nodes and the counters.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from types import TracebackType
from typing import Any

from sandbox import machine
from sandbox.config import ServeConfig
from sandbox.errors import ConfigError, NodeError, Overloaded
from sandbox.gateway.calls.call_table import Batch, Bounds, Ledger, Ticket
from sandbox.gateway.calls.executor_handle import ExecutorProcess, Launch, Node, Sized
from sandbox.gateway.heap import trim_at_rest
from sandbox.gateway.metrics import Counters, Sample, executor_samples
from sandbox.types import EncodedResult, Status
from sandbox.wire import MAX_FRAME_CALLS, TARGET_FRAME_BYTES

log = logging.getLogger(__name__)

TIMER_S = 0.002
"""The event loop's clock counts milliseconds, so its timers may be that early by ours."""
STOPPED = "the service stopped before this call was done; send it again"
STOP_CALLS = 512
"""Waiting calls that are answered `Stopped` in one turn of the loop, which takes some milliseconds."""
LEVEL_CHARS = 60
DEAD_S = 150.0
"""No executor for this long, and the service reports itself as not alive: more than one start may take."""


class Dispatcher:
    """Use as `async with Dispatcher(config) as dispatcher`, then `await dispatcher.started()`."""

    def __init__(self, config: ServeConfig, launch: Launch = ExecutorProcess.launch) -> None:
        self.config = config.resolved(machine.granted_cores(), machine.memory_limit() >> 20)
        self.counters = Counters()
        bounds = Bounds(
            config.queue_calls, config.queue_mb << 20, config.attempts, config.tenant_share, config.results_mb << 20
        )
        self.ledger = Ledger(bounds)
        self.is_draining = False
        self.nodes: list[Node] = []
        self._launch = launch
        self._loop: asyncio.AbstractEventLoop
        self._tasks = asyncio.TaskGroup()
        self._lives: list[asyncio.Task[None]] = []
        self._timers: dict[Batch, asyncio.TimerHandle] = {}
        self._pump_is_due = False
        self._idle = asyncio.Event()
        self._last_alive = 0.0

    async def __aenter__(self) -> Dispatcher:
        self._loop = asyncio.get_running_loop()
        self._last_alive = monotonic()
        shares = self.config.per_executor()
        self.nodes = [Node(n, self._launch, share.encode(), self) for n, share in enumerate(shares)]
        await self._tasks.__aenter__()
        self._lives = [self._tasks.create_task(node.run()) for node in self.nodes]
        self._lives.append(self._tasks.create_task(trim_at_rest(self._is_at_rest, lambda: self.counters.bytes_in)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_draining = True
        for life in self._lives:
            life.cancel()
        for node in self.nodes:
            node.started.cancel()
        await self._tasks.__aexit__(None, None, None)  # given `why`, it would wrap it

    async def started(self) -> None:
        """Wait until every executor is ready. Raises `ConfigError` with the reason of one that will never be."""
        try:
            await asyncio.gather(*(node.started for node in self.nodes))
        except NodeError as why:
            raise ConfigError(str(why)) from None

    async def drain(self, within_s: float) -> None:
        """Admit nothing more, and answer `unavailable` to what waits. What the executors have may finish within
        `within_s`; the rest of it gets `unavailable`, too."""
        self.is_draining = True
        self._schedule_pump()
        self._check_idle()
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            left = self.ledger.give_up("Stopped", STOPPED)
            self._count_unavailable(left)
            log.warning("stopped with %d calls unfinished after %g s", len(left), within_s)

    def kill(self) -> None:
        """End all executors at once."""
        for node in self.nodes:
            node.kill()

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and any(node.is_ready for node in self.nodes)

    @property
    def isolation(self) -> dict[str, str]:
        """The level that the executors report, and why `auto` took no stronger one."""
        levels = (node.about.get("isolation") for node in self.nodes)
        level = next((level[:LEVEL_CHARS] for level in levels if isinstance(level, str)), "")
        return {"isolation": level, "isolation_reason": self.config.isolation_reason}

    @property
    def is_alive(self) -> bool:
        """False when there has been no executor for `DEAD_S`."""
        if any(node.is_ready for node in self.nodes):
            return True
        return monotonic() - self._last_alive < DEAD_S

    def check_is_open(self) -> None:
        """Raises `Overloaded` once nothing more is admitted."""
        if self.is_draining:
            raise Overloaded("the service is stopping; send this to another one", retry_after_s=1)

    def turned_away(self) -> None:
        """There was a connection too many."""
        self.counters.refused[503] += 1

    def submit(self, batch: Batch) -> None:
        """Admit the calls of `batch` and see to their answers. Raises `Overloaded` or `RequestRefused`."""
        self.check_is_open()
        if not batch.tickets:
            return
        self.ledger.admit(batch, monotonic())
        self._arm(batch)
        self._schedule_pump()

    def cancel(self, batch: Batch) -> None:
        """Nobody waits for `batch` any more. Harmless when all is answered."""
        self.ledger.release(batch)
        timer = self._timers.pop(batch, None)
        if timer is not None:
            timer.cancel()
        if not batch.left:
            return
        before = self.ledger.calls
        for number, seqs in self.ledger.drop(batch).items():
            self.nodes[number].send(["cancel", seqs])
        self.counters.cancelled += before - self.ledger.calls
        self._schedule_pump()
        self._check_idle()

    def samples(self) -> list[Sample]:
        """What a scrape sees, gauges read now."""
        running = sum(self.ledger.running(node.number) for node in self.nodes)
        found: list[Sample] = [
            *self.counters.samples(),
            ("calls_waiting", {}, self.ledger.waiting),
            ("calls_running", {}, running),
            ("calls_bytes", {}, self.ledger.bytes),
            ("results_bytes", {}, self.ledger.results),
            ("executors_ready", {}, sum(node.is_ready for node in self.nodes)),
            ("executor_restarts_total", {}, sum(node.restarts for node in self.nodes)),
        ]
        for node in self.nodes:
            found += executor_samples(node.number, node.stats)
        return found

    def node_ready(self, node: Node) -> None:
        self._schedule_pump()

    def node_has_room(self, node: Node) -> None:
        self._schedule_pump()

    def node_answered(self, node: Node, answers: list[Sized]) -> None:
        answered, now = 0, monotonic()
        for seq, answer, size in answers:
            ticket = self.ledger.answer(node.number, seq, answer, size)
            if ticket is not None:
                answered += 1
                self._count(ticket, answer, now)
        self.ledger.drain.count(answered, now)
        self._schedule_pump()
        self._check_idle()

    def node_lost(self, node: Node) -> None:
        self._last_alive = monotonic()
        retried, given_up = self.ledger.lose(node.number, monotonic())
        self.counters.retried += len(retried)
        self._count_unavailable(given_up)
        for batch in {ticket.batch for ticket in retried}:
            self._arm(batch)
        self._schedule_pump()
        self._check_idle()

    def _is_at_rest(self) -> bool:
        return not self.ledger.calls and not self.ledger.results

    def _schedule_pump(self) -> None:
        if not self._pump_is_due:
            self._pump_is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Hand out as many calls as the executors have room for, to the one with most room first."""
        self._pump_is_due = False
        if self.is_draining:
            self._stop_waiting()
            return
        while self.ledger.waiting and any(map(self._fill, sorted(self.nodes, key=self._room, reverse=True))):
            pass

    def _stop_waiting(self) -> None:
        """Answer some of the waiting calls with `unavailable`, and the rest in later turns of the loop."""
        self._count_unavailable(self.ledger.give_up_waiting("Stopped", STOPPED, STOP_CALLS))
        if self.ledger.waiting:
            self._schedule_pump()
        self._check_idle()

    def _fill(self, node: Node) -> bool:
        """Send `node` a frame of calls; whether there were any for it. A last attempt waits for a node without one."""
        if (room := self._room(node)) <= 0:
            return False
        tickets = self.ledger.take(node.number, min(room, MAX_FRAME_CALLS), TARGET_FRAME_BYTES, monotonic())
        if tickets:
            node.send(["calls", [[ticket.seq, _wire(ticket)] for ticket in tickets]])
        return bool(tickets)

    def _room(self, node: Node) -> int:
        return node.window - self.ledger.running(node.number) if node.takes_calls else 0

    def _arm(self, batch: Batch) -> None:
        """One timer per batch, for those of its calls that wait."""
        expiry = self.ledger.next_expiry(batch)
        if expiry is not None and batch not in self._timers:
            self._timers[batch] = self._loop.call_later(expiry - monotonic() + TIMER_S, self._expire, batch)

    def _expire(self, batch: Batch) -> None:
        del self._timers[batch]
        self._count_unavailable(self.ledger.expire(batch, monotonic()))
        self._arm(batch)
        self._check_idle()

    def _count(self, ticket: Ticket, answer: EncodedResult, now: float) -> None:
        usage = answer["usage"]
        self.counters.by_status[answer["status"]] += 1
        self.counters.queue_s.observe(usage["queue_ms"] / 1000)
        self.counters.run_s.observe(usage["run_ms"] / 1000)
        self.counters.answer_s.observe(now - ticket.batch.admitted_at)

    def _count_unavailable(self, tickets: list[Ticket]) -> None:
        if tickets:
            self.counters.by_status[Status.UNAVAILABLE.value] += len(tickets)

    def _check_idle(self) -> None:
        if self.is_draining and not self.ledger.calls:
            self._idle.set()


def _wire(ticket: Ticket) -> dict[str, Any]:
    assert ticket.call is not None
    return ticket.call.encode(binary=True)
