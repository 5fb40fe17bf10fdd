"""Every admitted call, where it is, and its one answer.

Invariants:
- A batch is admitted whole or refused whole; admitted and unanswered calls never exceed `Bounds`, nor those of one
  tenant its share of them.
- Results that clients have not read yet are bounded too: past `Bounds.results` no batch is admitted, and a batch that
  holds more than an equal part of that gets `unavailable` in place of what comes.
- An admitted call either waits or runs at exactly one node, until it is answered once or dropped with its batch.
- A node that is lost costs its calls an attempt, not their answer: they go back to the head of the queue, and only
  after `attempts` of them get `unavailable`.
- Calls on their last attempt run one per node: one that kills its executor takes no other's last attempt along.
- No step depends on how many calls wait or run, but for those that say which they are about: `admit` and `drop` go once
  through their batch, `lose` through the calls of its node.
- Synchronous, without clock or I/O; `now` (seconds, monotonic) is passed in. What acts on all this is `dispatch`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sandbox.errors import Overloaded, RequestRefused
from sandbox.gateway.calls.fair_queue import FairQueue
from sandbox.types import Call, EncodedResult, unavailable_result

Node = int
"""A node by its number, as `dispatch` counts them."""

RATE_MEMORY_S = 10.0
"""How far back the observed drain rate looks."""
MAX_RETRY_AFTER_S = 60
EXPIRE_CALLS = 512
"""Given up in one go, which takes some milliseconds."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may be admitted at once, how many nodes one call may outlive, and which part of all one tenant may have.

    Tenants are who callers say they are: a share keeps out one that is greedy, not one that lies."""

    calls: int
    bytes: int
    attempts: int
    tenant_share: float = 1.0
    results: int = 1 << 30
    """Bytes of results that are held for clients to read."""


class Held:
    """Calls admitted and unanswered, and their bytes."""

    __slots__ = ("bytes", "calls")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0


class Ticket:
    """One call of a batch, from its admission to its answer."""

    __slots__ = (
        "attempts", "batch", "call", "clamped", "id", "index", "node", "priority", "queue_ms", "seq", "since", "size",
        "tenant",
    )  # fmt: skip

    def __init__(self, index: int, call: Call, call_id: str, clamped: dict[str, float]) -> None:
        self.batch: Batch
        """Set when its batch is admitted."""
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

    __slots__ = (
        "admitted_at", "answers", "first", "held", "left", "line", "on_answer", "on_done", "queue_timeout_s", "tickets",
    )  # fmt: skip

    def __init__(self, size: int, queue_timeout_s: float) -> None:
        self.queue_timeout_s = queue_timeout_s
        self.admitted_at = 0.0
        self.answers: list[EncodedResult | None] = [None] * size
        self.left = size
        self.held = 0
        """Bytes of answers of executors that the client has not read."""
        self.tickets: list[Ticket] = []
        self.first = 0
        """All tickets before this place have been taken once, or need not be."""
        self.line: deque[tuple[float, Ticket]] = deque()
        """Since when which call waits again, oldest first; some of them have ceased to."""
        self.on_answer: Callable[[int], None] | None = None
        self.on_done: Callable[[], None] | None = None

    def add(self, index: int, call: Call, call_id: str, clamped: dict[str, float]) -> None:
        """Make `call` the one in slot `index`."""
        self.tickets.append(Ticket(index, call, call_id, clamped))

    def fill(self, index: int, answer: EncodedResult) -> None:
        """Put the one answer for slot `index`."""
        assert self.answers[index] is None
        self.answers[index] = answer
        self.left -= 1
        if not self.left:
            self.forget()
        if self.on_answer is not None:
            self.on_answer(index)
        if not self.left and self.on_done is not None:
            self.on_done()

    def forget(self) -> None:
        """Drop the tickets, which refer to this batch: no cycle of references outlives the last answer."""
        self.tickets.clear()
        self.line.clear()
        self.first = 0

    def take(self, index: int) -> EncodedResult:
        """The answer in slot `index`, which is there; it is not kept here any longer."""
        answer, self.answers[index] = self.answers[index], None
        assert answer is not None
        return answer


class Ledger:
    """The state machine that admits, hands out, takes back and answers calls."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.all = Held()
        self._tenants: dict[str, Held] = {}
        self.results = 0
        """Bytes of results that clients have not read."""
        self._readers = 0
        """Batches that hold some of them."""
        self.drain = DrainRate()
        self._queue: FairQueue[Ticket] = FairQueue()
        self._last_attempts: OrderedDict[Ticket, None] = OrderedDict()
        """Waiting, but not in the queue."""
        self._running: dict[Node, dict[int, Ticket]] = {}
        self._alone: dict[Node, Ticket] = {}
        """Which of the running ones is on its last attempt; the queue counts all others as running."""
        self._seq = 0

    @property
    def calls(self) -> int:
        """Admitted and unanswered."""
        return self.all.calls

    @property
    def bytes(self) -> int:
        return self.all.bytes

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._last_attempts)

    def running(self, node: Node) -> int:
        """How many calls `node` holds."""
        return len(self._running.get(node, ()))

    def admit(self, batch: Batch, now: float) -> None:
        """Queue all calls of `batch`. Raises `Overloaded` when they do not fit now, `RequestRefused` when never."""
        groups = _alike(batch.tickets)
        wanted = _by_tenant(groups)
        self._check_room(wanted, now)
        for name, more in wanted.items():
            for held in (self.all, self._tenants.setdefault(name, Held())):
                held.calls += more.calls
                held.bytes += more.bytes
        batch.admitted_at = now
        for ticket in batch.tickets:
            ticket.batch, ticket.since = batch, now
        for group in groups:
            self._queue.push(*group)

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

    def answer(self, node: Node, seq: int, answer: EncodedResult, size: int = 0) -> Ticket | None:
        """The answer, of so many bytes (`size_of`), that `node` gave for `seq`; None when nobody waits for it any more
        (cancelled, or never asked)."""
        held = self._running.get(node)
        ticket = held.pop(seq, None) if held else None
        if ticket is None:
            return None
        self._end(node, ticket)
        answer["id"] = ticket.id
        answer["attempts"] = ticket.attempts - 1 + (answer.get("attempts") or 1)
        answer["clamped"] = ticket.clamped
        answer["usage"]["queue_ms"] = round(answer["usage"]["queue_ms"] + ticket.queue_ms, 3)
        self._hold(ticket.batch, answer, size)
        self._close(ticket)
        ticket.batch.fill(ticket.index, answer)
        return ticket

    def release(self, batch: Batch, size: int | None = None) -> None:
        """The client of `batch` has read so many bytes (`size_of`) of its results, or needs none of them any more."""
        if batch.held:
            read = batch.held if size is None else min(size, batch.held)
            batch.held -= read
            self.results -= read
            self._readers -= not batch.held

    def lose(self, node: Node, now: float) -> tuple[list[Ticket], list[Ticket]]:
        """`node` is gone: its calls wait again, or are given up after their last attempt. Returns both lists."""
        retried: list[Ticket] = []
        given_up: list[Ticket] = []
        alone = self._alone.pop(node, None)
        for ticket in self._running.pop(node, {}).values():
            ticket.node, ticket.since = None, now
            left = self.bounds.attempts - ticket.attempts
            (retried if left else given_up).append(ticket)
            if left > 1:
                self._queue.put_back(ticket)
            elif ticket is not alone:
                self._queue.end(ticket)
            if left == 1:
                self._last_attempts[ticket] = None
            if left:
                ticket.batch.line.append((now, ticket))
        for ticket in given_up:
            why = f"its executor died {ticket.attempts} times in a row; the service's log says why"
            self._refuse(ticket, "ExecutorLost", why)
        return retried, given_up

    def expire(self, batch: Batch, now: float) -> list[Ticket]:
        """Give up calls of `batch` that have waited its `queue_timeout_s` for a slot: `EXPIRE_CALLS` of them at most,
        since all else waits meanwhile, and the rest when asked again."""
        timeout_s, late = batch.queue_timeout_s, list[Ticket]()
        while len(late) < EXPIRE_CALLS and (oldest := _oldest(batch)) and now - oldest.since >= timeout_s:
            self._stop_waiting(oldest)
            why = (
                f"waited {round(now - oldest.since, 3):g} s for a slot, at most {timeout_s:g} s; send fewer calls at "
                "once, ask for a longer queue_timeout_s, or start the service with a larger --queue-timeout-s"
            )
            self._refuse(oldest, "QueueTimeout", why)
            late.append(oldest)
        return late

    def next_expiry(self, batch: Batch) -> float | None:
        """When the first waiting call of `batch` will have waited too long; None when none waits."""
        oldest = _oldest(batch)
        return None if oldest is None else oldest.since + batch.queue_timeout_s

    def drop(self, batch: Batch) -> dict[Node, list[int]]:
        """Forget the unanswered calls of `batch`, whose client is gone. Returns what runs where, to be cancelled."""
        cancelled: dict[Node, list[int]] = {}
        for ticket in _open(batch.tickets):
            if ticket.node is None:
                self._stop_waiting(ticket)
            else:
                del self._running[ticket.node][ticket.seq]
                self._end(ticket.node, ticket)
                cancelled.setdefault(ticket.node, []).append(ticket.seq)
            self._close(ticket)
        batch.forget()
        return cancelled

    def give_up_waiting(self, kind: str, message: str, most: int) -> list[Ticket]:
        """Answer calls that wait with `unavailable`, at most so many: no executor will get them."""
        left: list[Ticket] = []
        while len(left) < most:
            if self._last_attempts:
                ticket = self._last_attempts.popitem(last=False)[0]
            elif (popped := self._queue.pop()) is not None:
                ticket = popped
                self._queue.end(ticket)
            else:
                break
            self._refuse(ticket, kind, message)
            left.append(ticket)
        return left

    def give_up(self, kind: str, message: str) -> list[Ticket]:
        """Answer all that is left with `unavailable`: the service ends."""
        left = self.give_up_waiting(kind, message, self.waiting)
        running = [ticket for held in self._running.values() for ticket in held.values()]
        self._running.clear()
        self._alone.clear()
        self._queue = FairQueue()
        for ticket in running:
            self._refuse(ticket, kind, message)
        return left + running

    def retry_after_s(self, excess: int, now: float) -> int:
        """Seconds until `excess` calls have been answered, going by the last ones."""
        rate = self.drain.per_s(now)
        seconds = excess / rate if rate > 0 else 1.0
        return math.ceil(min(MAX_RETRY_AFTER_S, max(1.0, seconds)))

    def _hold(self, batch: Batch, answer: EncodedResult, size: int) -> None:
        """Count `answer` as held for its client. One that is too much becomes `unavailable`, in place."""
        most = self.bounds.results
        if self.results + size > most and batch.held + size > most / max(1, self._readers):
            why = (
                f"results of {self.results} bytes wait for clients to read them, at most {most}, and {batch.held} of "
                "them are this batch's; send smaller batches, ask for a stream, or read it faster"
            )
            lost = unavailable_result(answer["id"], "ResultsUnread", why, answer["attempts"]).encode(binary=True)
            answer.update({**lost, "usage": answer["usage"], "clamped": answer["clamped"]})
            size = size_of(answer)
        self._readers += not batch.held and size > 0
        batch.held += size
        self.results += size

    def _check_room(self, wanted: Mapping[str, Held], now: float) -> None:
        """Raises `RequestRefused` if any bound is too small for this batch alone, `Overloaded` if one is just now."""
        if self.results > self.bounds.results:
            after = self.retry_after_s(1, now)
            raise Overloaded(
                f"results of {self.results} bytes wait for clients to read them, at most {self.bounds.results}; "
                f"try again in {after} s",
                retry_after_s=after,
            )
        bounds = list(self._bounds_of(wanted))
        for who, why, unit, _, amount, most in bounds:
            if amount > most:
                raise RequestRefused(
                    f"{amount} {unit} in one batch, but {who} holds at most {most}{why}; send smaller batches"
                )
        for who, why, unit, held, amount, most in bounds:
            if held + amount > most:
                part = (held + amount - most) / max(held, 1)
                after = self.retry_after_s(math.ceil(part * self.calls), now)
                raise Overloaded(
                    f"{who} holds {held} of at most {most} {unit}{why}, and this batch has {amount} more; "
                    f"try again in {after} s",
                    retry_after_s=after,
                )

    def _bounds_of(self, wanted: Mapping[str, Held]) -> Iterator[tuple[str, str, str, int, int, int]]:
        """Who holds calls or bytes (and why no more), how many, how many more it would be, and how many it may be."""
        for unit, most in (("calls", self.bounds.calls), ("bytes", self.bounds.bytes)):
            yield "the queue", "", unit, getattr(self.all, unit), sum(getattr(m, unit) for m in wanted.values()), most
            share = math.ceil(most * self.bounds.tenant_share)
            for name, more in wanted.items():
                held = getattr(self._tenants.get(name) or Held(), unit)
                yield f"tenant {name!r}", f", a tenant's share of {most}", unit, held, getattr(more, unit), share

    def _stop_waiting(self, ticket: Ticket) -> None:
        if ticket in self._last_attempts:
            del self._last_attempts[ticket]
        else:
            self._queue.remove(ticket)

    def _end(self, node: Node, ticket: Ticket) -> None:
        """It runs no longer."""
        if self._alone.get(node) is ticket:
            del self._alone[node]
        else:
            self._queue.end(ticket)

    def _refuse(self, ticket: Ticket, kind: str, message: str) -> None:
        self._close(ticket)
        result = unavailable_result(ticket.id, kind, message, attempts=ticket.attempts)
        ticket.batch.fill(ticket.index, result.encode(binary=True))

    def _close(self, ticket: Ticket) -> None:
        assert ticket.call is not None
        ticket.call = None
        tenant = self._tenants[ticket.tenant]
        for held in (self.all, tenant):
            held.calls -= 1
            held.bytes -= ticket.size
        if not tenant.calls:
            del self._tenants[ticket.tenant]


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


