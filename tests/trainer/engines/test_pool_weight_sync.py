"""Weight syncs of the pool: only engines with checked weights generate, and a lost engine blocks no sync for long.

The weights of a `MarkovEngine` are its salt.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.trainer.engines.markov_pool import (
    LOAD_TIMEOUT_S,
    InsensitiveProbe,
    MarkovProbe,
    MemoryStore,
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
from trainer.engines.engine import EngineError, SamplingParams
from trainer.engines.engine_state import BRING_UP_TIMEOUT_S

SAMPLING = SamplingParams(4, seed=0)


def kill(engine):
    engine.before_generate = engine.before_scrape = fail_with("killed")


def restart(engine):
    """Make an engine answer again, with its initial weights."""
    engine.salt, engine.weight_version = 0, 0
    engine.before_generate = engine.before_scrape = wait_event_loop_steps(1)


@pytest.mark.parametrize("reported_version", [0, 1])
@virtual_time
async def test_episodes_continue_with_the_last_weights_after_the_only_engine_restarts(reported_version):
    """The engine's client may not notice the restart. In this case it still reports version 1, that of the sync."""
    (engine,) = engines = make_engines(1, before_generate=lambda: asyncio.sleep(1))
    store = MemoryStore()
    async with make_pool(engines, store=store, all_down_timeout_s=1000) as pool:
        await pool.sync_weights({"salt": 5})
        expected = await asyncio.gather(*start_episodes(pool, 6))
        assert expected != await ids_without_failures(range(6)), "other weights must give other ids"
        running = start_episodes(pool, 6)
        await asyncio.sleep(2.5)  # the third turns run
        kill(engine)
        await asyncio.sleep(900)
        assert not any(task.done() for task in running)
        restart(engine)
        engine.weight_version = reported_version
        assert await asyncio.gather(*running) == expected
        assert (engine.salt, engine.weight_version) == (5, 1)
        assert len(store.stored) == 1
        assert has_no_load(pool)
    assert not store.stored


@virtual_time
async def test_an_engine_that_missed_a_sync_gets_stored_weights_once_it_is_back():
    engines = make_engines(2)
    async with make_pool(engines, store=MemoryStore(), probe=InsensitiveProbe()) as pool:
        engines[0].before_generate = fail_with()
        await pool.sync_weights({"salt": 5})
        restart(engines[0])
        await asyncio.sleep(100)
        assert pool.engine_states["e0"].is_up
        assert [engine.salt for engine in engines] == [5, 5]


@virtual_time
async def test_stored_weights_last_until_newer_ones_are_checked():
    store, salts_at_check = MemoryStore(), []

    class RecordingProbe(MarkovProbe):
        async def check(self, engine, expected):
            salts_at_check.append([weights["salt"] for weights in store.stored])
            await super().check(engine, expected)

    async with make_pool(make_engines(1), store=store, probe=RecordingProbe()) as pool:
        for salt in (5, 6, 7):
            await pool.sync_weights({"salt": salt})
            assert store.stored == [{"salt": salt}]
    assert salts_at_check == [[5], [5, 6], [6, 7]]


@virtual_time
async def test_a_sync_waits_for_an_engine_to_come_back_but_the_first_sync_does_not():
    (engine,) = engines = make_engines(1)
    async with make_pool(engines, store=MemoryStore(), all_down_timeout_s=500) as pool:
        kill(engine)
        with pytest.raises(EngineError, match="all 1 engines are down: e0: killed"):
            await pool.sync_weights({"salt": 5})
        assert pool.now() == 0
        restart(engine)
        await pool.sync_weights({"salt": 5})
        kill(engine)
        await asyncio.sleep(2000)  # the time before the sync must not count as waiting time
        syncing = asyncio.create_task(pool.sync_weights({"salt": 6}))
        await asyncio.sleep(400)
        assert not syncing.done()
        restart(engine)
        assert await syncing == 3
        assert engine.salt == 6
        kill(engine)
        started_at = pool.now()
        with pytest.raises(EngineError, match="killed"):
            await pool.sync_weights({"salt": 7})
        assert 500 <= pool.now() - started_at <= 502


@virtual_time
async def test_a_restarted_engine_is_up_only_after_its_weights_are_checked():
    engines = make_engines(2)
    async with make_pool(engines) as pool:
        await pool.sync_weights({"salt": 5})
        engines[0].before_scrape = fail_with()
        await asyncio.sleep(10)
        engines[0].before_scrape, engines[0].salt = wait_event_loop_steps(1), "initial"
        await asyncio.sleep(100)
        state = pool.engine_states["e0"]
        assert (state.is_up, state.down_reason) == (False, "SyncFailed")
        assert await pool.sync_weights({"salt": 6}) == 2
        assert state.is_up


