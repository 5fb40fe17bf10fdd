"""bench.compatibility: every route is measured with the same programs, and wrong answers are reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import compatibility
from bench.compatibility import BATCH, ROUTES, SINGLE, Route
from tests.bench.conftest import RunBenchmark

SMALL = ("--calls", "40", "--batch", "16", "--rounds", "1", "--stdlib-only")


def test_a_small_run_measures_every_route(run_benchmark: RunBenchmark, guest_python: Path) -> None:
    exit_code, result = run_benchmark(compatibility.main, *SMALL, "--isolation", "none")
    assert set(result["routes"]) == set(ROUTES)
    assert all(row["calls_per_s"] > 0 and row["cpu_ms"] > 0 for row in result["routes"].values())
    assert set(result["slowdowns"]) == set(ROUTES) - {BATCH, SINGLE}
    assert result["holds"] == all(value <= compatibility.MAX_SLOWDOWN for value in result["slowdowns"].values())
    assert exit_code == (0 if result["holds"] else 1)


def test_a_wrong_answer_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], guest_python: Path
) -> None:
    monkeypatch.setitem(ROUTES, BATCH, Route(lambda numbers: ROUTES["/run/long-batch"].build([1]), bool))
    assert compatibility.main([*SMALL, "--isolation", "none"]) == 1
    assert re.search(r"/v1/batch: expected the numbers from \d+ on, got 400", capsys.readouterr().err)
