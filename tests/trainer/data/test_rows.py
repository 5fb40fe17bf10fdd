"""Tests of rows of files and of the hub: CSV that is read, files that are no CSV, and environments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.data.problems import prepare_problems
from trainer.data.rows import DataError
from trainer.data.sources import read_problems
from trainer.episodes.episode import Problem


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"problem,answer\np,1\n\xff,2\n", "expected CSV in UTF-8 ("), (b'problem,answer\n"p" x,1\n', "expected CSV in")],
)
def test_a_file_that_is_no_csv_is_an_error_that_names_it(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "file.csv"
    file.write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_problems(str(file))
    assert str(raised.value).startswith(f"{file}: after line ")
    assert message in str(raised.value)


def test_a_csv_file_has_mathematical_problems(tmp_path: Path) -> None:
    file = tmp_path / "hmmt.csv"
    file.write_text('\ufeffproblem_idx,problem,answer\n1,"Find $x$, or $y$.",\\frac{1}{2}\n', encoding="utf-8")
    assert read_problems(str(file)) == [Problem("hmmt-0", "Find $x$, or $y$.", r"\frac{1}{2}", "hmmt")]


def test_an_empty_cell_or_a_cell_too_many_is_a_malformed_row(tmp_path: Path) -> None:
    file = tmp_path / "some.csv"
    file.write_text("problem,answer\np,1\n,2\nq,3,4,5\nr\n", encoding="utf-8")
    kept, report = prepare_problems([str(file)])
    assert [problem.id for problem in kept] == ["some-0"]
    assert [(example["row"], example["details"].partition(" |")[0]) for example in report.examples] == [
        ("row 1", "expected a problem as problem"),
        ("row 2", "expected at most 2 cells, as in the first line, got more: ['4', '5']"),
        ("row 3", "expected an answer as answer"),
    ]


def test_a_row_from_the_hub_cannot_choose_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"id": "1", "text": "t", "answer": "", "source": "s", "environment": "mcp", "options": {"command": ["rm"]}}
    monkeypatch.setattr("trainer.data.sources._hub_rows", lambda source: iter([row]))
    with pytest.raises(DataError, match="a row of the hub cannot choose the environment 'mcp'"):
        read_problems("owner/name")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert read_problems(str(tmp_path / "rows.jsonl"))[0].environment == "mcp"
