"""The `ray` executor: one worker process per node of a Ray cluster, each with many episodes in its event loop.

    driver: RayExecutor                       node: EpisodeWorker, an asynchronous actor
      submit(episode) ------------------------> LocalExecutor -> EpisodeHost.run
      <--- events, taken by a long poll --------

Invariants:
- Ray places and starts workers. It restarts no worker and repeats no call to a worker. This module decides which
  workers are lost.
- A worker is lost at the first call to it that fails, or that it does not answer for `SILENCE_TIMEOUT_S`. The worker is
  then killed, its episodes fail with an infrastructure failure, and none of its later events is accepted. If its node
  is alive, the node gets a new worker.
- Nodes may join and leave at any time.
- Workers belong to the driver. Ray ends them when the driver ends, also if the driver is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any, Self

from trainer.collection.local import LocalExecutor
from trainer.collection.work import CollectionError, Event, EventQueue, Progress, RunEpisode, Try, TryFailed
from trainer.config import ConfigError
from trainer.episodes.episode import Episode, FailureKind

logger = logging.getLogger(__name__)

NODE_POLL_S = 1.0
"""Seconds between two requests for the list of nodes."""
RAY_TIMEOUT_S = 10.0
"""Maximum seconds of a request to the head node of Ray."""
LONG_POLL_S = 2.0
"""A worker answers a poll after at most this number of seconds, even if it has no event to report."""
SILENCE_TIMEOUT_S = 20.0
"""A worker is lost if it does not answer a poll for this number of seconds."""
START_TIMEOUT_S = 300.0
"""Seconds that a worker may take to start: import torch, connect to the engines and the sandbox."""
MAX_START_FAILURES = 3
"""If no worker runs, the collection ends after this number of failed starts in a row, on any nodes. A start has failed
if the worker's own code raised an exception. A worker that was killed while it started does not count."""
MAX_RESTART_DELAY_S = 30.0
"""Maximum of the seconds until a node gets another worker. The delay doubles with each worker in a row that was lost
while it started."""
NO_NODE_TIMEOUT_S = 300.0
"""The collection ends after this number of seconds without any worker."""
NAMESPACE = "rstar-train"
MAX_REASON_CHARS = 300

OpenHost = Callable[[], AbstractAsyncContextManager[RunEpisode]]
"""Opens what a worker process needs. It is sent to the nodes, so it has to be importable there."""


class EpisodeWorker:
    """The Ray actor that runs episodes on a node. `start` is called first: it opens in the actor's event loop what
    episodes need."""

    _executor: LocalExecutor

    def __init__(self, open_host: OpenHost, max_episodes: int) -> None:
        self._open_host, self._max_episodes = open_host, max_episodes
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        run_episode = await self._stack.enter_async_context(self._open_host())
        self._executor = await self._stack.enter_async_context(LocalExecutor(run_episode, self._max_episodes))

    async def submit(self, by: Try, episode: Episode) -> None:
        self._executor.submit(by, episode)

    async def cancel(self, by: Try) -> None:
        self._executor.cancel(by)

    async def next_events(self) -> list[Event]:
        with suppress(TimeoutError):
            async with asyncio.timeout(LONG_POLL_S):
                return await self._executor.next_events()
        return []

    async def stop(self) -> None:
        await self._stack.aclose()


