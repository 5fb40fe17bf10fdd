"""Tests of bench.throughput, which compares the service with fresh interpreters.

It divides the calls per second of the service by those of the fresh interpreters in each round. The median of these
ratios must reach the ratio that the project promises (`Kind.min_ratio`).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench import throughput
from bench.harness import requirements
from bench.throughput import Kind, Round
from tests.bench.conftest import RunBenchmark


def _rounds(*calls_per_s: float) -> list[Round]:
    """Rounds of two calls each, with these rates."""
    return [Round(rate, cpu_ms=1.0, latencies_ms=(1.0, 2.0), statuses=Counter(ok=2)) for rate in calls_per_s]


def _row(kind: Kind, service: list[Round], fresh_interpreters: list[Round]) -> dict[str, Any]:
    return throughput.summarize(kind, service, fresh_interpreters)


def test_the_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    row = _row(throughput.KINDS["print"], _rounds(100, 10, 600), _rounds(10, 1, 200))
    assert row["ratio"] == 10  # the ratios of the rounds are 10, 10 and 3
    assert requirements.hold(throughput.ratio_requirements({"print": row}))


def test_a_ratio_below_the_promise_does_not_hold() -> None:
    below_promise = {"print": _row(throughput.KINDS["print"], _rounds(79), _rounds(10))}  # 7.9; 8 is promised
    assert not requirements.hold(throughput.ratio_requirements(below_promise))
    without_promise = {"mix": _row(throughput.KINDS["mix"], _rounds(1), _rounds(10))}
    assert requirements.hold(throughput.ratio_requirements(without_promise))


@pytest.mark.runtime
def test_a_small_run_has_a_complete_result(guest_python: Path, run_benchmark: RunBenchmark) -> None:
    sizes = ["--kinds", "print,mix", "--rounds", "1", "--scale", "0.02"]
    _, result = run_benchmark(throughput.main, *sizes, "--python", str(guest_python))
    kinds = result["kinds"]
    assert list(kinds) == ["print", "mix"]
    for row in kinds.values():
        assert row["calls_per_s"] > 0 and row["fresh"]["calls_per_s"] > 0 and row["cpu_ms"] > 0
        assert row["latency_ms"]["p50"] <= row["latency_ms"]["p99"]
