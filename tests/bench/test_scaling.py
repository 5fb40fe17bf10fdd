"""bench.scaling: the estimate in cases that can be computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import scaling
from tests.bench.conftest import RunBenchmark

MACHINE = {"cpu": "Z80", "commit": "abc"}
BURST = {
    "in_flight": 1000, "call_cpu_ms": [8.0] * 201, "burst": {"cpu_ms": 10.0}, "machine": MACHINE,
    "steady": {"executor_cpu_ms": 0.4}, "memory_mb": {"idle": 100, "peak": 140}, "gateway_mb": {"idle": 50, "peak": 60},
}  # fmt: skip
MIXED = {
    "traffic": {"without_loops": {"call_cpu_ms": [50.0] * 190 + [1500.0] * 11, "cpu_ms": 140.0, "bytes": 500}},
    "machine": MACHINE,
}
GATEWAY = {"calls_per_core_s": 10_000, "machine": MACHINE}


def test_calls_wait_for_a_core_in_the_order_of_their_arrival() -> None:
    assert scaling.waits_s([0.0] * 6, [1.0] * 6, 2) == [0, 0, 1, 1, 2, 2]
    assert scaling.waits_s([0.0, 0.5, 5.0], [1.0, 1.0, 1.0], 1) == [0, 0.5, 0]


def test_the_smallest_sufficient_number_of_cores_is_found() -> None:
    due, needs_s = [0.0] * 1000, [0.01] * 1000
    # The 990th call starts on one of ten cores after 98 others, on one of eleven after 89 others.
    assert scaling.cores_for(due, needs_s, 0.995, wait_only=False) == 10
    assert scaling.cores_for(due, needs_s, 0.985, wait_only=False) == 11
    assert scaling.cores_for(due, needs_s, 0.985, wait_only=True) == 10
    assert scaling.cores_for(due, needs_s, 0.895, wait_only=True) == 11
    assert scaling.cores_for(due, needs_s, 0.885, wait_only=True) == 12


def test_no_number_of_cores_answers_calls_that_run_longer_than_the_bound() -> None:
    due, needs_s = [0.0] * 100, [0.1] * 95 + [2.0] * 5
    assert scaling.cores_for(due, needs_s, 1.0, wait_only=False) is None
    assert scaling.cores_for(due, needs_s, 1.0, wait_only=True) is not None


def test_drawn_calls_have_the_measured_distribution_and_mean() -> None:
    needs_s = scaling.needs([0.0, 10.0, 20.0], 15.0, 20_000, 1)
    assert min(needs_s) >= 0.005 and max(needs_s) <= 0.025
    assert sum(needs_s) / len(needs_s) == pytest.approx(0.015, rel=0.02)
    assert needs_s == scaling.needs([0.0, 10.0, 20.0], 15.0, 20_000, 1)


def test_every_arrival_pattern_has_all_calls_in_order() -> None:
    for due in scaling.arrivals(1000, 1).values():
        assert len(due) == 1000 and due == sorted(due)
    waves = scaling.arrivals(1000, 1)["in 10 waves over 60 s"]
    assert [waves.count(6.0 * n) for n in range(10)] == [100] * 10


def test_the_maximum_of_arrivals_in_a_second_is_found_at_any_start() -> None:
    assert scaling.max_in_a_second([0.0] * 5 + [0.5, 1.2, 1.4, 3.0]) == 6
    assert scaling.max_in_a_second([0.0, 1.0, 2.0]) == 1


def test_memory_is_that_of_calls_in_flight_and_of_running_calls() -> None:
    # In BURST 1,000 waiting calls take 10 MiB of the gateway, and running calls the other 30 of the server's 40 MiB.
    memory = scaling.memory_needs(BURST, 45_000)
    assert memory == {"idle_mb": 100, "call_kb": 10.2, "running_mb": 30, "total_mb": 580}


def _write_results(folder: Path) -> Path:
    """Write the required results to `folder` and return it."""
    for name, result in (("burst", BURST), ("mixed", MIXED), ("gateway", GATEWAY)):
        (folder / f"{name}.json").write_text(json.dumps(result))
    return folder


def test_the_estimate_comes_from_the_results_alone(tmp_path: Path, run_benchmark: RunBenchmark) -> None:
    exit_code, result = run_benchmark(scaling.main, "--results", str(_write_results(tmp_path)), "--calls", "1000")
    assert exit_code == 0
    at_once = result["kinds"]["print"]["arrival_patterns"]["all at once"]
    assert at_once == {"cores_for_answer": 10, "cores_for_wait": 10}  # 1,000 calls of 10 ms within a second
    mix = result["kinds"]["mix"]
    assert mix["own_p99_s"] > 1 and mix["arrival_patterns"]["all at once"]["cores_for_answer"] is None
    assert result["gateway"]["arrival_patterns"]["all at once"] == {"calls_per_s": 1000, "mb_per_s": 0.5}
    assert result["executor"] == {"cpu_ms": 0.4, "calls_per_core_s": 2500}
    assert result["endless_core_s"] == 100  # 1 % of 1,000 calls, 10 s each
    assert list(result["memory"]) == ["print"]


def test_memory_of_the_mix_is_reported_if_a_burst_of_it_was_measured(
    tmp_path: Path, run_benchmark: RunBenchmark
) -> None:
    (_write_results(tmp_path) / "burst-mix.json").write_text(json.dumps({**BURST, "in_flight": 500}))
    _, result = run_benchmark(scaling.main, "--results", str(tmp_path), "--calls", "1000")
    memory = result["memory"]
    assert (memory["print"]["call_kb"], memory["mix"]["call_kb"]) == (10.2, 20.5)


def test_a_missing_result_is_reported_with_the_command_that_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (_write_results(tmp_path) / "mixed.json").unlink()
    assert scaling.main(["--results", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "mixed.json" in error and "python -m bench.mixed --json" in error
