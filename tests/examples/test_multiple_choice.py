"""Tests of the converter of multiple-choice problems: both forms of rows, the order of the choices, and errors that
name file, row and field."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.multiple_choice import ENVIRONMENT, LETTERS, SINGLE_CHOICES, main, read_problems
from trainer.data import sources
from trainer.data.problems import prepare_problems, write_problems
from trainer.data.rows import DataError
from trainer.episodes.episode import Problem

TEXTS = ("the right one", "a text, with a comma", 'one\nof "two" lines', "none")
GPQA_HEADS = ("Pre-Revision Question", "Question", *SINGLE_CHOICES, "Explanation", "Record ID")


def write_csv(file: Path, heads: Sequence[str], *rows: Sequence[str]) -> str:
    """Write a CSV file and return its name as a source."""
    with file.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines).writerows([heads, *rows])
    return str(file)


def write_gpqa(file: Path, *ids: str) -> str:
    """Write a problem for each id in the form of GPQA's files."""
    return write_csv(file, GPQA_HEADS, *(["old", f"Which one, {id}? ", *TEXTS, "because", id] for id in ids))


def write_json(file: Path, *rows: Any) -> str:
    file.write_text(json.dumps(rows), encoding="utf-8")
    return str(file)


def listed(**changes: Any) -> dict[str, Any]:
    """Return a row with a list of choices."""
    return {"id": "rec", "question": "Which one?", "choices": list(TEXTS), "answer": 0} | changes


def chosen_text(problem: Problem) -> str:
    """Return the text of the right choice, as the problem lists it."""
    _, _, after = problem.text.partition(f"\n({problem.answer}) ")
    return next(text for text in TEXTS if after.startswith(text))


def test_a_csv_file_in_the_form_of_gpqa_is_read(tmp_path: Path) -> None:
    (problem,) = read_problems(write_gpqa(tmp_path / "gpqa.csv", "rec7"))
    assert (problem.id, problem.source, problem.environment) == ("rec7", "gpqa", ENVIRONMENT)
    assert problem.text.startswith("Which one, rec7?\n\n(A) ")
    assert [f"({letter}) " in problem.text for letter in LETTERS] == [True] * 4
    assert [problem.text.count(f") {text}") for text in TEXTS] == [1] * 4
    assert chosen_text(problem) == "the right one"


@pytest.mark.parametrize(("answer", "right"), [(0, 0), (3, 3), ("A", 0), ("d", 3), (" C ", 2)])
def test_a_list_of_choices_has_an_index_or_a_letter_as_its_answer(tmp_path: Path, answer: Any, right: int) -> None:
    (problem,) = read_problems(write_json(tmp_path / "file.json", listed(answer=answer)))
    assert (problem.id, problem.environment, chosen_text(problem)) == ("rec", ENVIRONMENT, TEXTS[right])


def test_the_order_of_the_choices_follows_from_the_id_alone(tmp_path: Path) -> None:
    """The expected letters come from this implementation. Another order of the choices would make old evaluations
    incomparable."""
    ids = [f"rec{number}" for number in range(400)]
    problems = read_problems(write_gpqa(tmp_path / "a.csv", *ids))
    letters = {problem.id: problem.answer for problem in problems}
    assert "".join(letters[id] for id in ids[:12]) == "ACDBDADDAABA"
    assert all(70 <= count <= 130 for count in Counter(letters.values()).values()), "400 / 4, and at most 3.5 sigma"
    orders = {tuple(sorted(TEXTS, key=problem.text.index)) for problem in problems}
    reverse = read_problems(write_gpqa(tmp_path / "b.csv", *reversed(ids)))
    assert {problem.id: problem.answer for problem in reverse} == letters
    assert len(orders) == 24, "the wrong choices change places, too"


def test_converted_problems_read_back_equal_and_are_not_checked_as_mathematics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_gpqa(tmp_path / "gpqa.csv", "x", "y"), tmp_path / "gpqa.jsonl"
    monkeypatch.setattr(sys, "argv", ["multiple_choice", source, "--out", str(out)])
    main()
    assert capsys.readouterr().out == f"{out}: 2 problems\n"
    problems, report = prepare_problems([str(out)], find_unparsable=lambda answers: answers)
    assert report.counts["gpqa"] == {"rows": 2, "kept": 2}
    assert problems == read_problems(source)
    write_problems(problems, tmp_path / "eval.jsonl")
    assert sources.read_problems(str(tmp_path / "eval.jsonl")) == problems


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (listed(choices=["a", "b", "c"]), "choices: expected a list of 4 texts, got ['a', 'b', 'c']"),
        (listed(choices="abcd"), "choices: expected a list of 4 texts, got 'abcd'"),
        (listed(choices=["a", "b", " ", "d"]), "choices.2: expected text, got ' '"),
        (listed(choices=["a", "b", 3, "d"]), "choices.2: expected text, got 3"),
        (listed(choices=["a", "b", "a ", "d"]), "expected four choices of which one is right, but 'a' occurs twice"),
        *(
            (listed(answer=answer), f"answer: expected an index from 0 to 3 or a letter from A to D, got {answer!r}")
            for answer in (4, -1, True, "E", "", "AB", None, 1.0, "the right one")
        ),
        (listed(question=None), "question: expected text, got None"),
        (listed(question="  "), "question: expected text, got '  '"),
        ({"Question": "q", "Correct Answer": "a"}, "Incorrect Answer 1: expected text, got None"),
        ({"Question": "q", "Incorrect Answer 1": "a"}, "Correct Answer: expected text, got None"),
    ],
)
def test_a_wrong_or_missing_field_is_an_error_that_names_file_row_and_field(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    source = write_json(tmp_path / "file.json", listed(), row)
    with pytest.raises(DataError) as raised:
        read_problems(source)
    assert str(raised.value) == f"{source}: row 1: {message}"


def test_an_empty_cell_or_a_cell_too_many_is_an_error(tmp_path: Path) -> None:
    heads, row = ("Question", *SINGLE_CHOICES), ["q", "a", "b", "c", "d"]
    for wrong, message in (
        (["q", "a", "", "c", "d"], "Incorrect Answer 1: expected text, got ''"),
        ([*row, "e", "f"], "expected an object, or as many cells as in the first line, got "),
        (row[:3], "Incorrect Answer 2: expected text, got None"),
    ):
        source = write_csv(tmp_path / "gpqa.csv", heads, row, wrong)
        with pytest.raises(DataError, match=f"^{source}: row 1: {message}"):
            read_problems(source)


def test_rows_with_choices_are_refused_as_mathematical_problems(tmp_path: Path) -> None:
    for row in (listed(), dict.fromkeys(("Question", *SINGLE_CHOICES), "a") | {"Answer": "7"}):
        with pytest.raises(DataError, match=r"row 0: a row with choices: convert its file by `python -m examples\.mul"):
            sources.read_problems(write_json(tmp_path / "file.json", row))


def test_a_data_set_on_the_hub_can_be_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, split: [listed()]))
    (problem,) = read_problems("owner/name")
    assert (problem.source, problem.environment) == ("name", ENVIRONMENT)
