"""`rstar-train entropy` on a run folder that is written here."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from trainer.runs.entropy import show_entropy
from trainer.runs.run_folder import RunFolder
from trainer.runs.show import ShowError

WORDS = ["but", " 1", "wait", "\x1b[31m", "so"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    row = {"problem": "p", "sample": 3, "response_ids": [0, 1, 3, 2, 4], "entropies": [3.0, 0.1, None, 2.0, 0.2]}
    RunFolder(tmp_path).write_entropies(4, [{"step": 4, **row}])
    return tmp_path


def show(run: Path, capsys: pytest.CaptureFixture[str], episode: str | None = None, step: int | None = None) -> str:
    show_entropy(argparse.Namespace(run=run, step=step, episode=episode), WORDS.__getitem__)
    return capsys.readouterr().out


def test_the_tables_separate_own_text_and_reactions_to_tools(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, reactions = show(run, capsys).split("Right after a tool response")
    assert "'but'" in own and "'wait'" not in own
    assert "2 tokens, mean entropy 1.1 nats, 0.0% with high entropy" in " ".join(reactions.split())


def test_an_episode_is_shown_with_its_control_characters_escaped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = show(run, capsys, episode="4/p/3")
    assert "but 1⟨1b⟩[31mwaitso" in text.replace("\n", "")
    with pytest.raises(ShowError, match="expected STEP/PROBLEM/SAMPLE of an episode with entropies, such as 4/p/3"):
        show(run, capsys, episode="4/p/9")


def test_a_run_without_entropies_says_what_to_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ShowError, match=r"set storage\.save_entropies"):
        show(tmp_path, capsys)


def test_a_continued_run_forgets_the_entropies_after_its_checkpoint(run: Path) -> None:
    folder = RunFolder(run)
    folder.truncate_after(4)
    assert folder.entropy_steps() == [4]
    folder.truncate_after(3)
    assert folder.entropy_steps() == []
