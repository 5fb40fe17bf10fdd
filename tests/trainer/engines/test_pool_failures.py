"""Turns of an engine that fails, hangs or returns NaN continue on another engine, and the engine comes back."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from tests.trainer.engines.markov_pool import (
    TOKENS_PER_TURN,
    fail_with,
    hang,
    has_no_load,
    ids_without_failures,
    make_engines,
    make_pool,
    open_episode,
    progress_at_each_scrape,
    run_episode,
    run_one_turn,
    start_episodes,
    wait_event_loop_steps,
)
from tests.trainer.fake_vllm import MarkovEngine
from tests.trainer.virtual_time import virtual_time
from trainer.engines.engine import EngineError, SamplingParams, TurnError
from trainer.engines.engine_state import (
    MAX_FAILED_PROBLEMS,
    MAX_MISSED_SCRAPES,
    STALL_TIMEOUT_S,
    TURN_TIMEOUT_FACTOR,
)
from trainer.engines.pool import MAX_FAILURES_PER_TURN

RETRY_AFTER_S = 30
"""The pool's default."""
SAMPLING = SamplingParams(4, seed=0)


@virtual_time
async def test_an_episode_continues_with_the_same_tokens_on_another_engine_when_its_engine_dies():
    engines = make_engines(2)
    async with make_pool(engines) as pool, open_episode(pool) as handle:
        first = await handle.generate([1], SAMPLING)
        home, other = engines if engines[0].name == first.engine else reversed(engines)
        home.before_generate = fail_with()
        context = [1, *first.ids, 7]
        second = await handle.generate(context, SAMPLING)
        assert second.engine == other.name
        assert other.requests[-1] == home.requests[-1]
        assert second.ids == (await MarkovEngine().generate(context, SAMPLING)).ids


@pytest.mark.parametrize("failure", [fail_with(), hang], ids=["dies", "hangs"])
@virtual_time
async def test_all_turns_of_a_lost_engine_continue_on_other_engines(failure):
    engines = make_engines(3, before_generate=lambda: asyncio.sleep(1))
    async with make_pool(engines) as pool:
        running = start_episodes(pool, 30)
        await asyncio.sleep(2.5)  # the third turns run
        engines[1].before_generate = failure
        if failure is hang:
            engines[1].before_scrape = hang
        assert await asyncio.gather(*running) == await ids_without_failures(range(30))
        assert has_no_load(pool)


@virtual_time
async def test_an_engine_that_answers_scrapes_but_computes_no_token_is_marked_down():
    engines = make_engines(2, before_generate=lambda: asyncio.sleep(1))
    async with make_pool(engines) as pool:
        started_at = pool.now()
        running = start_episodes(pool, 8)
        await asyncio.sleep(1.5)  # the second turns run
        engines[0].before_generate = hang
        assert await asyncio.gather(*running) == await ids_without_failures(range(8))
        assert STALL_TIMEOUT_S < pool.now() - started_at < STALL_TIMEOUT_S + 60
        assert "no token computed" in pool.engine_states["e0"].down_reason
        assert has_no_load(pool)


@pytest.mark.parametrize("num_failing_scrapes", [MAX_MISSED_SCRAPES - 1, MAX_MISSED_SCRAPES])
@virtual_time
async def test_an_engine_is_marked_down_only_after_several_missed_scrapes(num_failing_scrapes):
    (engine,) = engines = make_engines(1)
    async with make_pool(engines) as pool:
        await run_one_turn(pool)
        num_scrapes = 0

        async def fail_first_scrapes():
            nonlocal num_scrapes
            num_scrapes += 1
            if num_scrapes <= num_failing_scrapes:
                raise EngineError("refused")

        engine.before_scrape = fail_first_scrapes
        await asyncio.sleep(10)
        is_marked_down = num_failing_scrapes == MAX_MISSED_SCRAPES
        assert pool.engine_states["e0"].is_up != is_marked_down
        assert await run_one_turn(pool) == "e0"
        # Only an engine that was marked down makes the turn wait for the bring-up, `RETRY_AFTER_S` later.
        assert (pool.now() > RETRY_AFTER_S) == is_marked_down


