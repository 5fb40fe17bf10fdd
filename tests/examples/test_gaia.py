"""Tests of data sets in GAIA's file format: their conversion, malformed rows, generated problems, and submissions."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples import gaia, generated_gaia
from examples.gaia import write_submission
from trainer.collection.store import EpisodeStore
from trainer.data.problems import prepare_problems, write_problems
from trainer.data.rows import DataError
from trainer.data.sources import read_problems
from trainer.episodes.episode import Episode, Problem, StopReason, Turn

ROW: dict[str, Any] = {
    "task_id": "c61d22de-5f6c-4958-a7f6-5e9707bd3466",
    "Question": "How many?",
    "Level": 2,
    "Final answer": "egalitarian",
    "file_name": "",
    "Annotator Metadata": {"Steps": "1. Look", "Number of tools": "2"},
}


def write_metadata(folder: Path, *rows: Any) -> Path:
    """Write rows as the metadata of a data set, and return its directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def read(path: Path | str) -> list[Problem]:
    return gaia.read_problems(str(path))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["gaia", *map(str, arguments)])
    gaia.main()


def test_a_row_becomes_a_qa_problem(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    write_metadata(tmp_path, {**ROW, "file_name": "a.csv"})
    (problem,) = read(tmp_path)
    options = {"level": 2, "files": [str(tmp_path / "a.csv")]}
    assert problem == Problem(ROW["task_id"], "How many?", "egalitarian", "gaia-format-level-2", "qa", options)


@pytest.mark.parametrize("level", [1, "1"])
def test_a_level_is_a_number_or_text(tmp_path: Path, level: object) -> None:
    (problem,) = read(write_metadata(tmp_path, {**ROW, "Level": level}))
    assert problem.options["level"] == 1


def test_the_canary_row_is_skipped_and_a_numeric_answer_is_text(tmp_path: Path) -> None:
    rows = [{"task_id": "0-0-0-0-0"}, {**ROW, "Final answer": 17}]
    assert [problem.answer for problem in read(write_metadata(tmp_path, *rows))] == ["17"]


def test_a_hidden_answer_is_marked(tmp_path: Path) -> None:
    (problem,) = read(write_metadata(tmp_path, {**ROW, "Final answer": "?"}))
    assert problem.options == {"level": 2, "answer_is_hidden": True}


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        ({"Level": 4}, "Level: expected 1, 2 or 3, got 4"),
        ({"Level": None}, "Level: expected 1, 2 or 3, got None"),
        ({"Level": True}, "Level: expected 1, 2 or 3, got True"),
        ({"Question": " "}, "Question: expected text, got ' '"),
        ({"Final answer": None}, "Final answer: expected text, got None"),
        ({"task_id": 7}, "task_id: expected text, got 7"),
        ({"file_name": "missing.pdf"}, "file_name: there is no file"),
        ({"file_name": "../secret"}, "file_name: expected the name of a file beside the metadata, got '../secret'"),
        ({"file_name": "/etc/passwd"}, "file_name: expected the name"),
        ({"file_name": ".."}, "file_name: expected the name"),
        ({"file_name": ["a"]}, "file_name: expected the name"),
    ],
)
def test_a_malformed_row_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], expected_text: str
) -> None:
    folder = write_metadata(tmp_path, {**ROW, "task_id": "other"}, {**ROW, **change})
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "convert", folder, "--out", tmp_path / "out.jsonl")
    assert str(ended.value.code).startswith(f"{folder / 'metadata.jsonl'}: row 1: {expected_text}")


def test_a_row_that_is_no_object_and_an_id_that_occurs_twice_are_malformed(tmp_path: Path) -> None:
    for row, expected_text in (([1], r"expected a JSON object, got \[1\]"), (ROW, "task_id '.*' occurs a second time")):
        with pytest.raises(DataError, match=f"row 1: {expected_text}"):
            read(write_metadata(tmp_path, ROW, row))


