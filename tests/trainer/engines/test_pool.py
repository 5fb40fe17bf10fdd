"""The engine pool: no episode is lost in any engine failure, and only engines with checked weights generate."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.placement import POLICIES
from tests.trainer.engine_loads import engine_loads
from tests.trainer.fake_vllm import TableEngine
from tests.trainer.jump import jumping
from trainer.engines.busy_timer import BusyTimer
from trainer.engines.engine import EngineCapacity, EngineError, NonFiniteLogprobError, SamplingParams
from trainer.engines.episode_handle import MAX_FAILURES_PER_TURN, MAX_NON_FINITE_EPISODES
from trainer.engines.pool import BRING_UP_TIMEOUT_S, MAX_MISSED_SCRAPES, SCRAPE_TIMEOUT_S, STALL_TIMEOUT_S, EnginePool
from trainer.scheduling.scheduler import Scheduler

MAX_CONTEXT = 200
LOAD_S = 600


def make_engines(count, **options):
    return [TableEngine(f"e{number}", **options) for number in range(count)]


def failing(error="gone"):
    async def fail():
        raise EngineError(error)

    return fail


async def forever():
    await asyncio.Event().wait()


def steps(count):
    """Return a coroutine function that takes `count` steps of the event loop."""

    async def step():
        for _ in range(count):
            await asyncio.sleep(0)

    return step


def working(engine):
    """Return a coroutine function for `scraped` that raises the engine's token counter at each scrape."""

    async def work():
        engine.computed += 1

    return work


def test_the_busy_timer_counts_overlapping_tasks_once():
    now = iter([1.0, 5.0, 6.0, 9.0])
    busy = BusyTimer(lambda: next(now))
    with busy:
        with busy:
            pass
        with busy:
            pass
    assert busy.seconds == 4.0
    with busy:
        pass
    assert busy.seconds == 7.0


@dataclass
class TableProbe:
    """Compares an engine with another one that has the trainer's weights."""

    ids = (1, 2, 3, 4)

    def expected_logprobs(self, weights):
        return asyncio.run(TableEngine(salt=weights["salt"]).logprobs(self.ids))

    async def check(self, engine, expected):
        if await engine.logprobs(self.ids) != expected:
            raise OSError("SyncFailed")


async def transfer(engines, weights, version):
    async def load(engine):
        try:
            async with asyncio.timeout(LOAD_S):
                await engine.before()
        except (EngineError, TimeoutError) as error:
            return error
        await engine.load_weights(weights, version)
        return None

    return [await load(engine) for engine in engines]


def pool_of(engines, policy="kv", **options):
    scheduler = Scheduler(MAX_CONTEXT, POLICIES[policy]())
    return EnginePool(engines, **{"scheduler": scheduler, "transfer": transfer, "probe": TableProbe()} | options)