@virtual_time
async def test_the_turn_timeout_grows_with_the_engines_slowness():
    """The timeout of the second turn is `TURN_TIMEOUT_FACTOR` times the duration of the first turn, although
    `turn_timeout_s` is less."""
    first_turn_s = 50
    second_turn_s = 0.9 * TURN_TIMEOUT_FACTOR * first_turn_s
    (engine,) = engines = make_engines(1, before_generate=lambda: asyncio.sleep(first_turn_s))
    async with make_pool(engines, turn_timeout_s=60) as pool, open_episode(pool) as handle:
        first = await handle.generate([1], SAMPLING)
        engine.before_generate = lambda: asyncio.sleep(second_turn_s)
        engine.before_scrape = progress_at_each_scrape(engine)
        await handle.generate([1, *first.ids], SAMPLING)
        assert pool.now() == first_turn_s + second_turn_s


@virtual_time
async def test_a_turn_that_times_out_continues_on_another_engine():
    engines = make_engines(2)
    async with make_pool(engines, turn_timeout_s=60) as pool, open_episode(pool) as handle:
        first = await handle.generate([1], SAMPLING)
        home = next(engine for engine in engines if engine.name == first.engine)
        home.before_generate, home.before_scrape = hang, progress_at_each_scrape(home)
        second = await handle.generate([1, *first.ids], SAMPLING)
        assert second.engine != first.engine
        assert pool.engine_states[first.engine].down_reason == f"engine {first.engine}: no answer in 60 s"


@virtual_time
async def test_the_error_names_each_engines_failure_when_all_are_down_for_too_long():
    engines = make_engines(2)
    for engine in engines:
        engine.before_generate = engine.before_scrape = fail_with(f"{engine.name} burnt")
    async with make_pool(engines, all_down_timeout_s=100) as pool:
        # The first episode waits for `all_down_timeout_s`. When the second starts, this time is over: it fails at once.
        for expected_wait_s in (100, 0):
            started_at = pool.now()
            with pytest.raises(EngineError, match=r"all 2 engines are down: e0: e0 burnt; e1: e1 burnt"):
                await run_one_turn(pool)
            assert expected_wait_s <= pool.now() - started_at <= expected_wait_s + 1
        assert has_no_load(pool)


@virtual_time
async def test_episodes_wait_for_the_first_engine_that_comes_back():
    engines = make_engines(2, before_generate=lambda: asyncio.sleep(1))
    async with make_pool(engines) as pool:
        running = start_episodes(pool, 8)
        await asyncio.sleep(2.5)  # the third turns run
        for engine in engines:
            engine.before_generate = engine.before_scrape = fail_with()
        await asyncio.sleep(20)
        assert pool.scheduler.num_running == 0
        engines[1].before_generate = engines[1].before_scrape = wait_event_loop_steps(3)
        assert await asyncio.gather(*running) == await ids_without_failures(range(8))
        assert has_no_load(pool)


@virtual_time
async def test_a_failed_engine_is_brought_up_again_without_any_request():
    engines = make_engines(2)
    async with make_pool(engines) as pool:
        # Engines start with the salt 0. The new weights have the salt 5, and an engine must load them before it is up.
        await pool.sync_weights({"salt": 5})
        failed = await run_one_turn(pool)
        engine = next(engine for engine in engines if engine.name == failed)
        engine.before_generate = fail_with()
        assert await run_one_turn(pool) != failed
        engine.before_generate = wait_event_loop_steps(1)
        await asyncio.sleep(RETRY_AFTER_S - 1)
        assert not pool.engine_states[failed].is_up
        await asyncio.sleep(2)
        assert pool.engine_states[failed].is_up


