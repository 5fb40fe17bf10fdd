"""Tests of the `ray` executor of a collection, on a Ray cluster whose nodes are all on this machine. No episode is
lost, whatever process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.collection.hosts import NUM_TURNS, journal_rows, open_slow_host, wait_for
from trainer.collection import ray_executor
from trainer.collection.driver import Collection, CollectionStatus
from trainer.collection.ray_executor import RayExecutor, connect
from trainer.collection.store import EpisodeStore, StoreReader
from trainer.collection.work import CollectionError
from trainer.config import CollectConfig, ConfigError
from trainer.episodes.episode import Problem

ray = pytest.importorskip("ray", reason="Ray is not installed (the extra `cluster`)")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

STORE_BYTES = 80 << 20
"""Bytes of a node's object store, about the smallest that Ray accepts. Nothing here uses it."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs. Tests add nodes and remove them."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def nodes(cluster: Any) -> Iterator[list[Any]]:
    """Two nodes of the cluster. A test may add further ones to the list."""
    added = [cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES) for _ in range(2)]
    yield added
    for node in added:
        with suppress(Exception):  # a test has killed it
            cluster.remove_node(node, allow_graceful=False)


@asynccontextmanager
async def open_executor(
    cluster: Any, started: Path, turn_s: float = 0.02, gate: Path | None = None
) -> AsyncIterator[RayExecutor]:
    connect(cluster.address)
    async with RayExecutor(partial(open_slow_host, turn_s, started, gate), episodes_per_worker=8) as executor:
        yield executor


async def collect(executor: RayExecutor, path: Path, num_problems: int) -> CollectionStatus:
    problems = [Problem(f"p{index}", "Count.", str(NUM_TURNS - 1)) for index in range(num_problems)]
    with EpisodeStore(path / "store", {}) as store:
        return await Collection(
            store, executor, problems, CollectConfig(samples_per_problem=2, max_infrastructure_failures=50)
        ).run()


def assert_each_stored_once(path: Path, num_problems: int) -> None:
    with StoreReader(path / "store") as reader:
        keys = Counter(reader.query("problem, sample"))
        assert keys == Counter({(f"p{index}", sample): 1 for index in range(num_problems) for sample in range(2)})
        assert {episode.reward for episode in reader.episodes()} == {1.0}


def tries(started: Path) -> list[tuple[str, int, int]]:
    """Return (problem/sample, turns at the start, pid of the worker) of each try."""
    lines = started.read_text().splitlines() if started.exists() else []
    return [(key, int(turns), int(pid)) for key, turns, pid in map(str.split, lines)]


async def test_episodes_run_on_all_nodes_and_are_stored_once(cluster: Any, nodes: list[Any], tmp_path: Path) -> None:
    started = tmp_path / "started"
    async with open_executor(cluster, started) as executor:
        await wait_for(lambda: executor.num_workers == 2)
        status = await collect(executor, tmp_path, 20)
    assert_each_stored_once(tmp_path, 20)
    assert status.failed_tries == {}
    assert len({pid for *_, pid in tries(started)}) == 2


async def test_a_killed_worker_and_a_killed_node_lose_no_episode(
    cluster: Any, nodes: list[Any], tmp_path: Path
) -> None:
    """Until the node is lost, no episode ends: each waits in its second turn."""
    started, gate = tmp_path / "started", tmp_path / "gate"
    async with open_executor(cluster, started, gate=gate) as executor:
        collection = asyncio.create_task(collect(executor, tmp_path, 20))
        await wait_for(lambda: len({pid for *_, pid in tries(started)}) == 2)
        await wait_for(lambda: journal_rows(tmp_path / "store") >= 16)  # each running episode has a finished turn
        os.kill(tries(started)[0][2], signal.SIGKILL)
        await wait_for(lambda: len({pid for *_, pid in tries(started)}) == 3)  # a new worker has episodes
        nodes.append(cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES))
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
        await wait_for(lambda: executor.lost_workers == 2)
        gate.touch()
        status = await collection
    assert_each_stored_once(tmp_path, 20)
    assert status.failed_tries["infrastructure"] >= 2
    assert any(turns > 0 for _, turns, _ in tries(started))  # some episodes went on after their last turn


async def test_a_worker_that_does_not_answer_is_lost_and_its_late_events_are_ignored(
    cluster: Any, nodes: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "SILENCE_TIMEOUT_S", 4.0)
    started = tmp_path / "started"
    async with open_executor(cluster, started, turn_s=0.3) as executor:
        await wait_for(lambda: executor.num_workers == 2)
        collection = asyncio.create_task(collect(executor, tmp_path, 10))
        await wait_for(lambda: len({pid for *_, pid in tries(started)}) == 2)
        stopped = tries(started)[0][2]
        os.kill(stopped, signal.SIGSTOP)
        await wait_for(lambda: executor.lost_workers == 1)
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
        await collection
    assert_each_stored_once(tmp_path, 10)


async def test_a_node_that_joins_gets_episodes(cluster: Any, nodes: list[Any], tmp_path: Path) -> None:
    """No episode ends until the new node has episodes. So the time that Ray takes to start a worker does not matter."""
    started, gate = tmp_path / "started", tmp_path / "gate"
    async with open_executor(cluster, started, gate=gate) as executor:
        collection = asyncio.create_task(collect(executor, tmp_path, 30))
        await wait_for(lambda: len({pid for *_, pid in tries(started)}) == 2)
        nodes.append(cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES))
        await wait_for(lambda: len({pid for *_, pid in tries(started)}) == 3)
        gate.touch()
        await collection
    assert_each_stored_once(tmp_path, 30)


async def test_a_host_that_cannot_be_opened_ends_the_collection_with_its_reason(
    cluster: Any, nodes: list[Any], tmp_path: Path
) -> None:
    connect(cluster.address)
    async with RayExecutor(broken_host, episodes_per_worker=8) as executor:
        with pytest.raises(CollectionError, match=r"no worker could be started; .*no sandbox at nowhere"):
            await collect(executor, tmp_path, 1)


@asynccontextmanager
async def broken_host() -> AsyncIterator[Any]:
    raise ConfigError("no sandbox at nowhere")
    yield


async def test_an_address_without_ray_is_refused_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        started_at = time.monotonic()
        with pytest.raises(ConfigError, match="nothing answers"):
            connect(f"127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            connect("127.0.0.1")
        assert time.monotonic() - started_at < 10
