"""The ledger: nothing is lost, nothing is answered twice, nothing exceeds the bounds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sandbox.errors import Overloaded, RequestRefused
from sandbox.gateway.calls.call_table import EXPIRE_CALLS, MAX_RETRY_AFTER_S, Batch, Bounds, DrainRate, Ledger
from sandbox.types import Call

BOUNDS = Bounds(calls=12, bytes=6000, attempts=3, tenant_share=0.75)
NODES = (0, 1)


def batch_of(count: int, *, code: str = "1", queue_timeout_s: float = 10.0, tenants: Sequence[object] = ("",)) -> Batch:
    """Calls whose tenants take turns."""
    batch = Batch(count, queue_timeout_s)
    for index in range(count):
        batch.add(index, Call(code, tenant=str(tenants[index % len(tenants)])), f"call {index}", {})
    return batch


def answer() -> dict[str, Any]:
    return {"status": "ok", "usage": {"queue_ms": 0.0, "run_ms": 1.0}, "files": {}, "attempts": 1}


class LedgerMachine(RuleBasedStateMachine):
    """Batches come, nodes take, answer and die, clients leave, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(BOUNDS)
        self.now = 0.0
        self.batches: list[Batch] = []
        self.gone: list[Batch] = []
        self.heard: dict[Batch, list[int]] = {}
        self.done: list[Batch] = []
        self.at: dict[int, list[int]] = {node: [] for node in NODES}

    @rule(count=st.integers(1, 6), length=st.integers(0, 700), tenants=st.sampled_from(["a", "b", "ab"]))
    def submit(self, count: int, length: int, tenants: str) -> None:
        batch = batch_of(count, code="x" * length, tenants=tenants)
        heard = self.heard[batch] = []
        batch.on_answer = heard.append
        batch.on_done = lambda: self.done.append(batch)
        before = self.ledger.calls, self.ledger.bytes
        try:
            self.ledger.admit(batch, self.now)
        except RequestRefused:
            assert batch.tickets[0].size * count > 4500
        except Overloaded as why:
            assert (self.ledger.calls, self.ledger.bytes) == before
            assert why.retry_after_s is not None and 1 <= why.retry_after_s <= MAX_RETRY_AFTER_S
        else:
            self.batches.append(batch)

    @rule(node=st.sampled_from(NODES), most=st.integers(1, 5))
    def take(self, node: int, most: int) -> None:
        tickets = self.ledger.take(node, most, 1 << 20, self.now)
        assert len(tickets) <= most
        self.at[node] += [ticket.seq for ticket in tickets]

    @precondition(lambda self: any(self.at.values()))
    @rule(data=st.data())
    def reply(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from([node for node in NODES if self.at[node]]))
        seq = data.draw(st.sampled_from(self.at[node]))
        self.at[node].remove(seq)
        assert self.ledger.answer(node, seq, answer()) is not None
        assert self.ledger.answer(node, seq, answer()) is None

    @rule(node=st.sampled_from(NODES))
    def die(self, node: int) -> None:
        retried, given_up = self.ledger.lose(node, self.now)
        assert len(retried) + len(given_up) == len(self.at[node])
        assert all(ticket.attempts == BOUNDS.attempts for ticket in given_up)
        self.at[node].clear()

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        for node, seqs in self.ledger.drop(batch).items():
            for seq in seqs:
                self.at[node].remove(seq)
        self.batches.remove(batch)
        self.gone.append(batch)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for batch in self.batches:
            waits = [ticket for ticket in batch.tickets if ticket.call is not None and ticket.node is None]
            late = [ticket for ticket in waits if self.now - ticket.since >= batch.queue_timeout_s]
            assert sorted(map(id, self.ledger.expire(batch, self.now))) == sorted(map(id, late))
            rest = [ticket.since + batch.queue_timeout_s for ticket in waits if ticket not in late]
            assert self.ledger.next_expiry(batch) == min(rest, default=None)

    @rule(most=st.integers(1, 5))
    def stop(self, most: int) -> None:
        waiting = self.ledger.waiting
        assert len(self.ledger.give_up_waiting("Stopped", "the end", most)) == min(most, waiting)
        assert self.ledger.waiting == max(0, waiting - most)

    @invariant()
    def bounds_hold(self) -> None:
        assert self.ledger.calls == sum(batch.left for batch in self.batches) <= BOUNDS.calls
        assert 0 <= self.ledger.bytes <= BOUNDS.bytes
        for tenant in "ab":
            open_ = [t for batch in self.batches for t in batch.tickets if t.call is not None and t.tenant == tenant]
            assert len(open_) <= 9 and sum(ticket.size for ticket in open_) <= 4500
        assert self.ledger.waiting + sum(map(self.ledger.running, NODES)) == self.ledger.calls

    @invariant()
    def each_call_is_answered_once(self) -> None:
        for batch in self.batches:
            heard = self.heard[batch]
            assert len(heard) == len(set(heard)) == len(batch.answers) - batch.left
            assert (batch in self.done) == (batch.left == 0)

    def teardown(self) -> None:
        """However it went: whoever still waits gets an answer in the end."""
        self.ledger.give_up("Stopped", "the end")
        assert (self.ledger.calls, self.ledger.bytes, self.ledger.waiting) == (0, 0, 0)
        assert not self.ledger._tenants
        assert all(None not in batch.answers for batch in self.batches)
        assert sorted(map(id, self.done)) == sorted({id(b) for b in [*self.batches, *self.gone] if not b.left})


