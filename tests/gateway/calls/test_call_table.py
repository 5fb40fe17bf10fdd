"""Tests of the call table, the gateway's state of all unfinished calls.

Every call gets exactly one result, and no limit on calls and bytes is exceeded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sandbox.errors import Overloaded, RequestRefused
from sandbox.gateway.calls.batch import Batch, PendingCall
from sandbox.gateway.calls.call_table import (
    MAX_EXPIRED_AT_ONCE,
    MAX_RETRY_AFTER_S,
    SHARED_S,
    AdmissionLimits,
    AnswerRate,
    CallTable,
)
from sandbox.settings.tenants import Tenant
from sandbox.types import Call, UnavailableReason

LIMITS = AdmissionLimits(max_calls=12, max_bytes=6000, max_attempts=3, tenant_share=0.75)
MAX_TENANT_CALLS, MAX_TENANT_BYTES = 9, 4500  # `tenant_share`, 0.75, of `max_calls` and of `max_bytes`
UNLIMITED_BYTES = 1 << 20
"""A frame size that never limits the number of calls."""
EXECUTORS = (0, 1)


def batch_of(
    count: int,
    *,
    code: str = "1",
    queue_timeout_s: float = 10.0,
    tenants: Sequence[object] = ("",),
    deadline_s: float = math.inf,
    deadlines: Sequence[float | None] = (None,),
) -> Batch:
    """Return a batch of `count` calls. The id of a call is "call INDEX". The calls get the items of `tenants` in turn,
    and so those of `deadlines`."""
    batch = Batch(count, queue_timeout_s, deadline_s)
    for index in range(count):
        tenant, own_deadline_s = str(tenants[index % len(tenants)]), deadlines[index % len(deadlines)]
        call = Call(code, tenant=tenant, deadline_s=own_deadline_s, id=f"call {index}")
        batch.add(index, call.encode(binary=True), call.id, {})
    return batch


def deadline_of(call: PendingCall) -> float:
    """Return the time at which the deadline of an unfinished call passes."""
    assert call.call is not None
    return call.batch.admitted_at + min(call.call.get("deadline_s", math.inf), call.batch.deadline_s)


def limits_on_calls(max_calls: int) -> AdmissionLimits:
    """Return limits of which only `max_calls` matters."""
    return AdmissionLimits(max_calls, max_bytes=1 << 30, max_attempts=3)


def ok_result() -> Any:
    return {"status": "ok", "usage": {"queue_ms": 0.0, "run_ms": 1.0}, "files": {}, "attempts": 1}


class CallTableMachine(RuleBasedStateMachine):
    """Batches arrive, executors receive calls, answer and die, clients disconnect, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.call_table = CallTable(LIMITS)
        self.now = 0.0
        self.batches: list[Batch] = []
        self.cancelled: list[Batch] = []
        self.result_indices: dict[Batch, list[int]] = {}
        self.done: list[Batch] = []
        """Batches whose `on_done` was called."""
        self.assigned: dict[int, list[int]] = {executor: [] for executor in EXECUTORS}
        """The seqs of the calls that each executor has."""

    @rule(
        count=st.integers(1, 6),
        code_length=st.integers(0, 700),
        tenants=st.sampled_from(["a", "b", "ab"]),
        deadline_s=st.sampled_from([math.inf, 15.0]),
        deadlines=st.lists(st.one_of(st.none(), st.floats(0.01, 60)), min_size=1, max_size=3),
    )
    def submit(
        self, count: int, code_length: int, tenants: str, deadline_s: float, deadlines: list[float | None]
    ) -> None:
        batch = batch_of(count, code="x" * code_length, tenants=tenants, deadline_s=deadline_s, deadlines=deadlines)
        batch.on_result = self.result_indices.setdefault(batch, []).append
        batch.on_done = lambda: self.done.append(batch)
        outstanding_before = self.call_table.outstanding.calls, self.call_table.outstanding.bytes
        try:
            self.call_table.admit(batch, self.now)
        except RequestRefused:
            assert batch.calls[0].size_bytes * count > MAX_TENANT_BYTES
        except Overloaded as error:
            assert (self.call_table.outstanding.calls, self.call_table.outstanding.bytes) == outstanding_before
            assert error.retry_after_s is not None and 1 <= error.retry_after_s <= MAX_RETRY_AFTER_S
        else:
            self.batches.append(batch)

    @rule(executor=st.sampled_from(EXECUTORS), max_calls=st.integers(1, 5))
    def assign(self, executor: int, max_calls: int) -> None:
        calls = self.call_table.assign(executor, max_calls, UNLIMITED_BYTES, self.now)
        assert len(calls) <= max_calls
        self.assigned[executor] += [call.seq for call in calls]

    @precondition(lambda self: any(self.assigned.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        executor = data.draw(st.sampled_from([executor for executor in EXECUTORS if self.assigned[executor]]))
        seq = data.draw(st.sampled_from(self.assigned[executor]))
        self.assigned[executor].remove(seq)
        assert self.call_table.finish(executor, seq, ok_result()) is not None
        assert self.call_table.finish(executor, seq, ok_result()) is None

    @rule(executor=st.sampled_from(EXECUTORS))
    def lose_executor(self, executor: int) -> None:
        requeued, failed = self.call_table.executor_lost(executor, self.now)
        assert len(requeued) + len(failed) == len(self.assigned[executor])
        assert all(call.attempts == LIMITS.max_attempts for call in failed)
        self.assigned[executor].clear()

    @precondition(lambda self: any(self.assigned.values()))
    @rule(data=st.data())
    def lose_calls(self, data: st.DataObject) -> None:
        executor = data.draw(st.sampled_from([executor for executor in EXECUTORS if self.assigned[executor]]))
        seqs = data.draw(st.lists(st.sampled_from(self.assigned[executor]), min_size=1, unique=True))
        requeued, failed = self.call_table.calls_lost(executor, [(seq, "lost", True) for seq in seqs], self.now)
        assert len(requeued) + len(failed) == len(seqs)
        assert all(call.attempts == LIMITS.max_attempts for call in failed)
        self.assigned[executor] = [seq for seq in self.assigned[executor] if seq not in seqs]

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        self.withdraw(self.call_table.cancel(batch))
        self.batches.remove(batch)
        self.cancelled.append(batch)

    @rule(index=st.integers(0, 5))
    def cancel_by_id(self, index: int) -> None:
        unfinished = [call for batch in self.batches for call in batch.calls if call.call is not None]
        found = self.call_table.with_id(f"call {index}", None)
        assert sorted(map(id, found)) == sorted(id(call) for call in unfinished if call.index == index)
        ended = self.call_table.end(found, UnavailableReason.CANCELLED, "by the test")
        assert ended.calls == found
        assert not self.call_table.end(found, UnavailableReason.CANCELLED, "a second time").calls
        self.withdraw(ended.running)

    def withdraw(self, seqs_by_executor: dict[int, list[int]]) -> None:
        """Take calls from their executors. The results that executors send for them all the same are dropped."""
        for executor, seqs in seqs_by_executor.items():
            for seq in seqs:
                self.assigned[executor].remove(seq)
                assert self.call_table.finish(executor, seq, ok_result()) is None

    @rule(seconds=st.floats(0, 20))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for batch in self.batches:
            waiting = [call for call in batch.calls if call.call is not None and call.executor is None]
            expired = [call for call in waiting if self.now - call.waiting_since >= batch.queue_timeout_s]
            assert sorted(map(id, self.call_table.expire(batch, self.now))) == sorted(map(id, expired))
            unfinished = [call for call in batch.calls if call.call is not None]
            passed = [call for call in unfinished if deadline_of(call) <= self.now]
            ended = self.call_table.expire_deadlines(batch, self.now)
            assert sorted(map(id, ended.calls)) == sorted(map(id, passed))
            self.withdraw(ended.running)
            left = [call for call in unfinished if call not in passed]
            expiries = [call.waiting_since + batch.queue_timeout_s for call in left if call.executor is None]
            expiries += [deadline_of(call) for call in left if deadline_of(call) < math.inf]
            assert self.call_table.next_expiry(batch) == min(expiries, default=math.inf)

    @rule(max_calls=st.integers(1, 5))
    def fail_waiting(self, max_calls: int) -> None:
        waiting = self.call_table.waiting
        assert len(self.call_table.fail_waiting(UnavailableReason.STOPPED, "the end", max_calls)) == min(
            max_calls, waiting
        )
        assert self.call_table.waiting == max(0, waiting - max_calls)

    @invariant()
    def no_limit_is_exceeded(self) -> None:
        assert self.call_table.outstanding.calls == sum(batch.unfinished for batch in self.batches) <= LIMITS.max_calls
        assert 0 <= self.call_table.outstanding.bytes <= LIMITS.max_bytes
        for tenant in "ab":
            calls = [call for batch in self.batches for call in batch.calls]
            unfinished = [call for call in calls if call.call is not None and call.tenant == tenant]
            assert len(unfinished) <= MAX_TENANT_CALLS
            assert sum(call.size_bytes for call in unfinished) <= MAX_TENANT_BYTES
        running = sum(map(self.call_table.running, EXECUTORS))
        assert self.call_table.waiting + running == self.call_table.outstanding.calls

    @invariant()
    def each_call_gets_one_result(self) -> None:
        for batch in self.batches:
            indices = self.result_indices[batch]
            assert len(indices) == len(set(indices)) == len(batch.results) - batch.unfinished
            assert (batch in self.done) == (batch.unfinished == 0)

    def teardown(self) -> None:
        """After any sequence of steps, `fail_all` gives every remaining call a result."""
        self.call_table.fail_all(UnavailableReason.STOPPED, "the end")
        outstanding = self.call_table.outstanding
        assert (outstanding.calls, outstanding.bytes, self.call_table.waiting) == (0, 0, 0)
        assert not self.call_table._tenants  # private, because a leaked entry has no visible effect
        assert all(None not in batch.results for batch in self.batches)
        finished = [batch for batch in [*self.batches, *self.cancelled] if not batch.unfinished]
        assert sorted(map(id, self.done)) == sorted(map(id, finished))


TestCallTable = CallTableMachine.TestCase


def test_a_call_of_a_lost_executor_is_assigned_first_and_keeps_its_number_of_attempts() -> None:
    call_table = CallTable(LIMITS)
    call_table.admit(batch_of(3), 0.0)
    (first,) = call_table.assign(0, 1, UNLIMITED_BYTES, 0.0)
    call_table.executor_lost(0, 1.0)
    (second,) = call_table.assign(1, 1, UNLIMITED_BYTES, 1.0)
    assert second is first and second.attempts == 2


def test_a_call_whose_executors_all_die_is_unavailable() -> None:
    call_table, batch = CallTable(LIMITS), batch_of(1)
    call_table.admit(batch, 0.0)
    for _ in range(LIMITS.max_attempts):
        call_table.assign(0, 1, UNLIMITED_BYTES, 0.0)
        call_table.executor_lost(0, 0.0)
    result = batch.pop_result(0)
    assert (result["status"], result["error"]["type"], result["attempts"]) == ("unavailable", "Poison", 3)


def test_attempts_lost_with_a_zygote_and_attempts_lost_with_an_executor_are_counted_together() -> None:
    call_table, batch = CallTable(LIMITS), batch_of(1)
    call_table.admit(batch, 0.0)
    starts = 0
    while assigned := call_table.assign(0, 1, UNLIMITED_BYTES, 0.0):
        starts += 1
        if starts == 2:
            call_table.executor_lost(0, 0.0)
        else:
            call_table.calls_lost(0, [(assigned[0].seq, "its zygote exited", True)], 0.0)
    assert starts == LIMITS.max_attempts
    result = batch.pop_result(0)
    assert (result["error"]["type"], result["attempts"]) == ("Poison", starts)
    assert "its zygote exited" in result["error"]["message"]


@pytest.mark.parametrize("started_at_attempt", [1, 2, 3, None])
def test_a_call_without_attempts_left_is_poisonous_only_if_its_code_has_started(
    started_at_attempt: int | None,
) -> None:
    call_table, batch = CallTable(LIMITS), batch_of(1)
    call_table.admit(batch, 0.0)
    for attempt in range(1, LIMITS.max_attempts + 1):
        (call,) = call_table.assign(0, 1, UNLIMITED_BYTES, 0.0)
        call_table.calls_lost(0, [(call.seq, "no process", attempt == started_at_attempt)], 0.0)
    assert batch.pop_result(0)["error"]["type"] == ("NodeError" if started_at_attempt is None else "Poison")


def test_the_loss_of_a_cancelled_call_is_ignored() -> None:
    call_table, batch = CallTable(LIMITS), batch_of(1)
    call_table.admit(batch, 0.0)
    (call,) = call_table.assign(0, 1, UNLIMITED_BYTES, 0.0)
    call_table.cancel(batch)
    assert call_table.calls_lost(0, [(call.seq, "its zygote exited", True), (99, "unknown", True)], 0.0) == ([], [])
    assert call_table.waiting == 0


@pytest.mark.parametrize("dies", ["executor", "zygote"])
def test_a_call_that_kills_its_zygote_or_executor_does_not_use_up_the_last_attempts_of_other_calls(dies: str) -> None:
    """The executor has one zygote (the process that forks all its calls), so all calls of the executor are lost with
    the zygote."""
    call_table, deadly, others = CallTable(LIMITS), batch_of(1), batch_of(6)
    call_table.admit(deadly, 0.0)
    call_table.admit(others, 0.0)
    while call_table.outstanding.calls:
        assigned = call_table.assign(0, 64, UNLIMITED_BYTES, 0.0)
        if any(call.batch is deadly for call in assigned):
            if dies == "executor":
                call_table.executor_lost(0, 0.0)
            else:
                call_table.calls_lost(0, [(call.seq, "its zygote exited", True) for call in assigned], 0.0)
            continue
        for call in assigned:
            call_table.finish(0, call.seq, ok_result())
    assert deadly.pop_result(0)["status"] == "unavailable"
    assert [others.pop_result(index)["status"] for index in range(6)] == ["ok"] * 6


def test_queue_ms_is_the_waiting_time_of_all_attempts() -> None:
    call_table, batch = CallTable(LIMITS), batch_of(1)
    call_table.admit(batch, 10.0)
    call_table.assign(0, 1, UNLIMITED_BYTES, 11.0)
    call_table.executor_lost(0, 20.0)
    (call,) = call_table.assign(0, 1, UNLIMITED_BYTES, 22.0)
    call_table.finish(0, call.seq, ok_result())
    # The call waited 1 s before the first attempt and 2 s before the second.
    assert batch.pop_result(0)["usage"]["queue_ms"] == pytest.approx(3000)


def test_the_error_of_a_full_queue_contains_the_limit_and_the_time_to_wait() -> None:
    call_table = CallTable(LIMITS)
    call_table.admit(batch_of(12, tenants="ab"), 0.0)
    call_table.answer_rate.count(10, 0.0)  # 10 results in a window of 10 s: one result per second
    with pytest.raises(Overloaded, match=r"holds 12 of at most 12 calls, and this batch has 3 more; try again in 3 s"):
        call_table.admit(batch_of(3), 0.0)


def test_a_batch_larger_than_the_queue_is_refused_without_a_time_to_wait() -> None:
    with pytest.raises(RequestRefused, match="the queue holds at most 12"):
        CallTable(LIMITS).admit(batch_of(13), 0.0)


def test_a_batch_that_reads_results_is_admitted_however_many_are_unread() -> None:
    call_table = CallTable(
        AdmissionLimits(max_calls=12, max_bytes=UNLIMITED_BYTES, max_attempts=1, max_result_bytes=10)
    )
    call_table.admit(batch_of(1), 0.0)
    (call,) = call_table.assign(0, 1, UNLIMITED_BYTES, 0.0)
    call_table.finish(0, call.seq, ok_result(), 1000)
    with pytest.raises(Overloaded, match="clients have not read results of"):
        call_table.admit(batch_of(1), 0.0)
    checks = batch_of(1)
    checks.reads_results = True
    call_table.admit(checks, 0.0)
    assert call_table.waiting == 1


def test_cancelling_a_batch_that_was_not_admitted_changes_nothing() -> None:
    call_table, batch = CallTable(LIMITS), batch_of(3)
    call_table.admit(batch_of(12, tenants="ab"), 0.0)
    with pytest.raises(Overloaded):
        call_table.admit(batch, 0.0)
    assert call_table.cancel(batch) == {}
    assert (call_table.waiting, call_table.outstanding.calls) == (12, 12)


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


def _count_instructions(step: Callable[[], object]) -> int:
    """Return the number of bytecode instructions that `step` executes in Python functions."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
    return count


def test_a_tenant_holds_at_most_its_own_share_of_the_queue() -> None:
    call_table = CallTable(LIMITS)
    batch, more = batch_of(6, tenants="a"), batch_of(1, tenants="a")
    batch.tenant = more.tenant = Tenant("a", queue_share=0.5)
    call_table.admit(batch, 0.0)
    with pytest.raises(Overloaded, match="tenant 'a' holds 6 of at most 6 calls"):
        call_table.admit(more, 0.0)
    call_table.admit(
        batch_of(6, tenants="b"), 0.0
    )  # tenant b has no share of its own, so its limit is `MAX_TENANT_CALLS`


def test_max_running_bounds_the_calls_of_a_tenant_at_all_executors() -> None:
    call_table, batch = CallTable(LIMITS), batch_of(5, tenants="a")
    batch.tenant = Tenant("a", max_running=3)
    call_table.admit(batch, 0.0)
    assert [len(call_table.assign(executor, 2, UNLIMITED_BYTES, 0.0)) for executor in (0, 1)] == [2, 1]
    call_table.finish(0, 1, ok_result())
    assert len(call_table.assign(0, 2, UNLIMITED_BYTES, 0.0)) == 1
    assert len(call_table.fail_waiting(UnavailableReason.STOPPED, "", 10)) == 1


def test_a_tenant_finds_only_its_own_calls_by_their_id() -> None:
    call_table, batches = CallTable(LIMITS), {name: Batch(1, 10.0) for name in "ab"}
    for name, batch in batches.items():
        batch.tenant = Tenant(name)
        batch.add(0, Call("1", id="same", tenant=name).encode(binary=True), "same", {})
        call_table.admit(batch, 0.0)
    assert [call.tenant for call in call_table.with_id("same", Tenant("b"))] == ["b"]
    assert len(call_table.with_id("same", None)) == 2
    assert call_table.with_id("same", Tenant("c")) == []


def test_executors_are_shared_for_a_while_after_calls_of_several_tenants() -> None:
    call_table = CallTable(LIMITS)
    call_table.admit(batch_of(2, tenants="a"), 0.0)
    assert not call_table.is_shared(0.0)
    call_table.admit(batch := batch_of(1, tenants="b"), 1.0)
    call_table.cancel(batch)
    assert call_table.is_shared(1.0) and call_table.is_shared(SHARED_S) and not call_table.is_shared(1.0 + SHARED_S)


def test_executors_are_shared_if_a_tenant_follows_another_one_soon() -> None:
    for later_s, is_shared in ((SHARED_S - 1, True), (SHARED_S + 1, False)):
        call_table = CallTable(LIMITS)
        call_table.admit(batch := batch_of(1, tenants="a"), 0.0)
        call_table.cancel(batch)
        call_table.admit(batch_of(2, tenants="b"), later_s)
        assert call_table.is_shared(later_s) == is_shared
        assert not call_table.is_shared(later_s + SHARED_S)


def _step_costs(others: int, tenants: int, max_running: int | None) -> dict[str, int]:
    """Return the number of instructions of each step for a batch of three calls.

    The table also holds `others` calls of `tenants` tenants. Of these calls, 640 run on ten other executors. If the
    tenants have a bound `max_running`, fewer calls run.
    """
    call_table = CallTable(limits_on_calls(100_000))
    other_batch = batch_of(others, tenants=range(tenants), deadlines=[None, 3600.0])
    batch, last_batch = batch_of(3, deadline_s=19.0), batch_of(2)
    other_batch.tenant = Tenant(
        "", max_running=max_running
    )  # all calls may share this tenant, because the table reads only its bounds
    call_table.admit(other_batch, 0.0)
    for executor in range(1, 11):
        call_table.assign(executor, 64, UNLIMITED_BYTES, 0.0)
    costs = {
        "admit": _count_instructions(lambda: call_table.admit(batch, 1.0)),
        "assign": _count_instructions(lambda: call_table.assign(0, 2, UNLIMITED_BYTES, 1.0)),
        "finish": _count_instructions(lambda: call_table.finish(0, call_table._seq, ok_result())),
        "executor lost": _count_instructions(lambda: call_table.executor_lost(0, 2.0)),
        "next expiry": _count_instructions(lambda: call_table.next_expiry(other_batch)),
        "assign again": _count_instructions(lambda: call_table.assign(0, 1, UNLIMITED_BYTES, 3.0)),
        "expire": _count_instructions(lambda: call_table.expire(batch, 11.0)),
        "next deadline": _count_instructions(lambda: call_table.next_expiry(batch)),
        "deadline": _count_instructions(lambda: call_table.expire_deadlines(batch, 20.0)),
        "admit again": _count_instructions(lambda: call_table.admit(last_batch, 20.0)),
        "end": _count_instructions(
            lambda: call_table.end(last_batch.calls[:1], UnavailableReason.CANCELLED, "by the test")
        ),
        "cancel": _count_instructions(lambda: call_table.cancel(last_batch)),
    }
    assert call_table.outstanding.calls == others
    return costs


@pytest.mark.parametrize("max_running", [None, 3])
@pytest.mark.parametrize("tenants", [1, 100])
def test_the_cost_of_a_step_does_not_depend_on_the_number_of_calls(tenants: int, max_running: int | None) -> None:
    costs, costs_of_many = _step_costs(1_000, tenants, max_running), _step_costs(20_000, tenants, max_running)
    max_growth = 200  # instructions: their number also depends a little on the sizes of dicts
    growth = {step: costs_of_many[step] - cost for step, cost in costs.items()}
    assert {step: instructions for step, instructions in growth.items() if instructions > max_growth} == {}


def test_repeated_expiry_visits_each_call_once() -> None:
    """Every call is requeued at a different time, so that each expires at a different time."""
    costs = []
    for size in (100, 1_000):
        call_table, batch = CallTable(limits_on_calls(10_000)), batch_of(size)
        call_table.admit(batch, 0.0)
        for executor in range(size):
            call_table.assign(executor, 1, UNLIMITED_BYTES, 0.0)
        for executor in range(size):
            call_table.executor_lost(executor, executor / size)

        def expire_all(call_table: CallTable = call_table, batch: Batch = batch) -> None:
            while (expiry := call_table.next_expiry(batch)) < math.inf:
                call_table.expire(batch, expiry)

        costs.append(_count_instructions(expire_all))
    assert costs[1] < 11 * costs[0]  # ten times as many calls may cost about ten times as many instructions


def test_expiry_finishes_a_limited_number_of_calls_at_a_time() -> None:
    call_table, batch = CallTable(limits_on_calls(10_000)), batch_of(2 * MAX_EXPIRED_AT_ONCE + 1)
    call_table.admit(batch, 0.0)
    expired = []
    while (expiry := call_table.next_expiry(batch)) < math.inf:
        assert expiry == 10.0
        expired.append(len(call_table.expire(batch, 10.0)))
    assert expired == [MAX_EXPIRED_AT_ONCE, MAX_EXPIRED_AT_ONCE, 1] and not call_table.outstanding.calls


def test_a_call_ends_at_the_earlier_of_its_own_and_its_batchs_deadline() -> None:
    call_table = CallTable(LIMITS)
    batch = batch_of(3, queue_timeout_s=100.0, deadline_s=5.0, deadlines=[3.0, 8.0, None])
    call_table.admit(batch, 10.0)
    ended_at = {}
    while (expiry := call_table.next_expiry(batch)) < math.inf:
        ended_at |= {call.index: expiry for call in call_table.expire_deadlines(batch, expiry).calls}
    assert ended_at == {0: 13.0, 1: 15.0, 2: 15.0}
    result = batch.pop_result(1)
    assert (result["status"], result["error"]["type"], result["attempts"]) == ("unavailable", "Deadline", 0)
    assert result["error"]["message"].startswith(
        "not finished 5 s after its admission, which is its deadline_s; it wait"
    )


def test_a_requeued_call_keeps_its_deadline_on_its_next_executor() -> None:
    call_table, batch = CallTable(LIMITS), batch_of(1, deadlines=[30.0])
    call_table.admit(batch, 0.0)
    call_table.assign(0, 1, UNLIMITED_BYTES, 0.0)
    call_table.executor_lost(0, 25.0)
    (call,) = call_table.assign(1, 1, UNLIMITED_BYTES, 26.0)
    assert call_table.next_expiry(batch) == 30.0
    ended = call_table.expire_deadlines(batch, 30.0)
    assert (ended.calls, ended.running) == ([call], {1: [call.seq]})
    assert call_table.finish(1, call.seq, ok_result()) is None
    assert batch.pop_result(0)["error"]["type"] == "Deadline"


def test_deadlines_finish_a_limited_number_of_calls_at_a_time() -> None:
    call_table, batch = CallTable(limits_on_calls(10_000)), batch_of(2 * MAX_EXPIRED_AT_ONCE + 1, deadline_s=1.0)
    call_table.admit(batch, 0.0)
    ended = []
    while (expiry := call_table.next_expiry(batch)) < math.inf:
        assert expiry == 1.0
        ended.append(len(call_table.expire_deadlines(batch, 1.0).calls))
    assert ended == [MAX_EXPIRED_AT_ONCE, MAX_EXPIRED_AT_ONCE, 1] and not call_table.outstanding.calls


def test_calls_without_a_deadline_cost_nothing_for_deadlines() -> None:
    batch = batch_of(100)
    CallTable(limits_on_calls(100)).admit(batch, 0.0)
    assert batch.deadlines == []


def test_an_id_that_is_only_the_index_of_its_call_is_not_found() -> None:
    call_table, batch = CallTable(LIMITS), Batch(2, 10.0)
    batch.add(0, {"code": "1"}, "0", {})
    batch.add(1, {"code": "2", "id": "0"}, "0", {})
    call_table.admit(batch, 0.0)
    assert [call.index for call in call_table.with_id("0", None)] == [1]


def test_no_call_is_assigned_after_the_one_that_reaches_the_target_size() -> None:
    call_table = CallTable(limits_on_calls(100))
    call_table.admit(batch_of(10, code="x" * 1000), 0.0)
    assert len(call_table.assign(0, 64, 2000, 0.0)) == 2  # the second call reaches 2,000 bytes


@given(st.lists(st.tuples(st.floats(0.001, 5), st.integers(0, 1000)), min_size=1, max_size=30))
def test_the_answer_rate_never_exceeds_the_finished_calls(steps: list[tuple[float, int]]) -> None:
    rate, now, total = AnswerRate(), 0.0, 0
    for pause, count in steps:
        now += pause
        total += count
        rate.count(count, now)
        assert 0 <= rate.per_s(now) <= total / 10.0 + 1e-9  # the window is 10 s; 1e-9 is the rounding error


# After 7,130 s the answer rate is a subnormal number, after 7,440 s it underflows to 0.
@pytest.mark.parametrize("idle_s", [0.0, 60.0, 7130.0, 7440.0, 1e6])
def test_retry_after_is_within_its_limits_after_any_time_without_a_result(idle_s: float) -> None:
    call_table = CallTable(limits_on_calls(10))
    call_table.answer_rate.count(1, 0.0)
    assert 1 <= call_table.retry_after_s(100_000, idle_s) <= MAX_RETRY_AFTER_S
