"""Tests of the reading of problems: the formats of rows, the reasons to drop a row, and decontamination.

Decontamination drops training problems that overlap with problems of the evaluation. It is compared with a simple
version.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config_loading import load_config
from trainer.data import decontamination
from trainer.data.decontamination import ngram_index, shared_ngram
from trainer.data.problems import (
    MAX_EXAMPLES,
    MaxLength,
    PrepareReport,
    parse_integer,
    prepare_problems,
    write_problems,
)
from trainer.data.rows import DataError
from trainer.data.sources import iter_problems, read_conversations, read_problems
from trainer.episodes.episode import Problem

CONFIGS = Path(__file__).parents[3] / "configs"
SHARED = Path(__file__).parents[3].parent / "shared/data"
DAPO_TEXT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 2+3?\n\nAnd why?\n\nRemember to "
    'put your answer on its own line after "Answer:".'
)


def write_jsonl(path: Path, *rows: Any) -> str:
    """Write rows to a file and return its name as a source."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def problems(*texts: str, source: str = "s") -> list[Problem]:
    return [Problem(f"{source}-{number}", text, "1", source) for number, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {
                "data_source": "math_dapo",
                "prompt": [{"role": "user", "content": DAPO_TEXT}],
                "ability": "MATH",
                "reward_model": {"ground_truth": "5", "style": "rule"},
                "extra_info": {"index": "9a9b"},
            },
            ("9a9b", "What is 2+3?\n\nAnd why?", "5"),
        ),
        ({"prompt": "How many?", "solution": "34"}, ("file-0", "How many?", "34")),
        (
            [
                {"from": "human", "value": "How many?"},
                {"from": "assistant", "ground_truth": {"value": "\\frac{1}{2}", "pass_at_n": 0.1}},
            ],
            ("file-0", "How many?", "\\frac{1}{2}"),
        ),
        (
            {"0": {"value": "How many?"}, "1": {"ground_truth": {"value": "12"}}},
            ("file-0", "How many?", "12"),
        ),
        ({"question": "How many?", "answer": "1 + 1 = <<1+1=2>>2 ducks\n#### 1,002"}, ("file-0", "How many?", "1,002")),
        (
            {"ID": "2024-I-1", "Problem": "How many? ", "Solution": "Long.", "Answer": 204},
            ("2024-I-1", "How many?", "204"),
        ),
        (
            {"problem": "p", "solution": "So \\boxed{1}, no: $\\boxed{\\frac{1}{2}}$."},
            ("file-0", "p", "\\frac{1}{2}"),
        ),
        ({"id": "a/b.json", "problem": "p", "answer": "p - q", "level": 5}, ("a/b.json", "p", "p - q")),
        ({"id": 7, "problem": "p", "answer": 7.0}, ("7", "p", "7")),
        ({"Question": "p", "answer": 0, "solution": "1"}, ("file-0", "p", "0")),
    ],
)
def test_every_known_row_format_is_read_as_a_problem(tmp_path: Path, row: Any, expected: tuple[str, str, str]) -> None:
    (problem,) = read_problems(write_jsonl(tmp_path / "file.jsonl", row))
    assert (problem.id, problem.text, problem.answer, problem.source) == (*expected, "file")


MALFORMED_ROWS: list[Any] = [
    *({}, 1, None, "text", [1, 2], {"problem": "p"}, {"problem": " ", "answer": "1"}, {"problem": "p", "answer": True}),
    *({"problem": "p", "answer": float("nan")}, {"problem": ["p"], "answer": "1"}, {"answer": "1", "prompt": []}),
    *({"problem": "p", "solution": "a proof without a box"}, {"problem": "p", "solution": "\\boxed{1"}),
]


@pytest.mark.parametrize("row", MALFORMED_ROWS)
def test_malformed_rows_are_named_and_counted(tmp_path: Path, row: Any) -> None:
    source = write_jsonl(tmp_path / "file.jsonl", {"problem": "p", "answer": "1"}, row)
    with pytest.raises(DataError, match=r"file\.jsonl: row 1: expected an? (problem|answer)"):
        read_problems(source)
    kept, report = prepare_problems([source])
    assert len(kept) == 1
    assert report.counts["file"] == {"rows": 2, "malformed": 1, "kept": 1}
    assert [(example["row"], example["reason"]) for example in report.examples] == [("row 1", "malformed")]


def test_lines_that_are_not_json_are_malformed_rows(tmp_path: Path) -> None:
    file = tmp_path / "file.jsonl"
    surrogates = rb'{"problem": "\ud83d\ude00", "answer": "1"}', rb'{"problem": "\ud83d", "answer": "1"}'
    file.write_bytes(b"\n".join((b'{"problem": "p", "answer": "1"}\n', b'{"problem"', b"\xff", *surrogates)))
    kept, report = prepare_problems([str(file)])
    assert [problem.text for problem in kept] == ["p", "\N{GRINNING FACE}"]
    assert report.counts["file"]["malformed"] == 3


