"""The pool: episodes keep their engines, move when one fails, and sample only from weights that were proven."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from tests.trainer.fake_vllm import TableEngine
from trainer.engine import EngineFailed, Sampling
from trainer.pool import Pool

pytestmark = pytest.mark.asyncio
SAMPLING = Sampling(4, seed=0)


def engines(count, **options):
    return [TableEngine(f"e{number}", **options) for number in range(count)]


def failing(why="gone"):
    async def fail():
        raise EngineFailed(why)

    return fail


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


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def pool_of(made, **options):
    return Pool(made, carry=carry, reference=TableReference(), rest_s=10, **options)


async def test_an_episode_keeps_its_engine_and_the_least_loaded_takes_the_next():
    made = engines(3)
    async with Pool(made) as pool, pool.seat(group="a", prompt_tokens=1) as first:
        names = {(await first.generate([1], SAMPLING)).engine for _ in range(3)}
        async with pool.seat(group="a", prompt_tokens=1) as second, pool.seat(group="b", prompt_tokens=1) as third:
            others = {(await seat.generate([1], SAMPLING)).engine for seat in (second, third)}
            assert [desk.seats for desk in pool.desks] == [1, 1, 1]
        async with pool.seat(group="b", prompt_tokens=1) as fourth:
            assert (await fourth.generate([1], SAMPLING)).engine in others
        assert names == {"e0"}
        assert others == {"e1", "e2"}
        assert [desk.seats for desk in pool.desks] == [1, 0, 0]
        assert [(desk.requests, desk.tokens) for desk in pool.desks] == [(3, 12), (2, 8), (1, 4)]
    assert all(engine.is_closed for engine in made)


async def test_an_episode_goes_on_elsewhere_token_for_token_when_its_engine_dies():
    made = engines(2)
    (alone,) = engines(1)
    first = await alone.generate([1], SAMPLING)
    second = await alone.generate([1, *first.ids, 7], SAMPLING)
    async with Pool(made) as pool, pool.seat(group="a", prompt_tokens=1) as seat:
        assert (await seat.generate([1], SAMPLING)).ids == first.ids
        made[0].before = failing()
        moved = await seat.generate([1, *first.ids, 7], SAMPLING)
        assert (moved.ids, moved.logprobs, moved.engine) == (second.ids, second.logprobs, "e1")
        assert [desk.seats for desk in pool.desks] == [0, 1]
        assert made[1].asked[-1] == made[0].asked[-1]
        assert (await seat.generate([1], SAMPLING)).engine == "e1"


async def test_all_episodes_of_a_dead_engine_move_and_none_is_lost():
    made = engines(3)
    async with Pool(made) as pool:

        async def episode(number):
            async with pool.seat(group=str(number), prompt_tokens=1) as seat:
                ids = [number]
                for turn in range(5):
                    if (number, turn) == (7, 2):
                        made[1].before = failing()
                    ids += (await seat.generate(ids, Sampling(4, seed=number * 10 + turn))).ids
                return ids

        ended = await asyncio.gather(*map(episode, range(30)))
        assert [desk.seats for desk in pool.desks] == [0, 0, 0]
        assert pool.desks[1].failures > 0
    async with Pool(engines(1)) as pool:
        assert await asyncio.gather(*map(episode, range(30))) == ended


async def test_when_none_is_left_what_failed_is_said():
    made = engines(2)
    for engine in made:
        engine.before = failing(f"{engine.name} burnt")
    async with Pool(made) as pool:
        with pytest.raises(EngineFailed, match=r"no engine is left of 2: e0: e0 burnt; e1: e1 burnt"):
            async with pool.seat(group="a", prompt_tokens=1) as seat:
                await seat.generate([1], SAMPLING)
        with pytest.raises(EngineFailed, match="no engine is left"):
            async with pool.seat(group="a", prompt_tokens=1):
                pass
        assert [desk.seats for desk in pool.desks] == [0, 0]


async def test_a_wrong_request_is_not_the_engines_failure():
    async with Pool(engines(1)) as pool, pool.seat(group="a", prompt_tokens=1) as seat:
        with pytest.raises(ValueError, match="expected"):
            await seat.generate([1] * 300, SAMPLING)
        assert (await seat.generate([1], SAMPLING)).engine == "e0"


async def test_a_failed_engine_is_asked_again_after_its_rest():
    made, clock = engines(2), Clock()
    async with pool_of(made, clock=clock) as pool:
        await pool.sync({"salt": 5})
        made[0].before = failing()
        async with pool.seat(group="a", prompt_tokens=1) as seat:
            assert (await seat.generate([1], SAMPLING)).engine == "e1"
        made[0].before = made[1].before
        clock.now = 9.9
        async with pool.seat(group="a", prompt_tokens=1) as seat:
            assert (await seat.generate([1], SAMPLING)).engine == "e1"
        clock.now = 10.0
        async with pool.seat(group="a", prompt_tokens=1) as seat:
            assert (await seat.generate([1], SAMPLING)).engine == "e0"


async def test_an_engine_that_was_started_anew_has_to_prove_its_weights_first():
    made, clock = engines(2), Clock()
    async with pool_of(made, clock=clock) as pool:
        await pool.sync({"salt": 5})
        made[0].before = failing()
        async with pool.seat(group="a", prompt_tokens=1) as seat:
            await seat.generate([1], SAMPLING)
        made[0].before, made[0].salt = made[1].before, "as at its start"
        clock.now = 10.0
        async with pool.seat(group="a", prompt_tokens=1) as seat:
            assert (await seat.generate([1], SAMPLING)).engine == "e1"
        assert await pool.sync({"salt": 6}) == 2
        async with pool.seat(group="a", prompt_tokens=1) as seat:
            assert (await seat.generate([1], SAMPLING)).engine == "e0"


async def test_a_sync_reaches_every_engine_and_is_proven():
    made = engines(3)
    async with pool_of(made) as pool:
        assert (await pool.sync({"salt": 5}), await pool.sync({"salt": 6})) == (1, 2)
        assert [(engine.salt, engine.version) for engine in made] == [(6, 2)] * 3
        async with pool.seat(group="a", prompt_tokens=1) as seat:
            assert (await seat.generate([1], SAMPLING)).version == 2


async def test_an_engine_with_other_weights_stops_the_run():
    class Deaf(TableEngine):
        async def load(self, weights, version):
            self.version = version

    async with pool_of([*engines(1), Deaf("deaf")]) as pool:
        with pytest.raises(OSError, match="SyncFailed"):
            await pool.sync({"salt": 5})


async def test_an_engine_that_misses_a_sync_does_not_sample_until_the_next():
    made, clock = engines(2), Clock()
    async with pool_of(made, clock=clock) as pool:
        made[0].before = failing()
        await pool.sync({"salt": 5})
        made[0].before = made[1].before
        clock.now = 1000.0
        async with pool.seat(group="a", prompt_tokens=1) as seat:
            assert (await seat.generate([1], SAMPLING)).engine == "e1"
        await pool.sync({"salt": 6})
        async with pool.seat(group="a", prompt_tokens=1) as seat:
            assert (await seat.generate([1], SAMPLING)).engine == "e0"
        for engine in made:
            engine.before = failing()
        with pytest.raises(EngineFailed, match="no engine is left"):
            await pool.sync({"salt": 7})


async def test_a_sync_among_episodes_and_an_episode_in_a_sync_are_refused():
    made, reached, leave = engines(1), asyncio.Event(), asyncio.Event()
    async with pool_of(made) as pool:
        async with pool.seat(group="a", prompt_tokens=1):
            with pytest.raises(RuntimeError, match="without episodes"):
                await pool.sync({"salt": 5})

        async def slowly():
            reached.set()
            await leave.wait()

        made[0].before = slowly
        syncing = asyncio.create_task(pool.sync({"salt": 5}))
        await reached.wait()
        with pytest.raises(RuntimeError, match="during a sync"):
            async with pool.seat(group="a", prompt_tokens=1):
                pass
        with pytest.raises(RuntimeError, match="without episodes"):
            await pool.sync({"salt": 5})
        leave.set()
        assert await syncing == 1


async def test_a_cancelled_episode_leaves_its_seat():
    made, reached = engines(1), asyncio.Event()

    async def forever():
        reached.set()
        await asyncio.Event().wait()

    made[0].before = forever
    async with Pool(made) as pool:

        async def episode():
            async with pool.seat(group="a", prompt_tokens=1) as seat:
                await seat.generate([1], SAMPLING)

        task = asyncio.create_task(episode())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [(desk.seats, desk.failures) for desk in pool.desks] == [(0, 0)]


@pytest.mark.parametrize("made", [[], [TableEngine("same"), TableEngine("same")]])
async def test_a_pool_needs_engines_that_can_be_told_apart(made):
    with pytest.raises(ValueError, match="names of their own"):
        Pool(made)
