"""bench.roc: arms differ only in sampling and selection, and the result has the values of the runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import roc
from bench.harness.tables import markdown
from trainer.config_loading import load_config
from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus, Turn
from trainer.recipe.evaluation import write_outcomes
from trainer.recipe.phases import Phase, RecipeRun, TrainResult

SHARED = load_config(roc.CONFIG, {})


def episode(number: int, sample: int, reward: float | None, *, fails: bool) -> Episode:
    call = ToolCall("python", {"code": "1"}, ToolCallStatus.ERROR if fails else ToolCallStatus.OK, "1")
    return Episode(
        Problem(f"p{number}", "text", "1"),
        sample,
        prompt_ids=(1,),
        response_ids=(1, 2, 3),
        logprobs=(-1.0,) * 3,
        loss_mask=(1,) * 3,
        turns=(Turn(0, 3, "", (call,)),),
        stop_reason=StopReason.FINISHED,
        answer_blocks=1,
        reward=reward,
    )


def sft_run(folder: Path) -> RecipeRun:
    run = RecipeRun(roc.sft_config(SHARED, folder, 3))
    run.write_result(Phase("sft", "sft"), TrainResult("stages/sft/model", 0))
    return run


def rows(**changes: float) -> dict[str, Any]:
    names = (*roc.MEASURES, *roc.COSTS)
    return {**dict.fromkeys(names, 1.0), "curves": {name: [1.0, None] for name in roc.CURVES}, **changes}


def test_arms_differ_in_sampling_and_selection_alone(tmp_path: Path) -> None:
    run = sft_run(tmp_path)
    configs = {arm: roc.arm_config(SHARED, arm, run, tmp_path, 7) for arm in roc.ARMS}
    plain = {
        arm: replace(
            config,
            stages={
                "rl": replace(config.stage_config("rl"), samples_per_problem=2, kept_per_problem=2, roc_mode="off")
            },
        )
        for arm, config in configs.items()
    }
    assert len(set(map(repr, plain.values()))) == 1
    one = configs["roc"]
    stage = one.stage_config("rl")
    assert (one.seed, one.sft.data, stage.steps) == (3, (), 7)
    assert one.model.path == str(tmp_path / "stages/sft/model")
    assert (one.eval.max_response_tokens, one.eval.max_turns) == (stage.max_response_tokens, stage.max_turns)
    assert RecipeRun(one).phases() == [Phase("prepare"), Phase("grpo", "rl"), Phase("eval", "rl")]
    assert run.phases() == [Phase("prepare"), Phase("sft", "sft"), Phase("eval", "sft")]


def test_a_run_folder_is_read(tmp_path: Path) -> None:
    run = sft_run(tmp_path)
    for one in episode(0, 0, None, fails=True), episode(1, 0, 0.0, fails=True), episode(0, 0, 1.0, fails=False):
        write_outcomes(tmp_path / "stages/sft/eval", [one])
    for step in (1, 2):
        row = {"step": step, "stage": "sft", "episodes_in_loss": 8, "episodes_not_in_loss": 8, "sampled_tokens": 100}
        run.run_folder.append_metrics({**row, "one_answer": 0.5})
    measures = roc.measured(run, "sft")
    assert (measures["accuracy"], measures["tool_error_ratio"], measures["tool_error_ratio_correct"]) == (0.5, 0.5, 0.0)
    assert (
        measures["episodes"],
        measures["sampled_tokens"],
        measures["episodes_in_loss"],
        measures["unavailable"],
    ) == (32, 200, 16, 0)
    assert measures["curves"] == {
        "tool_error_ratio_correct": [None, None],
        "one_answer": [0.5, 0.5],
        "reward": [None] * 2,
    }


def test_differences_are_taken_within_a_seed() -> None:
    seeds = [
        {"sft": rows(), "roc": rows(accuracy=0.8), "grpo-g": rows(accuracy=0.5)},
        {"sft": rows(), "roc": rows(accuracy=0.4), "grpo-g": rows(accuracy=0.2)},
    ]
    result = roc.summarize(seeds)
    assert result["arms"]["roc"]["accuracy"]["mean"] == 0.6
    assert list(result["differences"]) == ["grpo-g"]
    assert result["differences"]["grpo-g"]["accuracy"] == {"mean": 0.25, "sd": 0.0707}
    assert result["curves"]["roc"]["one_answer"] == [1.0, None]
    assert "RoC less GRPO, all of G" in markdown(roc.tables({"steps": 2, "group": 8, **result}))


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure", reason="plots need matplotlib").Figure()
    axes = figure.subplots()
    roc.draw(axes, {"group": 8, **roc.summarize([{"sft": rows(), "roc": rows(), "grpo-g": rows()}])})
    assert [line.get_label() for line in axes.lines] == ["RoC, 2G to G", "GRPO, all of G"]
    assert list(axes.lines[0].get_xdata()) == [1]


def test_unknown_arms_are_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        roc.main(["--arms", "roc,best"])
    assert ended.value.code == 2
    assert "unknown name 'best'; expected some of roc" in capsys.readouterr().err
