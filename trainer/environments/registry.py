"""Environments by name.

A problem names its environment (`Problem.environment`): one of `ENVIRONMENTS`, or `package.module:Class` for a subclass
of `Environment` elsewhere. A class is imported when the first problem names it.
"""

from __future__ import annotations

from functools import cache

from trainer.config import ConfigError, suggestion
from trainer.environments.environment import Environment, parse_options
from trainer.environments.imports import import_named
from trainer.environments.own_reward import load_reward, with_own_reward
from trainer.environments.services import Services
from trainer.episodes.episode import Problem

ENVIRONMENTS = {
    "python": "trainer.environments.python_environment:PythonEnvironment",
    "code": "trainer.environments.code_environment:CodeEnvironment",
    "qa": "trainer.environments.qa_environment:QaEnvironment",
    "mcp": "trainer.environments.mcp_environment:McpEnvironment",
}
"""The class of each environment, as module:Class."""


@cache
def environment_class(name: str) -> type[Environment]:
    """Return the class of an environment. Raises `ConfigError` if there is none of this name."""
    path = ENVIRONMENTS.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f"environment {name!r}: {suggestion(name, ENVIRONMENTS)} Environments are {', '.join(ENVIRONMENTS)}, or "
            "package.module:Class"
        )
    try:
        kind = import_named(path)
    except ImportError as error:
        raise ConfigError(f"environment {name!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(f"environment {name!r}: expected a subclass of {Environment.__module__}.Environment")
    return kind


def check_problem(problem: Problem) -> None:
    """Check the environment, its options and the reward of a problem, and start nothing. Raises `ConfigError`."""
    try:
        parse_options(environment_class(problem.environment), problem.options)
        if problem.reward:
            load_reward(problem.reward)
    except ConfigError as error:
        raise ConfigError(f"problem {problem.id}: {error}") from error


def needs_sandbox(problem: Problem) -> bool:
    """Return whether the environment of a problem needs `Services.sandbox`. Raises `ConfigError`."""
    return environment_class(problem.environment).needs_sandbox


def open_environment(problem: Problem, services: Services) -> Environment:
    """Create the environment of one episode. The caller calls `reset`, and `close` whatever happens.

    Raises `ConfigError` for a problem that `check_problem` refuses, and if a sandbox is needed and there is none.
    """
    kind = environment_class(problem.environment)
    return (with_own_reward(kind) if problem.reward else kind)(services, parse_options(kind, problem.options))
