"""Engines that share the trainer's GPUs: they sleep while the trainer optimizes, and each weight sync wakes them.

The weights of a `MarkovEngine` are its salt, which is lost when the server in front of it sleeps.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp import web

from tests.trainer.engines.markov_pool import (
    MarkovProbe,
    hang,
    make_engines,
    make_pool,
    open_episode,
    run_one_turn,
    transfer,
)
from tests.trainer.fake_vllm import FakeVllm, MarkovEngine
from tests.trainer.virtual_time import virtual_time
from trainer.engines.engine import EngineError, SamplingParams
from trainer.engines.vllm_client import VllmEngine

pytest.importorskip("torch")

from trainer.sync.transfers import WakingTransfer, load_by_engine

WAKE_WEIGHTS, WAKE_KV_CACHE, SLEEP = "/wake_up?tags=weights", "/wake_up?tags=kv_cache", "/sleep?level=2"
SYNC = [WAKE_WEIGHTS, "/collective_rpc", "/reset_prefix_cache", WAKE_KV_CACHE, "/v1/completions"]
"""The requests of a weight sync. The last one scores the probe."""
SAMPLING = SamplingParams(4, seed=0)


class FolderStore:
    """A `WeightStore` that writes the salt as a file of weights."""

    def __init__(self, directory):
        self.directory = directory

    async def save(self, weights, version):
        directory = self.directory / f"v{version}"
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(weights["salt"])
        return directory

    async def delete_others(self, keep):
        pass


@asynccontextmanager
async def pool_of(*servers, store, **options):
    """Open a pool of clients of the servers."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(server.serve()) for server in servers]
        size = {"vocab_size": 50, "max_model_len": 256}
        clients = [VllmEngine(url, **size, name=f"e{number}") for number, url in enumerate(urls)]
        options = {"transfer": WakingTransfer(load_by_engine), "store": FolderStore(store), **options}
        yield await stack.enter_async_context(make_pool(clients, **options))


def fail_at(route, is_failing=lambda: True):
    """Return a function for `FakeVllm.change_answer` that fails one route."""

    def change_answer(requested, answer):
        if requested == route and is_failing():
            raise web.HTTPInternalServerError(text="CUDA out of memory")
        return answer

    return change_answer


def routes(server):
    return [route for route, _ in server.requests]


@pytest.mark.asyncio
async def test_each_step_wakes_the_weights_loads_them_wakes_the_kv_cache_samples_and_sleeps(tmp_path):
    server = FakeVllm(MarkovEngine())
    async with pool_of(server, store=tmp_path) as pool:
        for salt in (b"1", b"2"):
            await pool.sync_weights({"salt": salt})
            async with open_episode(pool) as handle:
                generation = await handle.generate([1], SAMPLING)
            assert generation.ids == (await MarkovEngine(salt=salt).generate([1], SAMPLING)).ids
            await pool.sleep()
            assert server.sleeping_tags == {"weights", "kv_cache"}
        assert routes(server) == [*SYNC, "/v1/completions", SLEEP] * 2


@pytest.mark.asyncio
async def test_a_turn_that_is_requested_while_engines_sleep_runs_after_the_next_sync(tmp_path):
    server = FakeVllm(MarkovEngine())
    async with pool_of(server, store=tmp_path) as pool:
        await pool.sync_weights({"salt": b"1"})
        await pool.sleep()
        async with open_episode(pool) as handle:
            turn = asyncio.create_task(handle.generate([1], SAMPLING))
            while not pool.handles:  # noqa: ASYNC110 (the pool sends no event)
                await asyncio.sleep(0)
            await pool.sleep()  # the scheduler gets its chance to place the turn
            assert routes(server)[len(SYNC) :] == [SLEEP, SLEEP] and not turn.done()
            await pool.sync_weights({"salt": b"2"})
            assert (await turn).weight_version == 2


