"""Scripted rollouts on real vLLM servers on the CPU, whose caches are too small for the workload.

Each server has cores of its own. The computed tokens of every decode step are read from a server's log, because vLLM
has no counter for recomputed tokens.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.progress import Progress

from bench.harness.command import BenchFailed
from bench.simulator.engine import WATERMARK
from bench.simulator.fit import BATCHES, BLOCK_SIZE, MAX_RUNNING, RESERVED_BLOCKS, Batch
from bench.simulator.measures import EngineCounters
from bench.simulator.placement import POLICIES
from bench.simulator.scripts import EpisodeScript, Workload
from bench.simulator.simulation import TurnTrace, teach_lengths
from trainer.engines.engine import SamplingParams
from trainer.engines.pool import EnginePool, TurnRecord
from trainer.engines.vllm_client import VllmEngine
from trainer.engines.vllm_servers import VllmServers

HIDDEN_SIZE = 512
"""With this width and `LAYERS` the model has 16 million parameters. A decode step with a full cache then takes about
35 ms, close to the 28 ms of the profile mi300x-14b. So a tool call lasts about equally many decode steps with both."""
LAYERS = 6
VOCAB_SIZE = 640
MAX_MODEL_LEN = 1024
ITERATION_LOG_LINE = re.compile(rb"(\d+) context tokens, (\d+) generation requests, (\d+) generation tokens")
COUNTERS = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "generation_tokens")
COUNTERS_TIMEOUT_S = 30.0
"""Seconds until the servers' counters must include all sampled tokens."""


@dataclass(slots=True)
class VllmTestbed:
    """Running servers. `play` may be called any number of times."""

    urls: list[str]
    logs: list[Path]
    session: aiohttp.ClientSession

    @classmethod
    @asynccontextmanager
    async def started(cls, python: str, count: int, directory: Path, kv_capacity: int) -> AsyncIterator[VllmTestbed]:
        """`count` warm servers with caches of `kv_capacity` tokens, in the environment of `python`. They log every
        decode step. Raises `EngineError`."""
        write_model(directory / "model")
        logs = directory / "logs"
        args = {
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": kv_capacity // BLOCK_SIZE + RESERVED_BLOCKS,
            "watermark": WATERMARK,
            "enable_logging_iteration_details": True,
        }
        servers = VllmServers(python, directory / "model", MAX_MODEL_LEN, MAX_RUNNING, dtype="float32", args=args)
        async with servers.serve(count, logs) as urls, aiohttp.ClientSession() as session:
            testbed = cls(urls, [logs / f"engine{number}.log" for number in range(count)], session)
            for running in (1, MAX_RUNNING // 2):  # the first steps of each batch size take seconds
                await testbed.time_batch(Batch(running, 100, 8))
            yield testbed

    def engines(self) -> list[VllmEngine]:
        """A client for each server."""
        return [
            VllmEngine(
                url, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_RUNNING, name=f"e{number}"
            )
            for number, url in enumerate(self.urls)
        ]

    async def play(self, policy: str, workload: Workload, seed: int) -> tuple[list[TurnTrace], EngineCounters]:
        """Play the workload with empty prefix caches."""
        await self.reset_prefix_caches()
        before, log_sizes = await self.read_counters(), [log.stat().st_size for log in self.logs]
        turns = await played(self.engines(), policy, workload, seed)
        expected_tokens = before["generation_tokens"] + sum(turn.sampled for turn in turns)
        async with asyncio.timeout(COUNTERS_TIMEOUT_S):
            while (after := await self.read_counters())["generation_tokens"] < expected_tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        computed = sum(tokens_computed(log, size) for log, size in zip(self.logs, log_sizes, strict=True))
        preemptions, queries, hits, _ = (int(after[name] - before[name]) for name in COUNTERS)
        return turns, EngineCounters(preemptions, computed - required_tokens(workload.scripts, turns), queries, hits)

    async def reset_prefix_caches(self) -> None:
        """Empty the prefix caches of all servers."""
        for url in self.urls:
            async with self.session.post(f"{url}/reset_prefix_cache") as response:
                response.raise_for_status()

    async def read_counters(self) -> dict[str, float]:
        """Sums of the servers' counters."""
        totals = dict.fromkeys(COUNTERS, 0.0)
        for url in self.urls:
            async with self.session.get(f"{url}/metrics") as response:
                text = await response.text()
            for name in COUNTERS:
                values = re.findall(rf"^vllm:{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE)
                if not values:
                    raise BenchFailed(f"expected vllm:{name}_total in {url}/metrics, got none: another vLLM version?")
                totals[name] += sum(map(float, values))
        return totals

    async def time_batches(self, bar: Progress) -> dict[Batch, float]:
        """Seconds of each of `BATCHES`."""
        return {batch: await self.time_batch(batch) for batch in bar.track(BATCHES, description="fit")}

    async def time_batch(self, batch: Batch) -> float:
        """Mean seconds of a batch, run on all engines at the same time."""
        engines = self.engines()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_run_batch(engine, batch)) for engine in engines]
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))
        return sum(task.result() for task in tasks) / len(tasks)


