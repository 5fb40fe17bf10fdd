"""What a soak promises, and that it says which of it was missed."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest

from bench import soak
from bench.chaos import Load, Tally
from bench.leaks import Holdings
from bench.soak import Sight
from bench.workloads import checked_calls
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from tests.executor.calling import OWN_PYTHON

REST = Holdings(1000, 8, 0, 200, 90, 4, 0, 120.0)
WORK = Sight(0.0, 0, 150.0, 260, 30, 2, 200, 4, 80.0, 90.0)


def _tally(**more: Any) -> Tally:
    return Tally(4000, answered=4000, statuses=Counter(ok=4000), latencies_ms=[1.0], **more)


def _sights(**rises: float) -> list[Sight]:
    """Forty looks, a hundred calls apart, with so much more of everything named from one to the next."""
    return [
        replace(WORK, calls=100 * turn, **{name: getattr(WORK, name) + by * turn for name, by in rises.items()})
        for turn in range(1, 41)
    ]


def _marks() -> list[Holdings]:
    return [replace(REST, calls=1000 * turn) for turn in range(1, 5)]


def test_steady_traffic_holds() -> None:
    figures = soak.summarise(_tally(), _sights(), _marks(), [])
    assert figures["holds"], figures["missed"]
    assert figures["last_half"]["memory_mb"]["median"] == 150
    assert figures["at_work"][::39] == [(100, 150.0), (4000, 150.0)]
    assert len(soak.summarise(_tally(), _sights() * 20, _marks(), [])["at_work"]) == 200


@pytest.mark.parametrize("name", [*soak.MEMORY, *soak.TOLERANCE])
def test_whatever_grows_at_work_is_named(name: str) -> None:
    figures = soak.summarise(_tally(), _sights(**{name: 1}), _marks(), [])
    assert [line.split()[0] for line in figures["missed"]] == [name]


def _wavering(seed: int, rise_mb: float) -> list[Sight]:
    """A run of 1,000,000 calls: the gateway's memory wavers by 1 MiB, and rises by so much over the last half."""
    rng = random.Random(seed)
    return [
        replace(WORK, calls=5000 * turn, gateway_mb=90 + rng.gauss(0, 1) + rise_mb * turn / 100)
        for turn in range(1, 201)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_line_that_is_as_low_as_the_noise_is_named_and_noise_alone_is_not(seed: int) -> None:
    tally = Tally(1_000_000, answered=1_000_000, latencies_ms=[1.0])
    marks = [replace(REST, calls=250_000 * turn) for turn in range(1, 5)]
    leak, noise = (soak.summarise(tally, _wavering(seed, rise_mb), marks, []) for rise_mb in (3.0, 0.0))
    assert [line.split()[0] for line in leak["missed"]] == ["gateway_mb"]
    assert noise["holds"], noise["missed"]


def test_a_block_that_an_allocator_takes_once_is_no_line() -> None:
    tally = Tally(1_000_000, answered=1_000_000, latencies_ms=[1.0])
    sights = [replace(one, gateway_mb=one.gateway_mb + 4 * (one.calls > 750_000)) for one in _wavering(1, 0.0)]
    marks = [replace(REST, calls=250_000 * turn) for turn in range(1, 5)]
    assert soak.summarise(tally, sights, marks, [])["holds"]


def test_the_slab_is_the_machines() -> None:
    figures = soak.summarise(_tally(), _sights(slab_mb=5), _marks(), [])
    assert figures["holds"] and figures["last_half"]["slab_mb"]["growth"] > 50


def test_growth_of_the_first_half_does_not_count() -> None:
    sights = [replace(sight, memory_mb=min(sight.calls, 1900) / 10) for sight in _sights()]
    assert soak.summarise(_tally(), sights, _marks(), [])["holds"]


def test_what_grows_at_rest_over_the_last_half_is_named() -> None:
    marks = _marks()
    marks = [*marks[:2], *(replace(mark, processes=9) for mark in marks[2:])]
    missed = soak.summarise(_tally(), _sights(), marks, [])["missed"]
    assert missed == ["processes at rest grew from 8 to 9"]


def test_too_few_looks_are_no_proof() -> None:
    missed = soak.summarise(_tally(), _sights()[:25], _marks(), [])["missed"]
    assert [line.startswith("6 looks in the last half, expected 10") for line in missed] == [True]


@pytest.mark.parametrize(
    ("tally", "left", "missed"),
    [
        (Tally(4001, answered=4000), [], "1 lost"),
        (_tally(doubled=2), [], "2 doubled"),
        (_tally(unavailable=Counter(ExecutorLost=3)), [], "3 unavailable"),
        (_tally(), ["process: x"], "1 left behind"),
    ],
)
def test_what_is_not_answered_right_once_is_named(tally: Tally, left: list[str], missed: str) -> None:
    figures = soak.summarise(tally, _sights(), _marks(), left)
    assert figures["missed"] == [f"{missed}, expected none"]


def test_the_stretches_together_ask_as_many_as_were_wanted() -> None:
    tally = Tally(0)
    args = argparse.Namespace(calls=10, seconds=None, seed=0, lean=True)
    asked = [[riddle.call.id for riddle in soak._asked(tally, args, stretch)] for stretch in range(4)]
    assert [len(some) for some in asked] == [2, 3, 2, 3]
    assert len({one for some in asked for one in some}) == 10 == tally.calls


@pytest.mark.asyncio
async def test_when_nothing_is_answered_any_more_the_rest_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        async def run(self, in_flight: int) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(soak, "STALLED_S", 0.01)
    await soak._until_stalled(cast(Load, Silent()), Tally(1), 1)


@pytest.mark.asyncio
async def test_what_goes_wrong_in_asking_is_said() -> None:
    class Broken:
        async def run(self, in_flight: int) -> None:
            raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        await soak._until_stalled(cast(Load, Broken()), Tally(1), 1)


def test_calls_and_seconds_are_one_or_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        soak.main(["--calls", "5", "--seconds", "5"])
    assert leaving.value.code == 2
    assert "--seconds" in capsys.readouterr().err


@pytest.mark.timeout(400)
def test_a_short_soak_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        choose_level("auto")
    except IsolationError as why:
        pytest.skip(str(why))
    code = soak.main(["--calls", "80", "--lean", "--python", OWN_PYTHON, "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    figures = json.loads(captured.out.splitlines()[-1])
    assert (figures["calls"], figures["answered"], figures["lost"]) == (80, 80, 0), captured.err
    assert (figures["doubled"], figures["mixed_up"]) == (0, 0), captured.err
    assert len(figures["at_rest"]) == 4 and sum(figures["statuses"].values()) == 80
    assert code == (0 if figures["holds"] else 1)


def test_the_riddles_of_a_soak_are_those_of_the_whole_tree_unless_it_is_lean() -> None:
    args = argparse.Namespace(calls=4000, seconds=None, seed=0, lean=False)
    kinds = {riddle.kind for riddle in soak._asked(Tally(0), args, 0)}
    assert kinds == set(checked_calls.KINDS)
