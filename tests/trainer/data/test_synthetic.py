"""Tests of generated problems and conversations: their answers are correct, and faults have the documented rates."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator

import pytest

from trainer.data import synthetic
from trainer.episodes.episode import Problem

COUNT = 3000
TOLERANCE = 0.03
"""More than three standard deviations of a share of `COUNT` conversations."""


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return synthetic.generate(COUNT, 1)


@pytest.fixture(scope="module")
def conversations() -> list[synthetic.Messages]:
    return synthetic.conversations(COUNT, 1, fault_seed=2)


def tool_calls(messages: synthetic.Messages) -> Iterator[tuple[str, str]]:
    """Yield (text between the tags, response) of each tool call."""
    for message, next_message in itertools.pairwise(messages):
        if match := re.search("<tool_call>\n(.*)\n</tool_call>", message["content"]):
            assert next_message["role"] == "tool"
            yield match[1], next_message["content"]


def boxed_answers(messages: synthetic.Messages) -> list[str]:
    assert messages[-1]["role"] == "assistant"
    return re.findall(r"<answer>\n\\boxed\{(-?\d+)\}\n</answer>", messages[-1]["content"])


FIRST_STEPS: dict[str, Callable[[int, int], int]] = {
    r"Add (\d+) and (\d+)": lambda a, b: a + b,
    r"Take (\d+) plus (\d+)": lambda a, b: a + b,
    r"Subtract (\d+) from (\d+)": lambda b, a: a - b,
    r"Take (\d+) minus (\d+)": lambda a, b: a - b,
    r"Multiply (\d+) by (\d+)": lambda a, b: a * b,
    r"Take (\d+) times (\d+)": lambda a, b: a * b,
    r"Find how often (\d+) fits into (\d+)": lambda b, a: a // b,
    r"Take (\d+) over (\d+), rounded down": lambda a, b: a // b,
    r"Find what (\d+) leaves when divided by (\d+)": lambda a, b: a % b,
    r"Take (\d+) modulo (\d+)": lambda a, b: a % b,
}
SECOND_STEPS: dict[str, Callable[[int, int], int]] = {
    r"": lambda value, _: value,
    r", then add (\d+)": lambda value, c: value + c,
    r", then subtract (\d+)": lambda value, c: value - c,
    r", then multiply by (\d+)": lambda value, c: value * c,
}


def test_answers_equal_a_second_parsing_of_the_text(problems: list[Problem]) -> None:
    forms = set()
    for problem in problems:
        for (first, compute), (second, continue_with) in itertools.product(FIRST_STEPS.items(), SECOND_STEPS.items()):
            if match := re.fullmatch(rf"{first}{second}\.", problem.text):
                a, b, c = (int(number) for number in (*match.groups(), 0)[:3])
                assert int(problem.answer) == continue_with(compute(a, b), c), problem
                forms.add((first, second))
    assert len(forms) == len(FIRST_STEPS) * len(SECOND_STEPS), "every form occurs"


def test_equal_seeds_give_equal_problems_and_conversations_and_other_seeds_give_others(problems: list[Problem]) -> None:
    assert synthetic.generate(100, 1) == problems[:100]
    assert synthetic.generate(100, 2) != problems[:100]
    conversations = synthetic.conversations(50, 1, fault_seed=3)
    assert synthetic.conversations(50, 1, fault_seed=3) == conversations
    assert synthetic.conversations(50, 1, fault_seed=4) != conversations
    assert [messages[0]["content"] for messages in conversations] == [problem.text for problem in problems[:50]]


def test_problems_differ_and_held_out_ones_never_occur_in_training(problems: list[Problem]) -> None:
    texts = {problem.text for problem in problems}
    assert len(texts) == len({problem.id for problem in problems}) == COUNT
    held_out_texts = {problem.text for seed in range(4) for problem in synthetic.generate(500, seed, held_out=True)}
    assert not held_out_texts & texts
    train_texts = {problem.text for seed in range(9) for problem in synthetic.generate(500, seed)}
    assert not held_out_texts & train_texts


def test_the_tool_responses_of_conversations_are_the_output_of_their_code(
    conversations: list[synthetic.Messages],
) -> None:
    for messages in conversations[:300]:
        for request, tool_response in tool_calls(messages):
            stdout = io.StringIO()
            try:
                with contextlib.redirect_stdout(stdout):
                    exec(compile(json.loads(request)["arguments"]["code"], "main.py", "exec"))
            except (SyntaxError, ValueError) as error:
                # A JSON error is the first line of its response. A syntax error is the last line of a traceback.
                line = tool_response.splitlines()[0 if isinstance(error, json.JSONDecodeError) else -1]
                assert line.startswith(f"{type(error).__name__}: {error.msg}")
            else:
                assert stdout.getvalue() == f"{tool_response}\n"
                assert set(boxed_answers(messages)) == {tool_response}


def test_faults_occur_at_their_rates(problems: list[Problem], conversations: list[synthetic.Messages]) -> None:
    responses = [response for messages in conversations for _, response in tool_calls(messages)]
    error_ratio = sum("Error: " in response for response in responses) / len(responses)
    answers = [boxed_answers(messages) for messages in conversations]
    num_correct = sum(given[0] == problem.answer for problem, given in zip(problems, answers, strict=True))
    num_single = sum(len(given) == 1 for given in answers)
    # After MAX_BROKEN_CALLS broken calls the next one is always valid, which lowers the ratio a little.
    rate = synthetic.BROKEN_CALL_RATE
    assert rate - 2 * TOLERANCE < error_ratio < rate + TOLERANCE
    assert num_correct / COUNT == pytest.approx(1 - synthetic.WRONG_OPERATOR_RATE, abs=TOLERANCE)
    assert num_single / COUNT == pytest.approx(1 - synthetic.DOUBLE_ANSWER_RATE, abs=TOLERANCE)
