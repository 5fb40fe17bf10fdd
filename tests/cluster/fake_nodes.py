"""A fake driver and fake nodes, which need no Ray.

A driver is the process that lists the nodes of a cluster. A fake node answers the handshake as a node agent does, and
then acts as a `FakeExecutor` over TCP.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from sandbox.cluster import handshake
from sandbox.cluster.membership import ClusterMembership
from sandbox.cluster.node_report import NodeReport
from sandbox.errors import ProtocolError
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.settings.server import ServeConfig
from tests.fakes import FakeExecutor

_instances = itertools.count(1)


class FakeNode:
    """One node: the executors that were started on it, and what Ray says of it."""

    def __init__(self, name: str, slots: int = 2, reaction: str = "ready", **report: Any) -> None:
        self.name = name
        self.executors: list[FakeExecutor] = []
        self.generations: list[int] = []
        self.state, self.reason, self.cpus = "ready", "", 1.0
        self.reaction = reaction
        self.reactions: dict[int, str] = {}
        """Reactions of single executors, by their number on the node."""
        self.starts: list[int] = []
        """The number of each executor that was started."""
        self._slots = slots
        self._changes = report
        self._secret = b""
        self._instance = ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.restart()

    def restart(self) -> None:
        """Act as if the agent was started again. The executors of the old agent go on."""
        self._instance = f"instance {next(_instances)}"

    def raw(self) -> dict[str, Any]:
        """Return the row that the driver sends."""
        host, port = self._listener.getsockname()
        report = NodeReport(
            instance=self._instance,
            version=version("rstar-sandbox"),
            cores=1,
            memory_mb=1 << 16,
            isolation="namespaces",
            isolation_error="",
            python="/their/python",
            python_error="",
            runtime="3.13-abc",
            host=host,
            port=port,
        )
        encoded = {**asdict(report), **self._changes} if self.state == "ready" else None
        row = {"id": f"id of {self.name}", "name": self.name, "address": host, "cpus": self.cpus, "report": encoded}
        return {**row, "state": self.state, "reason": self.reason}

    async def serve(self, secret: bytes) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            hello = handshake.MAGIC + bytes(handshake.NONCE_BYTES)
            try:
                await loop.sock_sendall(sock, hello)
                request = await loop.sock_recv(sock, handshake.REQUEST_BYTES)
                start = handshake.decode_request(secret, hello, request)
                self.generations.append(start.generation)
                await loop.sock_sendall(sock, handshake.encode_reply(secret, hello, request))
            except (OSError, ProtocolError):  # the gateway has closed the connection to the executor
                sock.close()
                continue
            self.starts.append(start.executor)
            executor = FakeExecutor(self._slots, self.reactions.get(start.executor, self.reaction))
            await executor.connect(sock)
            self.executors.append(executor)

    def close(self) -> None:
        self._listener.close()
        for executor in self.executors:
            executor.exit()


class FakeCluster:
    """A driver that lists `nodes` each time that `list_nodes` is called, and the gateway's dispatcher."""

    def __init__(self, *nodes: FakeNode) -> None:
        self.nodes = list(nodes)
        self.dispatcher: Dispatcher
        self.starts = 0
        """Starts of the driver."""
        self._events: asyncio.Queue[list[dict[str, Any]] | Exception] = asyncio.Queue()
        self._tasks = asyncio.TaskGroup()
        self._servers: dict[FakeNode, asyncio.Task[None]] = {}
        self._secret = b""

    def list_nodes(self) -> None:
        """Have the driver send its list."""
        self._serve_nodes()
        self._events.put_nowait([node.raw() for node in self.nodes])

    def fail(self, error: Exception) -> None:
        """Have the driver end with an error."""
        self._events.put_nowait(error)

    def rows(self) -> dict[str, tuple[str, str]]:
        """Return state and reason of each node, by name."""
        assert self.dispatcher.membership is not None
        return {row.name: (row.state, row.reason) for row in self.dispatcher.membership.rows()}

    async def snapshots(self) -> AsyncIterator[list[dict[str, Any]]]:
        while True:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            yield event

    @asynccontextmanager
    async def _drive(self, secret: bytes) -> AsyncIterator[FakeCluster]:
        self.starts += 1
        self._secret = secret
        self._serve_nodes()
        yield self

    def _serve_nodes(self) -> None:
        for node in self.nodes if self._secret else ():
            if node not in self._servers:
                self._servers[node] = self._tasks.create_task(node.serve(self._secret))

    @asynccontextmanager
    async def running(self, **settings: Any) -> AsyncIterator[FakeCluster]:
        """Run the dispatcher. The driver has sent its list once."""
        config = ServeConfig(cluster="ray", **settings)
        self.list_nodes()
        async with self._tasks:
            try:
                async with Dispatcher(config, membership=ClusterMembership(config, self._drive)) as self.dispatcher:
                    yield self
            finally:
                for server in self._servers.values():
                    server.cancel()
                for node in self._servers:
                    node.close()
