"""Follows the nodes of a cluster: accepts or refuses each node, and adds and removes its executors.

    starting -> ready      an executor of the node is ready
    starting -> lost       Ray does not list the node any more
    ready -> lost          no executor of the node is ready
    lost -> ready          an executor is ready again
    any -> refused         the node has no executor, and there is a reason not to start one
    refused -> ready       the reason is gone, and an executor is ready
    any -> removed         for `LOST_SHOWN_S`, Ray does not list the node and no executor of the node answers

Invariants:
- An executor is lost only if its own connection ends, fails or is silent. If Ray reports that a node is lost, the
  node's executors are removed once none of them answers.
- If the agent of a node (`node_agent.py`) has been started again, the node's executors are replaced.
- A node that comes back has new executors with new numbers.
- If an executor does not start, its start is repeated after a back-off. The other executors of its node keep running.
- An error of one node is logged with the node's name and shown in `/v1/stats`; it never ends the server.
- The start of the server fails if, before any node has been ready, Ray cannot be used or all its nodes are refused.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Protocol

from sandbox.backoff import backoff_s
from sandbox.cluster.handshake import ExecutorStart
from sandbox.cluster.node_report import NodeReport, refusal
from sandbox.cluster.ray_driver import RawNodes
from sandbox.cluster.remote_executor import RemoteExecutor
from sandbox.errors import ClusterError, ConfigError, ProtocolError, SandboxError
from sandbox.gateway.calls.dispatcher import Dispatcher, NodeRow
from sandbox.gateway.calls.executor_handle import ExecutorHandle
from sandbox.settings.server import ServeConfig

log = logging.getLogger(__name__)

SILENCE_TIMEOUT_S = 10.0
"""Seconds without a frame after which an executor on a node counts as lost. Stats frames come about once a second."""
MIN_RESTART_DELAY_S = 1.0
"""Seconds between the first failure and the next start, both for the driver and for the executors of a node. Each
further failure doubles the time, up to `MAX_RESTART_DELAY_S`."""
MAX_RESTART_DELAY_S = 30.0
LOST_SHOWN_S = 600.0
"""Seconds for which `/v1/stats` shows a node as lost after the node has left the cluster."""


class Driver(Protocol):
    """The part of `RayDriver` that the membership uses."""

    def snapshots(self) -> AsyncIterator[RawNodes]: ...


StartDriver = Callable[[bytes], AbstractAsyncContextManager[Driver]]
"""Starts a driver. Its argument is the secret that the driver gives to the agents of the nodes."""


@dataclass(eq=False)
class _Node:
    """One node, from the first list of Ray that contains it to `LOST_SHOWN_S` after its loss."""

    name: str
    address: str
    report: NodeReport | None = None
    executors: dict[int, ExecutorHandle] = field(default_factory=dict)
    """By the executor's number on the node, from 0. Executors whose start has failed are left out."""
    wanted_executors: int = 1
    is_listed: bool = True
    was_ready: bool = False
    start_problem: str = ""
    """The reason why the node is not accepted, or why one of its executors did not start."""
    loss: str = ""
    """Ray's reason why the node may be lost. Empty if Ray gives no reason."""
    failed_starts: int = 0
    """Failed starts since all executors of the node were last ready. The executors of a node start together, and fail
    together: the first failure is counted and sets `retry_at`, and the failures until `retry_at` are not counted."""
    retry_at: float = 0.0
    past_restarts: int = 0
    """Restarts of executors that have been removed, and of agents."""
    lost_at: float | None = None
    logged_state: str = "starting"

    @property
    def is_answering(self) -> bool:
        return any(executor.is_ready for executor in self.executors.values())

    @property
    def state(self) -> str:
        """One of `NODE_STATES`."""
        if self.is_answering:
            return "ready"
        if self.start_problem and not self.executors:
            return "refused"
        return "lost" if self.was_ready or not self.is_listed else "starting"

    def row(self) -> NodeRow:
        return NodeRow(
            name=self.name,
            address=self.address,
            state=self.state,
            reason=self.start_problem or ("" if self.is_answering else self.loss),
            isolation=self.report.isolation if self.report else "",
            executors=tuple(self.executors.values()),
            restarts=self.past_restarts + sum(executor.restarts for executor in self.executors.values()),
        )


