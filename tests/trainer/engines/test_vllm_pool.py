"""The pool on real vLLM servers that hang, come back and are killed. Runs where RSTAR_VLLM_PYTHON names a Python that
has vLLM."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from trainer.engines import pool as pool_module
from trainer.engines.engine import SamplingParams
from trainer.engines.pool import EnginePool
from trainer.engines.vllm_client import VllmEngine
from trainer.engines.vllm_servers import VllmServers
from trainer.scheduling.scheduler import Scheduler

VLLM = os.environ.get("RSTAR_VLLM_PYTHON", "")
EPISODES, TURNS, TOKENS = 24, 3, 60
MOST = 256


def signal_server(url, what):
    """Send a signal to the process that listens at a URL, and to its whole group."""
    port = url.rpartition(":")[2]
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        words = line.read_bytes().decode().split("\0") if line.exists() else []
        if "--port" in words and words[words.index("--port") + 1] == port:
            os.killpg(int(line.parent.name), what)
            return
    raise LookupError(f"no server at {url}")


async def episode(pool, number):
    """Even episodes are greedy, odd ones sample."""
    draw = random.Random(number)
    ids = draw.choices(range(40), k=20)
    async with pool.open_episode(group=number // 4, max_context_tokens=MOST) as handle:
        for turn in range(TURNS):
            sampling = SamplingParams(TOKENS, temperature=number % 2, seed=100 * number + turn)
            ids += (await handle.generate(ids, sampling)).ids
            ids += draw.choices(range(40), k=5)
    return ids


@asynccontextmanager
async def while_running(pool, engine, turns):
    """Run all episodes. The block starts once `turns` turns are over and some run on `engine`; its exit is awaited."""
    reached, served = asyncio.Event(), []

    def log(turn):
        served.append(turn)
        if len(served) >= turns and pool.engine_states[engine].requests:
            reached.set()

    pool.log = log
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(episode(pool, number)) for number in range(EPISODES)]
        await reached.wait()
        yield running


@pytest.mark.timeout(600)
@pytest.mark.asyncio
async def test_every_episode_ends_with_the_same_tokens_though_servers_hang_and_die(tmp_path, monkeypatch):
    if not VLLM:
        pytest.skip("RSTAR_VLLM_PYTHON names no Python that has vLLM")
    pytest.importorskip("torch")
    from tests.trainer.real_vllm import VOCABULARY, saved

    monkeypatch.setattr(pool_module, "SCRAPE_TIMEOUT_S", 2.0)
    servers = VllmServers(VLLM, saved(tmp_path / "model"), max_model_len=MOST, max_num_seqs=8, dtype="float32")
    async with servers.serve(2, tmp_path / "logs") as urls:
        size = {"vocab_size": VOCABULARY, "max_model_len": MOST, "max_num_seqs": 8}
        a, b = (VllmEngine(url, **size, name=name) for url, name in zip(urls, "ab", strict=True))
        async with EnginePool([a, b], scheduler=Scheduler(MOST), retry_after_s=1.0) as pool:
            expected = await asyncio.gather(*(episode(pool, number) for number in range(EPISODES)))
            before = await a.stats()
            assert before.computed_tokens > EPISODES * TURNS * TOKENS / 4
            assert (await a.capacity()).kv_tokens > MOST

            async with while_running(pool, "a", 20) as running:
                signal_server(a.url, signal.SIGSTOP)
            assert [task.result() for task in running] == expected
            assert "no answer to 3 scrapes" in pool.engine_states["a"].down_reason
            signal_server(a.url, signal.SIGCONT)
            while not pool.engine_states["a"].is_up:
                await b.stats()

            async with while_running(pool, "b", 20) as running:
                for task in running:
                    task.cancel()
            for engine in (a, b):  # vLLM drops what nobody waits for
                while (await engine.stats()).kv_usage:
                    pass

            async with while_running(pool, "b", 20) as running:
                signal_server(b.url, signal.SIGKILL)
            assert [task.result() for task in running] == expected
            while not pool.engine_states["b"].is_up:  # it is started anew
                await a.stats()
            async with while_running(pool, "b", 20) as running:
                pass
            assert [task.result() for task in running] == expected
            assert all(not any(book.values()) for book in pool.scheduler.books().values())
