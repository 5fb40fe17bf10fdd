"""bench.passes: its counts are those of rows counted by hand."""

from __future__ import annotations

from bench import passes
from bench.passes import Row, counted
from tests.bench.conftest import RunBenchmark


def test_positions_are_counted_as_each_way_computes_them() -> None:
    rows = [Row(10, 30, 20), Row(10, 30, 0), Row(20, 80, 80), Row(10, 80, 60)]  # lengths 40, 40, 100 and 90
    assert counted(rows, 200) == {
        "loss": 160,
        "trl": 2 * 4 * (20 + 80),
        "once": 4 * (20 + 80),
        "budget": 2 * 100 + 40,
        "unpadded": 100 + 90 + 40,
        "responses": 30 + 80 + 80,
    }


def test_a_run_compares_the_token_budget_with_trl(run_benchmark: RunBenchmark) -> None:
    exit_code, result = run_benchmark(passes.main, "--steps", "2")
    ratios = result["per_loss_token"]
    assert 1 < ratios["responses"] < ratios["unpadded"] < ratios["budget"] < ratios["once"] < ratios["trl"]
    assert exit_code == (0 if ratios["budget"] <= passes.MAX_PER_LOSS_TOKEN else 1)


def test_fewer_problems_with_a_signal_cost_trl_more(run_benchmark: RunBenchmark) -> None:
    ratios = [
        run_benchmark(passes.main, "--steps", "3", "--without-signal", share)[1]["per_loss_token"]
        for share in ("0", "0.5")
    ]
    assert ratios[0]["trl"] < 0.7 * ratios[1]["trl"]
    assert abs(ratios[0]["budget"] - ratios[1]["budget"]) < 0.05
