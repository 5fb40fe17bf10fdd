"""Tests of `rstar-train init`: each kind of run is complete, runs, and describes its settings as the code does."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from trainer import cli
from trainer.config import SftConfig
from trainer.config_loading import load_config
from trainer.data.sources import read_conversations, read_problems
from trainer.environments.registry import check_problem
from trainer.episodes.episode import Problem
from trainer.json_files import differing_settings
from trainer.recipe.new_run import KINDS
from trainer.recipe.new_run_files import rewards
from trainer.setting_comments import setting_comments

FILES = {
    "math": {"run.toml", "train.jsonl", "eval.jsonl", "rewards.py"},
    "code": {"run.toml", "train.jsonl", "eval.jsonl"},
    "agent": {"run.toml", "train.jsonl", "eval.jsonl", "sft.jsonl", "my_environment.py"},
}


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of run, whose files are in the working directory and can be imported."""
    assert cli.main(["init", str(tmp_path / "new"), "--kind", request.param]) == 0
    monkeypatch.chdir(tmp_path / "new")
    monkeypatch.syspath_prepend(tmp_path / "new")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "new"), prepend=":")
    return str(request.param)


def test_the_files_of_a_new_run_load_and_share_no_problem(kind: str) -> None:
    assert {path.name for path in Path().iterdir()} == FILES[kind]
    config = load_config(Path("run.toml"), {})
    train, held_out = read_problems(*config.data.train), read_problems(*config.eval.data)
    for problem in (*train, *held_out):
        check_problem(problem)
    assert not {problem.text for problem in train} & {problem.text for problem in held_out}
    assert len(train) >= config.stages["rl1"].problems_per_step
    assert len(read_conversations(*config.sft.data)) > 1000


def test_each_setting_has_the_description_of_the_code_and_a_hint_where_it_changes(kind: str) -> None:
    text = Path("run.toml").read_text(encoding="utf-8")
    comments = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    tree = tomllib.loads(text)
    described = setting_comments(SftConfig)
    assert [name for name in tree["sft"] if described[name][1:] not in comments] == []
    assert comments.count("Yours: ") >= 10
    assert max(map(len, text.splitlines())) <= 120


def test_the_run_of_programs_has_the_settings_of_the_config_that_was_measured(tmp_path: Path) -> None:
    """docs/environments.md states the accuracy of `configs/tiny-code.toml`."""
    assert cli.main(["init", str(tmp_path), "--kind", "code"]) == 0
    measured = Path(__file__).parents[3] / "configs/tiny-code.toml"
    new, config = (asdict(load_config(file, {})) for file in (tmp_path / "run.toml", measured))
    assert list(differing_settings(new, config)) == ["data.train", "eval.data", "run_dir"]


@pytest.mark.slow
def test_a_smoke_run_of_a_new_run_ends_well(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    assert cli.main(["recipe", "run.toml", "--smoke"]) == 0, capfd.readouterr().err
    assert json.loads(Path("run-smoke/summary.json").read_text())["stages"][-1]["name"] == "rl1"


def test_no_file_is_overwritten_and_nothing_is_written_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval.jsonl").write_text("mine")
    assert cli.main(["init", str(tmp_path)]) == 2
    assert (
        f"{tmp_path / 'eval.jsonl'} exists: expected a folder without it; nothing was written"
        in capsys.readouterr().err
    )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("eval.jsonl", "mine")]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["init", str(tmp_path / "file")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'file'}: expected a folder that can be written (" in line


@pytest.mark.parametrize(
    ("response", "reward"),
    [("\\boxed{41}", 0.0), ("no answer", 0.0), ("\\boxed{42}", 1.099), ("\\boxed{42}" * 200, 1.0)],
)
def test_the_reward_of_a_new_run_prefers_short_right_answers(response: str, reward: float) -> None:
    assert rewards.score(Problem("p", "6 * 7?", "42", "s"), response) == pytest.approx(reward)