@pytest.mark.asyncio
async def test_an_engine_that_does_not_wake_up_is_down_and_the_others_sample(tmp_path):
    good, bad = FakeVllm(MarkovEngine()), FakeVllm(MarkovEngine(), fail_at(WAKE_KV_CACHE))
    async with pool_of(good, bad, store=tmp_path) as pool:
        await pool.sync_weights({"salt": b"1"})
        assert "CUDA out of memory" in pool.engine_states["e1"].down_reason
        assert routes(bad) == SYNC[:4], "it is not asked for log-probabilities"
        assert {await run_one_turn(pool) for _ in range(3)} == {"e0"}


@pytest.mark.parametrize("route", [WAKE_WEIGHTS, WAKE_KV_CACHE])
@pytest.mark.asyncio
async def test_a_sync_without_any_engine_that_wakes_up_fails_with_the_reason(tmp_path, route):
    server = FakeVllm(MarkovEngine(), fail_at(route))
    async with pool_of(server, store=tmp_path) as pool:
        with pytest.raises(EngineError, match=r"all 1 engines are down: e0: .*CUDA out of memory"):
            await pool.sync_weights({"salt": b"1"})
        assert routes(server) == SYNC[: SYNC.index(route) + 1], "weights without memory are not loaded"


@pytest.mark.asyncio
async def test_an_engine_that_woke_up_too_late_gets_the_weights_again(tmp_path):
    is_failing = True
    server = FakeVllm(MarkovEngine(), fail_at(WAKE_KV_CACHE, lambda: is_failing))
    options = {"scrape_interval_s": 0.01, "retry_after_s": 0.05, "all_down_timeout_s": 100}
    async with pool_of(FakeVllm(MarkovEngine()), server, store=tmp_path, **options) as pool:
        await pool.sync_weights({"salt": b"1"})
        server.sleeping_tags = {"kv_cache"}
        assert not pool.engine_states["e1"].is_up
        is_failing = False
        while not pool.engine_states["e1"].is_up:  # noqa: ASYNC110 (the pool sends no event)
            await asyncio.sleep(0.01)
        assert server.engine.salt == b"1" and not server.sleeping_tags


@pytest.mark.asyncio
async def test_a_server_that_sleeps_is_alive(tmp_path):
    server = FakeVllm(MarkovEngine())
    async with server.serve() as url:
        client = VllmEngine(url, vocab_size=50, max_model_len=256)
        await client.check_alive()
        await client.sleep()
        await client.check_alive()
        assert routes(server) == ["/v1/completions", SLEEP], "a completion would wait for the next sync"
        await client.close()


@dataclass
class SleepingEngine(MarkovEngine):
    """An engine with the sleep mode of a `VllmEngine`."""

    is_asleep: bool = False
    sleep_calls: int = 0
    is_scored_asleep: bool = False
    """Whether log-probabilities were requested while the engine sleeps. vLLM would not answer."""

    async def logprobs(self, ids):
        self.is_scored_asleep |= self.is_asleep
        return await super().logprobs(ids)

    async def check_alive(self):
        await self.before_scrape()

    async def is_sleeping(self):
        await self.before_scrape()
        return self.is_asleep

    async def sleep(self):
        await self.before_scrape()
        self.is_asleep = True
        self.sleep_calls += 1

    async def wake_up(self, tag):
        await self.before_scrape()
        self.is_asleep &= tag != "kv_cache"

    __hash__ = object.__hash__


def sleeping_pool(count=2, **options):
    engines = [SleepingEngine(f"e{number}") for number in range(count)]
    return engines, make_pool(engines, transfer=WakingTransfer(transfer), probe=MarkovProbe(), **options)


