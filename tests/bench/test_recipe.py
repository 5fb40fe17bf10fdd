"""Tests of bench.recipe: how run folders become a result, and the requirements on this result."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bench import recipe
from bench.harness.command import BenchFailed
from bench.report import table_of
from tests.bench.conftest import RunBenchmark
from trainer.config import RunConfig
from trainer.config_loading import load_config
from trainer.json_files import write_json
from trainer.recipe.phases import EvalResult, FilterResult, PhaseResult, RecipeRun, TrainResult
from trainer.recipe.runner import PhaseFailed

MACHINE = {"cpu": "a", "cores": 2, "kernel": "6", "load": [0.0], "commit": "b", "date": "2026-01-01T00:00:00"}


def finished_run(folder: Path, seconds: float, accuracies: tuple[float, ...], overhead_s: float) -> RecipeRun:
    """Write a finished run of configs/tiny.toml.

    Every phase took `seconds`. The evaluations have these accuracies, in order. Each of the two training steps took
    10 s, with `overhead_s` of overhead.
    """
    run = RecipeRun(load_config(recipe.CONFIG, {}, [f"run_dir={folder}"]))
    scores = iter(accuracies)
    for phase in run.phases():
        result: PhaseResult = TrainResult("model", 0)
        if phase.command == "filter":
            result = FilterResult(7, 7)
        if phase.command == "eval":
            result = EvalResult({"accuracy": next(scores), "tool_error_ratio": 0.1, "one_answer": 0.9})
        write_json(run.result_path(phase), {**asdict(result), "seconds": seconds})
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "eval.jsonl").write_text("{}\n" * 7)  # seven held-out problems
    times = {"step_s": 10.0, "overhead_s": overhead_s, "overhead_cpu_s": 1.0}
    for step in (1, 2):
        run.run_folder.append_metrics({"step": step, "stage": "rl1", "reward": 0.5 * step, **times})
    return run


def result_of(tmp_path: Path, gains: tuple[float, ...], overhead_s: float, cpu_s: float) -> dict[str, Any]:
    """Return the result of runs in which RL gains this accuracy over 0.5."""
    runs = []
    for seed, gain in enumerate(gains):
        run = finished_run(tmp_path / f"seed-{seed}", 50.0, (0.5, 0.6, 0.7, 0.5 + gain), overhead_s)
        runs.append({"seed": seed, **recipe.summarize_run(run), "seconds": 500.0, "cpu_s": cpu_s + seed})
    return recipe.summarize(runs)


@pytest.mark.parametrize(
    ("gains", "overhead_s", "cpu_s", "holds"),
    [
        ((0.3, 0.2, 0.1), 0.2, 470, [True, True, True, True]),
        ((0.4, 0.4, 0.05), 0.2, 470, [True, False, True, True]),
        ((0.17, 0.17, 0.17), 0.6, 480, [False, True, False, False]),
    ],
)
def test_a_result_has_the_values_of_its_runs_and_the_requirements_that_hold(
    gains: tuple[float, ...], overhead_s: float, cpu_s: float, holds: list[bool], tmp_path: Path
) -> None:
    result = result_of(tmp_path, gains, overhead_s, cpu_s)
    assert result["mean_gain"] == pytest.approx(fmean(gains))
    run = result["runs"][2]
    assert run["gain"] == pytest.approx(gains[2])
    assert run["overhead_share"] == pytest.approx(overhead_s / 10)
    assert (run["problems"], run["steps"], run["rewards"]) == (7, 2, [0.5, 1.0])
    assert [row["holds"] for row in result["requirements"]] == holds
    table = table_of("recipe", {**result, "machine": MACHINE})
    accuracy = 0.5 + gains[2]
    assert (
        f"| 2 | 0.500 | 0.600 | 0.700 | {accuracy:.3f} | {gains[2]:.3f} | 0.100 | 0.900 | 500 | {cpu_s + 2} |" in table
    )
    assert f"| mean | 0.500 | 0.600 | 0.700 | {0.5 + fmean(gains):.3f} | {fmean(gains):.3f} | " in table
    assert table.count("**no**") == holds.count(False)
    assert "7 held-out problems" in table


def test_a_run_without_rl_is_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path, 1.0, (0.1, 0.2, 0.3, 0.4), 0.1)
    (tmp_path / "metrics.jsonl").unlink()  # this file has the training steps
    with pytest.raises(BenchFailed, match="expected SFT and a stage of RL"):
        recipe.summarize_run(run)


def test_each_seed_has_its_own_run_and_the_seconds_of_an_interrupted_run_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_benchmark: RunBenchmark
) -> None:
    """The run of seed 0 fails after 3 s, and takes 4 s more when it continues. That of seed 1 takes 1 s."""
    clock, outcomes = iter([0.0, 3.0, 10.0, 14.0, 20.0, 21.0]), iter(["fails", "ends", "ends"])
    seeds = []

    def fake_recipe(config: RunConfig) -> RecipeRun:
        seeds.append((config.seed, config.run_dir))
        if next(outcomes) == "fails":
            raise PhaseFailed("sft failed", 1)
        return finished_run(Path(config.run_dir), 1.0, (0.1, 0.2, 0.3, 0.4), 0.1)

    monkeypatch.setattr(recipe, "run_recipe", fake_recipe)
    monkeypatch.setattr(recipe, "perf_counter", lambda: next(clock))
    arguments = ["--seeds", "2", "--folder", str(tmp_path)]
    assert recipe.main(arguments) == 1
    _, result = run_benchmark(recipe.main, *arguments)
    folders = [str(tmp_path / f"seed-{seed}") for seed in (0, 1)]
    assert seeds == [(0, folders[0]), (0, folders[0]), (1, folders[1])]
    assert [run["seconds"] for run in result["runs"]] == [7.0, 1.0]
