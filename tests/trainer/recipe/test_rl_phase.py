"""Tests of the phase `grpo`: its start, a kill, and the evaluations inside it."""

from __future__ import annotations

import contextlib
import operator
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
load_file = pytest.importorskip("safetensors.torch").load_file

from tests.trainer.recipe.small_runs import STEP_TIMEOUT_S, copy_run, in_this_process, small_config, write_lines  # noqa: E402
from tests.trainer.sampling import QUIET_LIBRARIES  # noqa: E402
from trainer.config import ConfigError  # noqa: E402
from trainer.episodes.reward import NoRewardsError  # noqa: E402
from trainer.json_files import read_rows  # noqa: E402
from trainer.recipe import eval_phase, rl_phase, training_inputs  # noqa: E402
from trainer.recipe.evaluation import ALL, EpisodeOutcome, summarize  # noqa: E402
from trainer.recipe.phases import Phase, RecipeRun, TrainResult  # noqa: E402
from trainer.recipe.runner import run_recipe  # noqa: E402

pytestmark = QUIET_LIBRARIES


def test_all_ranks_wait_for_the_engines_before_a_stage_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, order = small_config(tmp_path), list[str]()
    run = RecipeRun(config)
    for phase in (Phase("prepare"), Phase("sft", "sft")):
        run.write_result(phase, TrainResult("model", 0))
    run.problems_path(config.stage_config("rl1")).parent.mkdir()
    run.problems_path(config.stage_config("rl1")).touch()

    @contextlib.contextmanager
    def fake_open_rollout(run: RecipeRun, model: Path) -> Iterator[None]:
        order.append("engines")
        yield

    def fake_train_stage(*args: Any, **options: Any) -> None:
        order.append("train")
        raise KeyboardInterrupt  # there is no result to write

    monkeypatch.setattr(rl_phase, "open_rollout", fake_open_rollout)
    monkeypatch.setattr(rl_phase, "wait_for_ranks", lambda hardware: order.append("wait"))
    monkeypatch.setattr(rl_phase, "train_stage", fake_train_stage)
    with pytest.raises(KeyboardInterrupt):
        rl_phase.grpo(run, Phase("grpo", "rl1"))
    assert order == ["engines", "wait", "train"]


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_a_killed_stage_ends_like_an_uninterrupted_one(tuned_run: RecipeRun, tmp_path: Path) -> None:
    uninterrupted, killed = copy_run(tuned_run, tmp_path / "uninterrupted"), copy_run(tuned_run, tmp_path / "killed")
    run_recipe(uninterrupted.config, run_phase=in_this_process("rl1"))
    if not _kill_after(killed, step=tuned_run.trained_model("sft").step + 2):
        pytest.skip("the stage ended before the kill, since this machine did not run the test in time")
    num_steps_before_kill = len(_untimed_metrics(killed))
    assert killed.result(Phase("grpo", "rl1")) is None
    run_recipe(killed.config, run_phase=in_this_process("rl1"))

    metrics = _untimed_metrics(uninterrupted)
    assert len({row["reward"] for row in metrics}) > 1, "equal weights prove nothing if training does not change them"
    assert num_steps_before_kill < len(metrics)
    assert _untimed_metrics(killed) == metrics
    expected, actual = (
        load_file(run.stage_dir("rl1") / "model" / "model.safetensors") for run in (uninterrupted, killed)
    )
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_the_last_evaluation_inside_a_stage_is_the_one_that_the_phase_eval_finds(
    tuned_run: RecipeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(training_inputs, "open_trackers", lambda *_, **__: contextlib.nullcontext(sent.append))
    run = copy_run(tuned_run, tmp_path / "run", "eval.every_steps=2", "stages.rl1.steps=3")
    stage_dir, phase = run.stage_dir("rl1"), Phase("eval", "rl1")
    left_by_a_kill = stage_dir / "eval_steps/step_000002/outcomes.jsonl"
    write_lines(left_by_a_kill, ["of other weights"])
    rl_phase.grpo(run, Phase("grpo", "rl1"))
    assert len(list(read_rows(left_by_a_kill))) == 2, "one row for each problem, of these weights"
    row = list(run.run_folder.read_metrics())[-1]
    with monkeypatch.context() as without_engines:
        without_engines.setattr(eval_phase, "open_rollout", None)
        reports = eval_phase.evaluate(run, phase)
    assert reports["all"].measures["accuracy"].value == row["eval_accuracy"]
    evaluations = [(each["step"], each["eval/accuracy"]) for each in sent if "eval/accuracy" in each]
    # The phase sends the last evaluation once more, since the training may have been killed before it sent it.
    assert evaluations[1:] == [(row["step"], row["eval_accuracy"])] * 2
    assert evaluations[0][0] == row["step"] - 1
    assert [each["step"] for each in sent if "stage" in each] == [row["step"] - 2, row["step"] - 1, row["step"]]
    trained = run.trained_model("rl1")
    assert trained.best["step"] in (row["step"] - 1, row["step"])
    assert trained.best["accuracy"] >= row["eval_accuracy"]
    assert run.model_path("stages/rl1/best").is_dir()
    # Engines that load the saved model sample the same episodes.
    in_stage = list(read_rows(stage_dir / "eval/outcomes.jsonl"))
    shutil.rmtree(stage_dir / "eval")
    eval_phase.evaluate(run, phase)
    by_problem = operator.itemgetter("problem")
    assert sorted(read_rows(stage_dir / "eval/outcomes.jsonl"), key=by_problem) == sorted(in_stage, key=by_problem)


def test_a_training_on_stored_episodes_refuses_evaluations_inside_it(tmp_path: Path) -> None:
    run = RecipeRun(small_config(tmp_path, "eval.every_steps=2"))
    for phase in (Phase("prepare"), Phase("sft", "sft")):
        run.write_result(phase, TrainResult("model", 0))
    with pytest.raises(ConfigError, match=r"^eval: every_steps: expected 0 for a training on stored episodes"):
        rl_phase.grpo(run, Phase("grpo", "rl1"), tmp_path / "store")
    run = RecipeRun(small_config(tmp_path, "stages.rl1.dynamic_sampling_rounds=1"))
    with pytest.raises(
        ConfigError, match=r"^stages\.rl1: dynamic_sampling_rounds: expected none of these with stored episodes"
    ):
        rl_phase.grpo(run, Phase("grpo", "rl1"), tmp_path / "store")


def test_an_outage_during_an_evaluation_inside_a_stage_marks_no_best_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecipeRun(small_config(tmp_path, "eval.every_steps=2"))
    stage, outcome = run.config.stage_config("rl1"), EpisodeOutcome(1.0, 0, 0, 1, "finished", 1, 1)
    lost = outcome._replace(reward=None)
    monkeypatch.setattr(rl_phase, "read_problems", lambda _: [])
    for num_lost in (2, 3):
        reports = {ALL: summarize([[outcome]] * (10 - num_lost) + [[lost]] * num_lost, 1)}
        monkeypatch.setattr(rl_phase, "run_evaluation", lambda *_, reports=reports, **__: reports)
        if num_lost == 2:
            assert rl_phase._evaluate_step(run, stage, None, 2) is reports
        else:
            with pytest.raises(NoRewardsError, match=r"3 of 10 episodes have no reward, .* at most 20% may"):
                rl_phase._evaluate_step(run, stage, None, 2)


def _kill_after(run: RecipeRun, *, step: int) -> bool:
    """Continue a run in child processes. Kill all of them once `step` is written. Return whether rl1 was unfinished at
    this time."""
    command = [sys.executable, "-m", "trainer", "recipe", str(run.dir), "--run-dir", str(run.dir)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environ, start_new_session=True, stderr=subprocess.PIPE, text=True) as parent:
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while parent.poll() is None and max((row["step"] for row in run.run_folder.read_metrics()), default=0) < step:
            assert time.monotonic() < deadline, f"no step in {STEP_TIMEOUT_S} s"
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
    return run.result(Phase("grpo", "rl1")) is None


def _untimed_metrics(run: RecipeRun) -> list[dict[str, Any]]:
    """Return the rows of rl1 without durations."""
    rows = [row for row in run.run_folder.read_metrics() if row["stage"] == "rl1"]
    return [{name: value for name, value in row.items() if not name.endswith(("_s", "_s_sum"))} for row in rows]