@virtual_time
async def test_engines_that_sleep_for_hours_are_not_taken_for_dead():
    (engine,), pool = sleeping_pool(1, all_down_timeout_s=60)
    async with pool:
        await pool.sync_weights({"salt": 1})
        await pool.sleep()
        requests = len(engine.requests)
        async with open_episode(pool) as handle:
            turn = asyncio.create_task(handle.generate([1], SAMPLING))
            await asyncio.sleep(4 * 3600)
            assert not turn.done() and len(engine.requests) == requests
            assert engine.sleep_calls == 1 and not pool.engine_states["e0"].is_unresponsive
            await pool.sync_weights({"salt": 2})
            assert (await turn).weight_version == 2


@virtual_time
async def test_an_engine_that_restarts_while_the_others_sleep_is_put_to_sleep_and_gets_the_next_weights():
    (first, second), pool = sleeping_pool()
    async with pool:
        await pool.sync_weights({"salt": 1})
        await pool.sleep()
        second.is_asleep, second.salt, second.weight_version = False, 0, 0
        await asyncio.sleep(3)
        assert (first.sleep_calls, second.sleep_calls) == (1, 2)
        await pool.sync_weights({"salt": 2})
        assert all(state.is_up for state in pool.engine_states.values())


@virtual_time
async def test_an_engine_that_does_not_wake_up_waits_for_the_next_sync_if_no_weights_are_stored():
    (_, second), pool = sleeping_pool()
    async with pool:
        await pool.sync_weights({"salt": 1})
        await pool.sleep()

        async def wake_up_weights_only(tag):
            if tag == "kv_cache":
                raise EngineError("CUDA out of memory")

        second.wake_up = wake_up_weights_only
        await pool.sync_weights({"salt": 2})
        await asyncio.sleep(1000)
        state = pool.engine_states["e1"]
        assert (state.is_up, state.down_reason, second.is_scored_asleep) == (False, "CUDA out of memory", False)
        del second.wake_up
        await pool.sync_weights({"salt": 3})
        assert state.is_up and second.salt == 3


@virtual_time
async def test_an_engine_that_hangs_delays_a_sleep_and_is_asked_again():
    (_, second), pool = sleeping_pool()
    async with pool:
        await pool.sync_weights({"salt": 1})
        second.before_scrape, started_at = hang, pool.now()
        await pool.sleep()
        assert pool.now() - started_at == pytest.approx(60, abs=1)
        assert "may keep its memory" in pool.engine_states["e1"].down_reason
        second.before_scrape = make_engines(1)[0].before_scrape
        await asyncio.sleep(100)
        assert second.is_asleep and not pool.engine_states["e1"].is_unresponsive


@virtual_time
async def test_a_sleeping_engine_whose_check_is_interrupted_by_a_sync_is_not_marked_down():
    (engine, _), pool = sleeping_pool()
    async with pool:
        await pool.sync_weights({"salt": 1})
        await pool.sleep()
        answers_from = pool.now() + 30

        async def wait_until_it_answers():
            await asyncio.sleep(max(0.0, answers_from - pool.now()))

        engine.before_scrape = wait_until_it_answers
        await asyncio.sleep(5)
        assert pool.engine_states["e0"].requests, "the check of the sleeping engine is in flight"
        assert await pool.sync_weights({"salt": 2}) == 2
        assert pool.engine_states["e0"].is_up


@virtual_time
async def test_engines_sleep_after_their_running_turns_and_not_during_a_weight_sync():
    (engine,), pool = sleeping_pool(1)
    async with pool:
        await pool.sync_weights({"salt": 1})
        engine.before_generate = lambda: asyncio.sleep(7)
        turn = asyncio.create_task(run_one_turn(pool))
        await asyncio.sleep(1)
        sleeping = asyncio.create_task(pool.sleep())
        await asyncio.sleep(1)
        assert not sleeping.done() and not engine.is_asleep
        with pytest.raises(RuntimeError, match="one weight sync at a time"):
            await pool.sync_weights({"salt": 2})
        await sleeping
        assert turn.done() and engine.is_asleep
        assert await turn == "e0"
