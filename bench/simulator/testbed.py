"""Rollouts by a script through real engines, and what a step of such an engine costs.

vLLM on the CPU, each server on cores of its own and with a cache too small for what it is asked. Its
log says of every step how many tokens it computed: that is the only place where what it recomputes can be seen.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import numpy as np
from rich.progress import Progress

from bench.harness.command import BenchFailed
from bench.rollouts import Counts
from bench.simulator.placement import POLICIES
from bench.simulator.simulation import Hardware, Plan, Turn, tell
from trainer.engines.engine import SamplingParams
from trainer.engines.engine_health import TurnRecord
from trainer.engines.pool import EnginePool
from trainer.engines.vllm_client import VllmEngine
from trainer.engines.vllm_servers import VllmServers
from trainer.scheduling.scheduler import Scheduler

BLOCK = 32
"""Tokens of a block: the least that vLLM's attention on the CPU takes."""
BLOCKS = 257
"""Of the cache, one of which vLLM keeps for itself."""
CAPACITY = (BLOCKS - 1) * BLOCK
SLOTS = 64
HIDDEN, LAYERS = 512, 6
"""16 million parameters: a step of a full cache takes some 35 ms, much as on the hardware that this stands for (28 ms
in the profile mi300x-14b), so that the seconds of a tool are as many steps here as there."""
VOCABULARY = 640
MAX_LENGTH = 1024
STEP = re.compile(rb"(\d+) context tokens, (\d+) generation requests, (\d+) generation tokens")
SETTLE_S = 30.0


class SmallServers(VllmServers):
    """Servers with a small cache that tell of every step."""

    def command(self, port: int) -> list[str]:
        cache = ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)]
        return [*VllmServers.command(self, port), *cache, "--enable-logging-iteration-details"]


@dataclass(slots=True)
class Bench:
    """Servers that are up. `play` may be called any number of times."""

    urls: list[str]
    logs: list[Path]
    session: aiohttp.ClientSession
    """Seconds."""

    @classmethod
    @asynccontextmanager
    async def started(cls, python: str, count: int, folder: Path) -> AsyncIterator[Bench]:
        """`count` servers in the environment of `python`, warm. Raises `EngineFailed`."""
        make_model(folder / "model")
        logs = folder / "logs"
        servers = SmallServers(python, folder / "model", MAX_LENGTH, SLOTS, dtype="float32")
        async with servers.serve(count, logs) as urls, aiohttp.ClientSession() as session:
            bench = cls(urls, [logs / f"engine{number}.log" for number in range(count)], session)
            for running in (1, SLOTS // 2):  # its first steps of a kind take seconds
                await bench.batch(Batch(running, 100, 8))
            yield bench

    @property
    def names(self) -> list[str]:
        return [f"e{number}" for number in range(len(self.urls))]

    def engines(self) -> list[VllmEngine]:
        return [
            VllmEngine(url, vocab_size=VOCABULARY, max_model_len=MAX_LENGTH, max_num_seqs=SLOTS, name=name)
            for url, name in zip(self.urls, self.names, strict=True)
        ]

    async def play(
        self, policy: str, plans: Sequence[Plan], before: Sequence[Plan], most_new: int, seed: int
    ) -> tuple[list[Turn], Counts]:
        """All `plans`, handed in at once, when the lengths of those `before` are known; what became of them, from time
        0, and what it cost the engines."""
        await self.forget()
        first, marks = await self.figures(), [log.stat().st_size for log in self.logs]
        turns = await played(self.engines(), policy, plans, before, most_new, seed)
        wanted = first["generation_tokens"] + sum(turn.sampled for turn in turns)
        async with asyncio.timeout(SETTLE_S):
            while (after := await self.figures())["generation_tokens"] < wanted:  # noqa: ASYNC110 another process
                await asyncio.sleep(0.05)
        computed = sum(tokens_computed(log, mark) for log, mark in zip(self.logs, marks, strict=True))
        made = {name: int(after[name] - first[name]) for name in after}
        recomputed = computed - needed(plans, turns)
        return turns, Counts(
            made["num_preemptions"], recomputed, made["prefix_cache_queries"], made["prefix_cache_hits"]
        )

    async def forget(self) -> None:
        """Empty the prefix caches."""
        for url in self.urls:
            async with self.session.post(f"{url}/reset_prefix_cache") as answer:
                answer.raise_for_status()

    async def figures(self) -> dict[str, float]:
        """Counters of all engines together."""
        names = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "generation_tokens")
        made = dict.fromkeys(names, 0.0)
        for url in self.urls:
            async with self.session.get(f"{url}/metrics") as answer:
                text = await answer.text()
            for name in names:
                found = re.findall(rf"^vllm:{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE)
                if not found:
                    raise BenchFailed(f"expected vllm:{name}_total in {url}/metrics, got none: another vLLM?")
                made[name] += sum(map(float, found))
        return made

    async def batches(self, bar: Progress) -> dict[Batch, float]:
        """Seconds that each of `BATCHES` takes."""
        return {batch: await self.batch(batch) for batch in bar.track(BATCHES, description="fit")}

    async def batch(self, batch: Batch) -> float:
        """Seconds that every engine takes for it, all at the same time."""
        engines = self.engines()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_run(engine, batch)) for engine in engines]
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))
        return sum(task.result() for task in tasks) / len(tasks)


