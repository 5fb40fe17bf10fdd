"""Tests of the zygote pool: one jail, and a zygote (an interpreter that forks once per call) per profile in it.

Zygotes are started, restarted and replaced. If a zygote breaks the protocol, its whole jail is ended.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from sandbox.errors import NodeError
from sandbox.executor import zygote_pool
from sandbox.types import Profile, Status
from tests.executor import fake_zygotes
from tests.executor.fake_zygotes import HOSTILE_BEHAVIOURS, FakeZygote, driven_executor, frame, until


@pytest.mark.parametrize("behaviour", [name for name in HOSTILE_BEHAVIOURS if name not in ("die", "kill_jail")])
@pytest.mark.parametrize("profile", [Profile.BARE, Profile.NUMERIC])
@pytest.mark.trio
async def test_a_protocol_error_ends_the_jail(
    behaviour: str, profile: Profile, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch, zygote_pools=1) as driver:
        await driver.run(f"{behaviour} 1", profile=profile)
        await driver.executor.wait_ready()
        (jail, *_) = driver.fleet.jails
        await until(lambda: not any(zygote.is_open for zygote in jail.zygotes))
        (result,) = await driver.run("ok", profile=profile)
        assert result.status is Status.OK


@pytest.mark.trio
async def test_the_death_of_a_zygote_does_not_affect_other_zygotes(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch, zygote_pools=1) as driver:
        bystander = driver.submit("slow 9", profile=Profile.BARE)
        (result,) = await driver.run("die 1", profile=Profile.NUMERIC)
        await driver.wait_for(bystander)
        assert result.attempts == 2
        assert driver.results[bystander[0]].attempts == 1
        assert len(driver.fleet.jails) == 1


@pytest.mark.trio
async def test_a_jail_that_outlives_its_kill_is_logged_and_replaced(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with driven_executor(monkeypatch, zygote_pools=1) as driver:
        driver.fleet.jails[0].outlives_kill = True
        (result,) = await driver.run("garbage 1")
        assert (result.status, len(driver.fleet.jails)) == (Status.OK, 2)
    assert f"has not ended {zygote_pool.KILL_TIMEOUT_S:g} s after SIGKILL" in caplog.text


@pytest.mark.trio
async def test_calls_of_another_jail_end_while_a_killed_jail_does_not(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch, zygote_pools=2) as driver:
        driver.fleet.jails[0].outlives_kill = driver.fleet.jails[1].outlives_kill = True
        lost = driver.submit("garbage 1")
        await until(lambda: any(not zygote.is_open for jail in driver.fleet.jails for zygote in jail.zygotes))
        killed_at = trio.current_time()
        (result,) = await driver.run("ok")
        waited_s = trio.current_time() - killed_at
        assert (result.status, waited_s < zygote_pool.KILL_TIMEOUT_S) == (Status.OK, True), f"waited {waited_s} s"
        await driver.wait_for(lost)


def test_the_executor_ends_if_its_zygotes_never_start(monkeypatch: pytest.MonkeyPatch) -> None:
    two_byte_header = b"\2\0\0\0\0\0\0\0{}"
    for behaviour in (
        FakeZygote.end,
        partial(FakeZygote.garbage, _run_id=0),
        partial(FakeZygote.send, data=two_byte_header),
    ):

        async def main(behaviour: Any = behaviour) -> None:
            with trio.fail_after(10_000):  # seconds of Trio's mock clock, which jumps
                async with driven_executor_with(monkeypatch, behaviour):
                    pytest.fail("the executor is ready")

        with pytest.raises(BaseExceptionGroup) as raised:
            trio.run(main, clock=MockClock(autojump_threshold=0))
        assert raised.group_contains(NodeError)


@pytest.mark.trio
async def test_only_missing_modules_of_the_verify_profile_are_logged_by_the_executor(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def send_loaded(zygote: FakeZygote) -> None:
        is_verify = len(zygote.fleet.zygotes) > 2  # the first two are bare and numeric
        missing = ["math_verify"] if is_verify else ["numpy"]
        zygote.send(frame({"op": "loaded", "python": "3.0", "modules": ["sys"], "missing": missing, "problems": []}))

    caplog.set_level("INFO")
    monkeypatch.setattr(FakeZygote, "send_loaded", send_loaded)
    async with driven_executor(monkeypatch, zygote_pools=1) as driver:
        assert [zygote.missing_modules for zygote in driver.executor.all_zygotes()] == [["numpy"], ["numpy"]]
        lines_before = [line for line in caplog.messages if "lacks" in line]
        await driver.run("ok", profile=Profile.VERIFY)
        lines = [line for line in caplog.messages if "lacks" in line]
    assert lines_before == [], "the server logs the modules that other zygotes lack"
    assert lines == ["the Python that runs the calls lacks math_verify, so answers cannot be checked; install them"]


@pytest.mark.parametrize("lacking", ["processes", "descriptors"])
@pytest.mark.trio
async def test_a_temporary_lack_of_processes_or_descriptors_does_not_end_the_executor(
    lacking: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch, zygote_pools=1, attempts=2) as driver:
        start_jail, socketpair = zygote_pool.ZygotePool._start_jail, socket.socketpair
        failures = iter(range(5))

        def fail_at_first(*args: Any, **kwargs: Any) -> Any:
            if next(failures, None) is not None:
                raise NodeError("no processes") if lacking == "processes" else OSError(24, "Too many open files")
            return start_jail(*args, **kwargs) if lacking == "processes" else socketpair(*args, **kwargs)

        with monkeypatch.context() as patch:
            if lacking == "processes":
                patch.setattr(zygote_pool.ZygotePool, "_start_jail", fail_at_first)
            else:
                patch.setattr("sandbox.executor.zygote_pool.socket.socketpair", fail_at_first)
            results = await driver.run("kill_jail 1", "ok")
            assert next(failures, None) is None, "all failures have happened"
        assert {result.status for result in results} == {Status.OK}


@pytest.mark.trio
async def test_a_replacement_is_ready_with_one_zygote(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    send_loaded = FakeZygote.send_loaded

    def send_loaded_if_first(zygote: FakeZygote) -> None:
        if zygote is zygote.fleet.zygotes[0]:
            send_loaded(zygote)

    monkeypatch.setattr(FakeZygote, "send_loaded", send_loaded_if_first)
    async with driven_executor(monkeypatch, is_replacement=True) as driver:
        assert [zygote.profile for zygote in driver.executor.all_zygotes()] == [Profile.BARE]
        (result,) = await driver.run("ok", profile=Profile.NUMERIC)
        assert result.status is Status.OK


@pytest.mark.trio
async def test_verify_calls_wait_for_their_zygote_and_delay_no_other_call(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch) as driver:
        zygotes_before = len(driver.fleet.zygotes)
        starting: list[FakeZygote] = []
        with monkeypatch.context() as patch:
            patch.setattr(FakeZygote, "send_loaded", lambda zygote: starting.append(zygote))
            checks = driver.submit(*(f"ok 9 {n}" for n in range(20)), profile=Profile.VERIFY)
            driver.executor.cancel(checks.pop())
            await driver.run(*(f"slow 9 {n}" for n in range(20)))
            assert len(starting) == 2, "the first verify call starts one verify zygote in each pool"
        assert not any(seq in driver.results for seq in checks)
        assert driver.executor.stats()["queued"] == 20, "with the cancelled call"
        starting[0].send_loaded()
        await driver.wait_for(checks)
        assert {driver.results[seq].attempts for seq in checks} == {1}
        starting[1].send_loaded()
        assert len(driver.fleet.zygotes) == zygotes_before + 2
        await driver.run("ok", profile=Profile.VERIFY)
        driver.check_idle()


@pytest.mark.trio
async def test_verify_calls_run_in_other_zygotes_if_theirs_fails_to_start(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """A real zygote of another profile cannot import `rstar_answer_check`. So the call ends there with an error, and
    without a verdict."""
    async with driven_executor(monkeypatch) as driver:
        zygotes_before = len(driver.fleet.zygotes)
        send_loaded = FakeZygote.send_loaded
        monkeypatch.setattr(FakeZygote, "send_loaded", FakeZygote.end)
        results = await driver.run(*(f"ok 9 {n}" for n in range(9)), profile=Profile.VERIFY)
        assert {result.status for result in results} == {Status.OK}, "fake zygotes run any code"
        assert len(driver.fleet.zygotes) >= zygotes_before + 2 * 3, "each of the two pools has tried three times"
        monkeypatch.setattr(FakeZygote, "send_loaded", send_loaded)
        await until(lambda: all(Profile.VERIFY in pool.zygotes for pool in driver.executor.pools))
        await driver.run("die 1", profile=Profile.VERIFY)
        driver.check_idle()


def driven_executor_with(monkeypatch: pytest.MonkeyPatch, behaviour: Any) -> Any:
    """Start a `driven_executor`, in which `behaviour` replaces `send_loaded`. It is called with the first zygote of
    each jail."""

    class FailingFleet(fake_zygotes.Fleet):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.on_start = behaviour

    monkeypatch.setattr(fake_zygotes, "Fleet", FailingFleet)
    return driven_executor(monkeypatch)


LOADED = {"op": "loaded", "modules": [], "python": "3", "missing": [], "problems": []}


@pytest.mark.parametrize(
    "frames",
    [
        [{"op": "loaded"}],
        [{**LOADED, "modules": 5}],
        [{**LOADED, "modules": ["a", 5]}],
        [{**LOADED, "python": {}}],
        [{**LOADED, "missing": {"a": 1}}],
        [{**LOADED, "missing": [[]]}],
        [{**LOADED, "op": "ended"}],
        [LOADED, {"op": "ready"}],  # before `start`
        [{"op": "ready"}],
    ],
)
@pytest.mark.trio
async def test_a_zygote_with_an_invalid_handshake_is_restarted(
    frames: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch) as driver:
        is_first = iter([True])

        def send_invalid_frame_first(zygote: FakeZygote) -> None:
            if next(is_first, False):
                zygote.send(b"".join(map(frame, frames)))
            else:
                zygote.send_loaded()

        driver.fleet.on_start = send_invalid_frame_first  # the jails run already, so this affects only a restarted jail
        (result,) = await driver.run("kill_jail 1", profile=Profile.BARE)
        assert (result.status, result.attempts) == (Status.OK, 2)
