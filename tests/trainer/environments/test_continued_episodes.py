"""Tests of episodes in real environments. Each episode is interrupted after every turn, and another host continues
it."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from tests.trainer.collection.hosts import make_host
from tests.trainer.environments.episodes import problem
from tests.trainer.environments.test_mcp_environment import SERVER
from tests.trainer.environments.test_qa_environment import SERVICES
from tests.trainer.fakes import END, ScriptedPool, answer_text
from trainer.collection.store import Growth
from trainer.engines.engine import SamplingParams
from trainer.environments.registry import open_environment
from trainer.environments.services import Services, open_services
from trainer.episodes.episode import Episode, Problem

pytest.importorskip("transformers")
pytest.importorskip("mcp")

HANOI = problem("examples.games:GameEnvironment", {"game": "tower_of_hanoi", "disks": 2})
HANOI_MOVES = [("move", {"source": source, "target": target}) for source, target in [(1, 2), (1, 3), (2, 3)]]
COUNTER = problem("mcp", {"command": [sys.executable, SERVER]}, answer="a is 3")
QUESTION = problem("qa", {"texts": {"a.txt": "7"}}, answer="7")
CODE = ("execute_python_code_with_standard_io", {"code": "7"})

Calls = list[tuple[str, Mapping[str, Any]]]


def scripted_pool(calls: Calls, answer: str) -> ScriptedPool:
    """A model that makes one of `calls` in each turn, and then answers."""

    def script(context: str, sampling: SamplingParams) -> str:
        turn = context.count("<tool_response>")
        if turn == len(calls):
            return answer_text(answer) + END
        name, arguments = calls[turn]
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{END}"

    return ScriptedPool(script)


@pytest.mark.parametrize(
    ("task", "calls", "num_turns"),
    [
        (HANOI, HANOI_MOVES, 3),  # the last move ends the episode
        (COUNTER, [("add", {"name": "a", "amount": amount}) for amount in (2, 1)], 3),
        (QUESTION, [CODE, CODE], 3),
    ],
)
@pytest.mark.asyncio
async def test_an_interrupted_episode_continues_with_the_same_tokens_and_reward(
    task: Problem, calls: Calls, num_turns: int
) -> None:
    async def run(services: Services, episode: Episode) -> tuple[float | None, list[Growth]]:
        growth: list[Growth] = []
        host = make_host(partial(open_environment, services=services), pool=scripted_pool(calls, task.answer))
        return await host.run(episode, growth.append), growth

    async with open_services(SERVICES.sandbox) as services:
        whole = Episode(task, 0)
        reward, growth = await run(services, whole)
        assert (reward, len(whole.turns)) == (1.0, num_turns)
        for length in range(1, num_turns):
            interrupted = copy.deepcopy(growth[0].tail)
            for item in growth[1:length]:
                interrupted = interrupted.with_tail(item.tail)
            reward, _ = await run(services, interrupted)
            assert (reward, interrupted.response_ids) == (1.0, whole.response_ids)