def size_of(answer: EncodedResult) -> int:
    """About how many bytes an answer holds. Raises `TypeError` or `KeyError` for what is none."""
    error, files = answer["error"], answer["files"]
    size = 1024 + len(answer["stdout"]) + len(answer["stderr"]) + len(answer["value"] or "")
    if error is not None:
        size += len(error["traceback"]) + len(error["message"])
    if files:
        size += sum(map(len, files.values()))
    return size


def _alike(tickets: Sequence[Ticket]) -> Collection[Sequence[Ticket]]:
    """`tickets`, those of one priority and tenant together."""
    groups: defaultdict[tuple[int, str], list[Ticket]] = defaultdict(list)
    for ticket in tickets:
        groups[ticket.priority, ticket.tenant].append(ticket)
    return groups.values()


def _by_tenant(groups: Iterable[Sequence[Ticket]]) -> dict[str, Held]:
    wanted: defaultdict[str, Held] = defaultdict(Held)
    for group in groups:
        held = wanted[group[0].tenant]
        held.calls += len(group)
        held.bytes += sum(ticket.size for ticket in group)
    return wanted


def _oldest(batch: Batch) -> Ticket | None:
    """Which waiting call of `batch` has waited longest: one that does since its admission, if there is any."""
    for place in range(batch.first, len(batch.tickets)):
        ticket = batch.tickets[place]
        if ticket.call is not None and not ticket.attempts:
            batch.first = place
            return ticket
    batch.first, line = len(batch.tickets), batch.line
    while line:
        since, ticket = line[0]
        if ticket.call is not None and ticket.node is None and ticket.since == since:
            return ticket
        line.popleft()
    return None


def _open(tickets: Sequence[Ticket]) -> Iterable[Ticket]:
    return (ticket for ticket in tickets if ticket.call is not None)
