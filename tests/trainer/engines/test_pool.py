"""Tests of the engine pool, all engines of a run. It starts only the turns that the scheduler places on an engine. No
episode is lost in any failure."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.placement import POLICIES
from tests.trainer.engine_loads import engine_loads
from tests.trainer.engines.markov_pool import (
    MAX_CONTEXT,
    TOKENS_PER_TURN,
    fail_with,
    hang,
    has_no_load,
    ids_without_failures,
    make_engines,
    make_pool,
    open_episode,
    run_episode,
    run_one_turn,
    start_episodes,
    wait_event_loop_steps,
)
from tests.trainer.fake_vllm import MarkovEngine
from tests.trainer.virtual_time import virtual_time
from trainer.engines.busy_timer import BusyTimer
from trainer.engines.engine import EngineCapacity, EngineError, SamplingParams
from trainer.engines.pool import EnginePool
from trainer.scheduling.scheduler import Scheduler


@virtual_time
async def test_episodes_stay_on_their_engines_and_are_spread_evenly():
    engines, records = make_engines(3), []
    async with make_pool(engines, on_turn=records.append) as pool:
        await asyncio.gather(*start_episodes(pool, 12, tool_s=1.0))
        assert has_no_load(pool)
    engine_by_episode = {record.episode: record.engine for record in records}
    assert all(engine_by_episode[record.episode] == record.engine for record in records)
    assert Counter(engine_by_episode.values()) == {"e0": 4, "e1": 4, "e2": 4}
    assert all(engine.is_closed for engine in engines)


@virtual_time
async def test_each_turn_is_reported_with_its_times_and_tokens():
    engines, records = make_engines(1, before_generate=lambda: asyncio.sleep(3)), []
    async with make_pool(engines, on_turn=records.append) as pool, open_episode(pool, group="a") as handle:
        pool.busy_timer = BusyTimer(pool.now)  # in place of one that uses the real clock
        first = await handle.generate([1, 2], SamplingParams(4, seed=0))
        await asyncio.sleep(2)
        await handle.generate([1, 2, *first.ids, 7], SamplingParams(5, seed=0))
    reported = [
        (record.group, record.engine, record.context_tokens, record.sampled_tokens, record.is_migration)
        for record in records
    ]
    assert reported == [("a", "e0", 2, 4, False), ("a", "e0", 7, 5, False)]
    times = [(record.requested_at, record.started_at, record.ended_at) for record in records]
    assert times == [(0, 0, 3), (5, 5, 8)]
    assert pool.busy_timer.seconds == 6


@pytest.mark.parametrize("policy", POLICIES)
@virtual_time
async def test_a_turn_is_sent_to_an_engine_only_after_its_placement(policy):
    capacity = EngineCapacity(kv_tokens=300, max_running=5)
    engines = make_engines(2, reported_capacity=capacity, before_generate=lambda: asyncio.sleep(1))
    max_loads = {}  # the largest value of each load so far

    async def check_loads():
        while True:
            await asyncio.sleep(0.1)
            assert sum(engine.num_running for engine in engines) == pool.scheduler.num_running
            for load in engine_loads(pool.scheduler).values():
                for name, value in load.items():
                    max_loads[name] = max(value, max_loads.get(name, 0))

    async with make_pool(engines, policy=policy) as pool:
        checking = asyncio.create_task(check_loads())
        ids = await asyncio.gather(*start_episodes(pool, 40))
        assert checking.cancel(), "the task must still run, so no check has failed"
        assert has_no_load(pool)
    assert ids == await ids_without_failures(range(40))
    bounded_load = {"kv": "resident_tokens", "reserve_worst_case": "worst_case_tokens"}.get(policy)
    assert bounded_load is None or max_loads[bounded_load] <= capacity.kv_tokens


@virtual_time
async def test_an_invalid_request_marks_no_engine_down():
    async with (
        make_pool(make_engines(1), scheduler=Scheduler(400)) as pool,
        pool.open_episode(group="a", max_context_tokens=400) as handle,
    ):
        # The engine's context is shorter than the scheduler's 400 tokens.
        with pytest.raises(ValueError, match="expected at most 256 ids below 50, got 300 ids and max_tokens 4"):
            await handle.generate([1] * 300, SamplingParams(4, seed=0))
        assert has_no_load(pool)
        first = await handle.generate([1, 2, 3], SamplingParams(4, seed=0))
        with pytest.raises(ValueError, match="expected a context of 7 to 400 tokens, got 2"):
            await handle.generate([1, 2], SamplingParams(4, seed=0))
        assert (await handle.generate([1, 2, 3, *first.ids], SamplingParams(4, seed=0))).engine == "e0"


@virtual_time
async def test_only_preemptions_after_the_bring_up_lower_the_target_utilization():
    (engine,) = engines = make_engines(1, preemptions=50)
    async with make_pool(engines) as pool:
        await run_one_turn(pool)
        initial = pool.scheduler.engines["e0"].target_utilization
        await asyncio.sleep(5)
        assert pool.scheduler.engines["e0"].target_utilization == initial
        engine.preemptions += 1
        await asyncio.sleep(1)  # one scrape
        assert pool.scheduler.engines["e0"].target_utilization < initial


@virtual_time
async def test_an_unexpected_exception_in_the_pool_ends_its_block():
    async def raise_when_up():
        if pool.engine_states["e0"].is_up:
            raise KeyError("a bug")

    (engine,) = engines = make_engines(1, before_scrape=raise_when_up)
    pool = make_pool(engines)
    with pytest.raises(ExceptionGroup, match="unhandled errors in a TaskGroup") as raised:
        async with pool:
            await hang()
    assert isinstance(raised.value.exceptions[0], KeyError)
    assert engine.is_closed


@pytest.mark.parametrize("engines", [[], [MarkovEngine("same"), MarkovEngine("same")]])
def test_a_pool_needs_engines_with_different_names(engines):
    with pytest.raises(ValueError, match="different names"):
        EnginePool(engines, scheduler=Scheduler(MAX_CONTEXT))


@pytest.mark.parametrize("num_cancelled", [1, 6])
@virtual_time
async def test_a_cancellation_at_any_step_leaves_the_scheduler_consistent(num_cancelled):
    """Cancel episodes after 0, 1, 2, ... steps of the event loop, until all of them end before their cancellation."""
    for step in itertools.count():
        engines = make_engines(2, reported_capacity=EngineCapacity(120, 3), before_generate=wait_event_loop_steps(3))
        async with make_pool(engines) as pool:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run_episode(pool, number, turns=3)) for number in range(6)]
                await wait_event_loop_steps(step)()
                have_all_ended = all(task.done() for task in running)
                for task in running[:num_cancelled]:
                    task.cancel()
            assert has_no_load(pool)
            assert not any(engine.num_running for engine in engines)
            await run_one_turn(pool)
            finished = [number for number, task in enumerate(running) if not task.cancelled()]
            assert [running[number].result() for number in finished] == await ids_without_failures(finished, turns=3)
        if have_all_ended:
            break
    assert step > 20, "so few steps cannot have covered all turns"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**9), policy=st.sampled_from(sorted(POLICIES)))
def test_no_episode_is_lost_or_run_twice_under_random_failures(seed, policy):
    virtual_time(run_random_failures)(seed, policy)


async def run_random_failures(seed, policy):
    """Engines die, hang, miss scrapes and come back at random; episodes and syncs are started and cancelled."""
    rng = random.Random(seed)
    capacity = EngineCapacity(rng.randint(150, 900), rng.randint(1, 9))
    engines, records = make_engines(3, reported_capacity=capacity), []

    async def wait_before_generate():
        await asyncio.sleep(rng.expovariate(0.3))

    async def cause_failures():
        while True:
            await asyncio.sleep(rng.expovariate(0.05))
            engine = rng.choice(engines)
            engine.before_generate = rng.choice([fail_with(), hang, wait_before_generate, wait_before_generate])
            engine.before_scrape = rng.choice(
                [fail_with(), hang, wait_event_loop_steps(2), wait_event_loop_steps(2), wait_event_loop_steps(2)]
            )
            if rng.random() < 0.3:
                rng.choice(running).cancel()
            engine.preemptions += rng.randint(0, 1)
            if rng.random() < 0.1:
                with suppress(EngineError, TimeoutError):  # no engine has loaded the weights, or the sync was cancelled
                    async with asyncio.timeout(rng.choice([None, rng.expovariate(0.1)])):
                        await pool.sync_weights({"salt": 0})

    for engine in engines:
        engine.before_generate = wait_before_generate
    async with make_pool(engines, policy=policy, all_down_timeout_s=1e9, on_turn=records.append) as pool:
        running = [
            asyncio.create_task(run_episode(pool, number, rng.randint(1, 5), rng.expovariate(1)))
            for number in range(25)
        ]
        failures = asyncio.create_task(cause_failures())
        await asyncio.wait(running)
        failures.cancel()
        results = await asyncio.gather(*running, failures, return_exceptions=True)
        assert has_no_load(pool)
    assert not any(state.requests for state in pool.engine_states.values())
    cancelled = [result for result in results if isinstance(result, asyncio.CancelledError)]
    failed = [result for result in results if isinstance(result, EngineError)]
    assert all("the same turn failed on 3 engines" in str(result) for result in failed)
    finished = {number: result for number, result in enumerate(results) if isinstance(result, list)}
    assert len(finished) + len(cancelled) + len(failed) == len(results)
    for number, ids in finished.items():
        turns = (len(ids) - 1) // (TOKENS_PER_TURN + 1)
        assert [ids] == await ids_without_failures([number], turns)
        assert sum(record.episode == number for record in records) == turns
