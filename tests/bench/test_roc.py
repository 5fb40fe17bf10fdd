"""Tests of bench.roc, which compares trainings (arms) with different rules of selection. The arms differ only in
sampling and selection. The result has the values of the runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import roc
from bench.harness.command import BenchFailed
from bench.harness.tables import markdown
from tests.bench.conftest import RefusedArguments
from trainer.config_loading import load_config
from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus, Turn
from trainer.recipe.evaluation import write_outcomes
from trainer.recipe.phases import Phase, RecipeRun, TrainResult

SHARED = load_config(roc.CONFIG, {})


def episode(problem: str, reward: float | None, *, fails: bool) -> Episode:
    """An episode with one turn of three tokens and one tool call, which may fail."""
    call = ToolCall("python", {"code": "1"}, ToolCallStatus.ERROR if fails else ToolCallStatus.OK, "1")
    return Episode(
        Problem(problem, "text", "1"),
        0,
        prompt_ids=(1,),
        response_ids=[1, 2, 3],
        logprobs=[-1.0] * 3,
        loss_mask=[1] * 3,
        turns=[Turn(0, 3, "", (call,))],
        stop_reason=StopReason.FINISHED,
        answer_blocks=1,
        reward=reward,
    )


def sft_run(folder: Path) -> RecipeRun:
    """A run of seed 3 whose SFT has ended."""
    run = RecipeRun(roc.sft_config(SHARED, folder, 3))
    run.write_result(Phase("sft", "sft"), TrainResult("stages/sft/model", 0))
    return run


def measured_row(**changes: float) -> dict[str, Any]:
    """Return the measures of one arm of one seed. Each is 1, apart from the changed ones."""
    names = (*roc.MEASURES, *roc.COSTS)
    return {**dict.fromkeys(names, 1.0), "curves": {name: [1.0, None] for name in roc.CURVES}, **changes}


def test_arms_differ_in_sampling_and_selection_alone(tmp_path: Path) -> None:
    run = sft_run(tmp_path)
    configs = {arm: roc.arm_config(SHARED, arm, run, tmp_path, 7) for arm in roc.ARMS}
    same_sampling: dict[str, Any] = {"samples_per_problem": 2, "kept_per_problem": 2, "roc_mode": "off"}
    with_same_sampling = [
        replace(config, stages={"rl": replace(config.stage_config("rl"), **same_sampling)})
        for config in configs.values()
    ]
    assert len(set(map(repr, with_same_sampling))) == 1
    config = configs["roc"]
    stage = config.stage_config("rl")
    assert (config.seed, config.sft.data, stage.steps) == (3, (), 7)
    assert config.model.path == str(tmp_path / "stages/sft/model")
    assert (config.eval.max_response_tokens, config.eval.max_turns) == (stage.max_response_tokens, stage.max_turns)
    assert RecipeRun(config).phases() == [Phase("prepare"), Phase("grpo", "rl"), Phase("eval", "rl")]
    assert run.phases() == [Phase("prepare"), Phase("sft", "sft"), Phase("eval", "sft")]


def test_the_measures_of_a_run_come_from_its_evaluation_and_its_training_steps(tmp_path: Path) -> None:
    run = sft_run(tmp_path)
    for outcome in (
        episode("p0", None, fails=True),  # this episode is unavailable, and the last item is its second attempt
        episode("p1", 0.0, fails=True),
        episode("p0", 1.0, fails=False),
    ):
        write_outcomes(tmp_path / "stages/sft/eval", [outcome])
    for step in (1, 2):
        row = {"step": step, "stage": "sft", "episodes_in_loss": 8, "episodes_not_in_loss": 8, "sampled_tokens": 100}
        run.run_folder.append_metrics({**row, "one_answer": 0.5})
    measures = roc.measured(run, "sft")
    assert (measures["accuracy"], measures["tool_error_ratio"], measures["tool_error_ratio_correct"]) == (0.5, 0.5, 0.0)
    sums = {"episodes": 32, "sampled_tokens": 200, "episodes_in_loss": 16, "unavailable": 0}  # sums over two steps
    assert measures.items() >= sums.items()
    no_values = [None, None]
    assert measures["curves"] == {"tool_error_ratio_correct": no_values, "one_answer": [0.5, 0.5], "reward": no_values}


def test_differences_are_taken_within_a_seed() -> None:
    seeds = [
        {"sft": measured_row(), "roc": measured_row(accuracy=0.8), "grpo-g": measured_row(accuracy=0.5)},
        {"sft": measured_row(), "roc": measured_row(accuracy=0.4), "grpo-g": measured_row(accuracy=0.2)},
    ]
    result = roc.summarize(seeds)
    assert result["arms"]["roc"]["accuracy"]["mean"] == 0.6
    assert list(result["differences"]) == ["grpo-g"]
    assert result["differences"]["grpo-g"]["accuracy"] == {"mean": 0.25, "sd": 0.0707, "p": 0.5}
    assert result["curves"]["roc"]["one_answer"] == [1.0, None]
    assert "RoC less GRPO, all of G" in markdown(roc.tables({"steps": 2, "group": 8, **result}))


def test_the_model_before_sft_is_evaluated_on_the_problems_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, commands = sft_run(tmp_path), []
    run.write_result(Phase("prepare"), TrainResult("/models/smollm2", 0))

    def fake_run(command_line: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command_line[2:])
        write_outcomes(tmp_path / "stages/before-sft/eval", [episode("p0", 1.0, fails=True)])
        return SimpleNamespace(returncode=len(commands) - 1)

    monkeypatch.setattr(roc.subprocess, "run", fake_run)
    measures = roc.measured(roc._evaluate_before_sft(run), roc.BEFORE_SFT)
    out = str(tmp_path / "stages/before-sft/eval")
    options = ["--model", "/models/smollm2", "--out", out, "--no-preflight"]
    assert commands == [["trainer", "eval", str(tmp_path), *options]]
    assert (measures["accuracy"], measures["tool_error_ratio"], measures["episodes"]) == (1.0, 1.0, 0)
    with pytest.raises(BenchFailed, match="the evaluation before SFT failed with exit code 1"):
        roc._evaluate_before_sft(run)


def test_only_arms_are_compared_with_roc_and_have_curves() -> None:
    row = measured_row()
    result = roc.summarize([{roc.BEFORE_SFT: row, "sft": row, "roc": row, "grpo-g": row}])
    assert list(result["names"].values()) == ["before SFT", "after SFT", "RoC, 2G to G", "GRPO, all of G"]
    assert list(result["differences"]) == ["grpo-g"]
    assert list(result["curves"]) == ["roc", "grpo-g"]


def test_the_plot_has_a_curve_for_each_arm(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure", reason="plots need matplotlib").Figure()
    axes = figure.subplots()
    roc.draw(
        axes, {"group": 8, **roc.summarize([{"sft": measured_row(), "roc": measured_row(), "grpo-g": measured_row()}])}
    )
    assert [line.get_label() for line in axes.lines] == ["RoC, 2G to G", "GRPO, all of G"]
    assert list(axes.lines[0].get_xdata()) == [1]  # the second step has no value


def test_an_unknown_arm_is_refused(refused_arguments: RefusedArguments) -> None:
    error = refused_arguments(roc.main, "--arms", "roc,best")
    assert "unknown name 'best'; expected some of roc" in error


def test_errors_that_clearly_cost_reward_after_sft_end_the_comparison() -> None:
    def gate(*ratios: float) -> dict[str, float]:
        return roc._gate([{"tool_error_ratio": 0.33, "tool_error_ratio_correct": ratio} for ratio in ratios])["gate"]

    assert gate(0.335, 0.327) == {"mean": 0.001, "sd": 0.0057}
    assert gate(0.321, 0.317) == {"mean": -0.011, "sd": 0.0028}  # less than two standard errors beyond the bound
    with pytest.raises(BenchFailed, match=r"-0\.0120 ± 0\.0005; expected less than 0\.01"):
        gate(0.3175, 0.3185)
    with pytest.raises(BenchFailed, match=r"expected less than 0\.01"):
        roc._gate([{"tool_error_ratio": 0.33, "tool_error_ratio_correct": 0.21}])
    with pytest.raises(BenchFailed, match="no episode with a tool call is correct"):
        roc._gate([{"tool_error_ratio": 0.33, "tool_error_ratio_correct": None}])


def test_the_requirements_are_half_of_the_errors_and_a_small_p() -> None:
    seeds = [
        {"sft": measured_row(), "roc": measured_row(tool_error_ratio_correct=errors), "uniform": measured_row()}
        for errors in (0.1, 0.2, 0.3)
    ]
    gate, ratio, p, accuracy = roc._requirements({"gate": {"mean": -0.0101}, **roc.summarize(seeds)})
    assert (gate["measured"], gate["holds"]) == (0.0101, False)
    assert (ratio["measured"], ratio["holds"]) == (pytest.approx(0.2), True)
    assert (p["measured"], p["holds"]) == (0.25, False)
    assert (accuracy["measured"], accuracy["holds"]) == (0, True)


def test_the_settings_of_the_free_task_name_files_that_exist(tmp_path: Path) -> None:
    args = roc._parser().parse_args(["--task", "free", "--folder", str(tmp_path), "--max-turns", "3"])
    shared = roc._shared_settings(args, 5)
    sources = [*shared.data.train, *shared.sft.data, *shared.eval.data, f"{shared.model.path}/config.json"]
    assert len(sources) == 4 and all(Path(source).is_file() for source in sources)
    run = sft_run(tmp_path / "sft-5")
    config = roc.arm_config(shared, "uniform", run, tmp_path / "uniform", 7, args.max_turns)
    assert config.stage_config("rl").max_turns == 3
    assert config.eval.max_turns > 3, "all doses are evaluated alike"
