"""Zygotes are started, restarted and replaced; a hostile one costs its jail."""

from __future__ import annotations

import re
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from sandbox.errors import NodeError
from sandbox.executor import zygote_pool
from sandbox.jail import GUEST_SOURCE_DIR
from sandbox.types import Profile, Status
from tests.executor.test_executor import until
from tests.executor.zygotes import HOSTILE, FakeZygote, driven, frame


@pytest.mark.parametrize("behaviour", [name for name in HOSTILE if name not in ("die", "kill_jail")])
@pytest.mark.parametrize("profile", [Profile.BARE, Profile.NUMERIC])
@pytest.mark.trio
async def test_a_protocol_error_ends_the_jail(
    behaviour: str, profile: Profile, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, zygote_pools=1) as driver:
        await driver.run(f"{behaviour} 1", profile=profile)
        await driver.executor.wait_ready()
        (jail, *_) = driver.fleet.jails
        await until(lambda: not any(peer.is_open for peer in jail.zygotes))
        (result,) = await driver.run("ok", profile=profile)
        assert result.status is Status.OK


@pytest.mark.trio
async def test_the_death_of_a_zygote_does_not_affect_other_zygotes(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, zygote_pools=1) as driver:
        bystander = driver.submit("slow 9", profile=Profile.BARE)
        (result,) = await driver.run("die 1", profile=Profile.NUMERIC)
        await driver.wait_for(bystander)
        assert result.attempts == 2
        assert driver.results[bystander[0]].attempts == 1
        assert len(driver.fleet.jails) == 1


def test_the_executor_ends_if_its_zygotes_never_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for start in (
        FakeZygote.end,
        partial(FakeZygote.garbage, _run_id=0),
        partial(FakeZygote.send, data=b"\2\0\0\0\0\0\0\0{}"),
    ):

        async def main(start: Any = start) -> None:
            with trio.fail_after(10_000):
                async with driven_from(monkeypatch, start):
                    pytest.fail("the executor is ready")

        with pytest.raises(BaseExceptionGroup) as raised:
            trio.run(main, clock=MockClock(autojump_threshold=0))
        assert raised.group_contains(NodeError)


@pytest.mark.trio
async def test_missing_modules_of_the_verify_profile_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def send_ready(zygote: FakeZygote) -> None:
        is_verify = len(zygote.fleet.zygotes) > 2
        missing = ["math_verify"] if is_verify else ["numpy"]
        zygote.send(frame({"op": "ready", "python": "3.0", "modules": ["sys"], "missing": missing, "problems": []}))

    caplog.set_level("INFO")
    monkeypatch.setattr(FakeZygote, "send_ready", send_ready)
    async with driven(monkeypatch, zygote_pools=1) as driver:
        assert [zygote.missing_modules for zygote in driver.executor.all_zygotes()] == [["numpy"], ["numpy"]]
        before = [line for line in caplog.messages if "lacks" in line]
        await driver.run("ok", profile=Profile.VERIFY)
        lines = [line for line in caplog.messages if "lacks" in line]
    assert before == []
    assert lines == ["the Python that runs the calls lacks math_verify, so answers cannot be checked; install them"]


@pytest.mark.parametrize("lacking", ["jail", "sockets"])
@pytest.mark.trio
async def test_a_temporary_lack_of_processes_or_descriptors_does_not_end_the_executor(
    lacking: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, zygote_pools=1, attempts=2) as driver:
        start_jail, socketpair = zygote_pool.ZygotePool._start_jail, socket.socketpair
        failures = iter(range(5))

        def fail_at_first(*args: Any, **kwargs: Any) -> Any:
            if next(failures, None) is not None:
                raise NodeError("no processes") if lacking == "jail" else OSError(24, "Too many open files")
            return start_jail(*args, **kwargs) if lacking == "jail" else socketpair(*args, **kwargs)

        with monkeypatch.context() as patch:
            if lacking == "jail":
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
    send_ready = FakeZygote.send_ready

    def send_ready_if_first(zygote: FakeZygote) -> None:
        if zygote is zygote.fleet.zygotes[0]:
            send_ready(zygote)

    monkeypatch.setattr(FakeZygote, "send_ready", send_ready_if_first)
    async with driven(monkeypatch, is_replacement=True) as driver:
        assert [zygote.profile for zygote in driver.executor.all_zygotes()] == [Profile.BARE]
        (result,) = await driver.run("ok", profile=Profile.NUMERIC)
        assert result.status is Status.OK