def test_json_arrays_and_parquet_files_are_read_like_jsonl(tmp_path: Path) -> None:
    rows = [{"problem": f"p{number}", "answer": str(number)} for number in range(5)]
    array = tmp_path / "file.json"
    array.write_text(json.dumps(rows))
    assert read_problems(str(array)) == read_problems(write_jsonl(tmp_path / "file.jsonl", *rows))
    pyarrow = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "file.parquet")
    assert read_problems(str(tmp_path / "file.parquet")) == read_problems(str(array))


def test_a_hub_name_may_have_a_config_and_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        requests.append((name, config, split))
        if name == "no/such":
            raise FileNotFoundError("no/such is not there")
        return [{"question": "How many?", "answer": "#### 3"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    source = "openai/gsm8k@main:test"
    assert read_problems(source) == [Problem(f"{source}-0", "How many?", "3", source)]
    read_problems("BytedTsinghua-SIA/DAPO-Math-17k")
    assert requests == [("openai/gsm8k", "main", "test"), ("BytedTsinghua-SIA/DAPO-Math-17k", None, "train")]
    with pytest.raises(DataError, match=r"^no/such: cannot be loaded from the hub"):
        read_problems("no/such")


HUB_SPLITS = {
    "BytedTsinghua-SIA/DAPO-Math-17k": {"default": {"train"}},
    "HuggingFaceH4/MATH-500": {"default": {"test"}},
    "HuggingFaceH4/aime_2024": {"default": {"train"}},
    "Open-Reasoner-Zero/orz_math_57k_collection": {"default": {"train"}},
    "math-ai/aime25": {"default": {"test"}},
    "openai/gsm8k": {"main": {"train", "test"}, "socratic": {"train", "test"}},
}
"""Configurations and splits of the data sets in configs/, from their cards and public code."""


def fake_load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, str]]:
    """Raise the errors of `datasets.load_dataset` for an unknown split, and for a missing configuration."""
    configs = HUB_SPLITS[name]
    if config is None and len(configs) > 1:
        raise ValueError(f"Config name is missing. Please pick one among the available configs: {list(configs)}")
    splits = configs[config or next(iter(configs))]
    if split not in splits:
        raise ValueError(f'Unknown split "{split}". Should be one of {list(splits)}.')
    return [{"question": "How many?", "answer": "#### 3"}]


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_the_data_sets_in_configs_exist_on_the_hub(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fake_load_dataset))
    config = load_config(file, {})
    stage_sources = [source for stage in config.stages.values() for source in stage.data]
    for source in (*config.data.train, *config.data.decontaminate_against, *config.eval.data, *stage_sources):
        if not source.startswith("data/"):  # files that the user supplies
            assert read_problems(source)


@pytest.mark.parametrize("source", ["nowhere.jsonl", "no-such-thing", "a/b/c", "generated:", "generated:-1", ""])
def test_an_invalid_source_is_named_in_the_error(source: str) -> None:
    with pytest.raises(DataError, match=f"^{source}: (expected|no such file)"):
        read_problems(source)