async def run_episode(pool, number, turns=5, tool_s=0.0):
    """Run an episode and return its ids, prompt included."""
    ids = [number % 50]
    async with pool.open_episode(group=number // 4, max_context_tokens=MAX_CONTEXT) as handle:
        for turn in range(turns):
            ids += (await handle.generate(ids, SamplingParams(4, seed=number * 10 + turn))).ids
            await asyncio.sleep(tool_s)
            ids += [turn]
    return ids


async def without_failures(numbers, turns=5):
    """Return the ids of the same episodes on a single engine without failures."""
    async with pool_of(make_engines(1)) as pool:
        return [await run_episode(pool, number, turns) for number in numbers]


def has_no_load(pool):
    return not any(any(load.values()) for load in engine_loads(pool.scheduler).values())


async def engine_of_one_turn(pool):
    async with pool.open_episode(group="a", max_context_tokens=MAX_CONTEXT) as handle:
        return (await handle.generate([1], SamplingParams(4, seed=0))).engine


@jumping
async def test_episodes_stay_on_their_engines_and_are_spread_evenly():
    engines, log = make_engines(3), []
    async with pool_of(engines, on_turn=log.append) as pool:
        await asyncio.gather(*(run_episode(pool, number, tool_s=1.0) for number in range(12)))
        assert has_no_load(pool)
    homes = {each.episode: each.engine for each in log}
    assert all(homes[each.episode] == each.engine for each in log)
    assert sorted(list(homes.values()).count(engine.name) for engine in engines) == [4, 4, 4]
    assert all(engine.is_closed for engine in engines)


@jumping
async def test_each_turn_is_reported_with_its_times_and_tokens():
    engines, log = make_engines(1, before=lambda: asyncio.sleep(3)), []
    async with (
        pool_of(engines, on_turn=log.append) as pool,
        pool.open_episode(group="a", max_context_tokens=MAX_CONTEXT) as handle,
    ):
        pool.busy_timer = BusyTimer(pool.now)
        first = await handle.generate([1, 2], SamplingParams(4, seed=0))
        await asyncio.sleep(2)
        await handle.generate([1, 2, *first.ids, 7], SamplingParams(5, seed=0))
    assert [(each.group, each.engine, each.context_tokens, each.sampled_tokens, each.is_migration) for each in log] == [
        ("a", "e0", 2, 4, False),
        ("a", "e0", 7, 5, False),
    ]
    assert [(each.requested_at, each.started_at, each.ended_at) for each in log] == [(0, 0, 3), (5, 5, 8)]
    assert pool.busy_timer.seconds == 6


@pytest.mark.parametrize("policy", POLICIES)
@jumping
async def test_only_placed_turns_are_requests(policy):
    room = EngineCapacity(300, 5)
    engines = make_engines(2, room=room, before=lambda: asyncio.sleep(1))
    most: Counter[str] = Counter()

    async def watch():
        while True:
            await asyncio.sleep(0.1)
            running = sum(engine.running for engine in engines)
            assert running == pool.scheduler.num_running
            for book in engine_loads(pool.scheduler).values():
                most.update({name: max(0, value - most[name]) for name, value in book.items()})

    async with pool_of(engines, policy=policy) as pool:
        watching = asyncio.create_task(watch())
        ended = await asyncio.gather(*(run_episode(pool, number) for number in range(40)))
        assert watching.cancel()
        assert has_no_load(pool)
    assert ended == await without_failures(range(40))
    bounded = {"kv": "resident_tokens", "reserve_worst_case": "worst_case_tokens"}.get(policy)
    assert not bounded or most[bounded] <= room.kv_tokens, "more than fits in an engine's cache"


@jumping
async def test_an_episode_continues_with_the_same_tokens_on_another_engine_when_its_engine_dies():
    engines = make_engines(2)
    async with pool_of(engines) as pool, pool.open_episode(group="a", max_context_tokens=MAX_CONTEXT) as handle:
        first = await handle.generate([1], SamplingParams(4, seed=0))
        home, other = sorted(engines, key=lambda engine: engine.name != first.engine)
        home.before = failing()
        moved = await handle.generate([1, *first.ids, 7], SamplingParams(4, seed=0))
        assert moved.engine == other.name
        assert other.requests[-1] == home.requests[-1]
        assert moved.ids == (await TableEngine().generate([1, *first.ids, 7], SamplingParams(4, seed=0))).ids


@pytest.mark.parametrize("how", [failing(), forever], ids=["dies", "hangs"])
@jumping
async def test_all_turns_of_a_lost_engine_continue_on_other_engines(how):
    engines = make_engines(3, before=lambda: asyncio.sleep(1))
    async with pool_of(engines) as pool:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run_episode(pool, number)) for number in range(30)]
            await asyncio.sleep(2.5)
            engines[1].before = how
            if how is forever:
                engines[1].scraped = forever
        assert [task.result() for task in running] == await without_failures(range(30))
        assert has_no_load(pool)


@jumping
async def test_an_engine_that_answers_scrapes_but_computes_no_token_is_marked_down():
    engines = make_engines(2, before=lambda: asyncio.sleep(1))
    async with pool_of(engines) as pool:
        started_at_s = pool.now()
        running = [asyncio.create_task(run_episode(pool, number)) for number in range(8)]
        await asyncio.sleep(1.5)
        engines[0].before = forever
        assert await asyncio.gather(*running) == await without_failures(range(8))
        assert STALL_TIMEOUT_S < pool.now() - started_at_s < STALL_TIMEOUT_S + 60
        assert "no token computed" in pool.engine_states["e0"].down_reason
        assert has_no_load(pool)


@pytest.mark.parametrize("misses", [MAX_MISSED_SCRAPES - 1, MAX_MISSED_SCRAPES])
@jumping
async def test_an_engine_is_marked_down_only_after_several_missed_scrapes(misses):
    engines = make_engines(1)
    async with pool_of(engines) as pool:
        await engine_of_one_turn(pool)
        count = 0

        async def miss():
            nonlocal count
            count += 1
            if count <= misses:
                raise EngineError("refused")

        engines[0].scraped = miss
        await asyncio.sleep(10)
        assert pool.engine_states["e0"].is_up == (misses < MAX_MISSED_SCRAPES)
        assert await engine_of_one_turn(pool) == "e0"  # a loss ends with its rest
        assert (pool.now() > 30) == (misses == MAX_MISSED_SCRAPES)


