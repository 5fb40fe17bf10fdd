"""Lost, doubled and mixed-up calls while nodes are killed and one is cut off.

- A kill ends all processes of a node with SIGKILL. Ray then starts a new node in its place. The last node is not
  killed.
- A cut takes the network of a node down for `cut_s`, if this process may create network namespaces. Otherwise it stops
  all processes of the node with SIGSTOP for this time. In both cases the node is silent while its connections stay
  open. Processes that were stopped then send what they still have to send.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.harness import command, requirements
from bench.harness.load import CallTally
from bench.harness.requirements import Requirement
from bench.harness.tables import Block, Result
from bench.probes import processes
from bench.probes.leftovers import surviving
from bench.servers import node_networks, service
from bench.servers.ray_cluster import RayCluster
from bench.servers.server_under_test import CheckedLoad
from bench.servers.service import Service
from bench.workloads.checked_calls import STDLIB_WEIGHTS, checked_calls

FLAGS = ("--profiles", "bare", "--slots", "8", "--long-slots", "8")
IN_FLIGHT = 128
MAX_S = 900.0
"""Seconds after which calls without an answer are lost."""
FIRST_CUT_S = 5.0
"""Seconds from the start of the load to the cut."""


@dataclass
class _Faults:
    """The faults so far. `nodes` are the nodes that are neither killed nor cut off."""

    cluster: RayCluster
    rng: random.Random
    nodes: list[int]
    kills: int = 0
    cuts: int = 0
    replacements: list[asyncio.Task[None]] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the task that uses the cluster, since the cluster does one thing at a time."""

    async def kill_nodes(self, every_s: float, tasks: asyncio.TaskGroup) -> None:
        due = time.monotonic()
        while True:
            due += self.rng.expovariate(1 / every_s)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if len(self.nodes) > 1:
                number = self.nodes.pop(self.rng.randrange(len(self.nodes)))
                _signal(self.cluster.processes(number), signal.SIGKILL)
                self.kills += 1
                self.replacements.append(tasks.create_task(self._replace(number)))

    async def _replace(self, number: int) -> None:
        async with self.lock:
            await asyncio.to_thread(self.cluster.kill_node, number)
            self.nodes.append(await asyncio.to_thread(self.cluster.add_node))

    async def cut_one(self, seconds: float) -> None:
        await asyncio.sleep(FIRST_CUT_S)
        async with self.lock:
            number = self.nodes.pop(0)
            pids = self.cluster.processes(number)
            await self._cut(number, pids)
        self.cuts += 1
        await asyncio.sleep(seconds)
        async with self.lock:
            await self._restore(number, pids)
            self.nodes.append(number)

    async def _cut(self, number: int, pids: list[int]) -> None:
        if self.cluster.has_networks:
            await asyncio.to_thread(self.cluster.cut, number)
        else:
            _signal(pids, signal.SIGSTOP)

    async def _restore(self, number: int, pids: list[int]) -> None:
        if self.cluster.has_networks:
            await asyncio.to_thread(self.cluster.restore, number)
        else:
            _signal(reversed(pids), signal.SIGCONT)


@dataclass
class _LoadedServer:
    """The server as `CheckedLoad` sees it. Nothing here may end it."""

    server: Service

    @property
    def url(self) -> str:
        return self.server.url

    def check_is_alive(self) -> None:
        assert processes.state(self.server.pid) not in ("", "Z"), "the gateway has ended by itself"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Send the calls under faults and return the counts."""
    tally, rng = CallTally(args.calls), random.Random(args.seed)
    with (
        RayCluster(networks=node_networks.are_available()) as cluster,
        command.counted_progress("calls under faults", args.calls) as advance,
    ):
        numbers = [cluster.add_node() for _ in range(args.nodes)]
        faults = _Faults(cluster, rng, numbers)
        with service.running(flags=[*FLAGS, "--cluster", f"ray={cluster.address}"]) as server:
            calls = checked_calls(args.calls, args.seed, STDLIB_WEIGHTS)
            load = CheckedLoad(_LoadedServer(server), calls, tally, random.Random(args.seed), advance)
            start = time.monotonic()
            asyncio.run(_attack(load, faults, args.kill_every, args.cut))
            seconds = time.monotonic() - start
            pids = [*server.processes(), *cluster.sandbox_processes()]
        left = [processes.command(pid) for pid in surviving(pids)]
    command.print_examples("cluster", tally.examples)
    result = {
        "calls": args.calls,
        "nodes": args.nodes,
        "seconds": round(seconds, 1),
        "kills": faults.kills,
        "cuts": faults.cuts,
        "cut_by": "network" if cluster.has_networks else "SIGSTOP",
        **tally.errors,
        "unavailable": tally.unavailable.total(),
        "retried": tally.retried,
        "leftovers": left,
    }
    return {**result, "requirements": needed(result)}


async def _attack(load: CheckedLoad, faults: _Faults, kill_every_s: float, cut_s: float) -> None:
    with contextlib.suppress(TimeoutError):  # the unanswered calls count as lost
        async with asyncio.timeout(MAX_S), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(faults.kill_nodes(kill_every_s, group)),
                group.create_task(faults.cut_one(cut_s)),
            ]
            await load.run(IN_FLIGHT)
            for task in (*tasks, *faults.replacements):
                task.cancel()


def needed(result: Result) -> list[Requirement]:
    return requirements.none_of(
        {name: result[name] for name in ("lost", "doubled", "mismatched")} | {"leftovers": len(result["leftovers"])}
    )


def tables(result: Result) -> list[Block]:
    """The counts, as text."""
    return [
        f"{result['calls']:,} calls over {result['nodes']} nodes in {result['seconds']:.0f} s, {result['kills']} nodes "
        f"killed and {result['cuts']} cut off ({result['cut_by']}): {result['lost']:,} lost, "
        f"{result['doubled']:,} doubled, {result['mismatched']:,} mixed up, {result['unavailable']:,} `unavailable`, "
        f"{result['retried']:,} retried."
    ]


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