@pytest.mark.trio
async def test_verify_calls_wait_for_their_zygote_and_delay_no_other_call(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch) as driver:
        others = len(driver.fleet.zygotes)
        slow: list[FakeZygote] = []
        with monkeypatch.context() as patch:
            patch.setattr(FakeZygote, "send_ready", lambda zygote: slow.append(zygote))
            checks = driver.submit(*(f"ok 9 {n}" for n in range(20)), profile=Profile.VERIFY)
            driver.executor.cancel(checks.pop())
            await driver.run(*(f"slow 9 {n}" for n in range(20)))
            assert len(slow) == 2, "one verify zygote per pool, started by the first call for it"
        assert not any(seq in driver.results for seq in checks)
        assert driver.executor.stats()["queued"] == 20
        slow[0].send_ready()
        await driver.wait_for(checks)
        assert {driver.results[seq].attempts for seq in checks} == {1}
        slow[1].send_ready()
        assert len(driver.fleet.zygotes) == others + 2
        await driver.run("ok", profile=Profile.VERIFY)
        driver.check_idle()


@pytest.mark.trio
async def test_verify_calls_run_elsewhere_if_their_zygote_fails_to_start(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """In a real zygote of another profile the import of the checker fails, which ends as an error, not as a verdict."""
    async with driven(monkeypatch) as driver:
        others = len(driver.fleet.zygotes)
        send_ready = FakeZygote.send_ready
        monkeypatch.setattr(FakeZygote, "send_ready", FakeZygote.end)
        results = await driver.run(*(f"ok 9 {n}" for n in range(9)), profile=Profile.VERIFY)
        assert {result.status for result in results} == {Status.OK}, "fake zygotes run any code"
        assert len(driver.fleet.zygotes) >= others + 6, "each of the two pools has tried three times"
        monkeypatch.setattr(FakeZygote, "send_ready", send_ready)
        await until(lambda: all(Profile.VERIFY in pool.zygotes for pool in driver.executor.pools))
        await driver.run("die 1", profile=Profile.VERIFY)
        driver.check_idle()


def driven_from(monkeypatch: pytest.MonkeyPatch, start: Any) -> Any:
    """`driven`, with `start` as the behaviour of each jail's first zygote."""
    from tests.executor import zygotes

    class FailingFleet(zygotes.Fleet):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.on_start = start

    monkeypatch.setattr(zygotes, "Fleet", FailingFleet)
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
async def test_a_zygote_with_an_invalid_ready_frame_is_restarted(
    ready: dict[str, Any], monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch) as driver:
        is_first = iter([True])

        def start(zygote: FakeZygote) -> None:
            if next(is_first, False):
                zygote.send(frame(ready))
            else:
                zygote.send_ready()

        driver.fleet.on_start = start  # the jails of `driven` have started already; this is for their restart
        (result,) = await driver.run("kill_jail 1", profile=Profile.BARE)
        assert (result.status, result.attempts) == (Status.OK, 2)


def test_a_zygote_has_a_confinement_mark_for_every_slot_of_a_pool() -> None:
    source = (Path(GUEST_SOURCE_DIR) / "zygote.py").read_text()
    (size,) = re.findall(r"^_MAX_SLOTS\w* = (\d+)$", source, re.MULTILINE)
    assert int(size) == zygote_pool.MAX_SLOTS_PER_POOL
