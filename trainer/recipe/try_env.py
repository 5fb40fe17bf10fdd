"""Runs scripted turns in the environments of problems, without a model: `rstar-train try-env CONFIG --answers FILE`.

A row of FILE is `{"problem": ID, "turns": [TEXT, ...]}`. A `TurnLoop` treats the turns like the turns of a model, with
the limits of `[eval]`. There is no tokenizer: each character counts as a token, so `max_response_tokens` does not
apply.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from trainer.config import ConfigError, RunConfig
from trainer.data.rows import file_rows
from trainer.data.sources import iter_problems
from trainer.engines.busy_timer import BusyTimer
from trainer.engines.engine import EngineError, Generation, SamplingParams
from trainer.environments.environment import Environment, EnvironmentFailure, check_score, close_environment
from trainer.environments.registry import check_problem, needs_sandbox, open_environment
from trainer.environments.services import open_services
from trainer.episodes.episode import Episode, Problem, ToolCall
from trainer.episodes.turn_parser import ToolCallRequest
from trainer.recipe.rollout_session import connect_sandbox
from trainer.rollout.turn_loop import TurnLoop

STOP_ID = 0x110000
"""The token id that ends a turn. It is larger than every code point, so it is not the id of a character."""


@dataclass(frozen=True, slots=True)
class _CharacterFormat:
    """A chat format without a tokenizer: the token ids are code points."""

    needs_answer_tags: bool
    stop_ids: tuple[int, ...] = (STOP_ID,)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def encode_tool_responses(self, texts: Sequence[str]) -> list[int]:
        return [ord(character) for character in "\n".join(texts)]


@dataclass(frozen=True, slots=True)
class _Script:
    """Generates the turns of a row."""

    turns: Iterator[str]

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        if (text := next(self.turns, None)) is None:
            raise EngineError("the row has no further turn, and the episode is not at its end")
        return Generation((*map(ord, text), STOP_ID), None, has_stop_token=True, engine="script", weight_version=0)


@dataclass(frozen=True, slots=True)
class _Tool:
    environment: Environment

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolCall:
        return await self.environment.step(ToolCallRequest(name, arguments))


async def try_env(config: RunConfig, answers: Path) -> AsyncIterator[str]:
    """Run the rows of a file, and yield lines that show each episode. Raises `ConfigError`."""
    rows = _read_rows(answers)
    problems = _find_problems(config, {name for name, _ in rows})
    for problem in problems.values():
        check_problem(problem)
    async with AsyncExitStack() as stack:
        needs = any(map(needs_sandbox, problems.values()))
        sandbox = await stack.enter_async_context(connect_sandbox(config.sandbox)) if needs else None
        services = await stack.enter_async_context(open_services(sandbox, config.reward))
        for name, turns in rows:
            environment = open_environment(problems[name], services)
            try:
                async for line in _episode(config, problems[name], environment, turns):
                    yield line
            finally:
                await close_environment(environment)


async def _episode(
    config: RunConfig, problem: Problem, environment: Environment, turns: Sequence[str]
) -> AsyncIterator[str]:
    state = await environment.reset(problem)
    yield f"=== problem {problem.id}, environment {problem.environment}"
    yield f"--- prompt\n{state.text}"
    for tool in state.tools:
        yield f"--- tool\n{json.dumps(tool['function'])}"
    episode, limits = Episode(problem, 0), replace(config.eval, max_response_tokens=1 << 62)
    chat_format = cast(Any, _CharacterFormat(needs_answer_tags=config.model.chat_format == "rstar2"))
    script = cast(Any, _Script(iter(turns)))
    await TurnLoop(chat_format, _Tool(environment), limits, 0, BusyTimer()).run(episode, script)
    for number, turn in enumerate(episode.turns, 1):
        yield f"--- turn {number}\n{turn.text}"
        for call in turn.tool_calls:
            yield f"--- tool response: {call.status}\n{call.error or call.response}"
    try:
        score = check_score(problem, await environment.score(episode))
    except EnvironmentFailure as error:
        score, episode.error = None, str(error)
    yield f"--- end: {episode.stop_reason}{f' ({episode.error})' if episode.error else ''}"
    yield f"--- answer: {episode.answer}, reward: {score}\n"


def _read_rows(answers: Path) -> list[tuple[str, list[str]]]:
    """Return the id of a problem and the turns of each row."""
    rows = []
    for number, row in enumerate(file_rows(answers)):
        match row:
            case {"problem": str(name), "turns": [*turns]} if all(isinstance(turn, str) for turn in turns):
                rows.append((name, turns))
            case _:
                expected = 'expected {"problem": ID, "turns": [TEXT, ...]}'
                raise ConfigError(f"--answers {answers}: row {number}: {expected}, got {row!r:.200}")
    return rows


def _find_problems(config: RunConfig, names: set[str]) -> dict[str, Problem]:
    """Return the first problem of each name in the sources of the run."""
    found: dict[str, Problem] = {}
    sources = [*config.data.train, *(s for stage in config.stages.values() for s in stage.data), *config.collect.data]
    for source in dict.fromkeys([*sources, *config.eval.data]):
        held_out = source in config.eval.data and source not in sources
        for problem in iter_problems(source, lambda *_: None, seed=config.seed, held_out=held_out):
            if problem.id in names:
                found.setdefault(problem.id, problem.with_default_reward(config.reward.function))
        if found.keys() == names:
            return found
    absent = ", ".join(sorted(names - found.keys()))
    raise ConfigError(
        f"--answers: {absent}: no such problem in data.train, the stages' data, collect.data or eval.data"
    )
