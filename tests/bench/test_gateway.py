"""Tests of bench.gateway, whose stub executors give complete results."""

from __future__ import annotations

import pytest

from bench import gateway
from bench.servers.stub_executor import result_of
from sandbox.types import Call, Result
from tests.bench.conftest import RunBenchmark


def test_the_result_of_a_stub_executor_is_complete() -> None:
    result = Result.decode({**result_of(Call("1").encode(binary=True)), "id": "x"})
    assert (result.status, result.stdout, result.usage.run_ms > 0) == ("ok", "1", True)


def test_a_small_run_has_a_complete_result(run_benchmark: RunBenchmark) -> None:
    exit_code, result = run_benchmark(gateway.main, "--calls", "200", "--batch", "64", "--rounds", "1")
    assert result["calls_per_s"] > 0 and result["cpu_us"] > 0
    assert result["holds"] == (result["calls_per_s"] >= gateway.MIN_CALLS_PER_S)
    assert exit_code == (0 if result["holds"] else 1)


def test_two_workers_are_compared_with_one(run_benchmark: RunBenchmark) -> None:
    flags = ("--workers", "2", "--batch", "1", "--calls", "200", "--in-flight", "32", "--rounds", "1")
    _, result = run_benchmark(gateway.main, *flags)
    assert result["workers"] == 2
    (requirement,) = result["requirements"]
    speedup = result["workers_calls_per_s"] / result["calls_per_core_s"]
    assert requirement["measured"] == pytest.approx(speedup, abs=0.02)  # all three are rounded