@jumping
async def test_the_turn_timeout_grows_with_the_engines_slowness():
    engines = make_engines(1, before=lambda: asyncio.sleep(50))
    async with (
        pool_of(engines, turn_timeout_s=60) as pool,
        pool.open_episode(group="a", max_context_tokens=MAX_CONTEXT) as handle,
    ):
        first = await handle.generate([1], SamplingParams(4, seed=0))
        engines[0].before, engines[0].scraped = lambda: asyncio.sleep(450), working(engines[0])
        await handle.generate([1, *first.ids], SamplingParams(4, seed=0))
        assert pool.now() == 500


@jumping
async def test_a_turn_that_times_out_continues_on_another_engine():
    engines = make_engines(2)
    async with (
        pool_of(engines, turn_timeout_s=60) as pool,
        pool.open_episode(group="a", max_context_tokens=MAX_CONTEXT) as handle,
    ):
        first = await handle.generate([1], SamplingParams(4, seed=0))
        home = next(engine for engine in engines if engine.name == first.engine)
        home.before, home.scraped = forever, working(home)
        moved = await handle.generate([1, *first.ids], SamplingParams(4, seed=0))
        assert moved.engine != first.engine
        assert pool.engine_states[first.engine].down_reason == f"engine {first.engine}: no answer in 60 s"


@jumping
async def test_the_error_names_each_engines_failure_when_all_are_down_for_too_long():
    engines = make_engines(2)
    for engine in engines:
        engine.before = engine.scraped = failing(f"{engine.name} burnt")
    async with pool_of(engines, all_down_timeout_s=100) as pool:
        for wait_s in (100, 0):
            started_at_s = pool.now()
            with pytest.raises(EngineError, match=r"all 2 engines are down: e0: e0 burnt; e1: e1 burnt"):
                await engine_of_one_turn(pool)
            assert wait_s <= pool.now() - started_at_s <= wait_s + 1
        assert has_no_load(pool)


@jumping
async def test_episodes_wait_for_the_first_engine_that_comes_back():
    engines = make_engines(2, before=lambda: asyncio.sleep(1))
    async with pool_of(engines) as pool:
        running = [asyncio.create_task(run_episode(pool, number)) for number in range(8)]
        await asyncio.sleep(2.5)
        for engine in engines:
            engine.before = engine.scraped = failing()
        await asyncio.sleep(20)
        assert pool.scheduler.num_running == 0
        engines[1].before = engines[1].scraped = steps(3)
        assert await asyncio.gather(*running) == await without_failures(range(8))
        assert has_no_load(pool)


def nan_turns(turns):
    """Return a coroutine function for `before` that makes the first `turns` turns fail with NaN."""
    left = iter(range(turns))

    async def fail():
        await asyncio.sleep(0)
        if next(left, None) is not None:
            raise NonFiniteLogprobError("NaN")

    return fail


@jumping
async def test_a_turn_with_nan_logprobs_runs_again_and_marks_no_engine_down():
    engines = make_engines(1)
    async with pool_of(engines) as pool:
        engines[0].before = nan_turns(MAX_FAILURES_PER_TURN - 1)
        assert await run_episode(pool, 1) == (await without_failures([1]))[0]
        assert (pool.nan_turns, pool.engine_states["e0"].is_up, pool.now()) == (MAX_FAILURES_PER_TURN - 1, True, 0)
        assert has_no_load(pool)


@jumping
async def test_a_turn_that_always_has_nan_logprobs_fails_its_episode_alone():
    engines = make_engines(1)
    async with pool_of(engines) as pool:
        engines[0].before = nan_turns(MAX_FAILURES_PER_TURN)
        with pytest.raises(EngineError, match="NaN"):
            await run_episode(pool, 1)
        assert (pool.nan_turns, pool.engine_states["e0"].is_up) == (MAX_FAILURES_PER_TURN, True)
        assert has_no_load(pool)
        assert await run_episode(pool, 2) == (await without_failures([2]))[0]


@jumping
async def test_an_engine_with_nan_logprobs_in_every_turn_is_marked_down_and_no_episode_is_lost():
    engines = make_engines(2)
    engines[0].before = nan_turns(1 << 30)
    async with pool_of(engines) as pool:
        ended = await asyncio.gather(*(run_episode(pool, number) for number in range(2 * MAX_NON_FINITE_EPISODES)))
        assert ended == await without_failures(range(2 * MAX_NON_FINITE_EPISODES))
        assert [state.is_up for state in pool.engine_states.values()] == [False, True]
        reason = pool.engine_states["e0"].down_reason
        assert reason == f"{MAX_NON_FINITE_EPISODES} episodes in a row failed; the last: NaN"


