"""Tests of bench.scaling, which estimates the cores and the memory for the calls of a training step. The cases can be
computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import scaling
from tests.bench.conftest import RunBenchmark

MACHINE = {"cpu": "Z80", "commit": "abc"}
BURST = {
    "in_flight": 1000, "burst": {"cpu_ms": 10.0}, "machine": MACHINE, "steady": {"executor_cpu_ms": 0.4},
    "memory_mb": {"idle": 100, "peak": 140}, "gateway_mb": {"idle": 50, "peak": 60},
}  # fmt: skip
MIXED = {"traffic": {"without_loops": {"cpu_ms": 140.0, "bytes": 500}}, "machine": MACHINE}
GATEWAY = {"calls_per_core_s": 10_000, "machine": MACHINE}
RESULTS = {"burst": BURST, "burst-mix": {**BURST, "in_flight": 500}, "mixed": MIXED, "gateway": GATEWAY}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with the required results."""
    for name, result in RESULTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    return tmp_path


def test_calls_need_their_core_seconds_within_the_seconds_of_their_arrival() -> None:
    row = scaling.estimate(45_000, cpu_ms=10.0)
    assert row["core_s"] == 450
    assert row["cores"] == {"all at once": 450, "in 10 waves": 45, "over 10 s": 45, "over 60 s": 8, "over 300 s": 2}


def test_memory_is_that_of_calls_in_flight_and_of_running_calls() -> None:
    # In BURST, 1,000 waiting calls take 10 MiB in the gateway. The running calls take the other 30 MiB of the server's
    # 40 MiB.
    memory = scaling.memory_needs(BURST, 45_000)
    assert memory == {"idle_mb": 100, "call_kb": 10.2, "running_mb": 30, "total_mb": 580}


def test_the_estimate_comes_from_the_results_alone(results: Path, run_benchmark: RunBenchmark) -> None:
    exit_code, result = run_benchmark(scaling.main, "--results", str(results), "--calls", "1000")
    assert exit_code == 0
    assert {name: kind["cores"]["all at once"] for name, kind in result["kinds"].items()} == {"print": 10, "mix": 140}
    assert result["executor_calls_per_core_s"] == 2500
    assert result["endless_core_s"] == 100  # 1 % of 1,000 calls, 10 s each
    assert (result["memory"]["print"]["call_kb"], result["memory"]["mix"]["call_kb"]) == (10.2, 20.5)


def test_a_missing_result_is_reported_with_the_command_that_makes_it(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "mixed.json").unlink()
    assert scaling.main(["--results", str(results)]) == 1
    error = capsys.readouterr().err
    assert "mixed.json" in error and "python -m bench.mixed --json" in error
