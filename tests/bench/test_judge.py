"""Tests of bench.judge: its program passes its tests, and a small run has a complete result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import judge
from bench.workloads.judged_program import PROGRAM, make_tests
from tests.bench.conftest import RunBenchmark


def test_the_program_and_the_expected_outputs_agree() -> None:
    assert 40 <= PROGRAM.count("\n") <= 80
    for test in make_tests(5, seed=1):
        done = subprocess.run([sys.executable, "-c", PROGRAM], input=test["stdin"], capture_output=True, text=True)
        assert done.stdout == test["expected"]
        assert 200 <= len(test["stdin"]) <= 600
    assert make_tests(2, seed=1) == make_tests(2, seed=1) != make_tests(2, seed=2)


@pytest.mark.runtime
def test_a_small_run_has_a_complete_result(guest_python: Path, run_benchmark: RunBenchmark) -> None:
    sizes = ["--tests", "5", "--requests", "1", "--rounds", "1", "--stdlib-only"]
    _, result = run_benchmark(judge.main, *sizes, "--python", str(guest_python))
    assert list(result["ways"]) == ["judge", "batch", "execute"]
    assert all(row["cpu_ms"] > 0 and row["tests_per_s"] > 0 for row in result["ways"].values())
    assert set(result["ratios"]) == {"batch", "execute"}
    assert len(result["requirements"]) == 1
