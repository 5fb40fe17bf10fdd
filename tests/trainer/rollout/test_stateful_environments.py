"""Tests of training episodes in stateful environments: each episode has an environment of its own, which is always
closed."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import ClassVar

import pytest

from tests.trainer.environments.episodes import problem
from tests.trainer.environments.test_continued_episodes import HANOI, HANOI_MOVES, SERVICES, scripted_pool
from tests.trainer.environments.test_mcp_environment import SERVER, children, eventually
from tests.trainer.fakes import ScriptedPool, finished_call
from tests.trainer.rollout.scripted_rollout import CALL_THEN_ANSWER, LIMITS, SEED
from trainer.environments.environment import Environment, InitialState
from trainer.environments.registry import open_environment
from trainer.environments.services import open_services
from trainer.episodes.episode import Problem, StopReason, ToolCallStatus
from trainer.rollout.collector import EpisodeCollector

pytest.importorskip("mcp")
pytestmark = pytest.mark.asyncio

COUNTER = problem("mcp", {"command": [sys.executable, SERVER]}, answer="a is 3")
ADDITIONS = [("add", {"name": "a", "amount": amount}) for amount in (2, 1)]


async def collect(pool, chat_format, task, size, *, max_stateful=64):
    async with open_services(SERVICES.sandbox) as services:
        create = partial(open_environment, services=services)
        collector = EpisodeCollector(pool, lambda _: chat_format, create, max_stateful)
        (group,) = await collector.collect([task], size, limits=LIMITS, seed=SEED)
        return group


@pytest.mark.parametrize(("task", "calls"), [(HANOI, HANOI_MOVES), (COUNTER, ADDITIONS)], ids=["text", "mcp"])
async def test_the_episodes_of_a_stateful_environment_do_not_see_each_others_state(chat_format, task, calls):
    before = children()
    pool = scripted_pool(calls, task.answer)
    group = await collect(pool, chat_format, task, 3)
    assert [(episode.stop_reason, episode.reward) for episode in group] == [(StopReason.FINISHED, 1.0)] * 3
    first, *others = [[call.response for turn in episode.turns for call in turn.tool_calls] for episode in group]
    assert len(first) == len(calls)
    assert others == [first] * 2
    await eventually(lambda: children() == before)


async def test_cancelling_a_step_ends_the_mcp_servers_of_its_episodes(chat_format):
    before = children()
    pool = scripted_pool([("hang", {})], "")
    step = asyncio.create_task(collect(pool, chat_format, COUNTER, 2))
    await eventually(lambda: len(pool.requests) == 2)  # both episodes have sampled their call
    assert children() > before
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await eventually(lambda: children() == before)


class Stalling(Environment):
    """An environment that never returns from the method that the problem's answer names."""

    is_stateful = True
    opened: ClassVar[list[Stalling]] = []
    stalled = asyncio.Event()

    def __init__(self, services, options):
        super().__init__(services, options)
        self.num_closed = 0
        self.opened.append(self)

    async def reset(self, problem):
        self.method = problem.answer
        await self._stall("reset")
        return InitialState("Go.")

    async def step(self, action):
        await self._stall("step")
        return finished_call(ToolCallStatus.OK, "done")

    async def score(self, episode):
        await self._stall("score")
        return 1.0

    async def close(self):
        await asyncio.sleep(0)
        self.num_closed += 1

    async def _stall(self, method):
        if method == self.method:
            self.stalled.set()
            await asyncio.Event().wait()


def stalling(method: str = "") -> Problem:
    Stalling.opened, Stalling.stalled = [], asyncio.Event()
    return Problem("p0", "Go.", method, "test", f"{__name__}:Stalling")


def call_once(context, sampling):
    return CALL_THEN_ANSWER["<tool_response>" in context]


@pytest.mark.parametrize("method", ["reset", "step", "score"])
async def test_a_cancelled_step_closes_each_environment_once(chat_format, method):
    step = asyncio.create_task(collect(ScriptedPool(call_once), chat_format, stalling(method), 3))
    await Stalling.stalled.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert [environment.num_closed for environment in Stalling.opened] == [1] * 3


async def test_at_most_max_stateful_environments_are_open(chat_format):
    most_open = 0

    def script(context, sampling):
        nonlocal most_open
        most_open = max(most_open, sum(not environment.num_closed for environment in Stalling.opened))
        return call_once(context, sampling)

    group = await collect(ScriptedPool(script), chat_format, stalling(), 5, max_stateful=2)
    assert (most_open, [episode.reward for episode in group]) == (2, [1.0] * 5)
