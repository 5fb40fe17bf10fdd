"""A pool of `MarkovEngine`s, and functions that make its engines fail, hang or answer slowly."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bench.simulator.placement import POLICIES
from tests.trainer.engine_loads import engine_loads
from tests.trainer.fake_vllm import MarkovEngine
from trainer.engines.engine import EngineError, SamplingParams
from trainer.engines.pool import EnginePool

MAX_CONTEXT = 200
TOKENS_PER_TURN = 4
LOAD_TIMEOUT_S = 600


def make_engines(count, **options):
    """Return engines with the names e0, e1 and so on."""
    return [MarkovEngine(f"e{number}", **options) for number in range(count)]


def fail_with(message="gone"):
    async def fail():
        raise EngineError(message)

    return fail


async def hang():
    await asyncio.Event().wait()


def wait_event_loop_steps(count):
    """Return a coroutine function that ends after `count` steps of the event loop, at the same virtual time."""

    async def step():
        for _ in range(count):
            await asyncio.sleep(0)

    return step


def progress_at_each_scrape(engine):
    """Return a coroutine function for `before_scrape` that raises the token counter of the engine. So the pool does not
    take an engine with a long turn for stalled."""

    async def compute():
        engine.computed_tokens += 1

    return compute


@dataclass
class MarkovProbe:
    """Compares an engine with another one that has the trainer's weights."""

    ids = (1, 2, 3, 4)

    def expected_logprobs(self, weights):
        return asyncio.run(MarkovEngine(salt=weights["salt"]).logprobs(self.ids))

    async def check(self, engine, expected):
        if await engine.logprobs(self.ids) != expected:
            raise OSError("SyncFailed")


class InsensitiveProbe(MarkovProbe):
    """Accepts any weights from an engine that answers. So does the real probe in bfloat16 after a small step."""

    async def check(self, engine, expected):
        await engine.logprobs(self.ids)


async def transfer(engines, weights, version):
    """Load weights as a `WeightTransfer`. An engine that cannot generate cannot load weights either."""

    async def load(engine):
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await engine.before_generate()
        except (EngineError, TimeoutError) as error:
            return error
        await engine.load_weights(weights, version)
        return None

    return [await load(engine) for engine in engines]


class MemoryStore:
    """A `WeightStore` in memory."""

    def __init__(self):
        self.stored = []

    async def save(self, weights, version):
        await asyncio.sleep(0)
        self.stored.append(dict(weights))
        return self.stored[-1]

    async def delete_others(self, keep):
        self.stored = [weights for weights in self.stored if weights is keep]


def make_pool(engines, policy="kv", **options):
    scheduler = POLICIES[policy](MAX_CONTEXT)
    return EnginePool(engines, **{"scheduler": scheduler, "transfer": transfer, "probe": MarkovProbe()} | options)


def open_episode(pool, group="a"):
    return pool.open_episode(group=group, max_context_tokens=MAX_CONTEXT)


async def run_episode(pool, number, turns=5, tool_s=0.0):
    """Run an episode and return its ids: 1 of the prompt, then for each turn `TOKENS_PER_TURN` and 1 of the tool."""
    ids = [number % 50]
    async with open_episode(pool, group=number // 4) as handle:
        for turn in range(turns):
            ids += (await handle.generate(ids, SamplingParams(TOKENS_PER_TURN, seed=number * 10 + turn))).ids
            await asyncio.sleep(tool_s)
            ids += [turn]
    return ids


def start_episodes(pool, count, **options):
    return [asyncio.create_task(run_episode(pool, number, **options)) for number in range(count)]


async def ids_without_failures(numbers, turns=5):
    """Return the ids of the same episodes on a single engine without failures."""
    async with make_pool(make_engines(1)) as pool:
        return [await run_episode(pool, number, turns) for number in numbers]


async def run_one_turn(pool):
    """Run an episode of one turn. Return the name of the engine that generated it."""
    async with open_episode(pool) as handle:
        return (await handle.generate([1], SamplingParams(TOKENS_PER_TURN, seed=0))).engine


def has_no_load(pool):
    """Return whether the scheduler has no episode, no turn and no reservation left."""
    return not any(any(load.values()) for load in engine_loads(pool.scheduler).values())