TestLedger = LedgerMachine.TestCase


def test_a_lost_call_goes_first_and_keeps_its_count_of_attempts() -> None:
    ledger = Ledger(BOUNDS)
    ledger.admit(batch_of(3), 0.0)
    (first,) = ledger.take(0, 1, 1 << 20, 0.0)
    ledger.lose(0, 1.0)
    (again,) = ledger.take(1, 1, 1 << 20, 1.0)
    assert again is first and again.attempts == 2


def test_a_call_that_outlives_no_executor_is_unavailable() -> None:
    ledger, batch = Ledger(BOUNDS), batch_of(1)
    ledger.admit(batch, 0.0)
    for _ in range(BOUNDS.attempts):
        ledger.take(0, 1, 1 << 20, 0.0)
        ledger.lose(0, 0.0)
    given = batch.take(0)
    assert (given["status"], given["error"]["type"], given["attempts"]) == ("unavailable", "ExecutorLost", 3)


def test_a_call_that_kills_executors_takes_no_others_last_attempt() -> None:
    ledger, poison, others = Ledger(BOUNDS), batch_of(1), batch_of(6)
    ledger.admit(poison, 0.0)
    ledger.admit(others, 0.0)
    while ledger.calls:
        taken = ledger.take(0, 64, 1 << 20, 0.0)
        if any(ticket.batch is poison for ticket in taken):
            ledger.lose(0, 0.0)
            continue
        for ticket in taken:
            ledger.answer(0, ticket.seq, answer())
    assert poison.take(0)["status"] == "unavailable"
    assert [others.take(index)["status"] for index in range(6)] == ["ok"] * 6


def test_waiting_time_of_all_attempts_is_in_the_result() -> None:
    ledger, batch = Ledger(BOUNDS), batch_of(1)
    ledger.admit(batch, 10.0)
    ledger.take(0, 1, 1 << 20, 11.0)
    ledger.lose(0, 20.0)
    (ticket,) = ledger.take(0, 1, 1 << 20, 22.0)
    ledger.answer(0, ticket.seq, answer())
    assert batch.take(0)["usage"]["queue_ms"] == pytest.approx(3000)


def test_full_queue_says_what_is_full_and_for_how_long() -> None:
    ledger = Ledger(BOUNDS)
    ledger.admit(batch_of(12, tenants="ab"), 0.0)
    ledger.drain.count(10, 0.0)
    with pytest.raises(Overloaded, match=r"holds 12 of at most 12 calls, and this batch has 3 more; try again in 3 s"):
        ledger.admit(batch_of(3), 0.0)


def test_a_batch_larger_than_the_queue_is_refused_for_good() -> None:
    with pytest.raises(RequestRefused, match="the queue holds at most 12"):
        Ledger(BOUNDS).admit(batch_of(13), 0.0)


def test_one_tenant_cannot_fill_the_queue() -> None:
    ledger = Ledger(BOUNDS)
    ledger.admit(batch_of(9, tenants=["greedy"]), 0.0)
    with pytest.raises(
        Overloaded, match="tenant 'greedy' holds 9 of at most 9 calls, a tenant's share of 12, and this"
    ):
        ledger.admit(batch_of(1, tenants=["greedy"]), 0.0)
    with pytest.raises(RequestRefused, match="tenant 'b' holds at most 9, a tenant's share of 12; send smaller"):
        ledger.admit(batch_of(10, tenants=["b"]), 0.0)
    ledger.admit(batch_of(3, tenants=["modest"]), 0.0)


