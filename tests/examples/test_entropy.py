"""Tests of the example that shows the tokens with high entropy of a run.

A reflection token is one of the first ten sampled tokens after a tool response. A forking token is any other sampled
token with high entropy.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples import entropy
from examples.entropy import marked_text
from tests.trainer.fakes import qwen_tokenizer
from tests.trainer.run_folders import episode
from trainer.runs.run_folder import RunFolder

WORDS = ["but", " 1", "wait", "\x1b[31m", "so"]
ROW = {"problem": "p", "sample": 3, "response_ids": [0, 1, 3, 2, 4], "entropies": [3.0, 0.1, None, 2.0, 0.2]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an episode in step 4 whose entropies were recorded, and its tokenizer."""
    folder = RunFolder(tmp_path)
    folder.bind_config({})
    written = episode(random.Random(1), "p", 3, skill=1.0)
    folder.write_episodes(4, "rl1", [[written]], [[0]])
    folder.write_entropies(4, [{"step": 4, **ROW}])
    return tmp_path


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy, "decoder", lambda run, model: decode)


def decode(ids: object) -> str:
    assert isinstance(ids, list)
    return "".join(WORDS[token] for token in ids)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what the example prints, with its lines joined."""
    entropy.main(argv)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("step", [[], ["--step", "4"]])
def test_the_tables_separate_own_text_and_reactions_to_tools(
    run: Path, capsys: pytest.CaptureFixture[str], step: list[str]
) -> None:
    own, reactions = shown(capsys, str(run), *step).split("Right after a tool response")
    assert "'but' 1 3.000" in own and "'wait'" not in own
    assert "2 tokens, mean entropy 1.1 nats, 0.0% with high entropy" in reactions


def test_tokens_with_high_entropy_are_in_brackets_and_control_characters_escaped_in_a_pipe(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, str(run), "--episode", "4/p/3")
    assert "⟦but⟧ 1⟨1b⟩[31mwaitso" in text
    assert "'but' 1 3.000" in text


def test_tokens_with_high_entropy_have_reversed_colours_in_a_terminal(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    text = shown(capsys, str(run), "--episode", "4/p/3")
    assert "\x1b[7mbut\x1b[0m 1\x1b[2m⟨1b⟩[31m\x1b[0mwaitso" in text


def test_an_episode_without_entropies_is_an_error_that_names_one(run: Path) -> None:
    with pytest.raises(SystemExit, match="expected STEP/PROBLEM/SAMPLE with entropies, such as 4/p/3"):
        entropy.main([str(run), "--episode", "4/p/9"])
    with pytest.raises(SystemExit, match=r"set storage\.save_entropies"):
        entropy.main([str(run), "--step", "5"])
    (run / "entropies/step_000004.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"set storage\.save_entropies"):
        entropy.main([str(run)])


def test_one_fifth_of_the_tokens_of_an_episode_are_marked_as_forking_or_reflection_tokens() -> None:
    ids = [0, 1, 3, 2, 4, 1, 1, 1, 1, 1, 1]
    row = {"response_ids": ids, "entropies": [3.0, 0.1, None, 2.0, *[0.0] * 7]}
    assert list(marked_text(row, decode)) == [
        ("forking", "but"),
        ("sampled", " 1"),
        ("tool", "\x1b[31m"),
        ("reflection", "wait"),
        ("sampled", "so 1 1 1 1 1 1"),
    ]


def test_a_token_without_entropy_is_never_marked() -> None:
    row = {"response_ids": [0, 1, 1, 1, 1], "entropies": [0.0] * 5}
    assert list(marked_text(row, decode)) == [("sampled", "but 1 1 1 1")]


def test_the_tokenizer_of_the_run_decodes_and_without_one_the_ids_are_shown(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert "⟦[0]⟧[1][3][2][4]" in shown(capsys, str(run), "--episode", "4/p/3")
    tokenizer = qwen_tokenizer()
    tokenizer.save_pretrained(run / "stages/sft/model")
    text = tokenizer.decode([0])
    assert f"⟦{text}⟧" in shown(capsys, str(run), "--episode", "4/p/3")