@pytest.mark.parametrize(
    ("truth", "expected"),
    [("17", True), ("Paris", True), ("a, b", True), ("inf", False), ("1e400", False), ("nan", False), ("+", False)],
)
def test_a_right_answer_must_differ_from_some_texts_and_equal_others(truth: str, expected: bool) -> None:
    assert gaia._has_answers(truth) == expected


def test_the_metadata_is_found_in_all_layouts(tmp_path: Path) -> None:
    for split in ("validation", "test"):
        write_metadata(tmp_path / "2023" / split, {**ROW, "Question": split})
    root = tmp_path
    texts = {
        f"{root}": "validation",
        f"{root}:validation": "validation",
        f"{root}:test": "test",
        f"{root}/2023:test": "test",
        f"{root}/2023/test": "test",
        f"{root}/2023/test/metadata.jsonl": "test",
    }
    assert {path: read(path)[0].text for path in texts} == texts
    for path in ("nowhere", f"{root}/2023/test:validation", f"{root}/2023/test/metadata.jsonl:test"):
        with pytest.raises(DataError, match="expected a metadata file, or a directory with metadata"):
            read(path)


def test_parquet_is_read_with_its_file_path(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "2023/validation"
    folder.mkdir(parents=True)
    (folder / "b.txt").write_text("text")
    rows = [{**ROW, "Level": "3", "file_name": None, "file_path": "2023/validation/b.txt"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "metadata.parquet")
    (problem,) = read(tmp_path)
    assert problem.options == {"level": 3, "files": [str(folder / "b.txt")]}
    (folder / "metadata.parquet").write_text("not Parquet")
    with pytest.raises(DataError, match="expected a Parquet file"):
        read(tmp_path)


# The generated problems


def orders_of(problem: Problem) -> list[dict[str, Any]]:
    """Parse the orders of a problem's file, without the generator's code."""
    ((name, text),) = problem.options["texts"].items()
    if name.endswith(".csv"):
        rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(text)))
    elif name.endswith(".json"):
        rows = json.loads(text)["orders"]
    else:
        pattern = r"Day \d+: (\w+) ordered (\d+) units of the product (\w+) at (\d+) each."
        keys = ("customer", "units", "product", "price")
        rows = [dict(zip(keys, match, strict=True)) for match in re.findall(pattern, text)]
    return [{**row, "units": int(row["units"]), "price": int(row["price"])} for row in rows]


def solve(problem: Problem) -> str:
    """Answer a generated question from its file, by a program that shares no code with the generator."""
    orders = orders_of(problem)

    def totals(key: str) -> list[tuple[int, str]]:
        names = {order[key] for order in orders}
        return sorted(((sum(o["units"] * o["price"] for o in orders if o[key] == n), n) for n in names), reverse=True)

    text = problem.text
    if match := re.match(r"How many units of the product (\w+) ", text):
        return str(sum(order["units"] for order in orders if order["product"] == match[1]))
    if match := re.match(r"How many units did (\w+) ", text):
        return str(sum(order["units"] for order in orders if order["customer"] == match[1]))
    if match := re.match(r"How much did (\w+) pay", text):
        return str({name: total for total, name in totals("customer")}[match[1]])
    if match := re.match(r"Which customers ordered the product (\w+)\?", text):
        return ", ".join(sorted({order["customer"] for order in orders if order["product"] == match[1]}))
    if text.startswith("Which customer paid most"):
        return totals("customer")[0][1]
    if text.startswith("Which three products"):
        return ", ".join(name for _, name in totals("product")[:3])
    assert text.startswith("Add up units times price for each customer")
    return str(totals("customer")[0][0] - totals("customer")[-1][0])


def test_every_generated_answer_follows_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "generate", 120, "--seed", 3, "--out", tmp_path / "orders.jsonl")
    problems = read_problems(str(tmp_path / "orders.jsonl"))
    assert problems == generated_gaia.generate(120, 3)
    assert [problem.options["level"] for problem in problems] == [1, 2, 3] * 40
    assert all(solve(problem) == problem.answer for problem in problems)
    suffixes = {Path(name).suffix for problem in problems for name in problem.options["texts"]}
    assert suffixes == {".csv", ".json", ".txt"}
    assert {len(problem.options["texts"]) for problem in problems} == {1}