@jumping
async def test_a_valid_turn_and_a_bring_up_reset_the_count_of_nan_episodes():
    engines = make_engines(1)
    async with pool_of(engines) as pool:
        for number in range(2 * MAX_NON_FINITE_EPISODES):
            engines[0].before = nan_turns(1)
            await run_episode(pool, number)
        assert (pool.nan_turns, pool.now()) == (2 * MAX_NON_FINITE_EPISODES, 0)
        engines[0].before = nan_turns(MAX_NON_FINITE_EPISODES)
        together = [asyncio.create_task(run_episode(pool, number)) for number in range(MAX_NON_FINITE_EPISODES)]
        await asyncio.sleep(1)
        assert not pool.engine_states["e0"].is_up
        engines[0].before = nan_turns(1)
        assert await asyncio.gather(*together) == await without_failures(range(MAX_NON_FINITE_EPISODES))
        assert 30 <= pool.now() < 60, "it was lost and rested, but not once more for the next one"


class MemoryStore:
    """Keeps weights in memory."""

    def __init__(self):
        self.kept = []

    async def save(self, weights, version):
        await asyncio.sleep(0)
        self.kept.append(dict(weights))
        return self.kept[-1]

    async def delete_others(self, keep):
        self.kept = [one for one in self.kept if one is keep]


def restart(engine):
    engine.salt, engine.weight_version, engine.before, engine.scraped = 0, 0, steps(1), steps(1)


@pytest.mark.parametrize("is_noticed", [False, True])
@jumping
async def test_episodes_continue_with_the_last_weights_after_the_only_engine_restarts(is_noticed):
    """The engine's client may not notice the restart and may still report the old version."""
    engines, keep = make_engines(1, before=lambda: asyncio.sleep(1)), MemoryStore()
    async with pool_of(engines, store=keep, all_down_timeout_s=1000) as pool:
        await pool.sync_weights({"salt": 5})
        expected = await asyncio.gather(*(run_episode(pool, number) for number in range(6)))
        assert expected != await without_failures(range(6))
        running = [asyncio.create_task(run_episode(pool, number)) for number in range(6)]
        await asyncio.sleep(2.5)
        engines[0].before = engines[0].scraped = failing("killed")
        await asyncio.sleep(900)
        assert not any(task.done() for task in running)
        restart(engines[0])
        engines[0].weight_version = 0 if is_noticed else 1
        assert await asyncio.gather(*running) == expected
        assert (engines[0].salt, engines[0].weight_version, len(keep.kept)) == (5, 1, 1)
        assert has_no_load(pool)
    assert not keep.kept


@jumping
async def test_an_engine_that_missed_a_sync_gets_stored_weights_once_it_is_back():
    class Coarse(TableProbe):
        async def check(self, engine, expected):
            await engine.logprobs(self.ids)

    engines = make_engines(2)
    async with pool_of(engines, store=MemoryStore(), probe=Coarse()) as pool:
        engines[0].before = failing()
        await pool.sync_weights({"salt": 5})
        restart(engines[0])
        await asyncio.sleep(100)
        assert pool.engine_states["e0"].is_up
        assert [engine.salt for engine in engines] == [5, 5]


@jumping
async def test_stored_weights_last_until_newer_ones_are_checked():
    engines, keep, there = make_engines(1), MemoryStore(), []

    class Looking(TableProbe):
        async def check(self, engine, expected):
            there.append([one["salt"] for one in keep.kept])
            await super().check(engine, expected)

    async with pool_of(engines, store=keep, probe=Looking()) as pool:
        for salt in (5, 6, 7):
            await pool.sync_weights({"salt": salt})
            assert keep.kept == [{"salt": salt}]
    assert there == [[5], [5, 6], [6, 7]]


@jumping
async def test_a_sync_waits_for_an_engine_to_come_back_but_the_first_sync_does_not():
    engines = make_engines(1)
    async with pool_of(engines, store=MemoryStore(), all_down_timeout_s=500) as pool:
        engines[0].before = engines[0].scraped = failing("refused")
        with pytest.raises(EngineError, match="all 1 engines are down: e0: refused"):
            await pool.sync_weights({"salt": 5})
        assert pool.now() == 0
        restart(engines[0])
        await pool.sync_weights({"salt": 5})
        engines[0].before = engines[0].scraped = failing("killed")
        await asyncio.sleep(2000)  # nobody needs it meanwhile
        syncing = asyncio.create_task(pool.sync_weights({"salt": 6}))
        await asyncio.sleep(400)
        assert not syncing.done()
        restart(engines[0])
        assert await syncing == 3
        assert engines[0].salt == 6
        engines[0].before = engines[0].scraped = failing("killed")
        began = pool.now()
        with pytest.raises(EngineError, match="killed"):
            await pool.sync_weights({"salt": 7})
        assert 500 <= pool.now() - began <= 502


