"""A Python tool for TRL's `GRPOTrainer`, as an environment.

    trainer = GRPOTrainer(..., environment_factory=PythonEnvironment)

`functools.partial(PythonEnvironment, "http://10.0.0.1:8642")` sets the server. TRL needs one instance per completion
of a batch; all instances of a process share one client. This module needs no part of TRL: TRL takes the public
methods of the class as tools, and reads their names, types and docstrings.
"""

from __future__ import annotations

from typing import Any

from sandbox.errors import SandboxError
from sandbox.integrations.connection import shared_client
from sandbox.tool import MAX_RESPONSE_CHARS, parse_arguments, render
from sandbox.types import DEFAULT_LIMITS, Limits, Result


class SandboxOutage(BaseException):
    """The service has not run a tool call, so the completion has no honest reward.

    It is not an `Exception`, because TRL turns each `Exception` of a tool into a text that the model reads and is
    rewarded for. It ends `trainer.train()`; the run can be resumed from its last checkpoint.
    """


class PythonEnvironment:
    """Runs the model's Python code in the sandbox. The calls of a completion share no state.

    `results` has the results of the completion's calls, for reward functions:
    `def reward(environments, **_): return [... environment.results ... for environment in environments]`.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        limits: Limits = DEFAULT_LIMITS,
        max_chars: int = MAX_RESPONSE_CHARS,
    ) -> None:
        """Without `url` and `token`, `RSTAR_SANDBOX_URL` and `RSTAR_SANDBOX_TOKEN` are used. The model reads at most
        `max_chars` characters of a result."""
        self.results: list[Result] = []
        self._client = shared_client(url, token)
        self._limits, self._max_chars = limits, max_chars

    def reset(self, **example: Any) -> None:
        """Forget the results of the last completion. `example` is the row of the data set."""
        self.results = []

    def run_python(self, code: str, input: str = "") -> str:
        """Run Python code with the given standard input and return what it prints.

        Args:
            code: Python code. Print what you want to see; if it prints nothing, the value of its last expression is
                shown. numpy, scipy and sympy are installed. Every call starts afresh.
            input: What the code reads from standard input.

        Returns:
            What the code printed, or its error.
        """
        call = parse_arguments({"code": code, "input": input})
        try:
            result = self._client.execute(call, limits=self._limits)
            text = render(result, max_chars=self._max_chars)
        except SandboxError as error:
            raise SandboxOutage(f"a tool call has no result: {error}") from error
        self.results.append(result)
        return text
