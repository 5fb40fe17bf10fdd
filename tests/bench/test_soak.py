"""bench.soak: which requirements are not met, and when its load ends."""

from __future__ import annotations

import argparse
import asyncio
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
from tests.bench.conftest import RefusedArguments, RunBenchmark
from tests.executor.calling import OWN_PYTHON

AT_REST = ResourceSnapshot(
    calls=1000, memory_mb=120.0, gateway_mb=60.0, processes=8, descriptors=200, mounts=90, cgroups=4
)
UNDER_LOAD = ResourceSnapshot(
    calls=0,
    memory_mb=150.0,
    gateway_mb=90.0,
    processes=30,
    zombies=2,
    descriptors=260,
    mounts=200,
    cgroups=4,
    slab_mb=80.0,
)


def _tally(calls: int = 4000, **fields: Any) -> CallTally:
    """A tally whose calls are all correct, except for the changed fields."""
    return CallTally(calls, **{"correct": calls, **fields})


def _unmet(result: dict[str, Any]) -> list[str]:
    """Names of the requirements that are not met."""
    return [row["name"] for row in result["requirements"] if not row["holds"]]


def _samples(**increase: float) -> list[ResourceSnapshot]:
    """Forty samples, 100 calls apart. Each named resource increases by its value before each of them."""
    return [
        replace(
            UNDER_LOAD,
            calls=100 * turn,
            **{name: getattr(UNDER_LOAD, name) + step * turn for name, step in increase.items()},
        )
        for turn in range(1, 41)
    ]