def _operations(work: Callable[[], object]) -> int:
    """How many bytecode instructions `work` takes in Python functions."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def _costs(others: int, tenants: int) -> dict[str, int]:
    """What each step takes for three calls among `others`, of so many tenants, of which ten nodes run some."""
    ledger, crowd, few = Ledger(Bounds(100_000, 1 << 30, 3)), batch_of(others, tenants=range(tenants)), batch_of(3)
    ledger.admit(crowd, 0.0)
    for node in range(1, 11):
        ledger.take(node, 64, 1 << 20, 0.0)
    costs = {
        "admit": _operations(lambda: ledger.admit(few, 1.0)),
        "take": _operations(lambda: ledger.take(0, 2, 1 << 20, 1.0)),
        "answer": _operations(lambda: ledger.answer(0, ledger._seq, answer())),
        "lose": _operations(lambda: ledger.lose(0, 2.0)),
        "next expiry": _operations(lambda: ledger.next_expiry(crowd)),
        "take again": _operations(lambda: ledger.take(0, 1, 1 << 20, 3.0)),
        "expire": _operations(lambda: ledger.expire(few, 11.0)),
        "drop": _operations(lambda: ledger.drop(few)),
    }
    assert ledger.calls == others
    return costs


@pytest.mark.parametrize("tenants", [1, 100])
def test_no_step_depends_on_how_many_calls_there_are(tenants: int) -> None:
    few, many = _costs(1_000, tenants), _costs(20_000, tenants)
    assert {step: many[step] - cost for step, cost in few.items() if many[step] > cost + 200} == {}


def test_an_expiry_that_comes_again_and_again_looks_at_each_call_once() -> None:
    """Every call of a batch is lost at its own moment, so that each has its own time to expire."""
    costs = []
    for size in (100, 1_000):
        ledger, batch = Ledger(Bounds(10_000, 1 << 30, 3)), batch_of(size)
        ledger.admit(batch, 0.0)
        for moment in range(size):
            ledger.take(moment, 1, 1 << 20, 0.0)
        for moment in range(size):
            ledger.lose(moment, moment / size)

        def expire_all(ledger: Ledger = ledger, batch: Batch = batch) -> None:
            while (when := ledger.next_expiry(batch)) is not None:
                ledger.expire(batch, when)

        costs.append(_operations(expire_all))
    assert costs[1] < 11 * costs[0]


def test_what_expires_together_is_given_up_in_parts() -> None:
    ledger, batch = Ledger(Bounds(10_000, 1 << 30, 3)), batch_of(2 * EXPIRE_CALLS + 1)
    ledger.admit(batch, 0.0)
    given_up = []
    while (when := ledger.next_expiry(batch)) is not None:
        assert when == 10.0
        given_up.append(len(ledger.expire(batch, 10.0)))
    assert given_up == [EXPIRE_CALLS, EXPIRE_CALLS, 1] and not ledger.calls


def test_big_calls_travel_in_small_frames() -> None:
    ledger = Ledger(Bounds(100, 1 << 30, 3))
    ledger.admit(batch_of(10, code="x" * 1000), 0.0)
    assert len(ledger.take(0, 64, 2000, 0.0)) == 2


@given(st.lists(st.tuples(st.floats(0.001, 5), st.integers(0, 1000)), min_size=1, max_size=30))
def test_drain_rate_never_exceeds_what_was_answered(steps: list[tuple[float, int]]) -> None:
    rate, now, total = DrainRate(), 0.0, 0
    for pause, count in steps:
        now += pause
        total += count
        rate.count(count, now)
        assert 0 <= rate.per_s(now) <= total / 10.0 + 1e-9


@pytest.mark.parametrize("idle_s", [0.0, 60.0, 7130.0, 7440.0, 1e6])
def test_after_however_long_without_an_answer_a_pause_is_named(idle_s: float) -> None:
    ledger = Ledger(Bounds(10, 10_000, 3))
    ledger.drain.count(1, 0.0)
    assert 1 <= ledger.retry_after_s(100_000, idle_s) <= MAX_RETRY_AFTER_S
