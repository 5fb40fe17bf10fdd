"""Tests of the resumption of an RL stage, of the optimizer states of the previous stage, and of the order of
problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from tests.trainer.sampling import QUIET_LIBRARIES, Sampler, problems  # noqa: E402
from tests.trainer.training.stage_run import StageRun, are_equal, load_weights  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.training.training_rows import problem_schedule  # noqa: E402

pytestmark = QUIET_LIBRARIES

TIMING_METRICS = (
    "step_s", "rollout_s", "rollout_wait_s", "weight_sync_s", "optimize_s", "overhead_cpu_s", "overhead_s", "eval_s"
)  # fmt: skip


def untimed_metrics(stage_run: StageRun) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if name not in TIMING_METRICS}
        for row in stage_run.run_folder.read_metrics()
    ]


def untimed_episodes(stage_run: StageRun, step: int) -> list[dict[str, Any]]:
    return [row | {"duration_s": 0} for row in stage_run.run_folder.read_episodes(step)]


def test_a_stage_resumed_after_a_failure_ends_like_an_uninterrupted_one(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    """The stage has steps 8 to 12 of the run, saves a checkpoint every 2 steps, and fails in its fourth step.

    `first_step` is the number of steps before the stage.
    """
    uninterrupted = StageRun(tmp_path / "uninterrupted", model, loop_thread, steps=5)
    uninterrupted_sampler = Sampler(model)
    expected = uninterrupted.run(uninterrupted_sampler, first_step=7)

    class StopTraining(Exception):
        pass

    def fail_in_fourth_step(index: int) -> None:
        if index == 3:
            raise StopTraining

    resumed = StageRun(tmp_path / "resumed", model, loop_thread, steps=5)
    with pytest.raises(StopTraining) as caught:
        resumed.run(Sampler(model, on_collect=fail_in_fourth_step), first_step=7)
    assert caught.traceback[-1].name == "fail_in_fourth_step", "the error keeps its traceback through TRL"
    assert [row["step"] for row in resumed.run_folder.read_metrics()] == [8, 9, 10]
    # A kill while a checkpoint is written leaves its directory without the mark of completeness.
    (tmp_path / "resumed/stages/rl1/checkpoints/checkpoint-3").mkdir()
    resumed_sampler = Sampler(model)
    actual = resumed.run(resumed_sampler, first_step=7)

    # The checkpoint has the stage's first two steps. Each step has two entries, a sync and a collection.
    assert resumed_sampler.log == uninterrupted_sampler.log[2 * 2 :]
    assert are_equal(load_weights(actual.model), load_weights(expected.model))
    # As text, since NaN is not equal to itself.
    assert str(untimed_metrics(resumed)) == str(untimed_metrics(uninterrupted))
    assert [row["weight_version"] for row in untimed_metrics(resumed)] == [7, 8, 9, 10, 11]
    for step in range(8, 13):
        assert untimed_episodes(resumed, step) == untimed_episodes(uninterrupted, step)
    # If all steps are done, another run repeats none of them.
    idle_sampler = Sampler(model)
    assert are_equal(load_weights(resumed.run(idle_sampler, first_step=7).model), load_weights(expected.model))
    assert idle_sampler.log == []


def test_the_optimizer_states_are_continued_or_reset_as_configured(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    first = StageRun(tmp_path, model, loop_thread).run(Sampler(model))  # two steps
    optimizer_steps = {}
    for name, checkpoint in {"continued": first.checkpoint, "reset": None}.items():
        stage_run = StageRun(tmp_path, first.model, loop_thread, name=name, steps=1, learning_rate=5e-4, save_steps=1)
        sampler = Sampler(first.model)
        trained = stage_run.run(sampler, first_step=2, optimizer_checkpoint=checkpoint)
        assert are_equal(sampler.syncs[0], load_weights(first.model))
        optimizer = torch.load(trained.checkpoint / "optimizer.pt", weights_only=True)
        optimizer_steps[name] = {int(state["step"]) for state in optimizer["state"].values()}
        assert {group["lr"] for group in optimizer["param_groups"]} == {5e-4}
        assert [row["step"] for row in stage_run.run_folder.read_metrics() if row["stage"] == name] == [3]
    assert optimizer_steps == {"continued": {3}, "reset": {1}}


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9), st.integers(0, 3))
def test_no_problem_occurs_twice_in_a_step_or_in_an_epoch_of_whole_steps(
    num_problems: int, per_step: int, steps: int, seed: int
) -> None:
    assume(num_problems >= per_step)
    order = problem_schedule(problems(num_problems), per_step, steps, seed)
    assert len(order) == per_step * steps and order == problem_schedule(problems(num_problems), per_step, steps, seed)
    assert all(len({*order[start : start + per_step]}) == per_step for start in range(0, len(order), per_step))
    epoch_length = num_problems // per_step * per_step
    assert len({*order[:epoch_length]}) == min(epoch_length, len(order))
