"""Tests of the executor with fake zygotes (the interpreters that fork once per call).

Every call gets exactly one result, whatever happens to its zygote. The failure of a zygote never changes the status of
a call.
"""

from __future__ import annotations

import errno
import itertools
import sys
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from sandbox import machine
from sandbox.executor import executor as executor_module
from sandbox.executor import profile_choice
from sandbox.executor.executor import Executor
from sandbox.executor.pool_plan import plan_pools
from sandbox.executor.slots import Slots
from sandbox.guest.protocol import MAX_SLOTS_PER_POOL
from sandbox.jail import CgroupUsage
from sandbox.settings.server import ExecutorConfig
from sandbox.types import Profile, Status, UnavailableReason
from tests.executor.calling import OWN_PYTHON
from tests.executor.fake_zygotes import HOSTILE_BEHAVIOURS, ExecutorDriver, driven_executor, until


@pytest.mark.trio
async def test_each_call_gets_the_output_of_its_own_code(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch) as driver:
        results = await driver.run(*(f"slow 99 {n}" for n in range(50)), id="name")
        assert [result.stdout for result in results] == [f"slow 99 {n}" for n in range(50)]
        assert {(result.id, result.status, result.attempts) for result in results} == {("name", Status.OK, 1)}
        driver.check_idle()


@pytest.mark.parametrize("behaviour", HOSTILE_BEHAVIOURS)
@pytest.mark.trio
async def test_a_hostile_zygote_costs_a_retry(
    behaviour: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch) as driver:
        (result,) = await driver.run(f"{behaviour} 1")
        is_hostile_after_result = behaviour == "twice"
        assert (result.status, result.attempts) == (Status.OK, 1 if is_hostile_after_result else 2)
        await driver.run("ok")
        driver.check_idle()


@pytest.mark.parametrize("behaviour", HOSTILE_BEHAVIOURS)
@pytest.mark.trio
async def test_a_call_whose_zygote_is_hostile_each_time_is_unavailable(
    behaviour: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch) as driver:
        (result,) = await driver.run(behaviour)
        if behaviour != "twice":  # "twice" first sends a valid result
            assert (result.status, result.attempts) == (Status.UNAVAILABLE, 3)
            assert result.error is not None
            assert result.error.type == UnavailableReason.POISON
            assert len(result.error.message) < 1000
            assert result.error.message.isprintable()
        assert (await driver.run("ok"))[0].status is Status.OK
        driver.check_idle()