@virtual_time
async def test_an_unexpected_exception_keeps_an_engine_down_and_does_not_fail_the_sync():
    async def reject():
        raise ValueError("this server does not understand the request")

    engines = make_engines(2)
    async with make_pool(engines) as pool:
        await pool.sync_weights({"salt": 5})  # version 1
        engines[0].before_scrape = fail_with()
        await asyncio.sleep(10)
        engines[0].before_scrape = reject
        await asyncio.sleep(100)
        version = await pool.sync_weights({"salt": 6})
        assert version == 2, "a sync succeeds with the other engine"
        assert [state.is_up for state in pool.engine_states.values()] == [False, True]


@virtual_time
async def test_a_turn_that_fails_on_several_engines_fails_its_episode():
    num_unused = 2
    engines = make_engines(MAX_FAILURES_PER_TURN + num_unused)
    async with make_pool(engines) as pool, open_episode(pool) as handle:
        for engine in engines:
            engine.before_generate = fail_with("it cannot be served")
        expected = f"the same turn failed {MAX_FAILURES_PER_TURN} times, the last: it cannot be served"
        with pytest.raises(EngineError, match=expected):
            await handle.generate([1], SAMPLING)
        assert sum(state.is_up for state in pool.engine_states.values()) == num_unused
        assert has_no_load(pool)


def fail_turns(num_turns):
    """Return a coroutine function for `before_generate` that makes the first turns fail."""
    failing_turns = iter(range(num_turns))

    async def fail():
        await asyncio.sleep(0)  # other tasks run before the turn fails, as during a request to a server
        if next(failing_turns, None) is not None:
            raise TurnError("odd")

    return fail


@virtual_time
async def test_the_error_of_a_turn_counts_its_failures_and_not_engines():
    (engine,) = engines = make_engines(1)
    failures = iter([TurnError("odd"), TurnError("odd"), EngineError("gone")])

    async def fail():
        raise next(failures)

    async with make_pool(engines) as pool:
        engine.before_generate = fail
        with pytest.raises(EngineError, match=r"^the same turn failed 3 times, the last: gone$"):
            await generate_turn(pool, problem=1)


class NanEngine(MarkovEngine):
    """The log-probability of the first token of each turn is NaN while `is_broken`."""

    is_broken = True

    async def generate(self, ids, sampling):
        generation = await super().generate(ids, sampling)
        logprobs = (math.nan, *generation.logprobs[1:]) if self.is_broken else generation.logprobs
        return replace(generation, logprobs=logprobs)


async def generate_turn(pool, problem, sample=0):
    """Run an episode of one turn, and return the turn."""
    async with open_episode(pool, group=problem) as handle:
        return await handle.generate([problem], SamplingParams(TOKENS_PER_TURN, seed=sample))


@virtual_time
async def test_a_turn_that_fails_runs_again_and_marks_no_engine_down():
    (engine,) = engines = make_engines(1)
    async with make_pool(engines) as pool:
        engine.before_generate = fail_turns(MAX_FAILURES_PER_TURN - 1)
        assert [await run_episode(pool, 1)] == await ids_without_failures([1])
        assert pool.engine_states["e0"].is_up
        assert pool.now() == 0, "the episode must not wait for a bring-up"
        assert has_no_load(pool)


@virtual_time
async def test_a_turn_that_always_fails_fails_its_episode_alone():
    (engine,) = engines = make_engines(1)
    async with make_pool(engines) as pool:
        engine.before_generate = fail_turns(MAX_FAILURES_PER_TURN)
        with pytest.raises(TurnError, match="odd"):
            await run_episode(pool, 1)
        assert pool.engine_states["e0"].is_up
        assert has_no_load(pool)
        assert [await run_episode(pool, 2)] == await ids_without_failures([2])


