"""Tests of dynamic sampling, which replaces groups without a signal (all their rewards are equal) by groups of further
problems. They also test what a step then trains on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from tests.trainer.sampling import QUIET_LIBRARIES, Sampler, Score, problems  # noqa: E402
from tests.trainer.training.stage_run import (  # noqa: E402
    ROWS_PER_STEP,
    SEED,
    StageRun,
    are_equal,
    load_weights,
    record_loss_inputs,
)
from tests.trainer.training.test_resume import untimed_metrics  # noqa: E402
from trainer.episodes.episode import Problem  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.training.training_rows import problem_schedule  # noqa: E402

pytestmark = QUIET_LIBRARIES

NUM_PROBLEMS = 6
FIRST_STEP = [problem.id for problem in problem_schedule(problems(NUM_PROBLEMS), 2, 1, SEED)]
"""The ids of the two problems with which a stage of `NUM_PROBLEMS` begins."""
OTHERS = [problem.id for problem in problems(NUM_PROBLEMS) if problem.id not in FIRST_STEP]
"""The ids of the other problems."""


def solved(*ids: str) -> Score:
    """Return a score. All samples of these problems are correct. Of each other problem, every second sample is
    correct."""

    def score(problem: Problem, sample: int, ids_T: Sequence[int]) -> float:
        return 1.0 if problem.id in ids else float(sample % 2)

    return score


def run_stage(
    path: Path, sampler: Sampler, loop_thread: LoopThread, *, num_problems: int = NUM_PROBLEMS, **changes: Any
) -> StageRun:
    options = {"steps": 1, "dynamic_sampling_rounds": 3} | changes
    stage_run = StageRun(path, sampler.folder, loop_thread, **options)
    stage_run.run(sampler, num_problems=num_problems)
    return stage_run


def sampled(sampler: Sampler) -> list[list[str]]:
    """Return the ids of the problems of each collection."""
    return [collection.problem_ids for collection in sampler.collections]


def test_groups_without_a_signal_are_replaced_until_enough_groups_have_one(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the first two problems is always solved. Of the other problems, all but one are always solved."""
    loss_inputs = record_loss_inputs(monkeypatch)
    sampler = Sampler(model, score=solved(FIRST_STEP[0], *OTHERS[:-1]))
    stage_run = run_stage(tmp_path, sampler, loop_thread, dynamic_sampling_rounds=9)
    first, *rounds = sampled(sampler)
    assert first == FIRST_STEP
    assert [len(ids) for ids in rounds] == [1] * len(rounds) and rounds[-1] == OTHERS[-1:]
    assert len({*FIRST_STEP, *(ids[0] for ids in rounds)}) == 2 + len(rounds), "no problem twice in a step"

    (row,) = stage_run.run_folder.read_metrics()
    assert (row["replacement_groups"], row["zero_variance_groups"]) == (len(rounds), len(rounds))
    assert (row["episodes_in_loss"], row["episodes_not_in_loss"]) == (ROWS_PER_STEP, 8 + 8 * len(rounds))
    episodes = list(stage_run.run_folder.read_episodes(1))
    assert len(episodes) == 8 * (2 + len(rounds)), "those of replaced groups are recorded"
    trained = {episode["problem"]["id"] for episode in episodes if episode["is_selected"]}
    assert trained == {FIRST_STEP[1], OTHERS[-1]}
    (inputs,) = loss_inputs
    assert inputs["completion_ids"].shape[0] == ROWS_PER_STEP and bool(inputs["tool_mask"].any(1).all())


