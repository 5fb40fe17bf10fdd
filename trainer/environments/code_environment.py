"""The environment `code`: the model writes a program, which the sandbox's /v1/judge runs against tests. The model can
try the program with the Python tool.

The program is a closed block between lines of three backquotes, outside of thoughts. If there are several, the last
block in the last turn with a block counts. Neither the model nor its program sees the expected outputs.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from sandbox.judging.programs import Program
from trainer.config import STRICT
from trainer.environments.environment import parse_options
from trainer.environments.python_environment import PythonEnvironment
from trainer.episodes.episode import Episode, Problem
from trainer.episodes.reward import INFRASTRUCTURE_STOPS
from trainer.episodes.turn_parser import fenced_block, program_prompt


@dataclass(frozen=True, config=STRICT)
class CodeOptions:
    """Options of a problem. `tests`, `compare` and `checker` have the form that /v1/judge takes (docs/judge.md)."""

    tests: list[dict[str, Any]]
    compare: str | dict[str, float] = "lines"
    checker: str = ""
    partial: bool = False
    """If true, the reward is the share of the tests that the program passes. If false, the reward is 1 if it passes all
    tests, else 0."""
    limits: dict[str, float] = Field(default_factory=dict)
    """Limits of the program in each test, in place of those of `[sandbox]`."""

    def __post_init__(self) -> None:
        Program.decode(self.program(""), where="options")

    def program(self, code: str) -> dict[str, Any]:
        """Return the body of a request to /v1/judge."""
        rule = {"checker": self.checker} if self.checker else {"compare": self.compare}
        limits = {"limits": self.limits} if self.limits else {}
        return {"code": code, "tests": self.tests, "stop_at_first_failure": not self.partial, **rule, **limits}


class CodeEnvironment(PythonEnvironment):
    options_type = CodeOptions

    @classmethod
    def prompt(cls, problem: Problem) -> str:
        names = dict.fromkeys(str(test["call"]) for test in parse_options(cls, problem.options).tests if "call" in test)
        return program_prompt(problem.text, *([f"defines {' and '.join(names)}"] if names else []))

    async def score(self, episode: Episode) -> float | None:
        if episode.stop_reason in INFRASTRUCTURE_STOPS:
            return None
        programs = (fenced_block(turn.text) for turn in reversed(episode.turns))
        code = next((program for program in programs if program is not None), None)
        if code is None:
            return 0.0
        options: CodeOptions = self.options
        return await self._sandbox.program_judge.reward(options.program(code), partial=options.partial)