def _at_rest(calls: int = 4000) -> list[ResourceSnapshot]:
    """The snapshots after each quarter of the calls, without growth."""
    return [replace(AT_REST, calls=calls * quarter // 4) for quarter in range(1, 5)]


def test_steady_traffic_meets_the_requirements() -> None:
    result = soak.summarize(_tally(), _samples(), _at_rest(), [])
    assert _unmet(result) == []
    assert result["last_half"]["memory_mb"]["median"] == 150
    assert result["under_load"][::39] == [(100, 150.0), (4000, 150.0)]  # the first and the last of the 40 samples
    assert len(soak.summarize(_tally(), _samples() * 20, _at_rest(), [])["under_load"]) == soak.MAX_PLOTTED_SAMPLES


@pytest.mark.parametrize("name", [*soak.MEMORY, *soak.TOLERANCE])
def test_every_resource_that_grows_under_load_is_named(name: str) -> None:
    result = soak.summarize(_tally(), _samples(**{name: 1}), _at_rest(), [])
    assert [text.split()[2] for text in _unmet(result)] == [name]


def _noisy(seed: int, rise_mb: float) -> list[ResourceSnapshot]:
    """200 samples over 1,000,000 calls, in which the gateway's memory has noise of 1 MiB.

    It rises by `rise_mb` over the last half.
    """
    rng = random.Random(seed)
    return [
        replace(UNDER_LOAD, calls=5000 * turn, gateway_mb=90 + rng.gauss(0, 1) + rise_mb * turn / 100)
        for turn in range(1, 201)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_rise_of_three_times_the_noise_is_named_and_noise_alone_is_not(seed: int) -> None:
    tally = _tally(1_000_000)
    leak, noise = (soak.summarize(tally, _noisy(seed, rise_mb), _at_rest(1_000_000), []) for rise_mb in (3.0, 0.0))
    assert _unmet(leak) == ["growth of gateway_mb in a line"]
    assert not _unmet(noise)


def test_a_single_step_of_memory_as_by_an_allocator_is_no_growth() -> None:
    tally = _tally(1_000_000)
    samples = [
        replace(sample, gateway_mb=sample.gateway_mb + 4 * (sample.calls > 750_000)) for sample in _noisy(1, 0.0)
    ]
    assert hold(soak.summarize(tally, samples, _at_rest(1_000_000), [])["requirements"])


def test_growth_of_the_slab_is_shown_and_not_judged() -> None:
    result = soak.summarize(_tally(), _samples(slab_mb=5), _at_rest(), [])
    assert hold(result["requirements"])
    assert result["last_half"]["slab_mb"]["growth"] > 50  # 5 MiB in each of 20 samples


def test_growth_in_the_first_half_does_not_count() -> None:
    samples = [replace(sample, memory_mb=min(sample.calls, 1900) / 10) for sample in _samples()]
    assert hold(soak.summarize(_tally(), samples, _at_rest(), [])["requirements"])


def test_a_resource_that_grows_at_rest_over_the_last_half_is_named() -> None:
    at_rest = _at_rest()
    at_rest = [*at_rest[:2], *(replace(snapshot, processes=9) for snapshot in at_rest[2:])]
    assert _unmet(soak.summarize(_tally(), _samples(), at_rest, [])) == ["processes at rest"]


def test_too_few_samples_do_not_meet_the_requirements() -> None:
    first_samples = _samples()[:25]  # the last half of the calls has five of them
    assert _unmet(soak.summarize(_tally(), first_samples, _at_rest(), [])) == ["samples in the last half"]


@pytest.mark.parametrize(
    ("tally", "leftovers", "unmet_requirement"),
    [
        (CallTally(4001, correct=4000), [], "lost"),
        (_tally(doubled=2), [], "doubled"),
        (_tally(correct=3997, unavailable=Counter(Poison=3)), [], "unavailable"),
        (_tally(), ["process: x"], "leftovers"),
    ],
)
def test_every_kind_of_error_is_named(tally: CallTally, leftovers: list[str], unmet_requirement: str) -> None:
    result = soak.summarize(tally, _samples(), _at_rest(), leftovers)
    assert _unmet(result) == [unmet_requirement]


def test_the_quarters_together_send_the_requested_number_of_calls() -> None:
    tally = CallTally()
    args = argparse.Namespace(calls=10, seconds=None, seed=0, stdlib_only=True)
    ids = [[call.call["id"] for call in soak._quarter_calls(tally, args, quarter)] for quarter in range(4)]
    assert [len(quarter) for quarter in ids] == [2, 3, 2, 3]
    assert len({call_id for quarter in ids for call_id in quarter}) == 10 == tally.calls


@pytest.mark.asyncio
async def test_the_load_ends_if_no_call_is_answered_for_the_stall_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    class UnansweredLoad:
        async def run(self, in_flight: int) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(soak, "STALL_TIMEOUT_S", 0.01)
    await soak._until_stalled(cast(CheckedLoad, UnansweredLoad()), CallTally(1), 1)


@pytest.mark.asyncio
async def test_an_error_of_the_load_is_raised() -> None:
    class FailingLoad:
        async def run(self, in_flight: int) -> None:
            raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        await soak._until_stalled(cast(CheckedLoad, FailingLoad()), CallTally(1), 1)


def test_calls_and_seconds_exclude_each_other(refused_arguments: RefusedArguments) -> None:
    assert "--seconds" in refused_arguments(soak.main, "--calls", "5", "--seconds", "5")


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("needs_isolation")
def test_a_short_soak_loses_nothing(run_benchmark: RunBenchmark) -> None:
    exit_code, result = run_benchmark(soak.main, "--calls", "80", "--stdlib-only", "--python", OWN_PYTHON)
    assert (result["calls"], result["answered"], result["lost"]) == (80, 80, 0)
    assert (result["doubled"], result["mismatched"]) == (0, 0)
    assert len(result["at_rest"]) == 4 and sum(result["statuses"].values()) == 80
    assert exit_code == (0 if result["holds"] else 1)


def test_a_soak_has_calls_of_all_kinds_unless_it_is_limited_to_the_standard_library() -> None:
    args = argparse.Namespace(calls=4000, seconds=None, seed=0, stdlib_only=False)
    kinds = {call.group for call in soak._quarter_calls(CallTally(), args, 0)}
    assert kinds == set(KIND_WEIGHTS)
