"""Zygotes that go wrong among calls of others: each call has its own answer, once, or no verdict."""

from __future__ import annotations

import random

import pytest
from trio.testing import MockClock

from sandbox.types import Profile, Status
from tests.executor.zygotes import HOSTILE, driven

WRONG = (*HOSTILE, "hang")


@pytest.mark.parametrize("what", ["hang", "garbage", "twice", "other"])
@pytest.mark.trio
async def test_a_zygote_that_is_wrong_once_costs_its_neighbours_nothing(
    what: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, slots=8) as driver:
        seqs = driver.submit(*(f"{what} 1 {n}" if n == 3 else f"slow 99 {n}" for n in range(16)))
        await driver.all_of(seqs)
        results = [driver.answers[seq] for seq in seqs]
        assert {result.status for result in results} == {Status.OK}
        assert [result.stdout.split()[-1] for result in results] == [str(n) for n in range(16)]
        driver.check_at_rest()


@pytest.mark.trio
async def test_a_zygote_that_never_answers_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with driven(monkeypatch, attempts=2) as driver:
        stuck, fine = driver.submit("hang", "ok")
        await driver.all_of([stuck, fine])
        assert (driver.answers[stuck].status, driver.answers[stuck].attempts) == (Status.UNAVAILABLE, 2)
        assert driver.answers[fine].status is Status.OK
        driver.check_at_rest()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.trio
async def test_hundreds_of_calls_among_all_that_can_go_wrong(
    seed: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    rng = random.Random(seed)
    async with driven(monkeypatch, slots=8, attempts=5) as driver:
        seqs = []
        for number in range(300):
            what = rng.choice(WRONG) if rng.random() < 0.1 else "slow"
            profile = rng.choice([Profile.BARE, Profile.NUMERIC])
            seqs += driver.submit(f"{what} {rng.randrange(3)} {number}", profile=profile)
        await driver.all_of(seqs)
        for number, seq in enumerate(seqs):
            result = driver.answers[seq]
            assert result.status in (Status.OK, Status.UNAVAILABLE)
            assert result.status is Status.UNAVAILABLE or result.stdout.split()[-1] == str(number)
        driver.check_at_rest()
