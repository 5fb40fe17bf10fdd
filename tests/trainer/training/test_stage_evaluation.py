"""Tests of evaluations inside a stage: which weights they get, after which steps there is one, which model is the best,
and how a stage with evaluations is resumed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from tests.trainer.sampling import QUIET_LIBRARIES, Collection, Sampler  # noqa: E402
from tests.trainer.training.stage_run import StageRun, are_equal, load_weights  # noqa: E402
from tests.trainer.training.test_resume import untimed_metrics  # noqa: E402
from trainer.json_files import read_json  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.training import grpo  # noqa: E402

pytestmark = QUIET_LIBRARIES


@dataclass
class Evaluation:
    """A fake evaluation with the given accuracies. It keeps the weights that the engines had."""

    sampler: Sampler
    accuracies: dict[int, float]
    """The accuracy by the number of steps of the stage. If a number is missing, its evaluation ends the run, as an
    engine that is down would."""
    weights: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, steps: int) -> float:
        accuracy = self.accuracies[steps]
        self.sampler.log.append(f"evaluate {steps}")
        self.weights[steps] = {name: tensor.clone() for name, tensor in self.sampler.model.state_dict().items()}
        return accuracy


def entries(sampler: Sampler) -> list[str]:
    return ["sample" if isinstance(entry, Collection) else entry for entry in sampler.log]


def test_an_evaluation_uses_the_weights_after_its_step_and_changes_no_training(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    without = StageRun(tmp_path / "without", model, loop_thread, steps=5)
    expected = without.run(Sampler(model))
    sampler, stage_run = Sampler(model), StageRun(tmp_path / "with", model, loop_thread, steps=5)
    evaluation = Evaluation(sampler, {2: 0.25, 4: 0.75, 5: 0.5})
    trained = stage_run.run(sampler, evaluate=evaluation, eval_steps=2)
    # The step after an evaluation starts from the weights that the engines have already.
    steps_1_2, steps_3_4 = ["sync", "sample"] * 2, ["sample", "sync", "sample"]
    first, second, last = (["sync", f"evaluate {steps}"] for steps in (2, 4, 5))
    assert entries(sampler) == [*steps_1_2, *first, *steps_3_4, *second, "sample", *last]
    assert are_equal(evaluation.weights[2], sampler.syncs[2]) and not are_equal(sampler.syncs[2], sampler.syncs[1])
    assert are_equal(evaluation.weights[5], load_weights(trained.model))
    assert are_equal(load_weights(trained.model), load_weights(expected.model))
    rows = untimed_metrics(stage_run)
    assert [row.pop("eval_accuracy", None) for row in rows] == [None, 0.25, None, 0.75, 0.5]
    assert str(rows) == str(untimed_metrics(without)), "as text, since NaN is not equal to itself"


def test_the_model_of_the_best_evaluation_is_kept_and_of_equal_ones_the_first(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    sampler, stage_run = Sampler(model), StageRun(tmp_path, model, loop_thread, steps=4)
    evaluation = Evaluation(sampler, {1: 0.0, 2: 0.5, 3: 0.5, 4: 0.25})
    stage_run.run(sampler, evaluate=evaluation, eval_steps=1, first_step=7)
    best = tmp_path / "stages/rl1/best"
    assert read_json(best / "best.json") == {"step": 7 + 2, "accuracy": 0.5}
    assert are_equal(load_weights(best), evaluation.weights[2])
    assert (best / "tokenizer.json").exists()
    assert not (tmp_path / "stages/rl1/best.part").exists()


def test_the_times_of_a_step_leave_its_evaluation_out(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_s, evaluated_s = 10_000.0, 0.0

    def evaluate(steps: int) -> float:
        nonlocal evaluated_s
        evaluated_s += long_s
        return 0.5

    monkeypatch.setattr(grpo, "perf_counter", lambda: time.perf_counter() + evaluated_s)
    stage_run = StageRun(tmp_path, model, loop_thread, steps=3)
    stage_run.run(Sampler(model), evaluate=evaluate, eval_steps=1)
    rows = list(stage_run.run_folder.read_metrics())
    assert [row["eval_s"] >= long_s for row in rows] == [True] * 3
    timed = {name: row[name] for row in rows for name in row if name.endswith("_s") and name != "eval_s"}
    assert {"step_s", "optimize_s", "rollout_s", "rollout_wait_s", "weight_sync_s", "overhead_s"} <= timed.keys()
    assert all(0 <= row[name] < long_s / 2 for row in rows for name in timed)


def test_a_resumed_stage_evaluates_no_step_again(tmp_path: Path, model: Path, loop_thread: LoopThread) -> None:
    """The stage fails in step 5, before its own first checkpoint. But each evaluation is followed by a checkpoint."""

    def fail_in_fifth_step(index: int) -> None:
        if index == 4:
            raise KeyboardInterrupt

    stage_run = StageRun(tmp_path, model, loop_thread, steps=5, save_steps=100)
    sampler = Sampler(model, on_collect=fail_in_fifth_step)
    with pytest.raises(KeyboardInterrupt):
        stage_run.run(sampler, evaluate=Evaluation(sampler, {2: 0.75, 4: 0.5}), eval_steps=2)
    second = Sampler(model)
    stage_run.run(second, evaluate=Evaluation(second, {5: 0.25}), eval_steps=2)
    assert entries(second) == ["sync", "sample", "sync", "evaluate 5"]
    assert [row.get("eval_accuracy") for row in stage_run.run_folder.read_metrics()] == [None, 0.75, None, 0.5, 0.25]
    assert read_json(tmp_path / "stages/rl1/best/best.json") == {"step": 2, "accuracy": 0.75}
    idle = Sampler(model)
    stage_run.run(idle, evaluate=Evaluation(idle, {}), eval_steps=2)
    assert idle.log == [], "the last step has been evaluated"


def test_a_step_whose_evaluation_failed_is_repeated_and_evaluated(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    stage_run, sampler = StageRun(tmp_path, model, loop_thread, steps=4, save_steps=100), Sampler(model)
    with pytest.raises(KeyError):
        stage_run.run(sampler, evaluate=Evaluation(sampler, {2: 0.5}), eval_steps=2)
    assert [row["step"] for row in stage_run.run_folder.read_metrics()] == [1, 2, 3]
    second = Sampler(model)
    stage_run.run(second, evaluate=Evaluation(second, {4: 0.5}), eval_steps=2)
    assert entries(second) == ["sync", "sample", "sync", "sample", "sync", "evaluate 4"]
    assert read_json(tmp_path / "stages/rl1/best/best.json") == {"step": 2, "accuracy": 0.5}


def test_an_evaluation_waits_for_the_step_that_is_sampled_beside_training(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    sampler = Sampler(model)
    stage_run = StageRun(tmp_path, model, loop_thread, steps=4, one_step_off_policy=True)
    stage_run.run(sampler, evaluate=Evaluation(sampler, {2: 0.5, 4: 0.5}), eval_steps=2)
    # As without the evaluation, step 3 is sampled with the weights before step 2, and step 4 with those after it.
    steps_1_2 = ["sync", "sample", "sample", "sync", "sample", "sync", "evaluate 2"]
    assert entries(sampler) == [*steps_1_2, "sample", "sync", "sync", "evaluate 4"]
    assert [row["staleness_mean_steps"] for row in stage_run.run_folder.read_metrics()] == [0, 1, 1, 1]
