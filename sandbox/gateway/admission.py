"""Every admitted call, where it is, and its one answer.

Invariants:
- A batch is admitted whole or refused whole; admitted and unanswered calls never exceed `Bounds`.
- An admitted call either waits or runs at exactly one node, until it is answered once or dropped with its batch.
- A node that is lost costs its calls an attempt, not their answer: they go back to the head of the queue, and only
  after `attempts` of them get `unavailable`.
- Calls on their last attempt run one per node: one that kills its executor takes no other's last attempt along.
- Synchronous, without clock or I/O; `now` (seconds, monotonic) is passed in. What acts on all this is `dispatch`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.errors import Overloaded, RequestRefused
from sandbox.gateway.queue import FairQueue
from sandbox.types import Call, unavailable

Node = int
"""A node by its number, as `dispatch` counts them."""
Answer = dict[str, Any]
"""`Result.encode(binary=True)`."""

RATE_MEMORY_S = 10.0
"""How far back the observed drain rate looks."""
MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may be admitted at once, and how many nodes one call may outlive."""

    calls: int
    bytes: int
    attempts: int


class Ticket:
    """One call of a batch, from its admission to its answer."""

    __slots__ = (
        "attempts", "batch", "call", "clamped", "id", "index", "node", "priority", "queue_ms", "seq", "since", "size",
        "tenant",
    )  # fmt: skip

    def __init__(self, batch: Batch, index: int, call: Call, call_id: str, clamped: dict[str, float]) -> None:
        self.batch = batch
        self.index = index
        self.call: Call | None = call
        """None once it is answered or dropped, so that nothing of it is kept."""
        self.id = call_id
        self.clamped = clamped
        self.priority = call.priority
        self.tenant = call.tenant
        self.size = call.size
        self.attempts = 0
        self.node: Node | None = None
        """Where it runs; None while it waits."""
        self.seq = 0
        self.since = 0.0
        """When it began to wait, last."""
        self.queue_ms = 0.0
        """How long it waited here, all attempts together."""


class Batch:
    """Calls that came together: their answers in order, and whom to tell.

    `on_answer(index)` is called for each answer, `on_done()` after the last. Slots of calls that were never valid are
    filled before admission with `fill`.
    """

    __slots__ = ("answers", "left", "on_answer", "on_done", "queue_timeout_s", "tickets")

    def __init__(self, size: int, queue_timeout_s: float) -> None:
        self.queue_timeout_s = queue_timeout_s
        self.answers: list[Answer | None] = [None] * size
        self.left = size
        self.tickets: list[Ticket] = []
        self.on_answer: Callable[[int], None] | None = None
        self.on_done: Callable[[], None] | None = None

    def add(self, index: int, call: Call, call_id: str, clamped: dict[str, float]) -> None:
        """Make `call` the one in slot `index`."""
        self.tickets.append(Ticket(self, index, call, call_id, clamped))

    def fill(self, index: int, answer: Answer) -> None:
        """Put the one answer for slot `index`."""
        assert self.answers[index] is None
        self.answers[index] = answer
        self.left -= 1
        if self.on_answer is not None:
            self.on_answer(index)
        if not self.left and self.on_done is not None:
            self.on_done()

    def take(self, index: int) -> Answer:
        """The answer in slot `index`, which is there; it is not kept here any longer."""
        answer, self.answers[index] = self.answers[index], None
        assert answer is not None
        return answer