def make_model(folder: Path) -> None:
    """The tiny model with more to compute: in a step of so small a one nothing costs but the step, and what is
    recomputed would be free, which it is on no engine that anyone uses."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    from trainer.data import tiny_model

    tiny_model.write_tiny_model(folder)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_hidden_layers": LAYERS}
    config = AutoConfig.from_pretrained(folder, **sizes, layer_types=["full_attention"] * LAYERS)
    Qwen3ForCausalLM(config).save_pretrained(folder)


async def played(
    engines: Sequence[Any],
    policy: str,
    plans: Sequence[Plan],
    before: Sequence[Plan],
    most_new: int,
    seed: int,
    vocabulary: int = VOCABULARY,
) -> list[Turn]:
    """Play `plans` through the pool. Turns are in the order in which they ended, in seconds from when all came."""
    numbers: dict[int, int] = {}
    served: list[TurnRecord] = []
    longest = max(plan.prompt for plan in plans) + most_new
    async with EnginePool(engines, scheduler=Scheduler(longest, POLICIES[policy]()), on_turn=served.append) as pool:
        while not all(state.is_up for state in pool.engine_states.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        tell(pool.scheduler, before)
        start = asyncio.get_running_loop().time()

        async def play(number: int, plan: Plan) -> None:
            ids = _ids(f"{seed}/{plan.group}", plan.prompt, vocabulary)
            async with pool.open_episode(group=plan.group, max_context_tokens=plan.prompt + most_new) as handle:
                numbers[handle.key] = number
                for turn, (sampled, shown, tool_s) in enumerate(plan.turns):
                    ids += (await handle.generate(ids, SamplingParams(sampled))).ids
                    ids += _ids(f"{seed}/{number}/{turn}", shown, vocabulary)
                    await asyncio.sleep(tool_s)

        async with asyncio.TaskGroup() as group:
            for number, plan in enumerate(plans):
                group.create_task(play(number, plan))
    return [
        Turn(
            episode=numbers[record.episode],
            engine=record.engine,
            began=record.started_at - start,
            ended=record.ended_at - start,
            context=record.context_tokens,
            sampled=record.sampled_tokens,
            has_moved=record.is_migration,
        )
        for record in served
    ]


def _ids(seed: str, count: int, vocabulary: int) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=count)


def needed(plans: Sequence[Plan], turns: Iterable[Turn]) -> int:
    """Tokens that engines have to compute for `turns` if they forget nothing: all but whole blocks that were computed
    before for the same episode, or on the same engine for the same prompt. The last token sampled never is."""
    known: set[tuple[str, int]] = set()
    had: dict[int, int] = {}
    total = 0
    for turn in sorted(turns, key=lambda turn: turn.began):
        plan = plans[turn.episode]
        first = plan.prompt if (turn.engine, plan.group) in known else 0
        known.add((turn.engine, plan.group))
        before = had.get(turn.episode, first)
        total += turn.context - min(before, turn.context - 1) // BLOCK * BLOCK + turn.sampled - 1
        had[turn.episode] = turn.context + turn.sampled - 1
    return total


def tokens_computed(log: Path, mark: int) -> int:
    """Of all steps that a server's log tells of after its first `mark` bytes."""
    with log.open("rb") as file:
        file.seek(mark)
        return sum(int(fresh) + int(more) for fresh, _, more in STEP.findall(file.read()))