@jumping
async def test_a_turn_that_fails_on_several_engines_fails_its_episode():
    engines = make_engines(5)
    async with pool_of(engines) as pool, pool.open_episode(group="a", max_context_tokens=MAX_CONTEXT) as handle:
        for engine in engines:
            engine.before = failing("it cannot be served")
        with pytest.raises(EngineError, match="the same turn failed on 3 engines, the last: it cannot be served"):
            await handle.generate([1], SamplingParams(4, seed=0))
        assert sum(state.is_up for state in pool.engine_states.values()) == 2
        assert has_no_load(pool)


@jumping
async def test_an_invalid_request_marks_no_engine_down():
    async with (
        pool_of(make_engines(1), scheduler=Scheduler(400)) as pool,
        pool.open_episode(group="a", max_context_tokens=400) as handle,
    ):
        with pytest.raises(ValueError, match="expected"):
            await handle.generate([1] * 300, SamplingParams(4, seed=0))
        assert has_no_load(pool)
        first = await handle.generate([1, 2, 3], SamplingParams(4, seed=0))
        with pytest.raises(ValueError, match="expected a context of 7 to 400 tokens, got 2"):
            await handle.generate([1, 2], SamplingParams(4, seed=0))
        assert (await handle.generate([1, 2, 3, *first.ids], SamplingParams(4, seed=0))).engine == "e0"


@jumping
async def test_only_preemptions_after_the_bring_up_lower_the_target_utilization():
    engines = make_engines(1, preemptions=50)
    async with pool_of(engines) as pool:
        await engine_of_one_turn(pool)
        before = pool.scheduler.engines["e0"].target_utilization
        await asyncio.sleep(5)
        assert pool.scheduler.engines["e0"].target_utilization == before
        engines[0].preemptions += 1
        await asyncio.sleep(1)
        assert pool.scheduler.engines["e0"].target_utilization < before


@jumping
async def test_a_failed_engine_is_brought_up_again_without_any_request():
    engines = make_engines(2)
    async with pool_of(engines) as pool:
        await pool.sync_weights({"salt": 5})
        lost = await engine_of_one_turn(pool)
        engine = next(engine for engine in engines if engine.name == lost)
        engine.before = failing()
        assert await engine_of_one_turn(pool) != lost
        engine.before = steps(1)
        await asyncio.sleep(29)
        assert not pool.engine_states[lost].is_up
        await asyncio.sleep(2)
        assert pool.engine_states[lost].is_up


@jumping
async def test_a_restarted_engine_is_up_only_after_its_weights_are_checked():
    engines = make_engines(2)
    async with pool_of(engines) as pool:
        await pool.sync_weights({"salt": 5})
        engines[0].scraped = failing()
        await asyncio.sleep(10)
        engines[0].scraped, engines[0].salt = steps(1), "as at its start"
        await asyncio.sleep(100)
        assert (pool.engine_states["e0"].is_up, pool.engine_states["e0"].down_reason) == (False, "SyncFailed")
        assert await pool.sync_weights({"salt": 6}) == 2
        assert pool.engine_states["e0"].is_up


@jumping
async def test_a_sync_reaches_every_engine_and_checks_it():
    engines = make_engines(3)
    async with pool_of(engines) as pool:
        assert (await pool.sync_weights({"salt": 5}), await pool.sync_weights({"salt": 6})) == (1, 2)
        assert [(engine.salt, engine.weight_version) for engine in engines] == [(6, 2)] * 3
        async with pool.open_episode(group="a", max_context_tokens=MAX_CONTEXT) as handle:
            assert (await handle.generate([1], SamplingParams(4, seed=0))).weight_version == 2


@jumping
async def test_an_engine_with_other_weights_raises_from_the_sync():
    class Deaf(TableEngine):
        async def load_weights(self, weights, version):
            self.weight_version = version

    async with pool_of([*make_engines(1), Deaf("deaf")]) as pool:
        with pytest.raises(OSError, match="SyncFailed"):
            await pool.sync_weights({"salt": 5})
        assert not pool.engine_states["deaf"].is_up


@jumping
async def test_an_engine_that_misses_a_sync_does_not_generate_until_the_next():
    engines = make_engines(2)
    async with pool_of(engines) as pool:
        engines[0].before = failing()
        await pool.sync_weights({"salt": 5})
        engines[0].before = steps(1)
        await asyncio.sleep(1000)
        assert [await engine_of_one_turn(pool) for _ in range(5)] == ["e1"] * 5
        await pool.sync_weights({"salt": 6})
        assert pool.engine_states["e0"].is_up
        for engine in engines:
            engine.before = failing()
        with pytest.raises(EngineError, match="all 2 engines are down: e0: gone; e1: gone"):
            await pool.sync_weights({"salt": 7})