@pytest.mark.trio
async def test_a_call_that_cannot_be_started_is_retried_with_bounded_delay(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch, attempts=100) as driver:
        before = trio.current_time()
        (result,) = await driver.run("start_failed 50")
        # The start failed 50 times in all. An attempt is lost after one failure more than the maximum.
        assert (result.status, result.attempts) == (Status.OK, 50 // (executor_module.MAX_START_FAILURES + 1) + 1)
        assert trio.current_time() - before < 51 * executor_module.MAX_RETRY_DELAY_S
        driver.check_idle()


@pytest.mark.trio
async def test_only_failed_starts_for_more_than_some_seconds_cost_attempts(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch) as driver:
        before = trio.current_time()
        (result,) = await driver.run(f"start_failed {executor_module.MAX_START_FAILURES}")
        assert (result.status, result.attempts) == (Status.OK, 1)
        assert 10 < trio.current_time() - before < 60, "about 20 s of back-off"
        (result,) = await driver.run("start_failed 50")
        assert (result.status, result.attempts) == (Status.UNAVAILABLE, 3)
        assert result.error is not None and result.error.type == "NodeError", "its code has never started"


@pytest.mark.parametrize(
    ("usage", "status", "attempts"),
    [
        (None, Status.KILLED, 1),
        (CgroupUsage(1.0, 1), Status.KILLED, 1),
        (CgroupUsage(1.0, 1, hit_own_limit=True), Status.MEMORY_LIMIT, 1),
        (CgroupUsage(1.0, 1, hit_outer_limit=True), Status.UNAVAILABLE, 3),
    ],
)
@pytest.mark.trio
async def test_cgroup_usage_decides_the_status_of_a_killed_call(
    usage: CgroupUsage | None,
    status: Status,
    attempts: int,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    monkeypatch.setattr(Slots, "read_usage", lambda _slots, _slot: usage)
    async with driven_executor(monkeypatch) as driver:
        (result,) = await driver.run("killed")
        assert (result.status, result.attempts) == (status, attempts)
        driver.check_idle()


@pytest.mark.parametrize(
    ("counts", "status", "attempts"),
    [
        ([7, 7], Status.KILLED, 1),  # no process was killed for lack of memory
        ([7, 8, 8], Status.KILLED, 2),  # one was; the second attempt was killed by its own signal
        ([7, 8, 9, 10], Status.UNAVAILABLE, 3),
    ],
)
@pytest.mark.trio
async def test_without_cgroups_the_kernels_count_of_oom_kills_decides_about_a_killed_call(
    counts: list[int],
    status: Status,
    attempts: int,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    monkeypatch.setattr(Slots, "read_usage", lambda _slots, _slot: None)
    remaining = iter(counts)
    monkeypatch.setattr(machine, "oom_kills", lambda: next(remaining))
    async with driven_executor(monkeypatch) as driver:
        (result,) = await driver.run("killed")
        assert (result.status, result.attempts) == (status, attempts)
        driver.check_idle()


@pytest.mark.trio
async def test_calls_killed_by_one_shortage_of_memory_are_all_repeated(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(Slots, "read_usage", lambda _slots, _slot: None)
    counts = itertools.chain([7], itertools.repeat(9))  # the counter is read after both were killed
    monkeypatch.setattr(machine, "oom_kills", lambda: next(counts))
    async with driven_executor(monkeypatch, slots=2) as driver:
        results = await driver.run("killed", "killed")
        assert [(result.status, result.attempts) for result in results] == [(Status.KILLED, 2)] * 2


@pytest.mark.trio
async def test_a_slot_whose_limits_cannot_be_set_costs_no_attempt_and_is_used_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    failures = iter([OSError(errno.EBUSY, "busy")] * 5)
    released = []

    def set_limits(_slots: Slots, _slot: int, _memory_bytes: int, _tasks: int) -> None:
        if failure := next(failures, None):
            raise failure

    async def release_when_empty(slots: Slots, slot: int) -> None:
        await trio.sleep(0.001)
        released.append(slot)
        slots.free.append(slot)

    monkeypatch.setattr(Slots, "set_limits", set_limits)
    monkeypatch.setattr(Slots, "release_when_empty", release_when_empty)
    async with driven_executor(monkeypatch, attempts=10) as driver:
        results = await driver.run(*["ok"] * 50)
        assert {result.status for result in results} == {Status.OK}
        assert sum(result.attempts for result in results) == 50
        assert driver.executor.counts["retried"] == len(released) == 5
        driver.check_idle()


@pytest.mark.trio
async def test_a_cancelled_call_gets_no_result_and_frees_its_slot(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch, zygote_pools=1, slots=2, profiles=("bare",)) as driver:
        running = driver.submit("hang", "hang")
        queued = driver.submit("ok 1 queued", "ok 1 queued")
        for seq in (*queued, *running):
            driver.executor.cancel(seq)
        assert (await driver.run("ok", "ok", "ok"))[2].status is Status.OK
        assert not {*running, *queued} & {*driver.results}
        assert driver.fleet.started == {"hang": 2, "ok": 3}
        driver.check_idle()


@pytest.mark.trio
async def test_cancelled_calls_in_the_queue_hold_no_code(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch, zygote_pools=1, slots=1, profiles=("bare",)) as driver:
        (blocking,) = driver.submit("hang")
        for seq in driver.submit(*["ok" * 100_000] * 100):
            driver.executor.cancel(seq)
        assert not driver.executor._queued and driver.executor.stats()["queued"] == 0
        driver.executor.cancel(blocking)
        assert (await driver.run("ok"))[0].status is Status.OK


@pytest.mark.trio
async def test_a_cancelled_call_that_does_not_end_costs_the_jail(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch, zygote_pools=1, slots=1, profiles=("bare",)) as driver:
        (seq,) = driver.submit("hang")
        await trio.testing.wait_all_tasks_blocked()
        for zygote in driver.fleet.zygotes:
            zygote.calls.clear()  # so that the zygote ignores the kill frame
        driver.executor.cancel(seq)
        before = trio.current_time()
        assert (await driver.run("ok"))[0].status is Status.OK
        assert trio.current_time() - before < 20, "long before the wall cap, which is 100 s for the default timeout_s"


@pytest.mark.trio
async def test_cancelling_an_unknown_call_is_ignored(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch) as driver:
        (seq,) = driver.submit("ok")
        await driver.wait_for([seq])
        for number in (seq, seq, -1, 10**30):
            driver.executor.cancel(number)
        driver.check_idle()


@pytest.mark.trio
async def test_a_call_in_a_reserved_place_starts_at_once_although_others_wait_for_a_slot(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch, zygote_pools=1, slots=8, profiles=("bare",)) as driver:
        large = driver.submit(*["hang"] * 20)
        await trio.testing.wait_all_tasks_blocked()
        assert driver.executor.running == 8
        small = driver.submit("hang", "hang", reserved=True)
        await trio.testing.wait_all_tasks_blocked()
        assert driver.executor.running == 9, "one slot is reserved"
        driver.executor.cancel(large[0])
        await trio.testing.wait_all_tasks_blocked()
        assert driver.executor.running == 9, "the other call in a reserved place has the short slot"
        assert driver.executor.stats()["queued"] == 12
        for seq in [*large, *small]:
            driver.executor.cancel(seq)
        await until(lambda: driver.executor.running == 0)
        driver.check_idle()


@pytest.mark.parametrize(
    ("max_slots", "slots", "long_slots"),
    [(0, 1, 0), (20, 20, 0), (100, 32, 68), (10_000, 32, 512), (sys.maxsize, 32, 512)],
)
def test_slots_are_limited_by_the_descriptor_limit(
    max_slots: int, slots: int, long_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module.jail, "max_slots_for_fds", lambda: max_slots)
    config = ExecutorConfig(python=sys.executable, isolation="none", slots=32, long_slots=512)
    plan = plan_pools(config)
    assert (plan.slots, plan.long_slots) == (slots, long_slots)
    assert plan.wanted_fds == 8 * (32 + 512) + 256, "8 per slot and 256 for the rest, whatever the limit"


def test_many_slots_are_spread_over_enough_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module.jail, "max_slots_for_fds", lambda: sys.maxsize)
    config = ExecutorConfig(python=str(OWN_PYTHON), isolation="none", zygote_pools=1, slots=10_000)
    pools = Executor(plan_pools(config), lambda *_: None, lambda *_: None).pools
    assert len(pools) == 3, "a pool has at most 4096 slots"
    assert max(max(pool.slots.free) for pool in pools) < MAX_SLOTS_PER_POOL


BEHAVIOURS = st.sampled_from(["ok", "slow", "start_failed", *HOSTILE_BEHAVIOURS])
PROFILES = st.sampled_from([Profile.BARE, Profile.NUMERIC, Profile.VERIFY])
CALLS = st.lists(st.tuples(BEHAVIOURS, st.integers(0, 4), PROFILES, st.booleans()), max_size=25)
"""Calls as tuples: the behaviour of the zygote, how often the zygote behaves like this, the profile, and whether the
call is cancelled."""


@settings(max_examples=150)
@given(CALLS, st.integers(1, 3), st.integers(1, 5))
def test_every_call_gets_exactly_one_result(calls: list[Any], pools: int, slots: int) -> None:
    async def main() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            async with driven_executor(monkeypatch, zygote_pools=pools, slots=max(pools, slots)) as driver:
                await _check_results(driver, calls)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def _check_results(driver: ExecutorDriver, calls: list[Any]) -> None:
    awaited = []
    for seq, (behaviour, times, profile, is_cancelled) in enumerate(calls):
        code = f"{behaviour} {times} {seq}"
        driver.attempts.start(seq, {"code": code, "profile": profile.value})
        if seq % 3 == 0:  # so that some calls are submitted while others run
            driver.executor.start_queued_calls()
        if is_cancelled:
            if seq % 2:  # so that some calls are cancelled while they run, others before they start
                await trio.sleep(0.005)
            driver.executor.cancel(seq)
        else:
            awaited.append(seq)
    driver.executor.start_queued_calls()
    await driver.wait_for(awaited)
    for seq in awaited:
        result = driver.results[seq]
        assert result.status in (Status.OK, Status.UNAVAILABLE)
        assert result.attempts <= 3
        if result.status is Status.OK and result.stdout:
            assert result.stdout.endswith(f" {seq}"), "the output belongs to the code of this call"
    # Cancelled calls end too. The jail of a zygote that does not end them is killed.
    await until(lambda: not any(zygote.running for zygote in driver.executor.all_zygotes()))
    await driver.run("ok")
    driver.check_idle()


def test_only_the_first_characters_are_scanned_for_imports() -> None:
    long_code = "import sympy\nimport " + ",".join(f"a{n}" for n in range(500_000))
    modules = profile_choice.imported_modules(long_code)
    assert "sympy" in modules
    assert len(modules) < profile_choice.MAX_SCANNED_CHARS
    assert profile_choice.imported_modules("#" * profile_choice.MAX_SCANNED_CHARS + "\nimport numpy") == set()
