"""Every call is answered exactly once, whatever becomes of the zygotes; what they do wrong is never a verdict."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from sandbox.config import ExecutorConfig
from sandbox.errors import NodeError
from sandbox.executor import executor as core
from sandbox.executor import profile_choice
from sandbox.executor import zygote_pool as family
from sandbox.executor.executor import Executor
from sandbox.executor.slots import Slots
from sandbox.jail import CgroupUsage
from sandbox.types import Profile, Status
from tests.executor.calling import OWN_PYTHON
from tests.executor.zygotes import HOSTILE, Driven, Peer, driven, frame


@pytest.mark.trio
async def test_calls_are_answered_with_what_their_zygote_said(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch) as driver:
        results = await driver.run(*(f"slow 99 {n}" for n in range(50)), id="name")
        assert [result.stdout for result in results] == [f"slow 99 {n}" for n in range(50)]
        assert {(result.id, result.status, result.attempts) for result in results} == {("name", Status.OK, 1)}
        driver.check_at_rest()


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.trio
async def test_a_hostile_zygote_costs_a_retry(
    what: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch) as driver:
        (result,) = await driver.run(f"{what} 1")
        ends_after_its_answer = what == "twice"
        assert (result.status, result.attempts) == (Status.OK, 1 if ends_after_its_answer else 2)
        await driver.run("ok")
        driver.check_at_rest()


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.trio
async def test_a_zygote_that_stays_hostile_is_no_verdict(
    what: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch) as driver:
        (result,) = await driver.run(what)
        if what != "twice":
            assert (result.status, result.attempts) == (Status.UNAVAILABLE, 3)
            assert result.error is not None
            assert result.error.type == "NodeError"
            assert len(result.error.message) < 1000
            assert result.error.message.isprintable()
        assert (await driver.run("ok"))[0].status is Status.OK
        driver.check_at_rest()


@pytest.mark.parametrize("what", [what for what in HOSTILE if what not in ("die", "kill_jail")])
@pytest.mark.parametrize("profile", [Profile.BARE, Profile.NUMERIC])
@pytest.mark.trio
async def test_a_zygote_that_breaks_the_protocol_loses_its_jail(
    what: str, profile: Profile, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, zygote_pools=1) as driver:
        await driver.run(f"{what} 1", profile=profile)
        await driver.executor.wait_ready()
        (jail, *_) = driver.fleet.jails
        await until(lambda: not any(peer.is_open for peer in jail.peers))
        (result,) = await driver.run("ok", profile=profile)
        assert result.status is Status.OK


@pytest.mark.trio
async def test_a_zygote_that_dies_takes_no_other_along(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, zygote_pools=1) as driver:
        bystander = driver.submit("slow 9", profile=Profile.BARE)
        (result,) = await driver.run("die 1", profile=Profile.NUMERIC)
        await driver.all_of(bystander)
        assert result.attempts == 2
        assert driver.answers[bystander[0]].attempts == 1
        assert len(driver.fleet.jails) == 1


@pytest.mark.trio
async def test_a_call_that_did_not_start_is_tried_later(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, attempts=100) as driver:
        before = trio.current_time()
        (result,) = await driver.run("failed 50")
        assert (result.status, result.attempts) == (Status.OK, 51 - core.FREE_REFUSALS)
        assert trio.current_time() - before < 51 * core.LONGEST_RETRY_S
        driver.check_at_rest()


@pytest.mark.trio
async def test_an_outage_of_some_seconds_costs_no_call_its_verdict(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch) as driver:
        before = trio.current_time()
        (result,) = await driver.run(f"failed {core.FREE_REFUSALS}")
        assert (result.status, result.attempts) == (Status.OK, 1)
        assert 10 < trio.current_time() - before < 60
        (result,) = await driver.run("failed 50 times")
        assert (result.status, result.attempts) == (Status.UNAVAILABLE, 3)


@pytest.mark.parametrize(
    ("spent", "status", "attempts"),
    [
        (None, Status.KILLED, 1),
        (CgroupUsage(1.0, 1), Status.KILLED, 1),
        (CgroupUsage(1.0, 1, hit_own_limit=True), Status.MEMORY_LIMIT, 1),
        (CgroupUsage(1.0, 1, hit_outer_limit=True), Status.UNAVAILABLE, 3),
    ],
)
@pytest.mark.trio
async def test_the_kernels_count_tells_one_kill_from_another(
    spent: CgroupUsage | None,
    status: Status,
    attempts: int,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    monkeypatch.setattr(Slots, "end", lambda _slots, _number: spent)
    async with driven(monkeypatch) as driver:
        (result,) = await driver.run("killed")
        assert (result.status, result.attempts) == (status, attempts)
        driver.check_at_rest()


@pytest.mark.trio
async def test_a_slot_that_cannot_be_bounded_costs_no_attempt_and_is_used_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    refusals = iter([OSError(16, "busy")] * 5)
    settled = []

    def begin(_slots: Slots, _number: int, _memory: int, _processes: int) -> None:
        for refusal in refusals:
            raise refusal

    async def settle(slots: Slots, number: int) -> None:
        await trio.sleep(0.001)
        settled.append(number)
        slots.free.append(number)

    monkeypatch.setattr(Slots, "begin", begin)
    monkeypatch.setattr(Slots, "settle", settle)
    async with driven(monkeypatch, attempts=10) as driver:
        results = await driver.run(*["ok"] * 50)
        assert {result.status for result in results} == {Status.OK}
        assert sum(result.attempts for result in results) == 50
        assert driver.executor.counts["retried"] == len(settled) == 5
        driver.check_at_rest()


@pytest.mark.trio
async def test_a_cancelled_call_is_not_answered_and_its_slot_is_free(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, zygote_pools=1, slots=2, profiles=("bare",)) as driver:
        running = driver.submit("hang", "hang")
        queued = driver.submit("ok 1 queued", "ok 1 queued")
        for seq in (*queued, *running):
            driver.executor.cancel(seq)
        assert (await driver.run("ok", "ok", "ok"))[2].status is Status.OK
        assert not {*running, *queued} & {*driver.answers}
        assert driver.fleet.started == {"hang": 2, "ok": 3}
        driver.check_at_rest()


@pytest.mark.trio
async def test_cancelled_calls_that_wait_hold_no_memory(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, zygote_pools=1, slots=1, profiles=("bare",)) as driver:
        (blocking,) = driver.submit("hang")
        for seq in driver.submit(*["ok" * 100_000] * 100):
            driver.executor.cancel(seq)
        assert sum(len(work.call) for work in driver.executor._queue) == 0
        driver.executor.cancel(blocking)
        assert (await driver.run("ok"))[0].status is Status.OK


@pytest.mark.trio
async def test_a_cancelled_call_that_will_not_end_costs_the_jail(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, zygote_pools=1, slots=1, profiles=("bare",)) as driver:
        (seq,) = driver.submit("hang")
        await trio.testing.wait_all_tasks_blocked()
        for peer in driver.fleet.peers:
            peer.calls.clear()  # a kill now finds nothing
        driver.executor.cancel(seq)
        before = trio.current_time()
        assert (await driver.run("ok"))[0].status is Status.OK
        assert trio.current_time() - before < 20, "long before a call of 10 s may take"


@pytest.mark.trio
async def test_unknown_cancels_are_fine(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    async with driven(monkeypatch) as driver:
        (seq,) = driver.submit("ok")
        await driver.all_of([seq])
        for number in (seq, seq, -1, 10**30):
            driver.executor.cancel(number)
        driver.check_at_rest()


def test_zygotes_that_never_start_end_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    for start in (Peer.end, partial(Peer.garbage, _ticket=0), partial(Peer.say, data=b"\2\0\0\0\0\0\0\0{}")):

        async def main(start: Any = start) -> None:
            with trio.fail_after(10_000):
                async with driven_from(monkeypatch, start):
                    pytest.fail("it says that it is ready")

        with pytest.raises(BaseExceptionGroup) as raised:
            trio.run(main, clock=MockClock(autojump_threshold=0))
        assert raised.group_contains(NodeError)


@pytest.mark.parametrize(
    ("most", "slots", "long_slots"), [(0, 1, 0), (20, 20, 0), (100, 32, 68), (10_000, 32, 512), (sys.maxsize, 32, 512)]
)
def test_slots_are_no_more_than_there_are_descriptors_for(
    most: int, slots: int, long_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.jail, "max_slots_for_fds", lambda: most)
    config = ExecutorConfig(python=sys.executable, isolation="none", slots=32, long_slots=512)
    executor = core.Executor(config, lambda *_: None)
    assert (executor.slots, executor.long_slots) == (slots, long_slots)
    assert executor.wanted_files == 8 * 544 + 256


@pytest.mark.trio
async def test_a_python_that_cannot_check_answers_is_one_line_that_says_so(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def warm(peer: Peer) -> None:
        lacks = ["math_verify"] if len(peer.fleet.peers) > 2 else ["numpy"]
        peer.say(frame({"op": "ready", "python": "3.0", "modules": ["sys"], "missing": lacks, "problems": []}))

    caplog.set_level("INFO")
    monkeypatch.setattr(Peer, "warm", warm)
    async with driven(monkeypatch, zygote_pools=1) as driver:
        zygotes = [zygote for family in driver.executor.families for zygote in family.zygotes.values()]
        assert [zygote.lacks for zygote in zygotes] == [["numpy"], ["numpy"]]
        before = [line for line in caplog.messages if "lacks" in line]
        await driver.run("ok", profile=Profile.VERIFY)
        lines = [line for line in caplog.messages if "lacks" in line]
    assert before == []
    assert lines == ["the Python that runs the calls lacks math_verify, so answers get no verdict; install them there"]


@pytest.mark.parametrize("what", ["a jail", "sockets"])
@pytest.mark.trio
async def test_a_machine_that_lacks_what_a_zygote_takes_for_a_while_costs_no_executor(
    what: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, zygote_pools=1, attempts=2) as driver:
        start, pair = family.Family._start_jail, socket.socketpair
        lacking = iter(range(5))

        def missing(*args: Any, **kwargs: Any) -> Any:
            if next(lacking, None) is not None:
                raise NodeError("no processes") if what == "a jail" else OSError(24, "Too many open files")
            return start(*args, **kwargs) if what == "a jail" else pair(*args, **kwargs)

        with monkeypatch.context() as patch:
            if what == "a jail":
                patch.setattr(family.Family, "_start_jail", missing)
            else:
                patch.setattr("sandbox.executor.zygote_pool.socket.socketpair", missing)
            results = await driver.run("kill_jail 1", "ok")
            assert next(lacking, None) is None
        assert {result.status for result in results} == {Status.OK}


@pytest.mark.trio
async def test_in_a_hurry_one_warm_zygote_is_enough(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    warm = Peer.warm
    monkeypatch.setattr(Peer, "warm", lambda peer: warm(peer) if peer is peer.fleet.peers[0] else None)
    async with driven(monkeypatch, hurry=True) as driver:
        assert [profile for family in driver.executor.families for profile in family.zygotes] == [Profile.BARE]
        (result,) = await driver.run("ok", profile=Profile.NUMERIC)
        assert result.status is Status.OK


@pytest.mark.trio
async def test_checks_wait_for_their_zygote_and_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch) as driver:
        others = len(driver.fleet.peers)
        slow: list[Peer] = []
        with monkeypatch.context() as patch:
            patch.setattr(Peer, "warm", lambda peer: slow.append(peer))
            checks = driver.submit(*(f"ok 9 {n}" for n in range(20)), profile=Profile.VERIFY)
            driver.executor.cancel(checks.pop())
            await driver.run(*(f"slow 9 {n}" for n in range(20)))
            assert len(slow) == 2, "one for each family, and only now"
        assert not any(seq in driver.answers for seq in checks)
        assert driver.executor.stats()["queued"] == 20
        slow[0].warm()
        await driver.all_of(checks)
        assert {driver.answers[seq].attempts for seq in checks} == {1}
        slow[1].warm()
        assert len(driver.fleet.peers) == others + 2
        await driver.run("ok", profile=Profile.VERIFY)
        driver.check_at_rest()


@pytest.mark.trio
async def test_a_check_whose_zygote_does_not_come_is_answered(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """By another zygote, which lacks what it imports: that is an error, and so no verdict."""
    async with driven(monkeypatch) as driver:
        others = len(driver.fleet.peers)
        warm = Peer.warm
        monkeypatch.setattr(Peer, "warm", Peer.end)
        results = await driver.run(*(f"ok 9 {n}" for n in range(9)), profile=Profile.VERIFY)
        assert {result.status for result in results} == {Status.OK}, "which fakes say of everything"
        assert len(driver.fleet.peers) >= others + 6, "after three tries of each family"
        monkeypatch.setattr(Peer, "warm", warm)
        families = driver.executor.families
        await until(lambda: all(Profile.VERIFY in family.zygotes for family in families))
        await driver.run("die 1", profile=Profile.VERIFY)
        driver.check_at_rest()


def driven_from(monkeypatch: pytest.MonkeyPatch, start: Any) -> Any:
    from tests.executor import zygotes

    class Sick(zygotes.Fleet):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.on_start = start

    monkeypatch.setattr(zygotes, "Fleet", Sick)
    return driven(monkeypatch)


@pytest.mark.parametrize(
    "ready",
    [
        {"op": "ready"},
        {"op": "ready", "modules": 5, "python": "3", "missing": []},
        {"op": "ready", "modules": ["a", 5], "python": "3", "missing": []},
        {"op": "ready", "modules": [], "python": {}, "missing": []},
        {"op": "ready", "modules": [], "python": "3", "missing": {"a": 1}},
        {"op": "ready", "modules": [], "python": "3", "missing": [[]]},
        {"op": "ended", "modules": [], "python": "3", "missing": []},
    ],
)
@pytest.mark.trio
async def test_a_zygote_that_is_warm_in_no_sane_way_is_started_anew(
    ready: dict[str, Any], monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    from tests.executor import zygotes

    async with driven(monkeypatch) as driver:
        sick = iter([True])

        def start(peer: Peer) -> None:
            peer.say(zygotes.frame(ready)) if next(sick, False) else peer.warm()

        driver.fleet.on_start = start
        (result,) = await driver.run("kill_jail 1", profile=Profile.BARE)
        assert (result.status, result.attempts) == (Status.OK, 2)


def test_many_slots_are_spread_over_enough_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.jail, "max_slots_for_fds", lambda: sys.maxsize)
    config = ExecutorConfig(python=str(OWN_PYTHON), isolation="none", zygote_pools=1, slots=10_000)
    families = Executor(config, lambda *_: None).families
    assert len(families) == 3
    assert max(max(one.slots.free) for one in families) < 4096


async def until(claim: Callable[[], bool]) -> None:
    with trio.fail_after(10_000):  # of a clock that jumps
        while not claim():  # noqa: ASYNC110  there is no event for it
            await trio.sleep(1)


BEHAVIOURS = st.sampled_from(["ok", "slow", "failed", *(what for what in HOSTILE if what != "hang")])
PROFILES = [Profile.BARE, Profile.NUMERIC, Profile.VERIFY]
CALLS = st.lists(
    st.tuples(
        BEHAVIOURS, st.integers(0, 4), st.sampled_from([Profile.BARE, Profile.NUMERIC, Profile.VERIFY]), st.booleans()
    ),
    max_size=25,
)


@settings(max_examples=150)
@given(CALLS, st.integers(1, 3), st.integers(1, 5))
def test_every_call_is_answered_exactly_once(calls: list[Any], families: int, slots: int) -> None:
    async def main() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            async with driven(monkeypatch, zygote_pools=families, slots=max(families, slots)) as driver:
                await _live_through(driver, calls)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def _live_through(driver: Driven, calls: list[Any]) -> None:
    wanted = []
    for seq, (what, times, profile, is_cancelled) in enumerate(calls):
        code = f"{what} {times} {seq}"
        driver.executor.submit(seq, {"code": code, "profile": profile.value})
        if seq % 3 == 0:
            driver.executor.pump()
        if is_cancelled:
            if seq % 2:
                await trio.sleep(0.005)
            driver.executor.cancel(seq)
        else:
            wanted.append(seq)
    driver.executor.pump()
    await driver.all_of(wanted)
    for seq in wanted:
        result = driver.answers[seq]
        assert result.status in (Status.OK, Status.UNAVAILABLE)
        assert result.attempts <= 3
        if result.status is Status.OK and result.stdout:
            assert result.stdout.endswith(f" {seq}"), "the answer is its own"
    families = driver.executor.families  # cancelled calls end, too, or cost their jail
    await until(lambda: not any(zygote.calls for family in families for zygote in family.zygotes.values()))
    await driver.run("ok")
    driver.check_at_rest()


def test_a_glance_at_imports_is_only_a_glance() -> None:
    endless = "import sympy\nimport " + ",".join(f"a{n}" for n in range(500_000))
    found = profile_choice.imported(endless)
    assert "sympy" in found
    assert len(found) < profile_choice.GLANCE
    assert profile_choice.imported("#" * profile_choice.GLANCE + "\nimport numpy") == set()