class Ledger:
    """The state machine that admits, hands out, takes back and answers calls."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.calls = 0
        """Admitted and unanswered."""
        self.bytes = 0
        self.drain = DrainRate()
        self._queue: FairQueue[Ticket] = FairQueue()
        self._last_attempts: OrderedDict[Ticket, None] = OrderedDict()
        """Waiting, but not in the queue."""
        self._running: dict[Node, dict[int, Ticket]] = {}
        self._alone: dict[Node, Ticket] = {}
        """Which of the running ones is on its last attempt."""
        self._seq = 0

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._last_attempts)

    def running(self, node: Node) -> int:
        """How many calls `node` holds."""
        return len(self._running.get(node, ()))

    def admit(self, batch: Batch, now: float) -> None:
        """Queue all calls of `batch`. Raises `Overloaded` when they do not fit now, `RequestRefused` when never."""
        count = len(batch.tickets)
        size = sum(ticket.size for ticket in batch.tickets)
        self._check_room(count, size, now)
        self.calls += count
        self.bytes += size
        for ticket in batch.tickets:
            ticket.since = now
            self._queue.push(ticket)

    def take(self, node: Node, most: int, most_bytes: int, now: float) -> list[Ticket]:
        """The next calls, now running at `node`: at most `most`, and no more after `most_bytes` are reached."""
        taken: list[Ticket] = []
        held = self._running.setdefault(node, {})
        size = 0
        while len(taken) < most and size < most_bytes:
            if self._last_attempts and node not in self._alone:
                ticket = self._alone[node] = self._last_attempts.popitem(last=False)[0]
            elif (popped := self._queue.pop()) is not None:
                ticket = popped
            else:
                break
            self._seq += 1
            ticket.seq, ticket.node = self._seq, node
            ticket.attempts += 1
            ticket.queue_ms += max(0.0, now - ticket.since) * 1000
            held[ticket.seq] = ticket
            size += ticket.size
            taken.append(ticket)
        return taken

    def answer(self, node: Node, seq: int, answer: Answer) -> Ticket | None:
        """The answer that `node` gave for `seq`; None when nobody waits for it any more (cancelled, or never asked)."""
        held = self._running.get(node)
        ticket = held.pop(seq, None) if held else None
        if ticket is None:
            return None
        self._no_longer_alone(node, ticket)
        answer["id"] = ticket.id
        answer["attempts"] = ticket.attempts - 1 + (answer.get("attempts") or 1)
        answer["clamped"] = ticket.clamped
        answer["usage"]["queue_ms"] = round(answer["usage"]["queue_ms"] + ticket.queue_ms, 3)
        self._close(ticket)
        ticket.batch.fill(ticket.index, answer)
        return ticket

    def lose(self, node: Node, now: float) -> tuple[list[Ticket], list[Ticket]]:
        """`node` is gone: its calls wait again, or are given up after their last attempt. Returns both lists."""
        retried: list[Ticket] = []
        given_up: list[Ticket] = []
        self._alone.pop(node, None)
        for ticket in self._running.pop(node, {}).values():
            ticket.node, ticket.since = None, now
            left = self.bounds.attempts - ticket.attempts
            (retried if left else given_up).append(ticket)
            if left > 1:
                self._queue.put_back(ticket)
            elif left:
                self._last_attempts[ticket] = None
        for ticket in given_up:
            why = f"its executor died {ticket.attempts} times in a row; the service's log says why"
            self._refuse(ticket, "ExecutorLost", why)
        return retried, given_up

    def expire(self, batch: Batch, now: float) -> list[Ticket]:
        """Give up those calls of `batch` that have waited its `queue_timeout_s` for a slot."""
        timeout_s = batch.queue_timeout_s
        late = [t for t in _open(batch.tickets) if t.node is None and now - t.since >= timeout_s]
        for ticket in late:
            self._stop_waiting(ticket)
            self._refuse(ticket, "QueueTimeout", f"waited {timeout_s:g} s for a slot; send fewer calls, or wait longer")
        return late

    def next_expiry(self, batch: Batch) -> float | None:
        """When the first waiting call of `batch` will have waited too long; None when none waits."""
        waiting = [ticket.since for ticket in _open(batch.tickets) if ticket.node is None]
        return min(waiting) + batch.queue_timeout_s if waiting else None

    def drop(self, batch: Batch) -> dict[Node, list[int]]:
        """Forget the unanswered calls of `batch`, whose client is gone. Returns what runs where, to be cancelled."""
        cancelled: dict[Node, list[int]] = {}
        for ticket in _open(batch.tickets):
            if ticket.node is None:
                self._stop_waiting(ticket)
            else:
                self._no_longer_alone(ticket.node, ticket)
                del self._running[ticket.node][ticket.seq]
                cancelled.setdefault(ticket.node, []).append(ticket.seq)
            self._close(ticket)
        batch.tickets.clear()
        return cancelled

    def give_up(self, kind: str, message: str) -> list[Ticket]:
        """Answer all that is left with `unavailable`: the service ends."""
        left = [ticket for held in self._running.values() for ticket in held.values()]
        left += self._last_attempts
        self._running.clear()
        self._alone.clear()
        self._last_attempts.clear()
        while (ticket := self._queue.pop()) is not None:
            left.append(ticket)
        for ticket in left:
            self._refuse(ticket, kind, message)
        return left

    def retry_after_s(self, excess: int, now: float) -> int:
        """Seconds until `excess` calls have been answered, going by the last ones."""
        rate = self.drain.per_s(now)
        seconds = excess / rate if rate > 0 else 1.0
        return math.ceil(min(MAX_RETRY_AFTER_S, max(1.0, seconds)))

    def _check_room(self, count: int, size: int, now: float) -> None:
        for amount, held, most, unit in (
            (count, self.calls, self.bounds.calls, "calls"),
            (size, self.bytes, self.bounds.bytes, "bytes"),
        ):
            if amount > most:
                raise RequestRefused(
                    f"{amount} {unit} in one batch, but the whole queue holds {most}; send smaller batches"
                )
            if held + amount > most:
                share = (held + amount - most) / max(held, 1)
                after = self.retry_after_s(math.ceil(share * self.calls), now)
                raise Overloaded(
                    f"the queue holds {held} of at most {most} {unit}, and this batch has {amount} more; "
                    f"try again in {after} s",
                    retry_after_s=after,
                )

    def _stop_waiting(self, ticket: Ticket) -> None:
        if ticket in self._last_attempts:
            del self._last_attempts[ticket]
        else:
            self._queue.remove(ticket)

    def _no_longer_alone(self, node: Node, ticket: Ticket) -> None:
        if self._alone.get(node) is ticket:
            del self._alone[node]

    def _refuse(self, ticket: Ticket, kind: str, message: str) -> None:
        self._close(ticket)
        result = unavailable(ticket.id, kind, message, attempts=ticket.attempts)
        ticket.batch.fill(ticket.index, result.encode(binary=True))

    def _close(self, ticket: Ticket) -> None:
        assert ticket.call is not None
        ticket.call = None
        self.calls -= 1
        self.bytes -= ticket.size


class DrainRate:
    """Answers per second, over about the last `RATE_MEMORY_S`."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at: float | None = None

    def count(self, answers: int, now: float) -> None:
        """`answers` more have been given by `now`."""
        self._rate = self.per_s(now) + answers / RATE_MEMORY_S
        self._at = now

    def per_s(self, now: float) -> float:
        if self._at is None:
            return 0.0
        return self._rate * math.exp(min(0.0, self._at - now) / RATE_MEMORY_S)


def _open(tickets: Sequence[Ticket]) -> Iterable[Ticket]:
    return (ticket for ticket in tickets if ticket.call is not None)
