"""Tests of the registry of environments.

An environment is the tools of an episode and the checker of its answer. A problem names its environment, and may have
options for it. A wrong name or option is an error before anything starts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainer.environments.episodes import ended_episode, opened_environment, problem, tool_call_request
from trainer.config import ConfigError
from trainer.data.sources import read_problems
from trainer.environments.environment import Environment
from trainer.environments.registry import (
    ENVIRONMENTS,
    check_problem,
    environment_class,
    needs_sandbox,
    open_environment,
)
from trainer.environments.services import Services
from trainer.episodes.episode import StopReason


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_name_has_a_class(name: str) -> None:
    assert issubclass(environment_class(name), Environment)


@pytest.mark.parametrize(
    ("name", "expected_text"),
    [
        ("pyhton", "problem p0: environment 'pyhton': did you mean python? Environments are python, "),
        ("chess", "expected one of python, "),
        ("no_such_module:Chess", "environment 'no_such_module:Chess': cannot be imported (No module named"),
        ("json:Chess", "cannot be imported (module 'json' has no attribute 'Chess')"),
        ("json:loads", "expected a subclass of trainer.environments.environment.Environment"),
        (":", "cannot be imported"),
        ("", "expected one of python, "),
    ],
)
def test_an_environment_that_cannot_be_found_is_an_error_with_the_reason(name: str, expected_text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_problem(problem(name))
    assert expected_text in str(raised.value)


@pytest.mark.parametrize(
    ("name", "options", "expected_text"),
    [
        ("python", {"timeout": 3}, "problem p0: options.timeout: Unexpected keyword argument, got 3"),
        ("qa", {"level": "x"}, "problem p0: options.level: Input should be a valid integer"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(name: str, options: dict[str, object], expected_text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_problem(problem(name, options))
    assert expected_text in str(raised.value)
    assert "\n" not in str(raised.value)


OWN_ENVIRONMENTS = """
import dataclasses
from trainer.environments.environment import Environment

@dataclasses.dataclass
class Style:
    colour: str = ""

@dataclasses.dataclass
class Options:
    tests: list[str]
    style: Style = dataclasses.field(default_factory=Style)

class WithOptionsClass(Environment):
    options_type = Options

class WithAnyOptions(Environment):
    options_type = dict
"""


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        ({"tests": [], "testz": ["x"]}, "options.testz: Unexpected keyword argument, got ['x']"),
        ({"tests": [], "style": {"color": "red"}}, "options.style.color: Unexpected keyword argument, got 'red'"),
        ({}, "options.tests: Field required"),
    ],
)
def test_an_unknown_option_of_an_own_environment_is_refused(
    options: dict[str, object], expected_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_options.py").write_text(OWN_ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    check_problem(problem("own_options:WithOptionsClass", {"tests": ["x"], "style": {"colour": "red"}}))
    check_problem(problem("own_options:WithAnyOptions", {"anything": 1}))
    with pytest.raises(ConfigError) as raised:
        check_problem(problem("own_options:WithOptionsClass", options))
    assert expected_text in str(raised.value)


def test_any_error_of_the_import_of_an_environment_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_environment.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be imported \(ZeroDivisionError: division by zero\)"):
        check_problem(problem("broken_environment:Own"))


def test_only_environments_that_run_code_need_a_sandbox() -> None:
    assert needs_sandbox(problem("python"))
    assert not needs_sandbox(problem("mcp"))
    with pytest.raises(ConfigError, match="expected a sandbox, got none"):
        open_environment(problem("python"), Services())


@pytest.mark.asyncio
async def test_the_documented_environment_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = Path(__file__).parents[3] / "docs/environments.md"
    section = document.read_text().partition("## Writing an environment")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "my_environments.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    # The document's example is a lock that opens when the model has dialled the digits of the answer.
    lock_problem = problem("my_environments:Lock", text="Open it.", answer="12")
    check_problem(lock_problem)
    async with opened_environment(lock_problem) as (environment, initial):
        assert (initial.text, initial.tools[0]["function"]["name"]) == ("Open it.", "turn")
        calls = [await environment.step(tool_call_request("turn", digit=digit)) for digit in (1, 1, "x", 2)]
        assert await environment.score(ended_episode(lock_problem)) == 1
        assert await environment.score(ended_episode(lock_problem, stop_reason=StopReason.UNAVAILABLE)) is None
    assert [call.status.value for call in calls] == ["ok", "ok", "malformed", "ok"]
    assert [call.ends_episode for call in calls] == [False, False, False, True]
    async with opened_environment(lock_problem) as (environment, _):
        assert await environment.score(ended_episode(lock_problem)) == 0


def test_the_problems_in_docs_environments_md_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp")
    document = (Path(__file__).parents[3] / "docs/environments.md").read_text()
    rows = re.findall(r"```json\n(.*?)```", document, re.DOTALL)
    (rewards,) = re.findall(r"```python\n((?:(?!```).)*?def rank\(.*?)```", document, re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(rewards)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    problems = read_problems(str(tmp_path / "rows.jsonl"))
    assert [row.environment for row in problems] == ["python", "code", "mcp", "python"]
    assert [row.reward for row in problems] == ["", "", "", "my_rewards:rank"]
    for row in problems:
        check_problem(row)