def write_model(directory: Path) -> None:
    """Write the tiny model with more parameters, so that recomputed tokens cost time as on any larger model."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    from trainer.data import tiny_model

    tiny_model.write_tiny_model(directory)
    sizes = {"hidden_size": HIDDEN_SIZE, "intermediate_size": 3 * HIDDEN_SIZE, "num_hidden_layers": LAYERS}
    config = AutoConfig.from_pretrained(directory, **sizes, layer_types=["full_attention"] * LAYERS)
    Qwen3ForCausalLM(config).save_pretrained(directory)


async def played(
    engines: Sequence[Any], policy: str, workload: Workload, seed: int, vocab_size: int = VOCAB_SIZE
) -> list[TurnTrace]:
    """Play the workload through the engine pool. Returns the turns in the order in which they ended."""
    indices: dict[int, int] = {}
    records: list[TurnRecord] = []
    scheduler = POLICIES[policy](workload.max_context_tokens)
    async with EnginePool(engines, scheduler=scheduler, on_turn=records.append) as pool:
        while not all(state.is_up for state in pool.engine_states.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        teach_lengths(pool.scheduler, workload.previous_step)
        start = asyncio.get_running_loop().time()

        async def play(index: int, script: EpisodeScript) -> None:
            ids = _random_ids(f"{seed}/{script.group}", script.prompt, vocab_size)
            max_context = script.prompt + workload.max_response_tokens
            async with pool.open_episode(group=script.group, max_context_tokens=max_context) as handle:
                indices[handle.key] = index
                for turn, (sampled, observed, tool_s) in enumerate(script.turns):
                    ids += (await handle.generate(ids, SamplingParams(sampled))).ids
                    ids += _random_ids(f"{seed}/{index}/{turn}", observed, vocab_size)
                    await asyncio.sleep(tool_s)

        async with asyncio.TaskGroup() as group:
            for index, script in enumerate(workload.scripts):
                group.create_task(play(index, script))
    return [
        TurnTrace(
            indices[record.episode],
            record.engine,
            record.started_at - start,
            record.ended_at - start,
            record.context_tokens,
            record.sampled_tokens,
            record.is_migration,
        )
        for record in records
    ]


def _random_ids(seed: str, count: int, vocab_size: int) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)


def required_tokens(scripts: Sequence[EpisodeScript], turns: Iterable[TurnTrace]) -> int:
    """Tokens that engines have to compute for `turns` if nothing is evicted.

    These are all tokens except two kinds. Whole blocks that were computed before, for the same episode or on the same
    engine for the same prompt, are cached. The last sampled token of a turn is never computed.
    """
    cached_prompts: set[tuple[str, int]] = set()
    computed: dict[int, int] = {}
    total = 0
    for turn in sorted(turns, key=lambda turn: turn.started_at):
        script = scripts[turn.episode]
        from_prompt = script.prompt if (turn.engine, script.group) in cached_prompts else 0
        cached_prompts.add((turn.engine, script.group))
        before = computed.get(turn.episode, from_prompt)
        total += turn.context - min(before, turn.context - 1) // BLOCK_SIZE * BLOCK_SIZE + turn.sampled - 1
        computed[turn.episode] = turn.context + turn.sampled - 1
    return total


def tokens_computed(log: Path, offset: int) -> int:
    """Tokens computed in all decode steps that a server has logged after the first `offset` bytes."""
    with log.open("rb") as file:
        file.seek(offset)
        lines = ITERATION_LOG_LINE.findall(file.read())
    return sum(int(prefill) + int(decode) for prefill, _, decode in lines)


async def _run_batch(engine: VllmEngine, batch: Batch) -> float:
    async def run_sequence(lengths: Sequence[int]) -> None:
        for sampled in lengths:
            ids = _random_ids(str(random.random()), batch.context, VOCAB_SIZE)
            await engine.generate(ids, SamplingParams(sampled))

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for lengths in batch.lengths:
            group.create_task(run_sequence(lengths))
    return time.perf_counter() - start