@virtual_time
async def test_a_sync_reaches_every_engine():
    engines = make_engines(3)
    async with make_pool(engines) as pool:
        assert await pool.sync_weights({"salt": 5}) == 1
        assert await pool.sync_weights({"salt": 6}) == 2
        assert [(engine.salt, engine.weight_version) for engine in engines] == [(6, 2)] * 3
        async with open_episode(pool) as handle:
            assert (await handle.generate([1], SAMPLING)).weight_version == 2


@virtual_time
async def test_a_sync_raises_if_an_engine_has_other_weights():
    class EngineThatKeepsItsWeights(MarkovEngine):
        async def load_weights(self, weights, version):
            self.weight_version = version

    async with make_pool([*make_engines(1), EngineThatKeepsItsWeights("stale")]) as pool:
        with pytest.raises(OSError, match="SyncFailed"):
            await pool.sync_weights({"salt": 5})
        assert not pool.engine_states["stale"].is_up


@virtual_time
async def test_an_engine_that_misses_a_sync_does_not_generate_until_the_next():
    engines = make_engines(2)
    async with make_pool(engines) as pool:
        engines[0].before_generate = fail_with()
        await pool.sync_weights({"salt": 5})
        engines[0].before_generate = wait_event_loop_steps(1)
        await asyncio.sleep(1000)
        assert [await run_one_turn(pool) for _ in range(5)] == ["e1"] * 5
        await pool.sync_weights({"salt": 6})
        assert pool.engine_states["e0"].is_up
        for engine in engines:
            engine.before_generate = fail_with()
        with pytest.raises(EngineError, match="all 2 engines are down: e0: gone; e1: gone"):
            await pool.sync_weights({"salt": 7})


@virtual_time
async def test_an_engine_that_misses_a_sync_is_logged_and_named(caplog):
    engines = make_engines(2)
    async with make_pool(engines) as pool:
        await asyncio.sleep(1)
        assert pool.down_reasons() == {}
        engines[0].before_generate = fail_with()
        await pool.sync_weights({"salt": 5})
        assert pool.down_reasons() == {"e0": "gone"}
    assert "engine e0 is down, next attempt in 30 s: gone" in caplog.text


@virtual_time
async def test_an_engine_that_missed_a_sync_stays_down_even_if_version_and_probe_agree():
    """The version may be right by chance, because two stages may use the same numbers. The probe may agree by chance,
    because in bfloat16 it does not detect small steps."""
    engines = make_engines(2)
    async with make_pool(engines, probe=InsensitiveProbe()) as pool:
        engines[0].before_generate = fail_with()
        assert await pool.sync_weights({"salt": 5}, version=0) == 0
        engines[0].before_generate = wait_event_loop_steps(1)
        await asyncio.sleep(1000)
        assert [state.is_up for state in pool.engine_states.values()] == [False, True]
        assert await pool.sync_weights({"salt": 5}, version=0) == 0
        assert all(state.is_up for state in pool.engine_states.values())


@pytest.mark.parametrize("is_down_before", [False, True], ids=["marked down by the sync", "marked down before"])
@pytest.mark.parametrize("answers_scrapes", [False, True], ids=["answers nothing", "answers scrapes"])
@virtual_time
async def test_an_engine_that_hangs_delays_at_most_one_sync(is_down_before, answers_scrapes):
    class EngineThatMayHang(MarkovEngine):
        async def logprobs(self, ids):
            await self.before_generate()
            return await super().logprobs(ids)

    engine = EngineThatMayHang("e0")
    async with make_pool([engine, MarkovEngine("e1")], turn_timeout_s=60) as pool:
        await pool.sync_weights({"salt": 5})
        engine.before_generate = hang
        if not answers_scrapes:
            engine.before_scrape = hang
        if is_down_before:
            await asyncio.gather(*start_episodes(pool, 4))
            assert not pool.engine_states["e0"].is_up
        for max_delay_s in (0 if is_down_before else LOAD_TIMEOUT_S, 0, 0):
            started_at = pool.now()
            await pool.sync_weights({"salt": 6})
            assert pool.now() - started_at <= max_delay_s
            assert {await run_one_turn(pool) for _ in range(3)} == {"e1"}
            await asyncio.sleep(100)
        engine.before_generate = engine.before_scrape = wait_event_loop_steps(1)
        await asyncio.sleep(BRING_UP_TIMEOUT_S + 5)  # a liveness probe that hangs times out, and the next one succeeds
        assert not pool.engine_states["e0"].is_up
        await pool.sync_weights({"salt": 7})
        assert pool.engine_states["e0"].is_up


@virtual_time
async def test_a_failed_engine_that_answers_again_gets_the_next_sync_before_its_retry_time():
    engines = make_engines(2)
    async with make_pool(engines) as pool:
        engines[0].before_generate = fail_with()
        await run_episode(pool, 0)
        await run_episode(pool, 1)
        engines[0].before_generate = wait_event_loop_steps(1)
        await asyncio.sleep(2)
        assert not pool.engine_states["e0"].is_up
        await pool.sync_weights({"salt": 5})
        assert pool.engine_states["e0"].is_up


