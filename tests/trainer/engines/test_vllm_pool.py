"""A test of the engine pool on real vLLM servers that hang, come back and are killed.

The test needs RSTAR_VLLM_PYTHON, the path of an interpreter that has vLLM.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.trainer.engine_loads import engine_loads
from trainer.engines import engine_state
from trainer.engines.engine import SamplingParams
from trainer.engines.pool import EnginePool
from trainer.engines.vllm_client import VllmEngine
from trainer.engines.vllm_servers import VllmServers
from trainer.scheduling.scheduler import Scheduler

VLLM_PYTHON = os.environ.get("RSTAR_VLLM_PYTHON", "")
NUM_EPISODES, NUM_TURNS, TOKENS_PER_TURN = 24, 3, 60
MAX_CONTEXT = 256


def signal_server(url, signal_number):
    """Send a signal to the server that listens at a URL, and to its whole process group."""
    port = url.rpartition(":")[2]
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        words = command_line.read_bytes().decode().split("\0") if command_line.exists() else []
        if "--port" in words and words[words.index("--port") + 1] == port:
            os.killpg(int(command_line.parent.name), signal_number)
            return
    raise LookupError(f"no server at {url}")


async def run_episode(pool, number):
    """Run an episode and return its ids. Episodes of even number sample at temperature 0, the others at 1."""
    rng = random.Random(number)
    ids = rng.choices(range(40), k=20)
    async with pool.open_episode(group=number // 4, max_context_tokens=MAX_CONTEXT) as handle:
        for turn in range(NUM_TURNS):
            sampling = SamplingParams(TOKENS_PER_TURN, temperature=number % 2, seed=100 * number + turn)
            ids += (await handle.generate(ids, sampling)).ids
            ids += rng.choices(range(40), k=5)
    return ids


@asynccontextmanager
async def while_running(pool, engine, min_turns=20):
    """Run all episodes. The block starts once `min_turns` turns have ended and another one runs on `engine`; its end
    waits for the episodes. Yields their tasks."""
    is_engine_running, records = asyncio.Event(), []

    def on_turn(record):
        records.append(record)
        if len(records) >= min_turns and pool.engine_states[engine].requests:
            is_engine_running.set()

    pool.on_turn = on_turn
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run_episode(pool, number)) for number in range(NUM_EPISODES)]
        await is_engine_running.wait()
        yield running


@pytest.mark.timeout(600)
@pytest.mark.asyncio
async def test_every_episode_has_the_same_tokens_although_servers_hang_and_die(tmp_path, monkeypatch):
    if not VLLM_PYTHON:
        pytest.skip("RSTAR_VLLM_PYTHON names no Python that has vLLM")
    pytest.importorskip("torch")
    from tests.trainer.engines.qwen_model import VOCAB_SIZE
    from tests.trainer.real_vllm import save_model

    monkeypatch.setattr(engine_state, "SCRAPE_TIMEOUT_S", 2.0)
    servers = VllmServers(
        VLLM_PYTHON, save_model(tmp_path / "model"), max_model_len=MAX_CONTEXT, max_num_seqs=8, dtype="float32"
    )
    async with servers.serve(2, tmp_path / "logs") as urls:
        size = {"vocab_size": VOCAB_SIZE, "max_model_len": MAX_CONTEXT, "max_num_seqs": 8}
        a, b = (VllmEngine(url, **size, name=name) for url, name in zip(urls, "ab", strict=True))
        async with EnginePool([a, b], scheduler=Scheduler(MAX_CONTEXT), retry_after_s=1.0) as pool:
            expected = await asyncio.gather(*(run_episode(pool, number) for number in range(NUM_EPISODES)))
            before = await a.stats()
            assert before.computed_tokens > NUM_EPISODES * NUM_TURNS * TOKENS_PER_TURN / 4
            assert (await a.capacity()).kv_tokens > MAX_CONTEXT

            async with while_running(pool, "a") as running:
                signal_server(a.url, signal.SIGSTOP)
            assert [task.result() for task in running] == expected
            assert "no answer to 3 scrapes" in pool.engine_states["a"].down_reason
            signal_server(a.url, signal.SIGCONT)
            while not pool.engine_states["a"].is_up:
                await b.stats()

            async with while_running(pool, "b") as running:
                for task in running:
                    task.cancel()
            for engine in (a, b):  # vLLM drops requests whose connection was closed
                while (await engine.stats()).kv_usage:
                    pass

            async with while_running(pool, "b") as running:
                signal_server(b.url, signal.SIGKILL)
            assert [task.result() for task in running] == expected
            while not pool.engine_states["b"].is_up:  # the launcher restarts it
                await a.stats()
            async with while_running(pool, "b") as running:
                pass
            assert [task.result() for task in running] == expected
            assert not any(any(load.values()) for load in engine_loads(pool.scheduler).values())
