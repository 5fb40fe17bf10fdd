"""Ratios are taken round by round, and a promise that is missed is said."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench import throughput
from bench.throughput import Kind, Pace


def _paces(*calls_per_s: float) -> list[Pace]:
    return [Pace(pace, 1.0, (1.0, 2.0), Counter(ok=2)) for pace in calls_per_s]


def test_the_ratio_is_the_median_of_each_rounds_own() -> None:
    figures = throughput.summarise(Kind("print", "", 2, 2, 5), _paces(100, 10, 600), _paces(10, 1, 200), 1)
    assert figures["ratio"] == 10
    assert figures["holds"]


def test_a_ratio_below_the_promise_does_not_hold() -> None:
    assert not throughput.summarise(Kind("print", "", 2, 2, 5), _paces(49), _paces(10), 1)["holds"]
    assert throughput.summarise(Kind("mix", "", 2, 2), _paces(1), _paces(10), 1)["holds"]


@pytest.mark.runtime
def test_a_small_run_has_all_its_figures(guest_python: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--kinds", "print,mix", "--rounds", "1", "--scale", "0.02"]
    assert throughput.main([*sizes, "--python", str(guest_python), "--json"]) in (0, 1)
    kinds = json.loads(capsys.readouterr().out.splitlines()[-1])["kinds"]
    assert list(kinds) == ["print", "mix"]
    for row in kinds.values():
        assert row["calls_per_s"] > 0 and row["fresh"]["calls_per_s"] > 0 and row["cpu_ms"] > 0
        assert row["memory_mb"] > 0 and row["latency_ms"]["p50"] <= row["latency_ms"]["p99"]