@virtual_time
async def test_a_sync_cancelled_at_any_step_does_not_break_later_ones():
    """Cancel a sync after 0, 1, 2, ... steps of the event loop, until it ends before its cancellation."""
    for step in itertools.count():
        engines = make_engines(2, before_generate=wait_event_loop_steps(3), before_scrape=wait_event_loop_steps(3))
        async with make_pool(engines) as pool:
            running = start_episodes(pool, 4, turns=2)
            await wait_event_loop_steps(5)()
            syncing = asyncio.create_task(pool.sync_weights({"salt": 0}))
            await wait_event_loop_steps(step)()
            has_ended = syncing.done()
            syncing.cancel()
            await asyncio.wait([syncing])
            assert await pool.sync_weights({"salt": 0}) in (1, 2)
            assert await asyncio.gather(*running) == await ids_without_failures(range(4), turns=2)
            assert all(state.is_up and not state.requests for state in pool.engine_states.values())
            assert has_no_load(pool)
        if has_ended:
            break
    assert step > 10, "so few steps cannot have covered the sync"


@virtual_time
async def test_the_only_engine_gets_weights_although_it_failed():
    (engine,) = engines = make_engines(1)
    async with make_pool(engines, all_down_timeout_s=0) as pool:
        engine.before_generate = fail_with()
        with pytest.raises(EngineError, match="engines are down"):
            await run_one_turn(pool)
        engine.before_generate = wait_event_loop_steps(1)
        assert await pool.sync_weights({"salt": 5}) == 1


@virtual_time
async def test_an_engine_whose_check_times_out_does_not_block_a_sync():
    class EngineWithoutScores(MarkovEngine):
        async def logprobs(self, ids):
            await hang()

    async with make_pool([*make_engines(1), EngineWithoutScores("e1")], turn_timeout_s=60) as pool:
        assert await pool.sync_weights({"salt": 5}) == 1
        assert pool.now() == 60
        assert [state.is_up for state in pool.engine_states.values()] == [True, False]


@virtual_time
async def test_a_sync_waits_for_running_turns_and_new_turns_wait_for_the_sync():
    engines = make_engines(2, before_generate=lambda: asyncio.sleep(1))
    versions = []
    async with make_pool(engines) as pool:

        async def record_versions(number):
            async with open_episode(pool, group=number) as handle:
                ids = [1]
                for _ in range(4):
                    generation = await handle.generate(ids, SAMPLING)
                    versions.append(generation.weight_version)
                    ids += generation.ids
                    await asyncio.sleep(0.1 * number)

        running = [asyncio.create_task(record_versions(number)) for number in range(6)]
        await asyncio.sleep(1.5)  # the second turns run
        syncing = asyncio.create_task(pool.sync_weights({"salt": 5}))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one weight sync at a time"):
            await pool.sync_weights({"salt": 5})
        assert await syncing == 1
        await asyncio.gather(*running)
        assert has_no_load(pool)
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


@virtual_time
async def test_after_a_cancelled_sync_only_checked_engines_generate():
    engines = make_engines(2)
    async with make_pool(engines) as pool:
        await pool.sync_weights({"salt": 5})
        engines[1].before_generate = hang
        syncing = asyncio.create_task(pool.sync_weights({"salt": 6}))
        await asyncio.sleep(1)
        syncing.cancel()
        await asyncio.wait([syncing])
        engines[1].before_generate = wait_event_loop_steps(1)
        assert [await run_one_turn(pool) for _ in range(5)] == ["e0"] * 5
        assert [engine.salt for engine in engines] == [6, 5]
        assert not pool.engine_states["e1"].is_up
        assert await pool.sync_weights({"salt": 7}) == 3


@virtual_time
async def test_an_engine_that_restarts_waits_for_the_next_weights_if_another_process_gives_them():
    engines = make_engines(2)
    async with make_pool(engines) as pool:
        pool.set_weight_version(3)
        assert {(await generate_once(pool)).weight_version for _ in range(2)} == {3}
        kill(engines[0])
        engines[0].weight_version = 0  # as `VllmEngine` reports once the server refuses a connection
        await asyncio.sleep(5)
        engines[0].before_generate = engines[0].before_scrape = wait_event_loop_steps(1)
        pool.set_weight_version(3)  # each episode of the step reports the same version
        await asyncio.sleep(100)
        assert [state.is_up for state in pool.engine_states.values()] == [False, True]
        pool.set_weight_version(4)
        await asyncio.sleep(2)
        assert [state.is_up for state in pool.engine_states.values()] == [True, True]
        assert {(await generate_once(pool)).weight_version for _ in range(2)} == {4}


async def generate_once(pool):
    async with open_episode(pool) as handle:
        return await handle.generate([1], SAMPLING)