class _Worker:
    """The driver's side of one worker."""

    def __init__(self, node_id: str, node_name: str, actor: Any) -> None:
        self.node_id, self.node_name, self.actor = node_id, node_name, actor
        self.is_ready = self.has_failed_to_start = False
        self.tries: set[Try] = set()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolved with the reason when the worker is lost, or with an empty text when the executor ends."""


class RayExecutor:
    """Runs episodes on all nodes of a Ray cluster, at most `episodes_per_worker` on each.

    Call `connect` first. `next_events` raises `CollectionError` if no worker can be started.
    """

    def __init__(self, open_host: OpenHost, episodes_per_worker: int) -> None:
        self.lost_workers = 0
        self._open_host, self._episodes_per_worker = open_host, episodes_per_worker
        self._workers: dict[str, _Worker] = {}
        """The worker of each node, by node id."""
        self._start_failures = 0
        self._losses_in_a_row: dict[str, int] = {}
        """By node id: the number of workers in a row that were lost before they were ready."""
        self._events = EventQueue()
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._watcher = self._tasks.create_task(self._watch_nodes())
        return self

    async def __aexit__(self, *_: object) -> None:
        import ray

        self._watcher.cancel()
        for worker in self._workers.values():
            if not worker.lost.done():
                worker.lost.set_result("")
        await self._tasks.__aexit__(None, None, None)
        ray.shutdown()

    @property
    def free_slots(self) -> int:
        return sum(self._free_slots(worker) for worker in self._workers.values())

    @property
    def num_workers(self) -> int:
        return sum(worker.is_ready for worker in self._workers.values())

    def _free_slots(self, worker: _Worker) -> int:
        can_run = worker.is_ready and not worker.lost.done()
        return self._episodes_per_worker - len(worker.tries) if can_run else 0

    def submit(self, by: Try, episode: Episode) -> None:
        """Give an episode to the worker that has the most free slots."""
        worker = max(self._workers.values(), key=self._free_slots)
        worker.tries.add(by)
        self._tasks.create_task(self._call(worker, "submit", by, episode))

    def cancel(self, by: Try) -> None:
        for worker in self._workers.values():
            if by in worker.tries:
                worker.tries.remove(by)
                self._tasks.create_task(self._call(worker, "cancel", by))

    async def next_events(self) -> list[Event]:
        return await self._events.next()

    async def _watch_nodes(self) -> None:
        """Start a worker on each node that has none, and notice nodes that have gone."""
        loop = asyncio.get_running_loop()
        had_worker_at = loop.time()
        while True:
            try:
                async with asyncio.timeout(RAY_TIMEOUT_S):
                    nodes = await asyncio.to_thread(_nodes_with_cpus)
            except Exception as error:
                self._events.fail(CollectionError(f"Ray's head does not answer: {type(error).__name__}: {error}"))
                return
            for node_id, name in nodes.items():
                if node_id not in self._workers:
                    self._tasks.create_task(self._run_worker(node_id, name))
            for node_id, worker in self._workers.items():
                if node_id not in nodes and not worker.lost.done():
                    worker.lost.set_result("its node left the cluster")
            if self.num_workers:
                had_worker_at = loop.time()
            elif loop.time() - had_worker_at > NO_NODE_TIMEOUT_S:
                self._events.fail(CollectionError(f"no node had a worker for {NO_NODE_TIMEOUT_S:g} s"))
                return
            await asyncio.sleep(NODE_POLL_S)

    async def _run_worker(self, node_id: str, node_name: str) -> None:
        """Run one worker until it is lost or the executor ends. If it is lost, report its episodes as failed."""
        import ray

        worker = self._workers[node_id] = _Worker(node_id, node_name, self._create_actor(node_id))
        poll = self._tasks.create_task(self._start_and_poll(worker))
        try:
            reason = await worker.lost
            if not reason:
                with suppress(Exception):
                    await asyncio.wait_for(worker.actor.stop.remote(), RAY_TIMEOUT_S)
                return
        finally:
            poll.cancel()
            with suppress(Exception):
                ray.kill(worker.actor)
        if worker.is_ready:
            self.lost_workers += 1
        self._start_failures = self._start_failures + 1 if worker.has_failed_to_start else 0
        logger.warning("worker on node %s lost with %d episodes: %s", node_name, len(worker.tries), reason)
        for by in worker.tries:
            self._events.put(TryFailed(by, FailureKind.INFRASTRUCTURE, f"worker on node {node_name} lost: {reason}"))
        if self._start_failures >= MAX_START_FAILURES and not self.num_workers:
            self._events.fail(
                CollectionError(f"no worker could be started; the last failure, on {node_name}: {reason}")
            )
        self._losses_in_a_row[node_id] = 0 if worker.is_ready else self._losses_in_a_row.get(node_id, 0) + 1
        await asyncio.sleep(min(MAX_RESTART_DELAY_S, NODE_POLL_S * (2 ** self._losses_in_a_row[node_id] - 1)))
        del self._workers[node_id]

    def _create_actor(self, node_id: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = ray.remote(EpisodeWorker).options(
            num_cpus=0,  # an event loop that mostly waits; the cores are for the sandbox
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=10_000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        return actor.remote(self._open_host, self._episodes_per_worker)

    async def _start_and_poll(self, worker: _Worker) -> None:
        if not await self._call(worker, "start", timeout_s=START_TIMEOUT_S):
            return
        worker.is_ready = True
        self._events.wake()
        while await self._call(worker, "next_events"):
            pass

    async def _call(
        self, worker: _Worker, method: str, *arguments: object, timeout_s: float = SILENCE_TIMEOUT_S
    ) -> bool:
        """Call a method of a worker. If the call fails, count the worker as lost and return False."""
        try:
            async with asyncio.timeout(timeout_s):
                result = await getattr(worker.actor, method).remote(*arguments)
        except TimeoutError:
            reason = f"no answer to {method} in {timeout_s:g} s"
        except Exception as error:  # Ray raises the actor's exceptions and its own
            cause = getattr(error, "cause", None)
            worker.has_failed_to_start = not worker.is_ready and cause is not None
            reason = _reason(cause or error)
        else:
            if not worker.lost.done() and result is not None:
                self._accept(worker, result)
            return not worker.lost.done()
        if not worker.lost.done():
            worker.lost.set_result(reason)
        return False

    def _accept(self, worker: _Worker, events: list[Event]) -> None:
        """Take the events of tries that the worker still has. Drop the events of cancelled tries."""
        for event in events:
            if event.by in worker.tries:
                self._events.put(event)
                if not isinstance(event, Progress):
                    worker.tries.remove(event.by)


def connect(address: str = "") -> None:
    """Connect to the Ray cluster at HOST:PORT. Raises `ConfigError`.

    Without an address there are three possibilities, in this order: the address in RAY_ADDRESS, a cluster that runs on
    this machine, or a new cluster on this machine.
    """
    # Otherwise Ray would rebuild the Python environment on the nodes.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError("executor ray: needs Ray; run pip install 'rstar-sandbox[cluster]'") from None
    if address:
        _check_reachable(address)
    try:
        ray.init(
            address or None,
            namespace=NAMESPACE,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
        )
    except Exception as error:  # a version mismatch is a RuntimeError, an absent head a ConnectionError
        raise ConfigError(f"Ray at {address or 'this machine'}: {str(error).strip().splitlines()[0]}") from error


def _check_reachable(address: str) -> None:
    """Raise `ConfigError` if nothing answers at `address`. `ray.init` itself would wait for minutes."""
    host, colon, port = address.rpartition(":")
    try:
        if not colon or not port.isdecimal():
            raise ConfigError(f"Ray's address {address!r}: expected HOST:PORT")
        with socket.create_connection((host, int(port)), timeout=5):
            pass
    except OSError as error:
        raise ConfigError(f"Ray at {address}: nothing answers ({error}); start one with `ray start --head`") from None


def num_nodes() -> int:
    """Return the number of nodes that get a worker."""
    return len(_nodes_with_cpus())


def _nodes_with_cpus() -> dict[str, str]:
    """Return the names of living nodes by id. Nodes without CPUs, such as a head, are left out. If no living node has
    CPUs, all of them are returned."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    workers = [node for node in alive if node["Resources"].get("CPU")]
    return {node["NodeID"]: f"{node['NodeManagerHostname']}:{node['NodeManagerPort']}" for node in workers or alive}


def _reason(error: Exception) -> str:
    """Return the error in one line. Ray's own errors have the cause in their last line that is not indented."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line[0].isspace()]
    is_ray = type(error).__module__.startswith("ray.")
    text = (lines[-1] if is_ray else lines[0]) if lines else ""
    return f"{type(error).__name__}: {text}"[:MAX_REASON_CHARS]
