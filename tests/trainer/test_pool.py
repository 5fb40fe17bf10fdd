"""The pool: no episode is lost, whatever becomes of engines; only proven weights sample; the books balance."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from tests.trainer.fake_vllm import TableEngine
from tests.trainer.jump import jumping
from trainer.engine import Capacity, EngineFailed, Sampling
from trainer.pool import Pool
from trainer.scheduler import POLICIES

MOST = 200
EMPTY = {"episodes": 0, "running": 0, "held": 0, "reserved": 0}


def engines(count, **options):
    return [TableEngine(f"e{number}", **options) for number in range(count)]


def failing(why="gone"):
    async def fail():
        raise EngineFailed(why)

    return fail


async def forever():
    await asyncio.Event().wait()


def steps(count):
    """Something that takes `count` steps of the event loop."""

    async def step():
        for _ in range(count):
            await asyncio.sleep(0)

    return step


@dataclass
class TableReference:
    """Another engine with the trainer's weights."""

    ids = (1, 2, 3, 4)

    def logprobs(self, weights):
        return asyncio.run(TableEngine(salt=weights["salt"]).logprobs(self.ids))

    async def check(self, engine, expected):
        if await engine.logprobs(self.ids) != expected:
            raise OSError("SyncFailed")


async def carry(engines, weights, version):
    async def load(engine):
        try:
            await engine.before()
        except EngineFailed as why:
            return why
        await engine.load(weights, version)
        return None

    return [await load(engine) for engine in engines]


def pool_of(made, **options):
    return Pool(made, **{"most_tokens": MOST, "carry": carry, "reference": TableReference()} | options)


async def episode(pool, number, turns=5, tool_s=0.0):
    """The ids of one episode, prompt included."""
    ids = [number % 50]
    async with pool.seat(group=number // 4, most_tokens=MOST) as seat:
        for turn in range(turns):
            ids += (await seat.generate(ids, Sampling(4, seed=number * 10 + turn))).ids
            await asyncio.sleep(tool_s)
            ids += [turn]
    return ids


async def alone(numbers):
    """What comes of episodes where nothing goes wrong."""
    async with pool_of(engines(1)) as pool:
        return [await episode(pool, number) for number in numbers]


def is_balanced(pool):
    return all(book == EMPTY for book in pool.scheduler.books().values()) and not pool.scheduler.running


async def served_by(pool):
    async with pool.seat(group="a", most_tokens=MOST) as seat:
        return (await seat.generate([1], Sampling(4, seed=0))).engine


@jumping
async def test_an_episode_keeps_its_engine_and_engines_share_episodes():
    made, log = engines(3), []
    async with pool_of(made, log=log.append) as pool:
        await asyncio.gather(*(episode(pool, number, tool_s=1.0) for number in range(12)))
        assert is_balanced(pool)
    homes = {each.episode: each.engine for each in log}
    assert all(homes[each.episode] == each.engine for each in log)
    assert sorted(list(homes.values()).count(engine.name) for engine in made) == [4, 4, 4]
    assert all(engine.is_closed for engine in made)


@jumping
async def test_a_turn_is_told_with_its_times_and_tokens():
    made, log = engines(1, before=lambda: asyncio.sleep(3)), []
    async with pool_of(made, log=log.append) as pool, pool.seat(group="a", most_tokens=MOST) as seat:
        first = await seat.generate([1, 2], Sampling(4, seed=0))
        await asyncio.sleep(2)
        await seat.generate([1, 2, *first.ids, 7], Sampling(5, seed=0))
    assert [(each.group, each.engine, each.context, each.sampled, each.has_moved) for each in log] == [
        ("a", "e0", 2, 4, False),
        ("a", "e0", 7, 5, False),
    ]
    assert [(each.wanted, each.began, each.ended) for each in log] == [(0, 0, 3), (5, 5, 8)]


@pytest.mark.parametrize("policy", POLICIES)
@jumping
async def test_only_turns_that_have_a_place_are_requests(policy):
    made = engines(2, room=Capacity(300, 5), before=lambda: asyncio.sleep(1))
    most = 0

    async def watch():
        nonlocal most
        while True:
            await asyncio.sleep(0.1)
            running = sum(engine.running for engine in made)
            assert running == pool.scheduler.running
            most = max(most, running)

    async with pool_of(made, policy=policy) as pool:
        watching = asyncio.create_task(watch())
        ended = await asyncio.gather(*(episode(pool, number) for number in range(40)))
        assert watching.cancel()
        assert is_balanced(pool)
    assert ended == await alone(range(40))
    assert most <= {"kv": 20, "reserve_worst_case": 2}.get(policy, 40)


@jumping
async def test_an_episode_goes_on_elsewhere_token_for_token_when_its_engine_dies():
    made = engines(2)
    async with pool_of(made) as pool, pool.seat(group="a", most_tokens=MOST) as seat:
        first = await seat.generate([1], Sampling(4, seed=0))
        home, other = sorted(made, key=lambda engine: engine.name != first.engine)
        home.before = failing()
        moved = await seat.generate([1, *first.ids, 7], Sampling(4, seed=0))
        assert moved.engine == other.name
        assert other.asked[-1] == home.asked[-1]
        assert moved.ids == (await TableEngine().generate([1, *first.ids, 7], Sampling(4, seed=0))).ids


@pytest.mark.parametrize("how", [failing(), forever], ids=["dies", "hangs"])
@jumping
async def test_all_turns_of_a_lost_engine_go_on_elsewhere(how):
    made = engines(3, before=lambda: asyncio.sleep(1))
    async with pool_of(made) as pool:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(episode(pool, number)) for number in range(30)]
            await asyncio.sleep(2.5)
            made[1].before = how
            if how is forever:
                made[1].scraped = forever
        assert [task.result() for task in running] == await alone(range(30))
        assert is_balanced(pool)
