"""Which increases of resources at rest count as growth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import leaks
from bench.probes.resource_growth import growth_at_rest
from bench.probes.resources import ResourceSnapshot

REST = ResourceSnapshot(1000, 500.0, 50.0, processes=14, descriptors=160, mounts=120)


def _snapshots(**increase: float) -> list[ResourceSnapshot]:
    """Ten snapshots, in each of which the named resources have increased by so much."""
    return [
        replace(REST, calls=1000 * turn, **{name: getattr(REST, name) + by * turn for name, by in increase.items()})
        for turn in range(1, 11)
    ]


def test_constant_resources_are_no_growth() -> None:
    assert growth_at_rest(_snapshots(), 2000) == {}


@pytest.mark.parametrize("name", ["processes", "zombies", "descriptors", "mounts", "cgroups", "temporary_files"])
def test_every_growing_count_is_reported(name: str) -> None:
    assert list(growth_at_rest(_snapshots(**{name: 1}), 2000)) == [name]


def test_memory_may_vary_but_not_grow() -> None:
    assert growth_at_rest(_snapshots(memory_mb=1), 2000) == {}
    assert growth_at_rest(_snapshots(memory_mb=20), 2000) == {"memory_mb": (540.0, 660.0)}


def test_growth_during_warm_up_does_not_count() -> None:
    snapshots = _snapshots()
    assert growth_at_rest([replace(snapshots[0], processes=1), *snapshots[1:]], 2000) == {}


def test_too_few_calls_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert leaks.main(["--calls", "100"]) == 1
    assert "3000" in capsys.readouterr().err


@pytest.mark.runtime
@pytest.mark.slow
def test_a_small_run_meets_the_requirements(guest_python: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--calls", "192", "--every", "64", "--warm-up", "64"]
    assert leaks.main([*sizes, "--python", str(guest_python), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["snapshots"]) == 3
    assert result["abandoned_batches"] == 3
