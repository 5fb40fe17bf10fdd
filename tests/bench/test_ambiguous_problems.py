"""Tests of the task `free` of bench.roc, on which a failing call costs nearly no reward: its files, and what its
conversations teach."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from bench.workloads.ambiguous_problems import TRACEBACK, write_files

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    folder = tmp_path_factory.mktemp("task")
    write_files(folder, 3, problems=400, conversations=500, held_out=100)
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in folder.glob("*.jsonl")}


def codes(conversation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the code of each call, and the response to it."""
    messages = conversation["messages"]
    return [
        (json.loads(call["content"].split("\n")[2])["arguments"]["code"], response["content"])
        for call, response in pairwise(messages)
        if response["role"] == "tool"
    ]


def test_training_and_held_out_problems_differ_and_both_meanings_are_equally_frequent(rows: dict[str, Rows]) -> None:
    texts = [row["text"] for name in ("problems", "held_out") for row in rows[name]]
    assert len(set(texts)) == len(texts) == 500
    taught = {conversation["messages"][0]["content"] for conversation in rows["conversations"]}
    assert not taught & {row["text"] for row in rows["held_out"]}
    for row in (*rows["problems"], *rows["held_out"]):
        a, b, c = (
            int("".join(filter(str.isdigit, word))) for word in row["text"].split() if any(map(str.isdigit, word))
        )
        assert int(row["answer"]) in (a + b + c, a - b + c)
        row["is_sum"] = int(row["answer"]) == a + b + c
    assert 0.4 < sum(row["is_sum"] for row in rows["problems"]) / 400 < 0.6


def test_every_response_is_that_of_python_and_half_of_the_calls_fail_first(rows: dict[str, Rows]) -> None:
    failed: Counter[bool] = Counter()
    for conversation in rows["conversations"]:
        calls = codes(conversation)
        for code, response in calls:
            if code.startswith("show("):
                assert response == TRACEBACK.format(code=code)
                failed[True] += 1
                continue
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code)
            assert printed.getvalue() == f"{response}\n"
        failed[False] += 2  # two calls work in each conversation
        assert calls[-1][1] in conversation["messages"][-1]["content"]
    assert 0.45 < failed[True] / failed[False] < 0.55


def test_equal_seeds_write_equal_files(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_files(tmp_path / name, seed, problems=5, conversations=20, held_out=5)
    contents = {
        name: b"".join(file.read_bytes() for file in sorted((tmp_path / name).rglob("*")) if file.is_file())
        for name in "abc"
    }
    assert contents["a"] == contents["b"] != contents["c"]
