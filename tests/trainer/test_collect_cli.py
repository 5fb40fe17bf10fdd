"""Tests of `rstar-train collect` and of the commands that read a store of episodes. Each misuse is reported in one line
and with exit code 2."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.config_loading import load_config
from trainer.recipe.collect_work import _store_settings
from trainer.recipe.phases import RecipeRun

pytest.importorskip("transformers")

GAMES = "examples.games:GameEnvironment"
NUMBER_GAME = {"id": "a", "text": "Play.", "answer": "", "source": "games", "environment": GAMES}


def config(tmp_path: Path, rows: list[object], **collect: object) -> str:
    """Write a configuration whose problems are `rows`, and return its path."""
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"data": [str(tmp_path / "problems.jsonl")], "max_response_tokens": 64, **collect}
    content = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "model")},
        "engines": {"max_model_len": 16384},
        "collect": settings,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    return str(tmp_path / "config.json")


def misuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail as misuse, and return what it says."""
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in lines if line.startswith("rstar-train: ")]) == 1
    return lines[-1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**NUMBER_GAME, "environment": "chess"}, "problem a: environment 'chess': expected one of"),
        ({**NUMBER_GAME, "options": {"game": "go"}}, "problem a: options"),
        ({**NUMBER_GAME, "options": "none"}, "expected environment as text and options as an object"),
        ({"id": "a"}, "row 0: expected a problem as"),
    ],
)
def test_a_wrong_problem_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, object], message: str
) -> None:
    assert message in misuse(capsys, "collect", config(tmp_path, [row]))
    assert not (tmp_path / "run").exists()


def test_two_problems_with_one_id_and_a_source_without_problems_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    game = {**NUMBER_GAME, "options": {"game": "number_guessing"}}
    assert "problem a: expected ids that occur once" in misuse(capsys, "collect", config(tmp_path, [game, game]))
    assert "expected problems, got none" in misuse(capsys, "collect", config(tmp_path, []))


def test_an_address_without_ray_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (the extra `cluster`)")
    game = {**NUMBER_GAME, "options": {"game": "number_guessing"}}
    with socket.socket() as unused:  # bound, but it does not listen
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        path = config(tmp_path, [game], executor="ray", ray_address=address)
        assert f"Ray at {address}: nothing answers" in misuse(capsys, "collect", path)


def test_a_missing_ray_is_reported_with_the_command_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    game = {**NUMBER_GAME, "options": {"game": "number_guessing"}}
    assert "pip install 'rstar-sandbox[cluster]'" in misuse(capsys, "collect", config(tmp_path, [game], executor="ray"))


def test_a_directory_without_a_store_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["episodes"], ["export", "--format", "chat", "--out", str(tmp_path / "out")]):
        assert f"{tmp_path}: expected a store of episodes" in misuse(capsys, *arguments, str(tmp_path))
    game = {**NUMBER_GAME, "options": {"game": "number_guessing"}}
    assert "run `collect` first" in misuse(capsys, "collect", config(tmp_path, [game]), "--status")


def test_a_store_keeps_its_settings_when_its_run_folder_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def settings(run_dir: Path, model: Path) -> dict[str, object]:
        return _store_settings(RecipeRun(load_config(Path(config(tmp_path, [])), {}, [f"run_dir={run_dir}"])), model)

    here, moved = Path("run"), tmp_path / "moved"
    assert settings(here, here / "stages/rl1/model") == settings(moved, moved / "stages/rl1/model")
    assert settings(here, here / "stages/rl1/model") != settings(here, here / "stages/rl2/model")
    assert settings(here, Path("owner/name"))["model"] == "owner/name"