@jumping
async def test_an_engine_that_missed_a_sync_stays_down_even_if_version_and_probe_agree():
    """Two stages may use the same version, and in bfloat16 the probe does not detect small steps."""

    class Coarse(TableProbe):
        async def check(self, engine, expected):
            await engine.logprobs(self.ids)

    engines = make_engines(2)
    async with pool_of(engines, probe=Coarse()) as pool:
        engines[0].before = failing()
        assert await pool.sync_weights({"salt": 5}, 0) == 0
        engines[0].before = steps(1)
        await asyncio.sleep(1000)
        assert [state.is_up for state in pool.engine_states.values()] == [False, True]
        assert await pool.sync_weights({"salt": 5}, 0) == 0
        assert all(state.is_up for state in pool.engine_states.values())


@pytest.mark.parametrize("is_known", [False, True], ids=["found out by a sync", "known before"])
@pytest.mark.parametrize("is_scraped", [False, True], ids=["answers nothing", "answers scrapes"])
@jumping
async def test_an_engine_that_hangs_delays_at_most_one_sync(is_known, is_scraped):
    class Hanging(TableEngine):
        async def logprobs(self, ids):
            await self.before()
            return await super().logprobs(ids)

    engines = [Hanging("e0"), TableEngine("e1")]
    async with pool_of(engines, turn_timeout_s=60) as pool:
        await pool.sync_weights({"salt": 5})
        engines[0].before = forever
        if not is_scraped:
            engines[0].scraped = forever
        if is_known:
            assert await asyncio.gather(*(run_episode(pool, number) for number in range(4))) is not None
            assert not pool.engine_states["e0"].is_up
        for most_s in (0 if is_known else LOAD_S, 0, 0):
            started_at_s = pool.now()
            await pool.sync_weights({"salt": 6})
            assert pool.now() - started_at_s <= most_s
            assert {await engine_of_one_turn(pool) for _ in range(3)} == {"e1"}
            await asyncio.sleep(100)
        engines[0].before = engines[0].scraped = steps(1)
        await asyncio.sleep(BRING_UP_TIMEOUT_S + 5)  # what it was asked before is given up by then
        assert not pool.engine_states["e0"].is_up
        await pool.sync_weights({"salt": 7})
        assert pool.engine_states["e0"].is_up


@jumping
async def test_a_failed_engine_that_answers_again_gets_the_next_sync_before_its_retry_time():
    engines = make_engines(2)
    async with pool_of(engines) as pool:
        engines[0].before = failing()
        await run_episode(pool, 0), await run_episode(pool, 1)
        engines[0].before = steps(1)
        await asyncio.sleep(2)
        assert not pool.engine_states["e0"].is_up
        await pool.sync_weights({"salt": 5})
        assert pool.engine_states["e0"].is_up


@jumping
async def test_any_exception_of_a_failed_engine_only_keeps_it_down():
    async def refuse():
        raise ValueError("this server takes other requests")

    engines = make_engines(2)
    async with pool_of(engines) as pool:
        await pool.sync_weights({"salt": 5})
        engines[0].scraped = failing()
        await asyncio.sleep(10)
        engines[0].scraped = refuse
        await asyncio.sleep(100)
        assert await pool.sync_weights({"salt": 6}) == 2
        assert [state.is_up for state in pool.engine_states.values()] == [False, True]


@jumping
async def test_a_sync_cancelled_at_any_step_does_not_break_later_ones():
    for step in itertools.count():
        engines = make_engines(2, before=steps(3), scraped=steps(3))
        async with pool_of(engines) as pool:
            running = [asyncio.create_task(run_episode(pool, number, turns=2)) for number in range(4)]
            await steps(5)()
            syncing = asyncio.create_task(pool.sync_weights({"salt": 0}))
            await steps(step)()
            is_over = syncing.done()
            syncing.cancel()
            await asyncio.wait([syncing])
            assert await pool.sync_weights({"salt": 0}) in (1, 2)
            assert await asyncio.gather(*running) == await without_failures(range(4), turns=2)
            assert all(state.is_up and not state.requests for state in pool.engine_states.values())
            assert has_no_load(pool)
        if is_over:
            break
    assert step > 10


@jumping
async def test_the_only_engine_gets_weights_although_it_failed():
    engines = make_engines(1)
    async with pool_of(engines, all_down_timeout_s=0) as pool:
        engines[0].before = failing()
        with pytest.raises(EngineError, match="engines are down"):
            await engine_of_one_turn(pool)
        engines[0].before = steps(1)
        assert await pool.sync_weights({"salt": 5}) == 1


@jumping
async def test_an_engine_whose_check_times_out_does_not_block_a_sync():
    class Mute(TableEngine):
        async def logprobs(self, ids):
            await forever()

    async with pool_of([*make_engines(1), Mute("mute")], turn_timeout_s=60) as pool:
        assert await pool.sync_weights({"salt": 5}) == 1
        assert pool.now() == 60
        assert (pool.engine_states["e0"].is_up, pool.engine_states["mute"].is_up) == (True, False)