@virtual_time
async def test_an_engine_whose_turns_all_fail_is_marked_down_and_no_episode_is_lost():
    engines = make_engines(2)
    engines[0].before_generate = fail_turns(1 << 30)
    num_episodes = 8 * MAX_FAILED_PROBLEMS  # four of the episodes belong to one problem
    async with make_pool(engines) as pool:
        ids = await asyncio.gather(*start_episodes(pool, num_episodes))
        assert ids == await ids_without_failures(range(num_episodes))
        assert [state.is_up for state in pool.engine_states.values()] == [False, True]
        reason = pool.engine_states["e0"].down_reason
        assert reason == f"turns of {MAX_FAILED_PROBLEMS} problems in a row failed; the last: odd"


@virtual_time
async def test_turns_of_one_problem_mark_no_engine_down_however_many_fail():
    (engine,) = engines = make_engines(1)
    async with make_pool(engines) as pool:
        for sample in range(2 * MAX_FAILED_PROBLEMS):
            engine.before_generate = fail_turns(MAX_FAILURES_PER_TURN)
            with pytest.raises(TurnError):
                await generate_turn(pool, problem=1, sample=sample)
        assert pool.engine_states["e0"].is_up


@virtual_time
async def test_a_turn_with_nan_is_returned_at_once_and_one_problem_marks_no_engine_down():
    engine = NanEngine("e0")
    async with make_pool([engine]) as pool:
        for sample in range(2 * MAX_FAILED_PROBLEMS):
            generation = await generate_turn(pool, problem=1, sample=sample)
            assert len(generation.ids) == TOKENS_PER_TURN
            assert [math.isnan(logprob) for logprob in generation.logprobs] == [True] + [False] * (TOKENS_PER_TURN - 1)
        assert len(engine.requests) == 2 * MAX_FAILED_PROBLEMS, "a turn with NaN was sampled again"
        assert pool.engine_states["e0"].is_up
        assert has_no_load(pool)


@virtual_time
async def test_nan_in_turns_of_several_problems_marks_an_engine_down_and_the_last_turn_runs_elsewhere():
    broken, sound = NanEngine("e0"), MarkovEngine("e1")
    async with make_pool([broken, sound]) as pool:
        turns = await asyncio.gather(*(generate_turn(pool, problem) for problem in range(8 * MAX_FAILED_PROBLEMS)))
        assert not pool.engine_states["e0"].is_up
        assert pool.engine_states["e0"].down_reason.endswith("the last: log-probabilities of NaN")
        assert [turn.engine for turn in turns].count("e0") == MAX_FAILED_PROBLEMS - 1
        assert has_no_load(pool)


@virtual_time
async def test_engines_that_all_give_nan_lose_no_turn():
    async with make_pool([NanEngine("e0")]) as pool:
        turns = await asyncio.gather(*(generate_turn(pool, problem) for problem in range(3 * MAX_FAILED_PROBLEMS)))
        assert all(len(turn.ids) == TOKENS_PER_TURN for turn in turns)


@virtual_time
async def test_a_valid_turn_and_a_bring_up_reset_the_count_of_failed_problems():
    (engine,) = engines = make_engines(1)
    async with make_pool(engines) as pool:
        for number in range(8 * MAX_FAILED_PROBLEMS):  # in each episode, valid turns follow the one that fails
            engine.before_generate = fail_turns(1)
            await run_episode(pool, number)
        assert pool.now() == 0, "the engine must not have been marked down"
        engine.before_generate = fail_turns(MAX_FAILED_PROBLEMS)
        running = [asyncio.create_task(generate_turn(pool, problem)) for problem in range(MAX_FAILED_PROBLEMS)]
        await asyncio.sleep(1)
        assert not pool.engine_states["e0"].is_up
        engine.before_generate = fail_turns(1)
        assert all(len(turn.ids) == TOKENS_PER_TURN for turn in await asyncio.gather(*running))
        assert RETRY_AFTER_S <= pool.now() < 2 * RETRY_AFTER_S, "the next failure must not mark the engine down again"
