"""Tests of aborts. An aborted turn returns the ids that were sampled so far. An engine that ignores the abort does not
block the pool."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.trainer.engines.markov_pool import (
    TOKENS_PER_TURN,
    hang,
    has_no_load,
    make_engines,
    make_pool,
    open_episode,
    run_episode,
)
from tests.trainer.fake_vllm import MarkovEngine
from tests.trainer.virtual_time import virtual_time
from trainer.engines.engine import EngineCapacity, EngineError, SamplingParams
from trainer.engines.engine_state import SCRAPE_TIMEOUT_S

SAMPLING = SamplingParams(9, seed=0)
LATER_CONTEXT = [1] * 20
"""The context of a second turn. The pool requires that it is longer than the context after the first turn."""


@virtual_time
async def test_aborted_turns_return_their_sampled_ids_and_leave_the_scheduler_consistent():
    """There are four turns: two run on the engine, and two wait for a placement."""
    (engine,) = engines = make_engines(1, reported_capacity=EngineCapacity(300, max_running=2))
    engine.before_generate = engine.wait_for_abort
    async with make_pool(engines) as pool, AsyncExitStack() as stack:
        handles = [await stack.enter_async_context(open_episode(pool)) for _ in range(4)]
        turns = [asyncio.create_task(handle.generate([1], SAMPLING)) for handle in handles]
        for _ in range(2):  # until two turns run on the engine
            await engine.waiting_semaphore.acquire()
        await pool.abort(handles)
        results = await asyncio.gather(*turns)
        assert sorted(len(result.ids) for result in results) == [0, 0, engine.tokens_at_abort, engine.tokens_at_abort]
        assert all(result.is_aborted for result in results)
        later_turns = await asyncio.gather(*(handle.generate(LATER_CONTEXT, SAMPLING) for handle in handles))
        assert all(result.is_aborted and not result.ids for result in later_turns)
        assert len(engine.requests) == 2
        await stack.aclose()
        assert has_no_load(pool)
        assert len(await run_episode(pool, 1, turns=5)) == 1 + 5 * (TOKENS_PER_TURN + 1)
        assert has_no_load(pool)


@virtual_time
async def test_a_turn_ends_by_itself_if_its_abort_fails():
    class EngineWithoutAbort(MarkovEngine):
        async def abort(self, request_ids):
            raise EngineError("no such route")

    async with make_pool([EngineWithoutAbort(before_generate=lambda: asyncio.sleep(5))]) as pool:
        async with open_episode(pool) as handle:
            turn = asyncio.create_task(handle.generate([1], SAMPLING))
            await asyncio.sleep(1)
            await pool.abort([handle])
            assert len((await turn).ids) == SAMPLING.max_tokens
            assert (await handle.generate(LATER_CONTEXT, SAMPLING)).is_aborted
        assert has_no_load(pool)


@pytest.mark.parametrize("is_marked_down", [False, True])
@virtual_time
async def test_an_engine_that_hangs_does_not_block_an_abort(is_marked_down):
    class HangingEngine(MarkovEngine):
        async def abort(self, request_ids):
            await hang()

    async with make_pool([HangingEngine("e0", before_generate=hang)]) as pool:
        async with open_episode(pool) as handle:
            turn = asyncio.create_task(handle.generate([1], SAMPLING))
            await asyncio.sleep(1)
            aborting = asyncio.create_task(pool.abort([handle]))
            await asyncio.sleep(1)
            if is_marked_down:
                pool.engine_states["e0"].mark_failed("gone")
            await aborting
            assert pool.now() == (2 if is_marked_down else 1 + SCRAPE_TIMEOUT_S)
            assert (await turn).is_aborted
        assert has_no_load(pool)


@virtual_time
async def test_an_aborted_turn_does_not_run_again_after_its_engine_dies():
    is_generating = asyncio.Event()

    async def report_and_hang():
        is_generating.set()
        await hang()

    engines = make_engines(2, before_generate=report_and_hang)
    async with make_pool(engines) as pool:
        async with open_episode(pool) as handle:
            turn = asyncio.create_task(handle.generate([1], SAMPLING))
            await is_generating.wait()
            await pool.abort([handle])
            (busy_engine,) = [engine for engine in engines if engine.requests]
            pool.engine_states[busy_engine.name].mark_failed("gone")
            assert (await turn).is_aborted
            assert sum(len(engine.requests) for engine in engines) == 1
        assert has_no_load(pool)
