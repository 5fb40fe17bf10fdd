"""Tests of the phase `filter`: the problems that it drops, and its continuation after a kill."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

from tests.trainer.recipe.small_runs import STEP_TIMEOUT_S, copy_run, small_config
from tests.trainer.sampling import QUIET_LIBRARIES
from trainer.config import ConfigError
from trainer.data.problems import write_problems
from trainer.data.sources import read_problems
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.json_files import read_rows
from trainer.recipe import filter_phase, rl_phase
from trainer.recipe.evaluation import write_outcomes
from trainer.recipe.phases import Phase, RecipeRun, TrainResult
from trainer.runs.run_folder import RunFolder

pytestmark = QUIET_LIBRARIES


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_the_filter_drops_problems_that_are_always_solved_and_continues_after_a_kill(
    tuned_run: RecipeRun, tmp_path: Path
) -> None:
    run = copy_run(tuned_run, tmp_path / "run")
    run.write_result(Phase("grpo", "rl1"), run.trained_model("sft"))  # rl1 is skipped
    with pytest.raises(ConfigError, match="run `rstar-train filter rl2` first"):
        rl_phase.grpo(run, Phase("grpo", "rl2"))
    filter_phase.filter_problems(run, Phase("filter", "rl2"))
    file = run.stage_dir("rl2") / "filter/outcomes.jsonl"
    rows = list(read_rows(file))
    solved = Counter(row["problem"] for row in rows if row["reward"] == 1)
    assert len(rows) == 6 * 3, "six problems, three samples of each"
    assert list(RunFolder(file.parent).episode_steps()) == [], (
        "a filter writes outcomes only: the episodes of 42K problems would fill the disk"
    )
    kept = stage_problems(run, "rl2")
    assert kept == [f"Number {number}?" for number in range(6) if solved[f"Number {number}?"] < 3]
    assert run.require_result(Phase("filter", "rl2")).kept == len(kept)

    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])  # a kill may leave a torn line
    num_complete = file.read_bytes().count(b"\n")
    filter_phase.filter_problems(run, Phase("filter", "rl2"))
    assert list(read_rows(file))[:num_complete] == rows[:num_complete], "these are not sampled again"
    assert stage_problems(run, "rl2") == kept


def test_the_difficulty_filter_drops_problems_of_which_all_samples_are_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecipeRun(small_config(tmp_path, "reward.correct_above=0.5"))
    rewards = {"a": [0.9, 0.6, 2.0], "b": [0.9, 0.5, 1.0], "c": [1.0, None, 1.0], "d": [1.0, 1.0, 1.0]}
    problems = [Problem(name, name, "1") for name in rewards]
    write_problems(problems, run.unfiltered_path(run.config.stages["rl2"]))
    for phase in (Phase("prepare"), Phase("sft", "sft"), Phase("grpo", "rl1")):
        run.write_result(phase, TrainResult("model", 0))
    monkeypatch.setattr(filter_phase, "run_evaluation", lambda *_, **__: {})
    write_outcomes(
        run.stage_dir("rl2") / "filter",
        (
            Episode(problem, sample, stop_reason=StopReason.FINISHED, reward=reward)
            for problem in problems
            for sample, reward in enumerate(rewards[problem.id])
        ),
    )
    filter_phase.filter_problems(run, Phase("filter", "rl2"))
    assert stage_problems(run, "rl2") == ["b", "c"]


def stage_problems(run: RecipeRun, stage: str) -> list[str]:
    """Return the ids of the problems that a stage trains on."""
    return [problem.id for problem in read_problems(str(run.problems_path(run.config.stage_config(stage))))]
