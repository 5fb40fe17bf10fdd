"""The generated problems and conversations: right where they should be, wrong as often as they should be."""

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
NEAR = 0.03
"""Over three standard deviations of a share of `COUNT`."""


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return synthetic.generate(COUNT, 1)


@pytest.fixture(scope="module")
def conversations() -> list[synthetic.Messages]:
    return synthetic.conversations(COUNT, 1, fault_seed=2)


def calls(messages: synthetic.Messages) -> Iterator[tuple[str, str]]:
    """What stands in the tags of each call, and the response."""
    for message, after in itertools.pairwise(messages):
        if found := re.search("<tool_call>\n(.*)\n</tool_call>", message["content"]):
            assert after["role"] == "tool"
            yield found[1], after["content"]


def boxed(messages: synthetic.Messages) -> list[str]:
    assert messages[-1]["role"] == "assistant"
    return re.findall(r"<answer>\n\\boxed\{(-?\d+)\}\n</answer>", messages[-1]["content"])


FIRST: dict[str, Callable[[int, int], int]] = {
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
THEN: dict[str, Callable[[int, int], int]] = {
    r"": lambda value, _: value,
    r", then add (\d+)": lambda value, c: value + c,
    r", then subtract (\d+)": lambda value, c: value - c,
    r", then multiply by (\d+)": lambda value, c: value * c,
}


def test_boxed_answers_equal_those_that_a_person_marked(problems: list[Problem]) -> None:
    seen = set()
    for problem in problems:
        for (first, do), (then, after) in itertools.product(FIRST.items(), THEN.items()):
            if found := re.fullmatch(rf"{first}{then}\.", problem.text):
                a, b, c = (int(number) for number in (*found.groups(), 0)[:3])
                assert int(problem.answer) == after(do(a, b), c), problem
                seen.add((first, then))
    assert len(seen) == len(FIRST) * len(THEN)


def test_equal_seeds_give_equal_workloads_and_different_seeds_different_ones(problems: list[Problem]) -> None:
    assert synthetic.generate(100, 1) == problems[:100]
    assert synthetic.generate(100, 2) != problems[:100]
    assert (
        synthetic.conversations(50, 1, fault_seed=3)
        == synthetic.conversations(50, 1, fault_seed=3)
        != synthetic.conversations(50, 1, fault_seed=4)
    )
    assert [messages[0]["content"] for messages in synthetic.conversations(50, 1, fault_seed=3)] == [
        one.text for one in problems[:50]
    ]


def test_problems_differ_and_fresh_ones_are_never_for_training(problems: list[Problem]) -> None:
    texts = {problem.text for problem in problems}
    assert len(texts) == len({problem.id for problem in problems}) == COUNT
    fresh = {problem.text for seed in range(4) for problem in synthetic.generate(500, seed, held_out=True)}
    assert not fresh & texts
    train = {problem.text for seed in range(9) for problem in synthetic.generate(500, seed)}
    assert not fresh & train


def test_the_tool_responses_of_conversations_are_the_output_of_their_code(
    conversations: list[synthetic.Messages],
) -> None:
    for messages in conversations[:300]:
        for request, tool_response in calls(messages):
            out = io.StringIO()
            try:
                with contextlib.redirect_stdout(out):
                    exec(compile(json.loads(request)["arguments"]["code"], "main.py", "exec"))
            except (SyntaxError, ValueError) as error:
                # Where in the text the JSON goes wrong depends on the blanks around it.
                where = 0 if isinstance(error, json.JSONDecodeError) else -1
                assert tool_response.splitlines()[where].startswith(f"{type(error).__name__}: {error.msg}")
            else:
                assert out.getvalue() == f"{tool_response}\n"
                assert set(boxed(messages)) == {tool_response}


def test_faults_come_at_their_rates(problems: list[Problem], conversations: list[synthetic.Messages]) -> None:
    tool_response = [response for messages in conversations for _, response in calls(messages)]
    failed = sum("Error: " in response for response in tool_response) / len(tool_response)
    right = [boxed(messages)[0] == problem.answer for problem, messages in zip(problems, conversations, strict=True)]
    once = [len(boxed(messages)) == 1 for messages in conversations]
    # Those after the last that is allowed are never broken; a wrong operator may come to the right value.
    assert synthetic.BROKEN_CALL_RATE - 2 * NEAR < failed < synthetic.BROKEN_CALL_RATE + NEAR
    assert sum(right) / COUNT == pytest.approx(1 - synthetic.WRONG_OPERATOR_RATE, abs=NEAR)
    assert sum(once) / COUNT == pytest.approx(1 - synthetic.DOUBLE_ANSWER_RATE, abs=NEAR)
