"""Tests of training episodes in stateful environments: each episode has an environment of its own, which is always
closed."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
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
from trainer.episodes.episode import Episode, Problem, StopReason, ToolCallStatus
from trainer.rollout.collector import EpisodeCollector
from trainer.rollout.turn_loop import turn_seed

pytest.importorskip("mcp")
pytestmark = pytest.mark.asyncio

COUNTER = problem("mcp", {"command": [sys.executable, SERVER]}, answer="a is 3")
ADDITIONS = [("add", {"name": "a", "amount": amount}) for amount in (2, 1)]


async def collect(pool, chat_format, groups, *, max_stateful=64, **options):
    async with open_services(SERVICES.sandbox) as services:
        create = partial(open_environment, services=services)
        collector = EpisodeCollector(pool, lambda _: chat_format, create, max_stateful)
        return await collector.collect_groups(groups, limits=LIMITS, seed=SEED, **options)


def group_of(task: Problem, size: int) -> list[Episode]:
    return [Episode(task, sample) for sample in range(size)]


@pytest.mark.parametrize("is_decided", [None, lambda rewards, unfinished: False], ids=["as a group", "one by one"])
@pytest.mark.parametrize(("task", "calls"), [(HANOI, HANOI_MOVES), (COUNTER, ADDITIONS)], ids=["text", "mcp"])
async def test_the_episodes_of_a_stateful_environment_do_not_see_each_others_state(
    chat_format, task, calls, is_decided
):
    before = children()
    pool = scripted_pool(calls, task.answer)
    (group,) = await collect(pool, chat_format, [group_of(task, 3)], is_decided=is_decided)
    assert [(episode.stop_reason, episode.reward) for episode in group] == [(StopReason.FINISHED, 1.0)] * 3
    first, *others = [[call.response for turn in episode.turns for call in turn.tool_calls] for episode in group]
    assert len(first) == len(calls)
    assert others == [first] * 2
    await eventually(lambda: children() == before)


async def test_cancelling_a_step_ends_the_mcp_servers_of_its_episodes(chat_format):
    before = children()
    pool = scripted_pool([("hang", {})], "")
    step = asyncio.create_task(collect(pool, chat_format, [group_of(COUNTER, 2)]))
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
    step = asyncio.create_task(collect(ScriptedPool(call_once), chat_format, [group_of(stalling(method), 3)]))
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

    groups = [group_of(stalling(), 5)]
    (group,) = await collect(ScriptedPool(script), chat_format, groups, max_stateful=2)
    assert (most_open, [episode.reward for episode in group]) == (2, [1.0] * 5)


async def test_an_aborted_episode_repeats_its_actions_and_a_finished_one_keeps_its_reward(chat_format):
    """Of the first group, one episode ends and is scored. The other one waits in its second turn until it is aborted,
    because the second group is complete."""
    groups = [[Episode(HANOI, 0), Episode(HANOI, 1)], [Episode(replace(HANOI, id="p1"), 0)]]
    finished, aborted = groups[0]

    async def pause():
        seed = pool.requests[-1][1].seed
        if seed == turn_seed(SEED, HANOI.id, 1, 1):
            await pool.abort_called.wait()
        while seed == turn_seed(SEED, "p1", 0, 2) and finished.reward is None:  # noqa: ASYNC110
            await asyncio.sleep(0)

    moves = scripted_pool(HANOI_MOVES, "").script
    pool = ScriptedPool(moves, pause, tokens_at_abort=lambda tokens: 0)
    pending, complete = await collect(pool, chat_format, groups, min_complete=1)
    assert (pending, complete) == (None, groups[1])
    assert (finished.reward, aborted.stop_reason, aborted.num_turns) == (1.0, None, 1)
    pool = ScriptedPool(moves)
    ((*continued,),) = await collect(pool, chat_format, groups[:1])
    assert [episode.reward for episode in continued] == [1.0, 1.0]
    assert len(pool.requests) == len(HANOI_MOVES) - 1