# What a step costs

RUNNING, CONTEXTS, SAMPLED = (1, 4, 12, 30, 60), (40, 150, 500), (12, 96)
TURNS, EACH = 5, 32
"""Turns of a sequence, and tokens of each, where turns come one by one, as those of rollouts do: each makes a step
longer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """So many sequences at once, each of so many turns on fresh contexts. With one turn all come at once; with more the
    first are of different lengths, so that the others come one by one."""

    running: int
    context: int
    sampled: int
    turns: int = 1

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens to sample in each turn of each sequence."""
        every = [self.sampled] * (self.turns - 1)
        if not every:
            return [[self.sampled]] * self.running
        return [[1 + self.sampled * number // self.running, *every] for number in range(self.running)]

    @property
    def does_fit(self) -> bool:
        """Into a cache, without any prompt that is shared."""
        return self.running * -(-(self.context + self.sampled) // BLOCK) < BLOCKS

    @property
    def features(self) -> list[float]:
        """What it is made of: steps, sequences and contexts in them, tokens that came, turns."""
        sampled = [sum(turns) for turns in self.lengths]
        contexts = sum(count * self.context + count * count / 2 for turns in self.lengths for count in turns)
        count = self.running * self.turns
        return [max(sampled), sum(sampled), contexts, count * self.context, count]


BATCHES = [
    batch
    for batch in (
        *(Batch(*sizes) for sizes in product(RUNNING, CONTEXTS, SAMPLED)),
        *(Batch(*sizes, EACH, TURNS) for sizes in product(RUNNING[1:], CONTEXTS[:2])),
    )
    if batch.does_fit
]
"""Those whose contexts all fit."""


def fitted(passes: Sequence[Mapping[Batch, float]], count: int) -> dict[str, Any]:
    """The constants of `Hardware` for one of `count` servers when all work, by least squares of the relative errors of
    what batches took, in seconds; none is negative. Of several passes the mean, as a machine that others share is not
    the same from one minute to the next."""
    took = {batch: fmean(took[batch] for took in passes) for batch in passes[0]}
    features = np.array([batch.features for batch in took])
    seconds = np.array([*took.values()])
    costs = _nonnegative(features / seconds[:, None], np.ones(len(took)))
    said = features @ costs
    errors = said / seconds - 1
    names = ("base_s", "per_sequence_s", "per_context_s", "prefill_s", "turn_s")
    hardware = Hardware(
        name="cpu-tiny",
        capacity=CAPACITY,
        most_running=SLOTS,
        **dict(zip(names, map(float, costs), strict=True)),
        block=BLOCK,
        source=f"fitted to {len(took)} kinds of batches, {count} vLLM servers at once, in {len(passes)} passes",
    )
    return {
        "hardware": asdict(hardware),
        "residual": float(np.median(np.abs(errors))),
        "batches": [
            {**asdict(batch), "seconds": round(seconds, 4), "error": round(float(error), 4)}
            for (batch, seconds), error in zip(took.items(), errors, strict=True)
        ],
    }


def _nonnegative(features: Any, wanted: Any) -> Any:
    """Least squares without negative costs: what comes out negative is left out, one by one."""
    inside = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, inside], wanted, rcond=None)
        if (found >= 0).all():
            costs = np.zeros(features.shape[1])
            costs[inside] = found
            return costs
        inside.pop(int(found.argmin()))


async def _run(engine: VllmEngine, batch: Batch) -> float:
    async def play(lengths: Sequence[int]) -> None:
        for sampled in lengths:
            await engine.generate(_ids(str(random.random()), batch.context, VOCABULARY), SamplingParams(sampled))

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for lengths in batch.lengths:
            group.create_task(play(lengths))
    return time.perf_counter() - start