def test_a_json_file_must_be_an_array(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("{}")
    with pytest.raises(DataError, match="expected an array of rows, got dict"):
        read_problems(str(tmp_path / "file.json"))


def test_generated_problems_are_a_source() -> None:
    assert read_problems("generated:5", seed=3) == read_problems("generated:9", seed=3)[:5]
    assert not set(read_problems("generated:50", seed=3)) & set(read_problems("generated:50", seed=3, held_out=True))
    kept, report = prepare_problems(["generated:50"], seed=3)
    assert len(kept) == 50
    assert report.counts == {"tiny": {"rows": 50, "kept": 50}}
    assert len(read_conversations("generated:5", seed=1)) == 5


def test_malformed_conversations_are_refused(tmp_path: Path) -> None:
    good = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert read_conversations(write_jsonl(tmp_path / "a.jsonl", {"messages": good, "id": 1})) == [good]
    for row in ({"messages": []}, {}, [], {"messages": [{"role": "user"}]}, {"messages": ["hi"]}):
        with pytest.raises(DataError, match="row 1: expected messages"):
            read_conversations(write_jsonl(tmp_path / "b.jsonl", {"messages": good}, row))


@given(
    st.lists(
        st.builds(Problem, id=st.text(min_size=1), text=st.text(min_size=1), answer=st.text(min_size=1)), max_size=5
    )
)
def test_written_problems_read_back_equal(tmp_path_factory: pytest.TempPathFactory, problems: list[Problem]) -> None:
    file = tmp_path_factory.mktemp("data") / "file.jsonl"
    write_problems(problems, file)
    assert read_problems(str(file)) == problems
    assert [path.name for path in file.parent.iterdir()] == ["file.jsonl"]


INTEGERS = {"12": "12", "1,234": "1234", "-0": "0", "073": "73", " +5 ": "5", "$-7$": "-7", "1,234,567": "1234567"}
NON_INTEGERS = ("1,23", "", "1.0", "\\frac{1}{2}", "2 apples", "x", "1e3", "$", "1-1", "²")


@pytest.mark.parametrize(("answer", "value"), [*INTEGERS.items(), *((answer, None) for answer in NON_INTEGERS)])
def test_integer_answers_are_normalised_and_others_are_none(answer: str, value: str | None) -> None:
    assert parse_integer(answer) == value


def test_every_row_is_counted_once_and_a_repeated_id_is_changed(tmp_path: Path) -> None:
    rows = [
        {"id": "x", "problem": "one two three four five six seven eight", "answer": "1"},
        {"id": "x", "problem": "another", "answer": "1,000"},
        {"id": "y", "problem": "another", "answer": "2"},
        {"id": "z", "problem": "third", "answer": "a half"},
        {"id": "w", "problem": "zero one Two, three four\nfive six seven -- EIGHT nine", "answer": "1"},
        "nonsense",
    ]
    held_out = write_jsonl(
        tmp_path / "test.jsonl", {"id": "t", "problem": "one two three four five six seven eight?", "answer": "1"}
    )
    kept, report = prepare_problems([write_jsonl(tmp_path / "train.jsonl", *rows)], decontaminate_against=[held_out])
    assert kept == [Problem("x~2", "another", "1000", "train")]
    assert report.counts == {
        "train": {"rows": 6, "malformed": 1, "duplicate": 1, "not_integer": 1, "contaminated": 2, "kept": 1}
    }
    details = [example["details"] for example in report.examples]
    assert "same text as x~2 of train, but the answers are '1,000' there and '2' here" in details
    assert "shares 'one two three four five six seven eight' with t of test" in details
    assert json.loads(json.dumps(asdict(report)))["counts"]["train"]["kept"] == 1


def test_a_changed_id_differs_from_all_others(tmp_path: Path) -> None:
    ids = ["0", "0~2", "0", "0", "0~2"]
    rows = [{"id": id, "problem": f"problem {number}", "answer": "1"} for number, id in enumerate(ids)]
    kept, _ = prepare_problems([write_jsonl(tmp_path / "train.jsonl", *rows)])
    assert [problem.id for problem in kept] == ["0", "0~2", "0~3", "0~4", "0~2~2"]


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "p", "answer": "42"},
        {"id": 7, "text": "p", "answer": 42, "source": "s", "level": 1},
        {"id": "7", "question": "p", "answer": 42.0, "choices": ["a", "b", "c", "d"]},
    ],
)
def test_any_form_of_row_may_name_an_environment(tmp_path: Path, row: dict[str, Any]) -> None:
    options = {"texts": {"a.txt": "b"}}
    [read] = read_problems(write_jsonl(tmp_path / "f.jsonl", {**row, "environment": "qa", "options": options}))
    assert (read.text, read.answer, read.environment, read.options) == ("p", "42", "qa", options)
    with pytest.raises(DataError, match="row 0: expected environment as text and options as an object"):
        read_problems(write_jsonl(tmp_path / "f.jsonl", {**row, "environment": "qa", "options": ["a", "b"]}))
    [plain] = read_problems(write_jsonl(tmp_path / "f.jsonl", {"problem": "p", "answer": "42", "options": ["a"]}))
    assert plain.environment == "python"


def test_a_problem_with_a_reward_function_needs_no_answer(tmp_path: Path) -> None:
    row = {"id": "7", "text": "p", "answer": "", "source": "s"}
    file = write_jsonl(tmp_path / "f.jsonl", {**row, "reward": "my:own"}, {**row, "id": "8", "text": "q"})
    kept, report = prepare_problems([file], find_unparsable=lambda answers: set(answers))
    assert [(problem.id, problem.reward) for problem in kept] == [("7", "my:own")]
    assert report.counts == {"s": {"rows": 2, "kept": 1, "not_integer": 1}}
    write_jsonl(tmp_path / "f.jsonl", {**row, "reward": "my:own"}, {**row, "id": "8"})
    kept, _ = prepare_problems([file], reward="my:default")
    assert [(problem.id, problem.reward) for problem in kept] == [("7", "my:own"), ("8", "my:default")]


