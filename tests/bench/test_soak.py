"""The requirements on a soak, and the names of those that are not met."""

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
from bench.harness.load import CallTally
from bench.harness.requirements import hold
from bench.probes.resources import ResourceSnapshot
from bench.servers.server_under_test import CheckedLoad
from bench.workloads.checked_calls import KIND_WEIGHTS
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from tests.executor.calling import OWN_PYTHON

REST = ResourceSnapshot(1000, 120.0, 60.0, processes=8, descriptors=200, mounts=90, cgroups=4)
LOADED = ResourceSnapshot(0, 150.0, 90.0, processes=30, zombies=2, descriptors=260, mounts=200, cgroups=4, slab_mb=80.0)


def _tally(calls: int = 4000, **fields: Any) -> CallTally:
    return CallTally(calls, **{"correct": calls, **fields})


def _not_met(result: dict[str, Any]) -> list[str]:
    """Names of the requirements that are not met."""
    return [row["name"] for row in result["requirements"] if not row["holds"]]


def _samples(**increase: float) -> list[ResourceSnapshot]:
    """Forty samples, a hundred calls apart; the named resources increase by so much from each to the next."""
    return [
        replace(LOADED, calls=100 * turn, **{name: getattr(LOADED, name) + by * turn for name, by in increase.items()})
        for turn in range(1, 41)
    ]


def _at_rest() -> list[ResourceSnapshot]:
    return [replace(REST, calls=1000 * turn) for turn in range(1, 5)]


def test_steady_traffic_meets_the_requirements() -> None:
    result = soak.summarize(_tally(), _samples(), _at_rest(), [])
    assert _not_met(result) == []
    assert result["last_half"]["memory_mb"]["median"] == 150
    assert result["under_load"][::39] == [(100, 150.0), (4000, 150.0)]
    assert len(soak.summarize(_tally(), _samples() * 20, _at_rest(), [])["under_load"]) == 200


@pytest.mark.parametrize("name", [*soak.MEMORY, *soak.TOLERANCE])
def test_every_resource_that_grows_under_load_is_named(name: str) -> None:
    result = soak.summarize(_tally(), _samples(**{name: 1}), _at_rest(), [])
    assert [text.split()[2] for text in _not_met(result)] == [name]


def _noisy(seed: int, rise_mb: float) -> list[ResourceSnapshot]:
    """1,000,000 calls: the gateway's memory has noise of 1 MiB and rises by `rise_mb` over the last half."""
    rng = random.Random(seed)
    return [
        replace(LOADED, calls=5000 * turn, gateway_mb=90 + rng.gauss(0, 1) + rise_mb * turn / 100)
        for turn in range(1, 201)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_rise_as_low_as_the_noise_is_named_and_noise_alone_is_not(seed: int) -> None:
    tally = _tally(1_000_000)
    at_rest = [replace(REST, calls=250_000 * turn) for turn in range(1, 5)]
    leak, noise = (soak.summarize(tally, _noisy(seed, rise_mb), at_rest, []) for rise_mb in (3.0, 0.0))
    assert _not_met(leak) == ["growth of gateway_mb in a line"]
    assert not _not_met(noise), noise["missed"]


def test_one_block_that_an_allocator_takes_is_no_growth() -> None:
    tally = _tally(1_000_000)
    samples = [
        replace(sample, gateway_mb=sample.gateway_mb + 4 * (sample.calls > 750_000)) for sample in _noisy(1, 0.0)
    ]
    at_rest = [replace(REST, calls=250_000 * turn) for turn in range(1, 5)]
    assert hold(soak.summarize(tally, samples, at_rest, [])["requirements"])


def test_growth_of_the_slab_is_shown_and_not_judged() -> None:
    result = soak.summarize(_tally(), _samples(slab_mb=5), _at_rest(), [])
    assert hold(result["requirements"]) and result["last_half"]["slab_mb"]["growth"] > 50


def test_growth_in_the_first_half_does_not_count() -> None:
    samples = [replace(sample, memory_mb=min(sample.calls, 1900) / 10) for sample in _samples()]
    assert hold(soak.summarize(_tally(), samples, _at_rest(), [])["requirements"])


def test_a_resource_that_grows_at_rest_over_the_last_half_is_named() -> None:
    at_rest = _at_rest()
    at_rest = [*at_rest[:2], *(replace(snapshot, processes=9) for snapshot in at_rest[2:])]
    missed = _not_met(soak.summarize(_tally(), _samples(), at_rest, []))
    assert missed == ["processes at rest"]


def test_too_few_samples_do_not_meet_the_requirements() -> None:
    missed = _not_met(soak.summarize(_tally(), _samples()[:25], _at_rest(), []))
    assert missed == ["samples in the last half"]


@pytest.mark.parametrize(
    ("tally", "left", "missed"),
    [
        (CallTally(4001, correct=4000), [], "lost"),
        (_tally(doubled=2), [], "doubled"),
        (_tally(correct=3997, unavailable=Counter(ExecutorLost=3)), [], "unavailable"),
        (_tally(), ["process: x"], "leftovers"),
    ],
)
def test_every_kind_of_error_is_named(tally: CallTally, left: list[str], missed: str) -> None:
    result = soak.summarize(tally, _samples(), _at_rest(), left)
    assert _not_met(result) == [missed]


def test_the_quarters_together_send_the_requested_number_of_calls() -> None:
    tally = CallTally()
    args = argparse.Namespace(calls=10, seconds=None, seed=0, stdlib_only=True)
    sent = [[call.call["id"] for call in soak._quarter_calls(tally, args, quarter)] for quarter in range(4)]
    assert [len(quarter) for quarter in sent] == [2, 3, 2, 3]
    assert len({call_id for quarter in sent for call_id in quarter}) == 10 == tally.calls


@pytest.mark.asyncio
async def test_the_load_ends_when_no_call_is_answered_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        async def run(self, in_flight: int) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(soak, "STALL_TIMEOUT_S", 0.01)
    await soak._until_stalled(cast(CheckedLoad, Silent()), CallTally(1), 1)


@pytest.mark.asyncio
async def test_an_error_of_the_load_is_raised() -> None:
    class Broken:
        async def run(self, in_flight: int) -> None:
            raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        await soak._until_stalled(cast(CheckedLoad, Broken()), CallTally(1), 1)


def test_calls_and_seconds_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        soak.main(["--calls", "5", "--seconds", "5"])
    assert exit_info.value.code == 2
    assert "--seconds" in capsys.readouterr().err


@pytest.mark.timeout(400)
def test_a_short_soak_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        choose_level("auto")
    except IsolationError as error:
        pytest.skip(str(error))
    code = soak.main(["--calls", "80", "--stdlib-only", "--python", OWN_PYTHON, "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    result = json.loads(captured.out.splitlines()[-1])
    assert (result["calls"], result["answered"], result["lost"]) == (80, 80, 0), captured.err
    assert (result["doubled"], result["mismatched"]) == (0, 0), captured.err
    assert len(result["at_rest"]) == 4 and sum(result["statuses"].values()) == 80
    assert code == (0 if result["holds"] else 1)


def test_a_soak_has_calls_of_all_kinds_unless_it_is_limited_to_the_standard_library() -> None:
    args = argparse.Namespace(calls=4000, seconds=None, seed=0, stdlib_only=False)
    kinds = {call.group for call in soak._quarter_calls(CallTally(), args, 0)}
    assert kinds == set(KIND_WEIGHTS)