def test_generated_problems_follow_from_the_seed_and_held_out_ones_differ_from_training() -> None:
    def ids(seed: int, held_out: bool) -> set[str]:
        return {problem.id for problem in generated_gaia.generate(60, seed, held_out=held_out)}

    assert ids(0, False) == ids(0, False)
    assert not ids(0, False) & ids(1, False)
    assert not ids(0, False) & ids(0, True)


def test_generated_problems_in_the_file_format_are_read_back(tmp_path: Path) -> None:
    rows, expected = [], generated_gaia.generate(9, 4)
    for problem in expected:
        ((name, text),) = problem.options["texts"].items()
        (tmp_path / name).write_text(text)
        row = {"task_id": problem.id, "Question": problem.text, "Final answer": problem.answer, "file_name": name}
        rows.append({**row, "Level": problem.options["level"]})
    for problem, original in zip(read(write_metadata(tmp_path, *rows)), expected, strict=True):
        (file,) = map(Path, problem.options["files"])
        options = {"level": problem.options["level"], "texts": {file.name: file.read_text()}}
        assert replace(problem, options=options) == original


def test_preparing_keeps_problems_with_equal_questions_and_other_files(tmp_path: Path) -> None:
    def refuse(answers: Any) -> Iterator[str]:
        raise AssertionError("answers of the environment qa are no mathematics")

    write_problems(generated_gaia.generate(90, 0), tmp_path / "orders.jsonl")
    problems, report = prepare_problems([str(tmp_path / "orders.jsonl")], find_unparsable=refuse)
    assert len(problems) == 90 > len({problem.text for problem in problems})
    assert {counts["kept"] for counts in report.counts.values()} == {30}
    write_problems(problems, tmp_path / "problems.jsonl")
    assert read_problems(str(tmp_path / "problems.jsonl")) == problems


def test_a_submission_has_the_first_attempt_at_each_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def episode(task: str, sample: int, answer: str | None, reward: float | None = 0.0) -> Episode:
        problem = Problem(task, "", "?", "", "qa")
        turns = [Turn(0, 1, f"turn {sample}"), Turn(1, 2, "last")]
        return Episode(problem, sample, stop_reason=StopReason.FINISHED, answer=answer, reward=reward, turns=turns)

    episodes = [
        episode("a", 1, "late"),
        replace(episode("d", 0, "half", None), stop_reason=StopReason.DEADLINE),
        episode("d", 1, "a later attempt"),
        episode("a", 0, r"\text{Paris}"),
        episode("b", 0, None, None),
        episode("b", 1, None),
        episode("c", 0, "x", None),
    ]
    assert write_submission(tmp_path / "submission.jsonl", episodes) == 3
    rows = [json.loads(line) for line in (tmp_path / "submission.jsonl").read_text().splitlines()]
    assert rows == [
        {"task_id": "a", "model_answer": "Paris", "reasoning_trace": "turn 0\n\nlast"},
        {"task_id": "d", "model_answer": "", "reasoning_trace": "turn 0\n\nlast"},
        {"task_id": "b", "model_answer": "", "reasoning_trace": "turn 1\n\nlast"},
    ]
    with EpisodeStore(tmp_path / "store", {}) as store:
        store.write([episode("a", 0, "Rome")])
    run(monkeypatch, "submission", tmp_path / "store", "--out", tmp_path / "of_a_store.jsonl")
    assert json.loads((tmp_path / "of_a_store.jsonl").read_text())["model_answer"] == "Rome"


def test_the_source_of_generated_problems_is_not_named_gaia() -> None:
    names = {problem.source for problem in generated_gaia.generate(6, 0)}
    assert names == {generated_gaia.SOURCE.format(level) for level in (1, 2, 3)}
    assert all(name.startswith("gaia-format") for name in names)
