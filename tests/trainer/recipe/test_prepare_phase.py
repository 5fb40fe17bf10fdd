"""Tests of the phase `prepare`: prepared problems, and the problems that are dropped or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

from tests.trainer.recipe.small_runs import GAMES, OWN_REWARD, STEP_TIMEOUT_S, small_config, write_lines
from tests.trainer.sampling import QUIET_LIBRARIES
from trainer.config import ConfigError
from trainer.data.rows import DataError
from trainer.data.sources import read_problems
from trainer.json_files import read_json
from trainer.recipe import prepare_phase, rollout_session
from trainer.recipe.phases import Phase, RecipeRun

pytestmark = QUIET_LIBRARIES


def test_prepare_writes_training_problems_that_differ_from_those_of_the_evaluation(tmp_path: Path) -> None:
    run = RecipeRun(small_config(tmp_path, 'data.train=["generated:30"]', 'eval.data=["generated:20"]'))
    prepare_phase.prepare(run, Phase("prepare"))
    training = read_problems(str(run.dir / "data/train.jsonl"))
    held_out = read_problems(str(run.dir / "data/eval.jsonl"))
    assert (len(training), len(held_out)) == (30, 20)
    assert not {problem.text for problem in training} & {problem.text for problem in held_out}
    result = run.trained_model("initial")
    assert (result.model, result.step) == ("stages/initial/model", 0)
    assert (run.dir / result.model / "config.json").exists()


def test_problems_whose_prompt_leaves_no_tokens_for_an_answer_are_dropped_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": "What is " + "1 + " * times + "1?", "answer": "3"} for times in (2, 200)]
    write_lines(tmp_path / "some.jsonl", rows)
    run = RecipeRun(small_config(tmp_path, "data.train=generated:3", f"eval.data={tmp_path / 'some.jsonl'}"))
    prepare_phase.prepare(run, Phase("prepare"))
    assert [len(read_problems(str(run.dir / f"data/{name}.jsonl"))) for name in ("train", "eval")] == [3, 1]
    printed = capsys.readouterr().err
    assert "eval: some: 2 rows, 1 too_long, 1 kept" in printed
    assert re.search(r"^eval: some: some-1: too_long: \d+, the limit is 72$", printed, re.MULTILINE)


def test_a_stage_with_too_few_problems_ends_the_preparation_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "same.jsonl"
    write_lines(file, [{"problem": f"What is {number} + {number}?", "answer": "3"} for number in range(8)])
    run = RecipeRun(small_config(tmp_path, f"data.train={file}", f"eval.data={file}"))
    with pytest.raises(ConfigError) as raised:
        prepare_phase.prepare(run, Phase("prepare"))
    assert str(raised.value).startswith(
        "stages.rl1: expected at least problems_per_step=2 problems, got 0: its data has 8 rows, 8 contaminated (the "
        "first is same-0 of same: shares 'what is 0 0' with same-0 of same); "
    )
    assert f"{run.dir}/data/report.json names dropped rows" in str(raised.value)
    assert read_json(run.dir / "data/report.json")
    assert not run.result(Phase("prepare"))


def test_a_malformed_row_of_the_evaluation_is_named_and_ends_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe must read all rows of the evaluation, because it compares the training problems with each of them."""
    file, message = (
        tmp_path / "some.jsonl",
        "expected a problem as problem | question | prompt | text, got {'answer': '3'}",
    )
    write_lines(file, [{"problem": "What is 1 + 2?", "answer": "3"}, {"answer": "3"}])
    run = RecipeRun(small_config(tmp_path, "data.train=generated:3", f"eval.data={file}"))
    with pytest.raises(DataError, match=re.escape(f"{file}: row 1: {message}")):
        prepare_phase.prepare(run, Phase("prepare"))
    chat_format = rollout_session.load_chat_format(run.config, run.stage_dir("initial") / "model")
    kept, _ = prepare_phase.prepare_problems(run.config, "eval", [str(file)], chat_format, 24)
    assert [problem.id for problem in kept] == ["some-0"]
    assert f"eval: some: row 1: malformed: {message}\n" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_problems_with_an_answer_that_the_checker_cannot_parse_are_dropped_and_reported(
    tuned_run: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": f"What is {answer}?", "answer": answer} for answer in ("7", "x^2 + 1", "\\text{}", "$$")]
    write_lines(tmp_path / "some.jsonl", rows)
    sets = [f"eval.data={tmp_path / 'some.jsonl'}", "data.train=generated:3"]
    endpoints = json.dumps(list(tuned_run.config.sandbox.endpoints))
    run = RecipeRun(small_config(tmp_path, *sets, f"sandbox.endpoints={endpoints}"))
    prepare_phase.prepare(run, Phase("prepare"))
    kept = read_problems(str(run.dir / "data/eval.jsonl"))
    assert [problem.answer for problem in kept] == ["7", "x^2 + 1"]
    assert "eval: some: 4 rows, 2 kept, 2 unparsable_answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ("pyhton", {}, "environment 'pyhton': did you mean python?"),
        ("qa", {"file": "a.csv"}, "options.file: "),
    ],
)
@pytest.mark.parametrize("setting", ["data.train", "eval.data"])
def test_an_environment_that_cannot_run_here_is_refused_before_anything_starts(
    setting: str, environment: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    row = {"id": "h1", "text": "Go.", "answer": "1", "source": "s", "environment": environment, "options": options}
    write_lines(tmp_path / "some.jsonl", [row])
    run = RecipeRun(small_config(tmp_path, f"{setting}={tmp_path / 'some.jsonl'}"))
    with pytest.raises(ConfigError, match=rf"^problem h1: {re.escape(message)}"):
        prepare_phase.prepare(run, Phase("prepare"))


def test_an_environment_with_a_state_is_accepted_for_stages_that_do_not_sample_here(tmp_path: Path) -> None:
    options = {"game": "tower_of_hanoi", "disks": 2}
    row = {"text": "Go.", "answer": "", "source": "s", "environment": GAMES, "options": options}
    write_lines(
        tmp_path / "some.jsonl",
        [{"id": f"h{disks}", **row, "options": {**options, "disks": disks}} for disks in (2, 3)],
    )
    collected = [f"stages.{name}.episodes=collected" for name in ("rl1", "rl2")]
    run = RecipeRun(small_config(tmp_path, f"data.train={tmp_path / 'some.jsonl'}", *collected))
    prepare_phase.prepare(run, Phase("prepare"))
    assert [problem.environment for problem in read_problems(str(run.dir / "data/train.jsonl"))] == [GAMES] * 2


def test_prepared_problems_have_the_reward_function_of_the_run(tmp_path: Path) -> None:
    run = RecipeRun(
        small_config(tmp_path, f"reward.function={OWN_REWARD}", "data.train=generated:8", "eval.data=generated:4")
    )
    prepare_phase.prepare(run, Phase("prepare"))
    for file, count in (("train", 8), ("eval", 4)):
        rewards = [problem.reward for problem in read_problems(str(run.dir / f"data/{file}.jsonl"))]
        assert rewards == [OWN_REWARD] * count
