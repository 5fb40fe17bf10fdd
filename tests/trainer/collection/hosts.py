"""Hosts of episodes with a scripted model and an environment that counts. The nodes of a Ray cluster can import this
module."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.trainer.fakes import END, ScriptedPool, answer_text, call_text, qwen_tokenizer
from trainer.collection.host import EpisodeHost
from trainer.collection.work import RunEpisode
from trainer.config import SamplingConfig
from trainer.engines.engine import SamplingParams
from trainer.environments.environment import Environment, InitialState
from trainer.episodes.chat_format import rstar2_format
from trainer.episodes.episode import Episode, Problem, ToolCall, ToolCallStatus
from trainer.episodes.turn_parser import ToolCallRequest
from trainer.rollout.episode_runner import EpisodeRunner

NUM_TURNS = 4
"""Turns of an episode. The last one has the answer."""
LIMITS = SamplingConfig(max_response_tokens=2000, max_turns=10)


def count_to_answer(context: str, sampling: SamplingParams) -> str:
    """Act as a model that calls the tool in each turn with the count so far, and then answers with the last
    response."""
    turn = context.count("<tool_response>")
    if turn < NUM_TURNS - 1:
        return call_text(str(turn)) + END
    return answer_text(context.rpartition("<tool_response>\n")[2].partition("\n")[0]) + END


@dataclass
class CountingEnvironment(Environment):
    """Answers each action with the number of actions so far. The right answer is the number of actions."""

    services: Any = None
    options: Any = None
    is_stateful: bool = True  # type: ignore[misc]  # a class variable of other environments
    before_step: Callable[[int], Any] = lambda count: None
    """Called with the number of actions so far. May raise, or return an awaitable that `step` waits for."""
    num_actions: int = 0
    num_closed: int = 0
    actions: list[ToolCallRequest] = field(default_factory=list)
    scores: Callable[[Episode], float | None] = lambda episode: float(episode.answer == str(NUM_TURNS - 1))

    async def reset(self, problem: Problem) -> InitialState:
        return InitialState(problem.text)

    async def step(self, action: ToolCallRequest) -> ToolCall:
        waiting = self.before_step(self.num_actions)
        if waiting is not None:
            await waiting
        self.num_actions += 1
        self.actions.append(action)
        return ToolCall(action.name, action.arguments, ToolCallStatus.OK, str(self.num_actions))

    async def score(self, episode: Episode) -> float | None:
        return self.scores(episode)

    async def close(self) -> None:
        self.num_closed += 1


def make_host(
    environment: Callable[[Problem], CountingEnvironment] = lambda problem: CountingEnvironment(),
    *,
    pool: ScriptedPool | None = None,
    deadline_s: float = 60.0,
    system_prompt: str = "",
) -> EpisodeHost:
    pool = pool or ScriptedPool(count_to_answer)
    tokenizer = qwen_tokenizer()
    runner = EpisodeRunner(
        pool,  # type: ignore[arg-type]
        lambda tools: rstar2_format(tokenizer, tools=tools, system_prompt=system_prompt),
        environment,
        LIMITS,
        seed=1,
        deadline_s=deadline_s,
    )
    return EpisodeHost(runner)


@asynccontextmanager
async def open_slow_host(turn_s: float, started: Path, gate: Path | None = None) -> AsyncIterator[RunEpisode]:
    """A host whose turns take `turn_s`. Each try leaves a line "problem/sample turns" in the file `started`. With a
    `gate`, each episode waits in its second turn until that file exists."""

    async def wait_for_gate() -> None:
        await wait_for(lambda: gate is None or gate.exists())

    pool = ScriptedPool(count_to_answer, pause=partial(asyncio.sleep, turn_s))
    host = make_host(
        lambda problem: CountingEnvironment(before_step=lambda count: wait_for_gate() if count == 1 else None),
        pool=pool,
    )

    async def run(episode: Episode, on_growth: Any) -> float | None:
        line = f"{episode.problem.id}/{episode.sample} {len(episode.turns)} {os.getpid()}\n"
        with started.open("a") as file:
            file.write(line)
        return await host.run(episode, on_growth)

    yield run


async def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for a condition outside this process or task."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def journal_rows(store: Path) -> int:
    """Return the number of turns that the journal of a store has on disk."""
    return sum(len(file.read_bytes().splitlines()) for file in store.glob("turns/*.jsonl"))