def test_a_step_with_replaced_groups_has_the_gradient_of_one_that_begins_with_the_other_problems(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    """A replaced group is not in the loss, and does not count in the denominator of the loss."""
    sampler = Sampler(model, score=solved(*FIRST_STEP))
    (row,) = run_stage(tmp_path / "replaced", sampler, loop_thread).run_folder.read_metrics()
    first, replacements = sampled(sampler)
    assert first == FIRST_STEP and not {*first} & {*replacements}
    # The seed of an episode follows from step, problem and sample, so it is the same in a stage of these two problems.
    direct, direct_sampler = StageRun(tmp_path / "direct", model, loop_thread, steps=1), Sampler(model, solved())
    direct.run(direct_sampler, chosen=[problem for problem in problems(NUM_PROBLEMS) if problem.id in replacements])
    (direct_row,) = direct.run_folder.read_metrics()
    assert sampled(direct_sampler) in ([replacements], [replacements[::-1]])
    assert row["episodes_in_loss"] == direct_row["episodes_in_loss"] == ROWS_PER_STEP
    assert row["grad_norm"] == pytest.approx(direct_row["grad_norm"], rel=1e-4) and row["grad_norm"] > 0


@pytest.mark.parametrize(("num_problems", "rounds"), [(6, [2, 2]), (5, [2, 1]), (2, [])])
def test_a_step_without_enough_signals_ends_when_rounds_or_problems_are_used_up(
    tmp_path: Path, model: Path, loop_thread: LoopThread, num_problems: int, rounds: list[int]
) -> None:
    sampler = Sampler(model, score=lambda *_: 1.0)
    stage_run = run_stage(tmp_path, sampler, loop_thread, num_problems=num_problems, dynamic_sampling_rounds=2)
    assert [len(ids) for ids in sampled(sampler)] == [2, *rounds]
    everything = [id for ids in sampled(sampler) for id in ids]
    assert len({*everything}) == len(everything), "no problem twice in a step"
    (row,) = stage_run.run_folder.read_metrics()
    assert (row["replacement_groups"], row["episodes_in_loss"], row["grad_norm"]) == (sum(rounds), 0, 0)
    trained = {episode["problem"]["id"] for episode in stage_run.run_folder.read_episodes(1) if episode["is_selected"]}
    assert trained == {*sampled(sampler)[0]}, "the first groups, since no other is better"


def test_the_choice_of_problems_follows_from_seed_step_and_rewards_also_after_a_kill(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    options = {"steps": 4, "num_problems": 12}
    score = solved(*(f"p{n}" for n in range(0, 12, 2)))
    whole_sampler = Sampler(model, score=score)
    whole = run_stage(tmp_path / "whole", whole_sampler, loop_thread, **options)
    rows = untimed_metrics(whole)
    assert sum(row["replacement_groups"] for row in rows) >= 3
    assert [row["episodes_in_loss"] for row in rows] == [ROWS_PER_STEP] * 4

    def fail_in_the_last_collection(index: int) -> None:
        if index == len(whole_sampler.collections) - 1:
            raise KeyboardInterrupt

    killed_sampler = Sampler(model, score=score, on_collect=fail_in_the_last_collection)
    with pytest.raises(KeyboardInterrupt):
        run_stage(tmp_path / "killed", killed_sampler, loop_thread, **options)
    assert sampled(killed_sampler) == sampled(whole_sampler)[:-1]
    sampler = Sampler(model, score=score)
    resumed = run_stage(tmp_path / "killed", sampler, loop_thread, **options)
    assert 0 < len(sampler.collections) < len(whole_sampler.collections)
    assert sampled(sampler) == sampled(whole_sampler)[-len(sampler.collections) :]
    assert str(untimed_metrics(resumed)) == str(rows)
    trained = [load_weights(stage_run.run_folder.path / "stages/rl1/model") for stage_run in (whole, resumed)]
    assert are_equal(*trained)


def test_without_groups_to_replace_a_step_is_the_same_as_without_the_setting(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_inputs, metrics = record_loss_inputs(monkeypatch), []
    for rounds in (0, 2):
        sampler = Sampler(model, score=solved())
        stage_run = run_stage(tmp_path / str(rounds), sampler, loop_thread, steps=2, dynamic_sampling_rounds=rounds)
        assert [len(ids) for ids in sampled(sampler)] == [2, 2]
        metrics.append(untimed_metrics(stage_run))
    without, with_rounds = loss_inputs[:2], loss_inputs[2:]
    for mine, theirs in zip(without, with_rounds, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine if torch.is_tensor(mine[name]))
    assert [row.pop("replacement_groups") for row in metrics[1]] == [0, 0]
    assert str(metrics[0]) == str(metrics[1])