@jumping
async def test_a_sync_waits_for_running_turns_and_new_turns_wait_for_the_sync():
    engines = make_engines(2, before=lambda: asyncio.sleep(1))
    versions = []
    async with pool_of(engines) as pool:

        async def talk(number):
            async with pool.open_episode(group=number, max_context_tokens=MAX_CONTEXT) as handle:
                ids = [1]
                for _ in range(4):
                    generation = await handle.generate(ids, SamplingParams(4, seed=0))
                    versions.append(generation.weight_version)
                    ids += generation.ids
                    await asyncio.sleep(0.1 * number)

        running = [asyncio.create_task(talk(number)) for number in range(6)]
        await asyncio.sleep(1.5)
        syncing = asyncio.create_task(pool.sync_weights({"salt": 5}))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one weight sync at a time"):
            await pool.sync_weights({"salt": 5})
        assert await syncing == 1
        await asyncio.gather(*running)
        assert has_no_load(pool)
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


@jumping
async def test_after_a_cancelled_sync_only_checked_engines_generate():
    engines = make_engines(2)
    async with pool_of(engines) as pool:
        await pool.sync_weights({"salt": 5})
        engines[1].before = forever
        syncing = asyncio.create_task(pool.sync_weights({"salt": 6}))
        await asyncio.sleep(1)
        syncing.cancel()
        await asyncio.wait([syncing])
        engines[1].before = steps(1)
        assert [await engine_of_one_turn(pool) for _ in range(5)] == ["e0"] * 5
        assert (engines[0].salt, engines[1].salt, pool.engine_states["e1"].is_up) == (6, 5, False)
        assert await pool.sync_weights({"salt": 7}) == 3


@pytest.mark.parametrize("kind", ["one episode", "all", "generate alone"])
@jumping
async def test_a_cancellation_at_any_step_leaves_the_scheduler_consistent(kind):
    for step in itertools.count():
        engines = make_engines(2, room=EngineCapacity(120, 3), before=steps(3))
        async with pool_of(engines) as pool:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run_episode(pool, number, turns=3)) for number in range(6)]
                await steps(step)()
                is_over = all(task.done() for task in running)
                for task in running if kind == "all" else running[:1]:
                    task.cancel()
            assert has_no_load(pool)
            assert not any(engine.running for engine in engines)
            await engine_of_one_turn(pool)
            left = [number for number, task in enumerate(running) if not task.cancelled()]
            assert [running[number].result() for number in left] == await without_failures(left, turns=3)
        if is_over:
            break
    assert step > 20


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**9), policy=st.sampled_from(sorted(POLICIES)))
def test_no_episode_is_lost_or_run_twice_under_random_failures(seed, policy):
    jumping(run_random_failures)(seed, policy)


async def run_random_failures(seed, policy):
    """Engines die, hang, miss scrapes and come back at random; episodes and syncs are started and cancelled."""
    rng = random.Random(seed)
    engines, log = make_engines(3, room=EngineCapacity(rng.randint(150, 900), rng.randint(1, 9))), []

    async def turn():
        await asyncio.sleep(rng.expovariate(0.3))

    async def accidents():
        while True:
            await asyncio.sleep(rng.expovariate(0.05))
            engine = rng.choice(engines)
            engine.before = rng.choice([failing(), forever, turn, turn])
            engine.scraped = rng.choice([failing(), forever, steps(2), steps(2), steps(2)])
            if rng.random() < 0.3:
                rng.choice(running).cancel()
            engine.preemptions += rng.randint(0, 1)
            if rng.random() < 0.1:
                with suppress(EngineError, TimeoutError):  # none took them, or cancelled
                    async with asyncio.timeout(rng.choice([None, rng.expovariate(0.1)])):
                        await pool.sync_weights({"salt": 0})

    for engine in engines:
        engine.before = turn
    async with pool_of(engines, policy=policy, all_down_timeout_s=1e9, on_turn=log.append) as pool:
        running = [
            asyncio.create_task(run_episode(pool, number, rng.randint(1, 5), rng.expovariate(1)))
            for number in range(25)
        ]
        chaos = asyncio.create_task(accidents())
        await asyncio.wait(running)
        chaos.cancel()
        results = await asyncio.gather(*running, chaos, return_exceptions=True)
        assert has_no_load(pool)
    assert not any(state.requests for state in pool.engine_states.values())
    cancelled = [result for result in results if isinstance(result, asyncio.CancelledError)]
    given_up = [result for result in results if isinstance(result, EngineError)]  # by the worst of luck
    assert all("the same turn failed on 3 engines" in str(result) for result in given_up)
    whole = {number: result for number, result in enumerate(results) if isinstance(result, list)}
    assert len(whole) + len(cancelled) + len(given_up) == len(results)
    for number, ids in whole.items():
        turns = (len(ids) - 1) // 5
        assert [ids] == await without_failures([number], turns)
        assert sum(each.episode == number for each in log) == turns