class ClusterMembership:
    """The `Membership` of a dispatcher. A driver process lists the nodes. If the driver process ends, it is started
    again."""

    def __init__(self, config: ServeConfig, start_driver: StartDriver) -> None:
        self._config = config
        self._start_driver = start_driver
        self._secret = secrets.token_bytes(32)
        self._nodes: dict[str, _Node] = {}
        """By the id that Ray gives a node."""
        self._runtime_identity = ""
        """The guest runtime of the first accepted node."""
        self._generations = itertools.count(1)
        """Numbers of all starts of executors (`handshake.py`)."""
        self._server_start_ended = asyncio.Event()
        """Set when the start of the server has succeeded or failed."""
        self._start_error: ClusterError | None = None
        self._has_nodes = True
        """Whether the last list of nodes was not empty."""
        self._dispatcher: Dispatcher

    def rows(self) -> list[NodeRow]:
        return [node.row() for node in self._nodes.values()]

    async def started(self) -> None:
        await self._server_start_ended.wait()
        if self._start_error is not None:
            raise self._start_error

    async def run(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        failures = 0
        while True:
            try:
                async with self._start_driver(self._secret) as driver:
                    async for nodes in driver.snapshots():
                        failures = 0
                        self.update(nodes)
            except (SandboxError, OSError) as error:
                if not self._server_start_ended.is_set():
                    return self._fail_start(str(error))  # no further try: `started` raises, and the server ends
                failures += 1
                log.warning("the Ray driver will be started again: %s", error)
            await asyncio.sleep(backoff_s(failures, MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S))

    def update(self, raw_nodes: RawNodes) -> None:
        """Bring the nodes and their executors up to date with a new list of Ray."""
        if self._dispatcher.is_draining:
            return
        for node in self._nodes.values():
            node.is_listed, node.loss = False, "Ray does not list it"
        for raw in raw_nodes:
            node = self._nodes.setdefault(raw["id"], _Node(raw["name"], raw["address"]))
            node.is_listed, node.loss = True, raw["reason"]
            self._update_node(node, raw)
        now = monotonic()
        for key, node in list(self._nodes.items()):
            if not node.is_listed and not node.is_answering:
                self._remove_executors(node)
                node.lost_at = node.lost_at or now
                if now - node.lost_at > LOST_SHOWN_S:
                    del self._nodes[key]
        self._log_changes()
        self._check_start()

    def _update_node(self, node: _Node, raw: dict[str, Any]) -> None:
        if raw["state"] != "ready":
            if not node.is_answering:
                self._remove_executors(node)
            if raw["state"] == "refused":
                node.start_problem = raw["reason"]
            return
        try:
            report = NodeReport.decode(raw["report"])
        except ProtocolError as error:
            node.start_problem = str(error)
            return
        ray_cores = max(1, int(raw["cpus"]))  # a node may have less than one CPU in Ray
        report = replace(report, cores=min(report.cores, ray_cores))
        if node.report is None or node.report.instance != report.instance:  # another start of the agent
            if node.report is not None:  # otherwise this is the first start
                node.past_restarts += 1
            self._remove_executors(node)
            node.report, node.retry_at = report, 0.0
            self._add_executors(node, report)
        elif len(node.executors) < node.wanted_executors and monotonic() >= node.retry_at:
            self._add_executors(node, report)

    def _add_executors(self, node: _Node, report: NodeReport) -> None:
        """Start the missing executors of a node, unless it is refused."""
        node.start_problem = refusal(report, self._config, self._runtime_identity)
        if node.start_problem:
            return
        node_config = replace(self._config, isolation=report.isolation, python=report.python)
        try:
            executor_configs = node_config.resolved(report.cores, report.memory_mb).per_executor()
        except ConfigError as error:
            node.start_problem = str(error)
            return
        self._runtime_identity = self._runtime_identity or report.runtime
        node.wanted_executors = len(executor_configs)
        for index, executor_config in enumerate(executor_configs):
            if index not in node.executors:
                launch = functools.partial(self._launch, report, index)
                executor = self._dispatcher.add_executor(launch, executor_config.encode(), SILENCE_TIMEOUT_S)
                node.executors[index] = executor
                executor.started.add_done_callback(functools.partial(self._on_started, node, index, executor))
        self._limit_memory()

    async def _launch(self, report: NodeReport, index: int) -> RemoteExecutor:
        start = ExecutorStart(index, next(self._generations))
        return await RemoteExecutor.launch(report.host, report.port, self._secret, start)

    def _on_started(self, node: _Node, index: int, executor: ExecutorHandle, started: asyncio.Future[None]) -> None:
        """Handle the end of an executor's start: the executor is ready, or the start has failed."""
        if started.cancelled() or node.executors.get(index) is not executor:
            return
        error = started.exception()
        if error is None:
            node.was_ready, node.lost_at = True, None
            if sum(executor.is_ready for executor in node.executors.values()) == node.wanted_executors:
                node.failed_starts = 0
            self._server_start_ended.set()
        else:
            if (now := monotonic()) >= node.retry_at:
                node.failed_starts += 1
                node.retry_at = now + backoff_s(node.failed_starts, MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S)
            node.start_problem = str(error)
            self._remove_executor(node, index)
            if node.executors:  # otherwise `_log_changes` logs it
                log.warning("node %s: %s", node.name, error)
        self._log_changes()
        self._check_start()

    def _remove_executors(self, node: _Node) -> None:
        if node.executors:
            node.start_problem = ""  # it was the reason why one executor did not start, while others ran
        for index in list(node.executors):
            self._remove_executor(node, index)

    def _remove_executor(self, node: _Node, index: int) -> None:
        executor = node.executors.pop(index)
        node.past_restarts += executor.restarts
        self._dispatcher.remove_executor(executor)
        self._limit_memory()

    def _limit_memory(self) -> None:
        """Limit the memory of further calls to that of the smallest node with executors, since any of these nodes may
        run a call. If no node has executors, the limit stays."""
        memory_mb = [node.report.memory_mb for node in self._nodes.values() if node.executors and node.report]
        if memory_mb:
            self._dispatcher.limit_memory(min(memory_mb))

    def _log_changes(self) -> None:
        had_nodes, self._has_nodes = self._has_nodes, any(node.is_listed for node in self._nodes.values())
        if had_nodes and not self._has_nodes:
            log.warning("Ray lists no node with CPUs; calls wait in the queue")
        for node in self._nodes.values():
            row = node.row()
            if row.state != node.logged_state:
                numbers = ", ".join(str(executor.number) for executor in node.executors.values())
                detail = row.reason or (f"isolation {row.isolation}, executors {numbers}" if numbers else "")
                level = logging.INFO if row.state == "ready" else logging.WARNING
                log.log(level, "node %s is %s: %s", node.name, row.state, detail or "no reason given")
                node.logged_state = row.state

    def _check_start(self) -> None:
        """Fail the start of the server if Ray lists only nodes that are refused."""
        listed = [node for node in self._nodes.values() if node.is_listed]
        if listed and not self._server_start_ended.is_set() and all(node.state == "refused" for node in listed):
            reasons = "; ".join(f"node {node.name}: {node.start_problem}" for node in listed)
            self._fail_start(f"no node of the cluster can run calls: {reasons}")

    def _fail_start(self, reason: str) -> None:
        self._start_error = ClusterError(reason)
        self._server_start_ended.set()
