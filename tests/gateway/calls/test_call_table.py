"""The call_table: nothing is lost, nothing is answered twice, nothing exceeds the bounds."""

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
from sandbox.gateway.calls.batch import Batch
from sandbox.gateway.calls.call_table import (
    MAX_EXPIRED_AT_ONCE,
    MAX_RETRY_AFTER_S,
    AdmissionLimits,
    AnswerRate,
    CallTable,
)
from sandbox.types import Call

LIMITS = AdmissionLimits(max_calls=12, max_bytes=6000, max_attempts=3, tenant_share=0.75)
NODES = (0, 1)


def batch_of(count: int, *, code: str = "1", queue_timeout_s: float = 10.0, tenants: Sequence[object] = ("",)) -> Batch:
    """Calls whose tenants take turns."""
    batch = Batch(count, queue_timeout_s)
    for index in range(count):
        batch.add(index, Call(code, tenant=str(tenants[index % len(tenants)])), f"call {index}", {})
    return batch


def answer() -> dict[str, Any]:
    return {"status": "ok", "usage": {"queue_ms": 0.0, "run_ms": 1.0}, "files": {}, "attempts": 1}


class CallTableMachine(RuleBasedStateMachine):
    """Batches come, nodes take, answer and die, clients leave, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.call_table = CallTable(LIMITS)
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
        batch.on_result = heard.append
        batch.on_done = lambda: self.done.append(batch)
        before = self.call_table.outstanding.calls, self.call_table.outstanding.bytes
        try:
            self.call_table.admit(batch, self.now)
        except RequestRefused:
            assert batch.calls[0].size_bytes * count > 4500
        except Overloaded as why:
            assert (self.call_table.outstanding.calls, self.call_table.outstanding.bytes) == before
            assert why.retry_after_s is not None and 1 <= why.retry_after_s <= MAX_RETRY_AFTER_S
        else:
            self.batches.append(batch)

    @rule(node=st.sampled_from(NODES), most=st.integers(1, 5))
    def take(self, node: int, most: int) -> None:
        tickets = self.call_table.assign(node, most, 1 << 20, self.now)
        assert len(tickets) <= most
        self.at[node] += [ticket.seq for ticket in tickets]

    @precondition(lambda self: any(self.at.values()))
    @rule(data=st.data())
    def reply(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from([node for node in NODES if self.at[node]]))
        seq = data.draw(st.sampled_from(self.at[node]))
        self.at[node].remove(seq)
        assert self.call_table.finish(node, seq, answer()) is not None
        assert self.call_table.finish(node, seq, answer()) is None

    @rule(node=st.sampled_from(NODES))
    def die(self, node: int) -> None:
        retried, given_up = self.call_table.executor_lost(node, self.now)
        assert len(retried) + len(given_up) == len(self.at[node])
        assert all(ticket.attempts == LIMITS.max_attempts for ticket in given_up)
        self.at[node].clear()

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        for node, seqs in self.call_table.cancel(batch).items():
            for seq in seqs:
                self.at[node].remove(seq)
        self.batches.remove(batch)
        self.gone.append(batch)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for batch in self.batches:
            waits = [ticket for ticket in batch.calls if ticket.call is not None and ticket.executor is None]
            late = [ticket for ticket in waits if self.now - ticket.waiting_since >= batch.queue_timeout_s]
            assert sorted(map(id, self.call_table.expire(batch, self.now))) == sorted(map(id, late))
            rest = [ticket.waiting_since + batch.queue_timeout_s for ticket in waits if ticket not in late]
            assert self.call_table.next_expiry(batch) == min(rest, default=None)

    @rule(most=st.integers(1, 5))
    def stop(self, most: int) -> None:
        waiting = self.call_table.waiting
        assert len(self.call_table.fail_waiting("Stopped", "the end", most)) == min(most, waiting)
        assert self.call_table.waiting == max(0, waiting - most)

    @invariant()
    def bounds_hold(self) -> None:
        assert self.call_table.outstanding.calls == sum(batch.unfinished for batch in self.batches) <= LIMITS.max_calls
        assert 0 <= self.call_table.outstanding.bytes <= LIMITS.max_bytes
        for tenant in "ab":
            open_ = [t for batch in self.batches for t in batch.calls if t.call is not None and t.tenant == tenant]
            assert len(open_) <= 9 and sum(ticket.size_bytes for ticket in open_) <= 4500
        assert self.call_table.waiting + sum(map(self.call_table.running, NODES)) == self.call_table.outstanding.calls

    @invariant()
    def each_call_is_answered_once(self) -> None:
        for batch in self.batches:
            heard = self.heard[batch]
            assert len(heard) == len(set(heard)) == len(batch.results) - batch.unfinished
            assert (batch in self.done) == (batch.unfinished == 0)

    def teardown(self) -> None:
        """However it went: whoever still waits gets an answer in the end."""
        self.call_table.fail_all("Stopped", "the end")
        assert (self.call_table.outstanding.calls, self.call_table.outstanding.bytes, self.call_table.waiting) == (
            0,
            0,
            0,
        )
        assert not self.call_table._tenants
        assert all(None not in batch.results for batch in self.batches)
        assert sorted(map(id, self.done)) == sorted({id(b) for b in [*self.batches, *self.gone] if not b.unfinished})


TestCallTable = CallTableMachine.TestCase


def test_a_lost_call_goes_first_and_keeps_its_count_of_attempts() -> None:
    call_table = CallTable(LIMITS)
    call_table.admit(batch_of(3), 0.0)
    (first,) = call_table.assign(0, 1, 1 << 20, 0.0)
    call_table.executor_lost(0, 1.0)
    (again,) = call_table.assign(1, 1, 1 << 20, 1.0)
    assert again is first and again.attempts == 2


def test_a_call_that_outlives_no_executor_is_unavailable() -> None:
    call_table, batch = CallTable(LIMITS), batch_of(1)
    call_table.admit(batch, 0.0)
    for _ in range(LIMITS.max_attempts):
        call_table.assign(0, 1, 1 << 20, 0.0)
        call_table.executor_lost(0, 0.0)
    given = batch.pop_result(0)
    assert (given["status"], given["error"]["type"], given["attempts"]) == ("unavailable", "ExecutorLost", 3)


def test_a_call_that_kills_executors_takes_no_others_last_attempt() -> None:
    call_table, poison, others = CallTable(LIMITS), batch_of(1), batch_of(6)
    call_table.admit(poison, 0.0)
    call_table.admit(others, 0.0)
    while call_table.outstanding.calls:
        taken = call_table.assign(0, 64, 1 << 20, 0.0)
        if any(ticket.batch is poison for ticket in taken):
            call_table.executor_lost(0, 0.0)
            continue
        for ticket in taken:
            call_table.finish(0, ticket.seq, answer())
    assert poison.pop_result(0)["status"] == "unavailable"
    assert [others.pop_result(index)["status"] for index in range(6)] == ["ok"] * 6


def test_waiting_time_of_all_attempts_is_in_the_result() -> None:
    call_table, batch = CallTable(LIMITS), batch_of(1)
    call_table.admit(batch, 10.0)
    call_table.assign(0, 1, 1 << 20, 11.0)
    call_table.executor_lost(0, 20.0)
    (ticket,) = call_table.assign(0, 1, 1 << 20, 22.0)
    call_table.finish(0, ticket.seq, answer())
    assert batch.pop_result(0)["usage"]["queue_ms"] == pytest.approx(3000)


def test_full_queue_says_what_is_full_and_for_how_long() -> None:
    call_table = CallTable(LIMITS)
    call_table.admit(batch_of(12, tenants="ab"), 0.0)
    call_table.answer_rate.count(10, 0.0)
    with pytest.raises(Overloaded, match=r"holds 12 of at most 12 calls, and this batch has 3 more; try again in 3 s"):
        call_table.admit(batch_of(3), 0.0)


def test_a_batch_larger_than_the_queue_is_refused_for_good() -> None:
    with pytest.raises(RequestRefused, match="the queue holds at most 12"):
        CallTable(LIMITS).admit(batch_of(13), 0.0)


def test_one_tenant_cannot_fill_the_queue() -> None:
    call_table = CallTable(LIMITS)
    call_table.admit(batch_of(9, tenants=["greedy"]), 0.0)
    with pytest.raises(
        Overloaded, match="tenant 'greedy' holds 9 of at most 9 calls, a tenant's share of 12, and this"
    ):
        call_table.admit(batch_of(1, tenants=["greedy"]), 0.0)
    with pytest.raises(RequestRefused, match="tenant 'b' holds at most 9, a tenant's share of 12; send smaller"):
        call_table.admit(batch_of(10, tenants=["b"]), 0.0)
    call_table.admit(batch_of(3, tenants=["modest"]), 0.0)


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
    call_table, crowd, few = (
        CallTable(AdmissionLimits(100_000, 1 << 30, 3)),
        batch_of(others, tenants=range(tenants)),
        batch_of(3),
    )
    call_table.admit(crowd, 0.0)
    for node in range(1, 11):
        call_table.assign(node, 64, 1 << 20, 0.0)
    costs = {
        "admit": _operations(lambda: call_table.admit(few, 1.0)),
        "take": _operations(lambda: call_table.assign(0, 2, 1 << 20, 1.0)),
        "answer": _operations(lambda: call_table.finish(0, call_table._seq, answer())),
        "lose": _operations(lambda: call_table.executor_lost(0, 2.0)),
        "next expiry": _operations(lambda: call_table.next_expiry(crowd)),
        "take again": _operations(lambda: call_table.assign(0, 1, 1 << 20, 3.0)),
        "expire": _operations(lambda: call_table.expire(few, 11.0)),
        "drop": _operations(lambda: call_table.cancel(few)),
    }
    assert call_table.outstanding.calls == others
    return costs


@pytest.mark.parametrize("tenants", [1, 100])
def test_no_step_depends_on_how_many_calls_there_are(tenants: int) -> None:
    few, many = _costs(1_000, tenants), _costs(20_000, tenants)
    assert {step: many[step] - cost for step, cost in few.items() if many[step] > cost + 200} == {}


def test_an_expiry_that_comes_again_and_again_looks_at_each_call_once() -> None:
    """Every call of a batch is lost at its own moment, so that each has its own time to expire."""
    costs = []
    for size in (100, 1_000):
        call_table, batch = CallTable(AdmissionLimits(10_000, 1 << 30, 3)), batch_of(size)
        call_table.admit(batch, 0.0)
        for moment in range(size):
            call_table.assign(moment, 1, 1 << 20, 0.0)
        for moment in range(size):
            call_table.executor_lost(moment, moment / size)

        def expire_all(call_table: CallTable = call_table, batch: Batch = batch) -> None:
            while (when := call_table.next_expiry(batch)) is not None:
                call_table.expire(batch, when)

        costs.append(_operations(expire_all))
    assert costs[1] < 11 * costs[0]


def test_what_expires_together_is_given_up_in_parts() -> None:
    call_table, batch = CallTable(AdmissionLimits(10_000, 1 << 30, 3)), batch_of(2 * MAX_EXPIRED_AT_ONCE + 1)
    call_table.admit(batch, 0.0)
    given_up = []
    while (when := call_table.next_expiry(batch)) is not None:
        assert when == 10.0
        given_up.append(len(call_table.expire(batch, 10.0)))
    assert given_up == [MAX_EXPIRED_AT_ONCE, MAX_EXPIRED_AT_ONCE, 1] and not call_table.outstanding.calls


def test_big_calls_travel_in_small_frames() -> None:
    call_table = CallTable(AdmissionLimits(100, 1 << 30, 3))
    call_table.admit(batch_of(10, code="x" * 1000), 0.0)
    assert len(call_table.assign(0, 64, 2000, 0.0)) == 2


@given(st.lists(st.tuples(st.floats(0.001, 5), st.integers(0, 1000)), min_size=1, max_size=30))
def test_drain_rate_never_exceeds_what_was_answered(steps: list[tuple[float, int]]) -> None:
    rate, now, total = AnswerRate(), 0.0, 0
    for pause, count in steps:
        now += pause
        total += count
        rate.count(count, now)
        assert 0 <= rate.per_s(now) <= total / 10.0 + 1e-9


@pytest.mark.parametrize("idle_s", [0.0, 60.0, 7130.0, 7440.0, 1e6])
def test_after_however_long_without_an_answer_a_pause_is_named(idle_s: float) -> None:
    call_table = CallTable(AdmissionLimits(10, 10_000, 3))
    call_table.answer_rate.count(1, 0.0)
    assert 1 <= call_table.retry_after_s(100_000, idle_s) <= MAX_RETRY_AFTER_S
