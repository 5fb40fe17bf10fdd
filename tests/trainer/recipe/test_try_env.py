"""Tests of `rstar-train try-env`, which runs turns from a file in an environment, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer import cli

GAMES = "examples.games:GameEnvironment"
GAME = {"environment": GAMES, "options": {"game": "tower_of_hanoi", "disks": 1}}
CODE = {"environment": "code", "options": {"tests": [{"stdin": "3 4\n", "expected": "7\n"}]}}


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _try(folder: Path, problem: dict[str, Any], *answers: object) -> int:
    """Run `try-env` with one problem, whose id is p0."""
    row = {"id": "p0", "text": "Do it.", "answer": "", "source": "s", **problem}
    (folder / "problems.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (folder / "run.toml").write_text(f'[data]\ntrain = ["{folder}/problems.jsonl"]\n', encoding="utf-8")
    (folder / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in answers), encoding="utf-8")
    return cli.main(["try-env", str(folder / "run.toml"), "--answers", str(folder / "answers.jsonl")])


def test_prompts_tool_responses_and_rewards_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    won = [_call("move", source=2, target=1), _call("move", source=1, target=3)]
    lost = {"problem": "p0", "turns": ["I do not know."]}
    assert _try(tmp_path, GAME, {"problem": "p0", "turns": won}, lost) == 0
    first, second = capsys.readouterr().out.split(f"=== problem p0, environment {GAMES}\n")[1:]
    assert "--- prompt\nDo it.\n\n" in first and '--- tool\n{"name": "move"' in first
    assert f"--- turn 1\n{won[0]}\n--- tool response: error\nIllegalMove: " in first
    assert f"--- turn 2\n{won[1]}\n--- tool response: ok\n" in first
    assert first.endswith("--- end: finished\n--- answer: None, reward: 1.0\n\n")
    assert second.endswith("--- end: finished\n--- answer: None, reward: 0.0\n\n")


def test_a_row_with_too_few_turns_has_no_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _try(tmp_path, GAME, {"problem": "p0", "turns": [_call("move", source=1, target=1)]}) == 0
    out = capsys.readouterr().out
    assert "--- end: unavailable (engine: the row has no further turn, and the episode is not at its end)" in out
    assert "reward: None" in out


def test_a_reward_function_scores_the_turns_and_a_failure_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tried_rewards.py").write_text("def score(response):\n    return 1 / len(response.split())\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"problem": "p0", "turns": [text]} for text in ("two words", " ")]  # " ": `score` divides by 0
    assert _try(tmp_path, {**GAME, "reward": "tried_rewards:score"}, *rows) == 0
    out = capsys.readouterr().out
    assert "--- end: finished\n--- answer: None, reward: 0.5\n" in out
    reason = "reward tried_rewards:score: ZeroDivisionError: division by zero"
    assert f"--- end: finished ({reason})\n--- answer: None, reward: None\n" in out


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"problem": "p9", "turns": []}, "--answers: p9: no such problem in data.train"),
        ({"problem": "p0", "turns": "x"}, 'row 0: expected {"problem": ID, "turns": [TEXT, ...]}, got'),
    ],
)
def test_a_malformed_row_of_answers_exits_with_2(
    answer: object, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _try(tmp_path, GAME, answer) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.runtime
def test_programs_are_tried_and_judged_in_a_sandbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = _call("execute_python_code_with_standard_io", code="print(sum(map(int, input().split())))", input="1 2")
    right = "<answer>\n```python\nprint(sum(map(int, input().split())))\n```\n</answer>"
    rows = [{"problem": "p0", "turns": turns} for turns in ([trial, right], ["```\nprint(8)\n```"])]
    assert _try(tmp_path, CODE, *rows) == 0
    out = capsys.readouterr().out
    assert "--- tool response: ok\n3\n" in out
    assert [line.rpartition(" ")[2] for line in out.splitlines() if "reward: " in line] == ["1.0", "0.0"]