def test_a_row_of_the_hub_cannot_choose_a_reward_function(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"id": "7", "text": "p", "answer": "1", "source": "s"}
    rows = [{**row, "reward": "os:system"}, {**row, "reward": 0.5}]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: rows))
    refused: list[str] = []
    read = list(iter_problems("some/rows", lambda name, number, error: refused.append(f"{number}: {error}")))
    assert refused == ["0: a row of the hub cannot choose the reward 'os:system'"]
    assert [problem.reward for problem in read] == [""], "a number in another column of this name means nothing here"


def test_the_number_of_examples_is_bounded_and_counts_are_complete(tmp_path: Path) -> None:
    _, report = prepare_problems([write_jsonl(tmp_path / "file.jsonl", *[{}] * 100)])
    assert report.counts["file"]["malformed"] == 100
    assert len(report.examples) == MAX_EXAMPLES
    assert asdict(PrepareReport()) == {"counts": {}, "examples": []}


def words_of(text: str) -> list[str]:
    """Return the words of a text: its only n-gram, if n is large."""
    (ngram,) = decontamination._ngrams(text, 10**6)
    return list(ngram)


def _overlap(text: str, other_text: str, n: int) -> bool:
    """Return whether the texts share `n` consecutive words. A text of fewer words matches only itself."""
    words, other_words = words_of(text), words_of(other_text)
    if len(words) < n or len(other_words) < n:
        return words == other_words
    ngrams, other_ngrams = ({tuple(each[i : i + n]) for i in range(len(each) - n + 1)} for each in (words, other_words))
    return not ngrams.isdisjoint(other_ngrams)


_TEXTS = st.lists(
    st.lists(st.sampled_from(["a", "B", "b,", "1", "\\frac{1}", "é"]), max_size=7).map(" ".join), max_size=6
)


@given(train=_TEXTS, test=_TEXTS, n=st.integers(1, 4))
def test_decontamination_finds_the_overlaps_of_a_comparison_of_all_pairs(
    train: list[str], test: list[str], n: int
) -> None:
    held_out = problems(*test, source="t")
    index = ngram_index(held_out, n)
    for problem in problems(*train):
        ngram = shared_ngram(problem.text, index, n)
        assert (ngram is not None) == any(_overlap(problem.text, other.text, n) for other in held_out)
        if ngram is not None:
            assert " ".join(ngram) in " ".join(words_of(problem.text))
            assert " ".join(ngram) in " ".join(words_of(index[ngram].text))


def test_problems_over_the_maximum_length_are_dropped(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "file.jsonl", *({"problem": "p" * size, "answer": "1"} for size in (3, 4, 5)))
    kept, report = prepare_problems([source], max_length=MaxLength(4, lambda problem: len(problem.text)))
    assert [len(problem.text) for problem in kept] == [3, 4]
    assert report.counts["file"] == {"rows": 3, "kept": 2, "too_long": 1}
    assert report.examples[0]["details"] == "5, the limit is 4"


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs real data sets in {SHARED}")
def test_all_rows_of_real_files_are_read() -> None:
    num_rows = {"aime2024": 30, "aime2025": 30, "gsm8k_test": 1319, "gsm8k_train_3000": 3000, "math500": 500}
    for name, expected in {**num_rows, "train_integer": 5230}.items():
        read = read_problems(str(SHARED / f"{name}.jsonl"))
        assert len(read) == expected
        if name != "math500":  # the only file with answers that are not integers
            assert [problem.answer for problem in read if parse_integer(problem.answer) is None] == []
    benchmarks = [str(SHARED / f"{name}.jsonl") for name in ("aime2024", "aime2025", "math500")]
    kept, report = prepare_problems([str(SHARED / "train_integer.jsonl")], decontaminate_against=benchmarks)
    counts = report.counts["train_integer"]
    assert counts["rows"] == 5230 == counts["kept"] + counts.get("duplicate", 0) + counts["contaminated"]
    math500 = ngram_index(read_problems(benchmarks[2]))
    assert not [problem for problem in kept if shared_ngram(problem.text, math500)]


def test_unparsable_answers_are_dropped_and_each_answer_is_checked_once(tmp_path: Path) -> None:
    answers = ["12", "?", "x", "?"]
    file = write_jsonl(
        tmp_path / "some.jsonl", *({"problem": f"Which is {i}?", "answer": answer} for i, answer in enumerate(answers))
    )
    requests: list[Sequence[str]] = []

    def find_unparsable(answers: Sequence[str]) -> set[str]:
        requests.append(answers)
        return {"?"}

    kept, report = prepare_problems([file], integer_answers_only=False, find_unparsable=find_unparsable)
    assert requests == [["?", "x"]], "plain integers need no check"
    assert [problem.answer for problem in kept] == ["12", "x"]
    assert report.counts == {"some": {"rows": 4, "kept": 2, "unparsable_answer": 2}}
    prepare_problems([file], find_unparsable=find_unparsable)
    assert len(requests) == 1, "if all answers are integers, there is no check"
