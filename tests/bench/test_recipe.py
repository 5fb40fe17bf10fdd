"""Tests of bench.recipe: how a run folder becomes a result, and the requirements on this result."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from bench import recipe
from bench.harness.command import BenchFailed
from bench.report import table_of
from trainer.config_loading import load_config
from trainer.json_files import write_json
from trainer.recipe.phases import EvalResult, FilterResult, Phase, PhaseResult, RecipeRun, TrainResult

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


@pytest.mark.parametrize(
    ("seconds", "accuracies", "overhead_s", "holds"),
    [
        (50.0, (0.6, 0.7, 0.75, 0.8), 0.2, [True, True, True]),
        (500.0, (0.6, 0.7, 0.75, 0.7), 0.6, [False, False, False]),
    ],
)
def test_a_result_has_the_values_of_its_run_and_the_requirements_that_hold(
    seconds: float, accuracies: tuple[float, ...], overhead_s: float, holds: list[bool], tmp_path: Path
) -> None:
    run = finished_run(tmp_path, seconds, accuracies, overhead_s)
    result = recipe.summarize(run)
    assert result["seconds"] == seconds * len(run.phases())
    assert result["gain"] == pytest.approx(accuracies[-1] - accuracies[0])
    assert result["overhead_share"] == pytest.approx(overhead_s / 10)
    assert (result["problems"], result["steps"], result["rewards"]) == (7, 2, [0.5, 1.0])
    assert [row["holds"] for row in result["requirements"]] == holds
    table = table_of("recipe", {**result, "machine": MACHINE})
    assert f"| rl3 | {accuracies[-1]:.3f} | 0.100 | 0.900 |" in table
    assert table.count("**no**") == holds.count(False)
    assert "7 held-out problems" in table


def test_a_run_without_rl_is_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path, 1.0, (0.1, 0.2, 0.3, 0.4), 0.1)
    (tmp_path / "metrics.jsonl").unlink()  # this file has the training steps
    with pytest.raises(BenchFailed, match="expected SFT and a stage of RL"):
        recipe.summarize(run)


def test_the_time_of_an_unfinished_phase_is_not_counted(tmp_path: Path) -> None:
    run = finished_run(tmp_path, 1.0, (0.1, 0.2, 0.3, 0.4), 0.1)
    run.result_path(Phase("prepare")).unlink()
    assert recipe.summarize(run)["seconds"] == len(run.phases()) - 1
