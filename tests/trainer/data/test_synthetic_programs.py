"""Tests of generated programming problems: their tests accept the right program only, and faults have their rates."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

from trainer.data import synthetic, synthetic_programs
from trainer.data.decontamination import NGRAM
from trainer.data.problems import prepare_problems
from trainer.data.sources import read_conversations, read_problems, tokenizer_conversations
from trainer.environments.registry import check_problem, environment_class
from trainer.episodes.episode import Problem
from trainer.episodes.turn_parser import fenced_block
from trainer.json_files import write_rows

COUNT = 2000
TOLERANCE = 0.035
"""More than three standard deviations of a share of `COUNT` conversations."""


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return synthetic_programs.generate(COUNT, 1)


@pytest.fixture(scope="module")
def programs() -> list[str]:
    """The programs of the conversations about `problems`."""
    conversations = synthetic_programs.conversations(COUNT, 1, fault_seed=2)
    blocks = [fenced_block(messages[-1]["content"]) for messages in conversations]
    return [block for block in blocks if block is not None]


def passes(program: str, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether a program passes all tests of a problem, compared as the judge's rule `lines` does."""
    for test in problem.options["tests"]:
        stdout = io.StringIO()
        monkeypatch.setattr(sys, "stdin", io.StringIO(test["stdin"]))
        try:
            with contextlib.redirect_stdout(stdout):
                exec(compile(program, "main.py", "exec"), {})
        except (SyntaxError, ValueError):
            return False
        if stdout.getvalue() != test["expected"]:
            return False
    return True


def test_tests_accept_exactly_the_programs_without_a_fault(
    problems: list[Problem], programs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(programs) == COUNT, "each conversation has a program"
    passed = [passes(program, problem, monkeypatch) for program, problem in zip(programs, problems, strict=True)]
    rates = (
        synthetic_programs.WRONG_CONDITION_RATE,
        synthetic_programs.WRONG_FUNCTION_RATE,
        synthetic_programs.SYNTAX_ERROR_RATE,
    )
    expected = 1.0
    for rate in rates:
        expected *= 1 - rate
    assert sum(passed) / COUNT == pytest.approx(expected, abs=TOLERANCE)
    broken = sum(not program.endswith(")\n") for program in programs)
    assert broken / COUNT == pytest.approx(synthetic_programs.SYNTAX_ERROR_RATE, abs=TOLERANCE)


def test_equal_seeds_give_equal_problems_and_held_out_ones_never_occur_in_training(problems: list[Problem]) -> None:
    assert synthetic_programs.generate(100, 1) == problems[:100]
    assert synthetic_programs.generate(100, 2) != problems[:100]
    held_out = {problem.text for seed in range(4) for problem in synthetic_programs.generate(500, seed, held_out=True)}
    assert not held_out & {problem.text for problem in problems}
    assert max(len(re.findall(r"\w+", text)) for text in held_out) <= NGRAM, "no text is dropped as contaminated"


def test_a_conversation_has_the_prompt_of_the_environment(problems: list[Problem]) -> None:
    conversations = synthetic_programs.conversations(20, 1, fault_seed=2)
    prompts = [environment_class("code").prompt(problem) for problem in problems[:20]]
    assert [messages[0]["content"] for messages in conversations] == prompts


def test_generated_programs_are_a_source_of_problems_and_of_conversations(tmp_path: Path) -> None:
    kept, report = prepare_problems(["generated-programs:50"], decontaminate_against=["generated-programs:99"], seed=3)
    assert kept == read_problems("generated-programs:50", seed=3)
    assert report.counts == {"programs": {"rows": 50, "kept": 50}}
    for problem in kept:
        check_problem(problem)
    assert len(read_conversations("generated-programs:5", seed=1)) == 5
    taught = {name: tokenizer_conversations([f"{name}:9"], 3, 0) for name in ("generated", "generated-programs")}
    assert taught["generated"] == tokenizer_conversations([], 3, 0) == tokenizer_conversations(["owner/name"], 3, 0)
    assert taught["generated"] == synthetic.conversations(3, 0, fault_seed=0)
    assert taught["generated-programs"] == synthetic_programs.conversations(3, 0, fault_seed=0)
    write_rows(tmp_path / "sft.jsonl", [{"messages": messages} for messages in taught["generated"]])
    assert tokenizer_conversations([str(tmp_path / "sft.jsonl")], 2, 0) == taught["generated"][:2]


def test_the_tests_of_a_problem_depend_on_its_text_only() -> None:
    by_text = {problem.text: problem for problem in synthetic_programs.generate(500, 1)}
    again = [problem for problem in synthetic_programs.generate(2000, 7) if problem.text in by_text]
    assert again and all(by_text[problem.text] == problem for problem in again)
