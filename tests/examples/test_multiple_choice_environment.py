"""Tests of the environment of multiple-choice problems: its prompt, and the scores of answers, which are letters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.multiple_choice import ENVIRONMENT
from sandbox.tool import TOOL_NAMES
from tests.trainer.environments.episodes import ended_episode, opened_environment, problem, tool_call_request
from tests.trainer.fakes import FakePythonTool, FakeVerifier
from trainer.environments.connection import SandboxConnection
from trainer.environments.registry import check_problem, needs_sandbox
from trainer.environments.services import Services
from trainer.episodes.episode import StopReason

VERIFIER = FakeVerifier()
SERVICES = Services(SandboxConnection((), FakePythonTool(), VERIFIER, None))  # type: ignore[arg-type]
QUESTION = problem(ENVIRONMENT, text="Which?\n\n(A) this\n(B) that", answer="B")
PARTICLES = problem(
    ENVIRONMENT,
    text="Which has no charge?\n\n(A) $p$,\na proton\n(B) A neutron\n(C) 5 C\n(D) -5 C",
    answer="B",
)


@pytest.mark.asyncio
async def test_the_model_reads_the_choices_and_how_to_answer_and_has_the_python_tool() -> None:
    check_problem(QUESTION)
    assert needs_sandbox(QUESTION)
    async with opened_environment(QUESTION, SERVICES) as (environment, initial):
        assert initial.text.startswith("Which?\n\n(A) this\n(B) that\n\nThe answer is the letter")
        assert [tool["function"]["name"] for tool in initial.tools] == [TOOL_NAMES[0]]
        assert (await environment.step(tool_call_request(TOOL_NAMES[0], code="7"))).response == "7"


@pytest.mark.parametrize(
    "answer",
    ["B", "b", "(B)", "(b)", "B)", "B.", "{B}", "$B$", r"\text{B}", r"\textbf{(\text{B})}", r"\mathrm{b}", r"B\ "],
)
@pytest.mark.asyncio
async def test_a_letter_with_or_without_parentheses_is_right(answer: str) -> None:
    async with opened_environment(QUESTION, SERVICES) as (environment, _):
        assert await environment.score(ended_episode(QUESTION, answer)) == 1
    assert not VERIFIER.requests, "math-verify would accept other texts"


@pytest.mark.parametrize(
    "answer", ["B. that", "B) that", "B: that", "(B) that", "[B]", "B – that", r"\textbf{B: that}", r"(B)\ \text{that}"]
)
@pytest.mark.asyncio
async def test_a_letter_with_its_text_is_right(answer: str) -> None:
    async with opened_environment(QUESTION, SERVICES) as (environment, _):
        assert await environment.score(ended_episode(QUESTION, answer)) == 1


@pytest.mark.parametrize("answer", ["A", "(C)", "E", "", "BB", "AB", "(B", "that", "2", "1", "В", "ᴮ", "to B", "not B"])
@pytest.mark.asyncio
async def test_any_other_answer_is_wrong(answer: str) -> None:
    async with opened_environment(QUESTION, SERVICES) as (environment, _):
        assert await environment.score(ended_episode(QUESTION, answer)) == 0


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B: neutron", "B"),
        ("B: A neutron", "B"),
        ("B A neutron", "B"),
        ("B: it is neutral (b)", "B"),
        (r"\mathbf{B}", "B"),
        (r"\bm{B}: neutron", "B"),
        ("C: 5 C", "C"),
        ("C: 5 coulomb", "C"),
        ("(A) $p$, a proton", "A"),
        ("b) a neutron", "B"),
        ("A neutron", None),  # "A" is an article here
        ("B neutron", None),
        ("B: 5 C", None),  # "5 C" is the text of another choice
        ("C: -5 C", None),
        ("B or C", None),
        ("B: or C", None),
        ("B, C", None),
        ("(B) and (c)", None),
        ("B. Not A.", None),
    ],
)
@pytest.mark.asyncio
async def test_one_letter_with_its_text_is_that_letter_and_two_letters_are_wrong(answer: str, letter: str) -> None:
    for right in "ABCD":
        question = replace(PARTICLES, answer=right)
        async with opened_environment(question, SERVICES) as (environment, _):
            assert await environment.score(ended_episode(question, answer)) == float(right == letter)


@pytest.mark.asyncio
async def test_without_an_answer_the_episode_is_wrong_and_after_an_outage_it_has_no_reward() -> None:
    async with opened_environment(QUESTION, SERVICES) as (environment, _):
        assert await environment.score(ended_episode(QUESTION)) == 0
        assert await environment.score(ended_episode(QUESTION, "B", StopReason.UNAVAILABLE)) is None
