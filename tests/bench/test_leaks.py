"""Tests of bench.leaks, which checks that a server at rest holds the same resources after many calls: which increases
count as growth, and which calls are sent."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import leaks
from bench.probes import processes
from bench.probes.resource_growth import growth_at_rest
from bench.probes.resources import ResourceSnapshot, wait_until_settled
from tests.bench.conftest import RunBenchmark

REST = ResourceSnapshot(calls=1000, memory_mb=500.0, processes=14, descriptors=160, mounts=120)


def _snapshots(**increase: float) -> list[ResourceSnapshot]:
    """Return ten snapshots with 1,000 calls between two of them. Before each snapshot, each named resource increases by
    the given value."""
    return [
        replace(REST, calls=1000 * turn, **{name: getattr(REST, name) + step * turn for name, step in increase.items()})
        for turn in range(1, 11)
    ]


def test_constant_resources_do_not_grow() -> None:
    assert growth_at_rest(_snapshots(), 2000) == {}


@pytest.mark.parametrize("name", ["processes", "zombies", "descriptors", "mounts", "cgroups", "temporary_files"])
def test_every_growing_count_is_reported(name: str) -> None:
    assert list(growth_at_rest(_snapshots(**{name: 1}), 2000)) == [name]


def test_memory_may_grow_within_its_tolerance_alone() -> None:
    assert growth_at_rest(_snapshots(memory_mb=1), 2000) == {}
    # The growth is that from 2,000 calls (500 + 2 * 20 MiB) to the lowest of the last three snapshots
    # (500 + 8 * 20 MiB).
    assert growth_at_rest(_snapshots(memory_mb=20), 2000) == {"memory_mb": (540.0, 660.0)}


def test_growth_during_warm_up_does_not_count() -> None:
    snapshots = _snapshots()
    assert growth_at_rest([replace(snapshots[0], processes=1), *snapshots[1:]], 2000) == {}


def test_too_few_calls_for_the_warm_up_and_one_interval_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert leaks.main(["--calls", "100"]) == 1
    assert "3000" in capsys.readouterr().err


def test_a_process_that_still_computes_is_not_at_rest() -> None:
    """A new zygote imports its packages. A snapshot before the end of the imports shows less memory than the server has
    at rest."""
    code = "import time\nwhile time.process_time() < 1.5: pass\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_until_settled(lambda: [process.pid])
        used_s = processes.cpu_s([process.pid])
        process.kill()
    assert used_s >= 1.5


@pytest.mark.alone
@pytest.mark.runtime
@pytest.mark.slow
def test_a_small_run_meets_the_requirements(guest_python: Path, run_benchmark: RunBenchmark) -> None:
    sizes = ["--calls", "192", "--every", "64", "--warm-up", "64"]
    exit_code, result = run_benchmark(leaks.main, *sizes, "--python", str(guest_python))
    assert exit_code == 0
    assert len(result["snapshots"]) == result["abandoned_batches"] == 3  # 192 calls, 64 between two snapshots
