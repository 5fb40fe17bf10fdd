"""Tests with zygotes (the interpreters that fork once per call) that have faults.

Each call gets one result: its own, or `unavailable`. The code of a call is "NAME TIMES NUMBER". NAME selects what a
fake zygote does in the first TIMES attempts of the call (`tests/executor/fake_zygotes.py`). NUMBER makes the codes
different.
"""

from __future__ import annotations

import random

import pytest
from trio.testing import MockClock

from sandbox.types import Profile, Status
from tests.executor.fake_zygotes import HOSTILE_BEHAVIOURS, driven_executor

FAULTS = (*HOSTILE_BEHAVIOURS, "hang")


@pytest.mark.parametrize("fault", ["hang", "garbage", "twice", "other_call"])
@pytest.mark.trio
async def test_one_fault_of_a_zygote_changes_no_other_result(
    fault: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch, slots=8) as driver:
        codes = [f"slow 99 {number}" for number in range(16)]  # 99: in each attempt
        codes[3] = f"{fault} 1 3"
        seqs = driver.submit(*codes)
        await driver.wait_for(seqs)
        results = [driver.results[seq] for seq in seqs]
        assert {result.status for result in results} == {Status.OK}
        assert [result.stdout.split()[-1] for result in results] == [str(number) for number in range(16)]
        driver.check_idle()


@pytest.mark.trio
async def test_a_call_whose_zygote_never_reports_its_end_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven_executor(monkeypatch, attempts=2) as driver:
        stuck, fine = driver.submit("hang", "ok")
        await driver.wait_for([stuck, fine])
        assert (driver.results[stuck].status, driver.results[stuck].attempts) == (Status.UNAVAILABLE, 2)
        assert driver.results[fine].status is Status.OK
        driver.check_idle()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.trio
async def test_hundreds_of_calls_among_all_faults_get_their_own_results(
    seed: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    rng = random.Random(seed)
    async with driven_executor(monkeypatch, slots=8, attempts=5) as driver:
        seqs = []
        for number in range(300):
            behaviour = rng.choice(FAULTS) if rng.random() < 0.1 else "slow"
            times = rng.randrange(3)
            profile = rng.choice([Profile.BARE, Profile.NUMERIC])
            seqs += driver.submit(f"{behaviour} {times} {number}", profile=profile)
        await driver.wait_for(seqs)
        for number, seq in enumerate(seqs):
            result = driver.results[seq]
            assert result.status in (Status.OK, Status.UNAVAILABLE)
            assert result.status is Status.UNAVAILABLE or result.stdout.split()[-1] == str(number)
        driver.check_idle()
