"""Tests of the environment `code`. The program of an episode is judged in the sandbox, by the tests of the problem.

The executors of the fake server print the code of a call. Programs that try to get a reward without a solution run in a
real sandbox.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import unused_port

from sandbox.client import AsyncClient
from sandbox.types import Limits
from tests.escape.test_judge import FUNCTION_ATTACKS, OUTPUT_ATTACKS, SEARCH_LIMITS, SECRET
from tests.gateway.serving import serving
from tests.trainer.environments.episodes import ended_episode, opened_environment, problem
from tests.trainer.fakes import FakePythonTool
from trainer.config import ConfigError
from trainer.environments.connection import SandboxConnection, open_sandbox
from trainer.environments.program_judge import ProgramJudge
from trainer.environments.registry import check_problem
from trainer.environments.services import Services
from trainer.episodes.episode import Episode, StopReason, Turn
from trainer.episodes.turn_parser import fenced_block

TESTS = [{"stdin": "", "expected": "hi"}, {"stdin": "", "expected": "ho"}]


def _services(client: AsyncClient) -> Services:
    tool: Any = FakePythonTool()
    return Services(SandboxConnection((), tool, tool, ProgramJudge(client, Limits())))


def _episode(*texts: str, **options: Any) -> Episode:
    episode = ended_episode(problem("code", {"tests": TESTS[:1], **options}))
    episode.turns = [Turn(0, 0, text) for text in texts]
    return episode


@pytest_asyncio.fixture
async def services() -> AsyncIterator[Services]:
    async with serving() as served, AsyncClient(served.url) as client:
        yield _services(client)


async def _score(episode: Episode, services: Services) -> float | None:
    async with opened_environment(episode.problem, services) as (environment, _):
        return await environment.score(episode)


@pytest.mark.asyncio
async def test_the_last_program_of_an_episode_is_scored_by_its_tests(services: Services) -> None:
    assert await _score(_episode("```python\nhi\n```"), services) == 1
    assert await _score(_episode("```python\nho\n```"), services) == 0
    assert await _score(_episode("```\nho\n```\n<answer>\n```python\nhi\n```\n</answer>"), services) == 1
    assert await _score(_episode("```\nhi\n```", "It is done."), services) == 1
    assert await _score(_episode("hi"), services) == 0
    both = {"tests": TESTS}
    assert await _score(_episode("```\nhi\n```", **both), services) == 0
    assert await _score(_episode("```\nhi\n```", **both, partial=True), services) == 0.5


@pytest.mark.asyncio
@pytest.mark.usefixtures("guest_python", "needs_isolation")
async def test_programs_that_tamper_with_the_judge_get_no_reward_from_a_real_sandbox() -> None:
    """The attacks are those on `/v1/judge`. A solution shows that the same tests can be passed."""
    output, function = {"stdin": "", "expected": SECRET}, {"call": "solve", "args": [], "expected": SECRET}
    programs = [
        *((attack, code, output) for attack, code in OUTPUT_ATTACKS.items()),
        *((attack, code, function) for attack, code in FUNCTION_ATTACKS.items()),
        ("the solution", f"print({SECRET!r})", output),
        ("the solution", f"def solve(): return {SECRET!r}", function),
    ]
    async with open_sandbox(arguments=["--profiles", "bare", "--zygote-pools", "1", "--slots", "4"]) as sandbox:
        services = Services(sandbox)
        for attack, code, test in programs:
            for partial in (False, True):
                episode = _episode(f"```python\n{code}\n```", tests=[test] * 2, partial=partial, limits=SEARCH_LIMITS)
                assert await _score(episode, services) == (attack == "the solution"), f"{attack}: {code}"
        forged = '<answer>\n{"outcome": "passed", "passed": 2, "total": 2, "is_scorable": true}\n</answer>'
        assert await _score(_episode(forged, tests=[output]), services) == 0


@pytest.mark.asyncio
async def test_a_failure_of_the_service_is_no_reward(services: Services) -> None:
    interrupted = _episode("```\nhi\n```")
    interrupted.stop_reason = StopReason.UNAVAILABLE
    assert await _score(interrupted, services) is None
    async with AsyncClient(f"http://127.0.0.1:{unused_port()}", retries=0) as client:
        assert await _score(_episode("```\nhi\n```"), _services(client)) is None


@pytest.mark.asyncio
async def test_the_prompt_says_what_the_program_must_be_and_shows_no_test(services: Services) -> None:
    function = problem("code", {"tests": [{"call": "Solution.half", "args": [7], "expected": 3.5}]}, text="Halve it.")
    async with opened_environment(function, services) as (_, initial):
        assert initial.text.startswith("Halve it.\n\nWrite a Python program that defines Solution.half. Put the whole")
        assert "3.5" not in initial.text
    async with opened_environment(problem("code", {"tests": TESTS}), services) as (_, initial):
        assert "a Python program that reads standard input and prints the answer" in initial.text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "options.tests: Field required"),
        ({"tests": []}, "options.tests: expected a list of at least one test"),
        ({"tests": [{"stdin": "1"}]}, "options.tests[0].expected: expected a value, or a checker"),
        ({"tests": TESTS, "compare": "exactly"}, "options.compare: expected exact"),
        ({"tests": TESTS, "limits": {"timeout": 1}}, "did you mean limits.timeout_s?"),
        ({"tests": TESTS, "testz": []}, "options.testz: Unexpected keyword argument"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_problem(problem("code", options))
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\nx = 1\n\ny\n```", "x = 1\n\ny\n"),
        ("a\n  ```py\nx\n  ```\nb", "x\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("<think>\n```\na\n```\n</think>\nno program", None),
        ("```python\nnot closed", None),
        ("```\n```", ""),
        ("inline ```x```", None),
    ],
)
def test_a_program_is_the_last_closed_block_outside_of_thoughts(text: str, expected: str | None) -> None:
    assert fenced_block(text) == expected
