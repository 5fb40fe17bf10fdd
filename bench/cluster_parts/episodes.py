"""The part `episodes`: collections of episodes with each executor, and one whose processes are killed.

- `sequential`: one episode after the other, as AWorld's baseline (arXiv 2508.20404);
- `local`: `--per-worker` episodes at once in one process;
- `ray`: `--per-worker` episodes at once on each node, timed from the moment at which all workers are ready.

Episodes wait for a model endpoint with a given latency. The fault test is a collection whose workers and nodes are
killed at random, and whose driver is killed twice.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.tables import Block, Result, Table
from bench.probes import processes
from bench.servers.ray_cluster import RayCluster, kill
from trainer.collection.driver import Collection, CollectionStatus
from trainer.collection.local import LocalExecutor
from trainer.collection.store import EpisodeStore, StoreReader
from trainer.collection.work import EpisodeExecutor
from trainer.config import CollectConfig, EnginesConfig, ModelConfig, RunConfig
from trainer.episodes.episode import Problem

AWORLD_SPEEDUP = 14.6
"""AWorld's rollout time on one sequential node, divided by its time on the cluster (arXiv 2508.20404, table 2: 7,695 s
and 525 s)."""
SAMPLES_PER_PROBLEM = 4
FAULT_EPISODES_PER_WORKER = 1
"""Episodes at once per node in the fault test. With few, the test lasts long enough for many kills."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=arguments.count, default=128, help="episodes per executor (default: 128)")
    parser.add_argument("--turns", type=arguments.count, default=4, help="turns per episode (default: 4)")
    parser.add_argument(
        "--latency-s", type=arguments.seconds, default=0.25, help="latency of the model per turn (default: 0.25)"
    )
    parser.add_argument("--per-worker", type=arguments.count, default=8, help="episodes at once per node (default: 8)")
    parser.add_argument(
        "--episode-nodes", default="1,2,4,8", help="numbers of nodes of the part episodes (default: 1,2,4,8)"
    )
    parser.add_argument(
        "--fault-episodes", type=arguments.count, default=500, help="episodes of the fault test (default: 500)"
    )
    parser.add_argument(
        "--kill-episodes-every",
        type=arguments.seconds,
        default=5.0,
        metavar="S",
        help="mean seconds between two kills of the part episodes (default: 5)",
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds with each executor, the counts under faults, and the requirements."""
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as directory:
        return _measure(args, Path(directory))


def _measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from trainer.data.tiny_model import write_tiny_model

    write_tiny_model(directory / "model")
    node_counts = [int(number) for number in args.episode_nodes.split(",")]
    with _model_endpoint(directory / "model", args.latency_s, args.turns) as url:
        setup = _Setup(directory, url, args.per_worker)
        with RayCluster() as cluster, command.counted_progress("runs", 3 + len(node_counts)) as advance:
            sequential_s = setup.collect("sequential", args.episodes)
            advance()
            local_s = setup.collect("local", args.episodes)
            advance()
            ray_s: dict[str, float] = {}
            for count in node_counts:
                while len(cluster.raylets) < count:
                    cluster.add_node()
                ray_s[str(count)] = setup.collect("ray", args.episodes, cluster.address, count)
                advance()
            faults = _faults(setup, cluster, args)
            advance()
    most = str(node_counts[-1])
    bounds = [
        requirements.at_most("stored episodes missing", 0, faults["episodes"] - faults["stored"]),
        requirements.at_most("episodes stored twice", 0, faults["doubled"]),
    ]
    if "1" in ray_s:
        bounds.append(requirements.at_most("time of ray on 1 node over local", 1.1, ray_s["1"] / local_s))
    if int(most) >= 8:
        ratio = sequential_s / ray_s[most]
        bounds.append(requirements.at_least(f"sequential over ray on {most} nodes", AWORLD_SPEEDUP, ratio))
    return {
        "count": args.episodes,
        "turns": args.turns,
        "latency_s": args.latency_s,
        "per_worker": args.per_worker,
        "sequential_s": sequential_s,
        "local_s": local_s,
        "ray_s": ray_s,
        "faults": faults,
        "requirements": bounds,
    }


class _Setup:
    """The same collection with each executor."""

    def __init__(self, directory: Path, url: str, per_worker: int) -> None:
        self.directory, self.url, self.per_worker = directory, url, per_worker

    def collect(self, executor: str, num_episodes: int, address: str = "", num_nodes: int = 0) -> float:
        """Return the seconds from the first to the last episode."""
        path = self.directory / f"{executor}-{num_nodes}"
        seconds = asyncio.run(self._collect(path, executor, num_episodes, address, num_nodes))
        with StoreReader(path) as reader:
            assert len(list(reader.query("sample"))) == num_episodes
        return round(seconds, 3)

    async def _collect(self, path: Path, executor: str, num_episodes: int, address: str, num_nodes: int) -> float:
        with EpisodeStore(path, {}) as store:
            async with self.open_executor(executor, address) as opened:
                while opened.free_slots < num_nodes * self.per_worker:  # noqa: ASYNC110  Ray sends no event
                    await asyncio.sleep(0.05)
                started_at = time.perf_counter()
                await run_collection(store, opened, num_episodes)
                return time.perf_counter() - started_at

    @asynccontextmanager
    async def open_executor(self, name: str, address: str = "") -> AsyncIterator[EpisodeExecutor]:
        from trainer.collection.ray_executor import RayExecutor, connect
        from trainer.recipe.collect_work import HostSpec, open_host

        config = RunConfig(
            model=ModelConfig(system_prompt="Play."),
            engines=EnginesConfig(kind="vllm", endpoints=(self.url,), max_num_seqs=1024),
            collect=CollectConfig(max_response_tokens=2000, max_turns=50),
        )
        spec = HostSpec(config, self.directory / "model", self.directory, needs_sandbox=False, share=1.0)
        if name == "ray":
            connect(address)
            async with RayExecutor(partial(open_host, spec), self.per_worker) as executor:
                yield executor
            return
        max_episodes = 1 if name == "sequential" else self.per_worker
        async with open_host(spec) as run_episode, LocalExecutor(run_episode, max_episodes) as local:
            yield local


async def run_collection(store: EpisodeStore, executor: EpisodeExecutor, num_episodes: int) -> CollectionStatus:
    """Collect episodes, `SAMPLES_PER_PROBLEM` of each problem. The number of tries is practically unlimited, since each
    kill makes a try fail."""
    options = {"game": "number_guessing", "low": 2, "max_moves": 50}
    if num_episodes % SAMPLES_PER_PROBLEM:
        raise command.Misuse(f"expected a multiple of {SAMPLES_PER_PROBLEM} episodes, got {num_episodes}")
    num_problems = num_episodes // SAMPLES_PER_PROBLEM
    environment = "examples.games:GameEnvironment"
    problems = (Problem(f"game-{index}", "Play.", "1", "", environment, options) for index in range(num_problems))
    limits = CollectConfig(samples_per_problem=SAMPLES_PER_PROBLEM, max_infrastructure_failures=1000)
    return await Collection(store, executor, problems, limits).run()


@contextmanager
def _model_endpoint(model_dir: Path, latency_s: float, num_turns: int) -> Iterator[str]:
    arguments = [str(model_dir), str(latency_s), str(num_turns)]
    with subprocess.Popen(
        [sys.executable, "-m", "bench.servers.model_endpoint", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise command.BenchFailed("the model endpoint did not start; its output is above")
        yield url
        process.stdin.close()


def _faults(setup: _Setup, cluster: RayCluster, args: argparse.Namespace) -> dict[str, Any]:
    """Collect in a process of its own, and kill workers, nodes and twice the driver."""
    rng = random.Random(args.seed)
    kills: Counter[str] = Counter()
    path = setup.directory / "faults"
    nodes = list(range(len(cluster.raylets)))
    with ExitStack() as stack:
        driver = stack.enter_context(_FaultDriver(setup, cluster.address, path, args.fault_episodes))
        while True:
            with suppress(subprocess.TimeoutExpired):
                driver.process.wait(rng.expovariate(1 / args.kill_episodes_every))
                break
            if kills["driver"] < 2 and driver.num_stored() > args.fault_episodes * (kills["driver"] + 1) / 3:
                kills["driver"] += 1
                driver.restart()
            elif rng.random() < 0.5 and (workers := _worker_pids(cluster, nodes)):
                kills["worker"] += 1
                kill(rng.choice(workers))
            else:
                kills["node"] += 1
                cluster.kill_node(nodes.pop(rng.randrange(len(nodes))))
                nodes.append(cluster.add_node())
        if driver.process.returncode:
            raise command.BenchFailed(f"the driver ended with exit code {driver.process.returncode}")
    with StoreReader(path) as reader:
        stored = Counter(reader.query("problem, sample"))
        rows = sum(len(shard.read_bytes().splitlines()) for shard in (path / "episodes").glob("*.jsonl"))
    return {
        "episodes": args.fault_episodes,
        "kills": sum(kills.values()),
        "kills_by_kind": dict(kills),
        "stored": len(stored),
        "doubled": rows - len(stored),
    }


class _FaultDriver:
    """The driver of a collection as a process that can be killed and started again."""

    def __init__(self, setup: _Setup, address: str, path: Path, num_episodes: int) -> None:
        parts = (setup.directory, setup.url, FAULT_EPISODES_PER_WORKER, address, path, num_episodes)
        self._command = [sys.executable, "-m", __spec__.name, *map(str, parts)]
        self._path = path

    def __enter__(self) -> _FaultDriver:
        self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.__exit__()
        self.__enter__()

    def num_stored(self) -> int:
        return sum(shard.read_bytes().count(b"\n") for shard in (self._path / "episodes").glob("*.jsonl"))


def _worker_pids(cluster: RayCluster, nodes: Sequence[int]) -> list[int]:
    """Return the processes of Ray's actors on these nodes that run episodes."""
    pids = [pid for number in nodes for pid in cluster.processes(number)]
    return [pid for pid in pids if processes.command(pid).startswith("ray::EpisodeWorker")]


def run_driver(directory: str, url: str, per_worker: str, address: str, path: str, num_episodes: str) -> None:
    """The process of `_FaultDriver`."""

    async def run() -> None:
        with EpisodeStore(Path(path), {}) as store:
            async with _Setup(Path(directory), url, int(per_worker)).open_executor("ray", address) as executor:
                await run_collection(store, executor, int(num_episodes))

    asyncio.run(run())


def tables(result: Result) -> list[Block]:
    """AWorld's table from this run, and one sentence on faults."""
    faults, sequential_s = result["faults"], result["sequential_s"]
    times = {
        "one at a time (AWorld's baseline)": sequential_s,
        f"`local`, {result['per_worker']} at once": result["local_s"],
        **{
            f"`ray`, {count} node{'s' * (count != '1')}, {result['per_worker']} at once on each": seconds
            for count, seconds in result["ray_s"].items()
        },
    }
    rows = [(name, f"{seconds:.2f}", f"{sequential_s / seconds:.1f}") for name, seconds in times.items()]
    title = (
        f"{result['count']} episodes of {result['turns']} turns, an endpoint that takes "
        f"{result['latency_s']:g} s per turn, all nodes on one machine"
    )
    return [
        Table(("executor", "rollout s", "times faster"), rows, title),
        f"{faults['episodes']} episodes while a worker, a node or the driver was killed {faults['kills']} times: "
        f"{faults['stored']} stored, {faults['doubled']} stored twice.",
    ]


if __name__ == "__main__":
    run_driver(*sys.argv[1:])
