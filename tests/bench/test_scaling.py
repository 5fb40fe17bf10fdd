"""The estimate on cases that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import scaling

MACHINE = {"cpu": "Z80"}
BURST = {
    "in_flight": 1000, "call_cpu_ms": [8.0] * 201, "burst": {"cpu_ms": 10.0}, "machine": MACHINE,
    "steady": {"executor_cpu_ms": 0.4}, "memory_mb": {"idle": 100, "peak": 140}, "gateway_mb": {"idle": 50, "peak": 60},
}  # fmt: skip
MIXED = {
    "traffic": {"without_loops": {"call_cpu_ms": [50.0] * 190 + [1500.0] * 11, "cpu_ms": 140.0, "bytes": 500}},
    "machine": MACHINE,
}
GATEWAY = {"calls_per_core_s": 10_000, "machine": MACHINE}


def test_calls_at_once_take_turns_on_the_cores() -> None:
    assert scaling.waits_s([0.0] * 6, [1.0] * 6, 2) == [0, 0, 1, 1, 2, 2]
    assert scaling.waits_s([0.0, 0.5, 5.0], [1.0, 1.0, 1.0], 1) == [0, 0.5, 0]


def test_the_cores_are_as_many_as_it_takes_and_no_more() -> None:
    due, needs_s = [0.0] * 1000, [0.01] * 1000
    # The 990th of them has its turn after 98 others on one of ten cores, after 89 on one of eleven.
    assert scaling.cores_for(due, needs_s, 0.995, wait_only=False) == 10
    assert scaling.cores_for(due, needs_s, 0.985, wait_only=False) == 11
    assert scaling.cores_for(due, needs_s, 0.985, wait_only=True) == 10
    assert scaling.cores_for(due, needs_s, 0.895, wait_only=True) == 11
    assert scaling.cores_for(due, needs_s, 0.885, wait_only=True) == 12


def test_no_number_of_cores_answers_a_call_before_it_has_run() -> None:
    due, needs_s = [0.0] * 100, [0.1] * 95 + [2.0] * 5
    assert scaling.cores_for(due, needs_s, 1.0, wait_only=False) is None
    assert scaling.cores_for(due, needs_s, 1.0, wait_only=True) is not None


def test_calls_vary_as_those_measured_and_cost_what_those_cost() -> None:
    needs_s = scaling.needs([0.0, 10.0, 20.0], 15.0, 20_000, 1)
    assert min(needs_s) >= 0.005 and max(needs_s) <= 0.025
    assert sum(needs_s) / len(needs_s) == pytest.approx(0.015, rel=0.02)
    assert needs_s == scaling.needs([0.0, 10.0, 20.0], 15.0, 20_000, 1)


def test_every_way_of_arriving_brings_all_calls_in_order() -> None:
    for due in scaling.arrivals(1000, 1).values():
        assert len(due) == 1000 and due == sorted(due)
    waves = scaling.arrivals(1000, 1)["in 10 waves over 60 s"]
    assert [waves.count(6.0 * n) for n in range(10)] == [100] * 10


def test_the_most_calls_in_a_second() -> None:
    assert scaling.most_in_a_second([0.0] * 5 + [0.5, 1.2, 1.4, 3.0]) == 6
    assert scaling.most_in_a_second([0.0, 1.0, 2.0]) == 1


def test_memory_is_that_of_those_in_flight_which_the_gateway_has_and_of_those_that_ran() -> None:
    held = scaling.memory(BURST, 45_000)
    assert held == {"idle_mb": 100, "each_kb": 10.2, "running_mb": 30, "all_mb": 580}


def _results(folder: Path) -> Path:
    for name, figures in (("burst", BURST), ("mixed", MIXED), ("gateway", GATEWAY)):
        (folder / f"{name}.json").write_text(json.dumps(figures))
    return folder


def test_the_estimate_comes_from_the_results_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.main(["--results", str(_results(tmp_path)), "--calls", "1000", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    at_once = figures["kinds"]["print"]["ways"]["all at once"]
    assert at_once == {"cores_for_answer": 10, "cores_for_wait": 10}
    mix = figures["kinds"]["mix"]
    assert mix["own_p99_s"] > 1 and mix["ways"]["all at once"]["cores_for_answer"] is None
    assert figures["gateway"]["ways"]["all at once"] == {"calls_per_s": 1000, "gateways": 1, "mb_per_s": 0.5}
    assert figures["executor"] == {"cpu_ms": 0.4, "calls_per_core_s": 2500}
    assert figures["endless_core_s"] == 100
    assert list(figures["memory"]) == ["print"]


def test_memory_of_the_mix_is_told_where_a_burst_of_it_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (_results(tmp_path) / "burst-mix.json").write_text(json.dumps({**BURST, "in_flight": 500}))
    assert scaling.main(["--results", str(tmp_path), "--calls", "1000", "--json"]) == 0
    held = json.loads(capsys.readouterr().out.splitlines()[-1])["memory"]
    assert (held["print"]["each_kb"], held["mix"]["each_kb"]) == (10.2, 20.5)


def test_a_result_that_is_missing_is_named_with_what_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (_results(tmp_path) / "mixed.json").unlink()
    assert scaling.main(["--results", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "mixed.json" in said and "python -m bench.mixed --json" in said