@jumping
async def test_a_bug_in_the_pool_ends_its_block():
    async def broken():
        if pool.engine_states["e0"].is_up:
            raise KeyError("a bug")

    engines = make_engines(1, scraped=broken)
    pool = pool_of(engines)
    with pytest.raises(ExceptionGroup, match="unhandled errors in a TaskGroup") as raised:
        async with pool:
            await forever()
    assert isinstance(raised.value.exceptions[0], KeyError)
    assert engines[0].is_closed


@pytest.mark.parametrize("engines", [[], [TableEngine("same"), TableEngine("same")]])
def test_a_pool_needs_engines_with_different_names(engines):
    with pytest.raises(ValueError, match="different names"):
        EnginePool(engines, scheduler=Scheduler(MAX_CONTEXT))


@jumping
async def test_aborted_turns_return_their_sampled_ids_and_leave_the_scheduler_consistent():
    """Four turns at an engine that runs two: two run, and two wait to be placed. Only their handles are aborted."""
    (engine,) = engines = make_engines(1, room=EngineCapacity(300, 2))
    engine.before = engine.until_aborted
    async with pool_of(engines) as pool, AsyncExitStack() as stack:
        handles = [
            await stack.enter_async_context(pool.open_episode(group="a", max_context_tokens=MAX_CONTEXT))
            for _ in range(4)
        ]
        turns = [asyncio.create_task(handle.generate([1], SamplingParams(9, seed=0))) for handle in handles]
        await engine.begun.acquire()
        await engine.begun.acquire()
        await pool.abort(handles)
        results = await asyncio.gather(*turns)
        assert sorted(len(result.ids) for result in results) == [0, 0, engine.reached, engine.reached]
        assert all(result.is_aborted for result in results)
        later = await asyncio.gather(*(handle.generate([1] * 20, SamplingParams(9, seed=0)) for handle in handles))
        assert all(result.is_aborted and not result.ids for result in later)
        assert len(engine.requests) == 2
        await stack.aclose()
        assert has_no_load(pool)
        assert len(await run_episode(pool, 1)) == 26
        assert has_no_load(pool)


@jumping
async def test_a_turn_ends_by_itself_if_its_abort_fails():
    class Deaf(TableEngine):
        async def abort(self, requests):
            raise EngineError("no such route")

    async with pool_of([Deaf("deaf", before=lambda: asyncio.sleep(5))]) as pool:
        async with pool.open_episode(group="a", max_context_tokens=MAX_CONTEXT) as handle:
            turn = asyncio.create_task(handle.generate([1], SamplingParams(9, seed=0)))
            await asyncio.sleep(1)
            await pool.abort([handle])
            assert len((await turn).ids) == 9
            assert (await handle.generate([1] * 20, SamplingParams(9, seed=0))).is_aborted
        assert has_no_load(pool)


@pytest.mark.parametrize("dies", [False, True])
@jumping
async def test_an_engine_that_hangs_does_not_block_an_abort(dies):
    class Hanging(TableEngine):
        async def abort(self, requests):
            await forever()

    async with pool_of([Hanging("hanging", before=forever)]) as pool:
        async with pool.open_episode(group="a", max_context_tokens=MAX_CONTEXT) as handle:
            turn = asyncio.create_task(handle.generate([1], SamplingParams(9, seed=0)))
            await asyncio.sleep(1)
            interrupting = asyncio.create_task(pool.abort([handle]))
            await asyncio.sleep(1)
            if dies:
                pool.mark_failed(pool.engine_states["hanging"], "gone")
            await interrupting
            assert pool.now() == (2 if dies else 1 + SCRAPE_TIMEOUT_S)
            assert (await turn).is_aborted
        assert has_no_load(pool)


@jumping
async def test_an_aborted_turn_does_not_run_again_after_its_engine_dies():
    engines = make_engines(2)
    begun = asyncio.Semaphore(0)

    async def before():
        begun.release()
        await forever()

    engines[0].before = engines[1].before = before
    async with pool_of(engines) as pool:
        async with pool.open_episode(group="a", max_context_tokens=MAX_CONTEXT) as handle:
            turn = asyncio.create_task(handle.generate([1], SamplingParams(9, seed=0)))
            await begun.acquire()
            await pool.abort([handle])
            (busy_engine,) = [engine for engine in engines if engine.requests]
            pool.mark_failed(pool.engine_states[busy_engine.name], "gone")
            assert (await turn).is_aborted
            assert sum(len(engine.requests) for engine in engines) == 1
        assert has_no_load(pool)
