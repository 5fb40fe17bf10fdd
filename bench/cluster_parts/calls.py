"""Throughput and latency of `serve --cluster ray` with one node, beside the same executors as processes of the gateway.

Both servers have the same settings and all cores of the machine. They run one after the other. So no Ray runs beside
the local server, and the cost of Ray's own processes counts against the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.harness import command, requirements
from bench.harness.load import CallTally, OnAnswer, closed_loop, encoded_batches, execute, http_session, send_batch
from bench.harness.requirements import Requirement
from bench.harness.statistics import median
from bench.harness.tables import Block, Result, Table
from bench.servers import service
from bench.servers.ray_cluster import RayCluster
from bench.servers.service import Service
from bench.workloads.checked_calls import numbered_calls
from sandbox import machine

BATCH = 64
"""Calls in a request."""
BATCHES_IN_FLIGHT = 4
WARM_UP_CALLS = 512
SINGLE_CALLS = 400
"""Calls sent one at a time, for the latency."""
FLAGS = ("--profiles", "bare")
MIN_SHARE = 0.8
"""The requirement: with a node of Ray, the throughput is at least this share of the local one."""
MAX_ADDED_MS = 5.0
"""The requirement: a node adds at most this number of ms to the median latency."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both servers `--rounds` times, and return the medians and all rounds."""
    calls = args.calls_per_round
    num_calls = 2 * args.rounds * (calls + WARM_UP_CALLS + SINGLE_CALLS)
    sides: dict[str, Callable[[], Any]] = {"local": _local_server, "ray": _ray_server}
    rows: list[dict[str, float]] = []
    with command.counted_progress("calls", num_calls) as advance:
        for _ in range(args.rounds):
            row: dict[str, float] = {}
            for name, side in sides.items():
                with side() as server:
                    measured = asyncio.run(_load(server, calls, advance))
                row |= {f"{name}_{key}": value for key, value in measured.items()}
            rows.append(row)
    local, ray = (median([row[f"{name}_per_s"] for row in rows]) for name in sides)
    added_ms = median([row["ray_p50_ms"] - row["local_p50_ms"] for row in rows])
    result = {
        "calls": calls,
        "local_per_s": round(local),
        "ray_per_s": round(ray),
        "share": round(ray / local, 3),
        "added_p50_ms": round(added_ms, 2),
        "rounds": [{key: round(value, 2) for key, value in row.items()} for row in rows],
    }
    return {**result, "requirements": needed(result)}


def needed(result: Result) -> list[Requirement]:
    return [
        requirements.at_least("share of the local throughput", MIN_SHARE, result["share"]),
        requirements.at_most("added median latency, ms", MAX_ADDED_MS, result["added_p50_ms"]),
    ]


def tables(result: Result) -> list[Block]:
    """A row for each server."""
    rows = [
        (f"{name}", f"{result[f'{key}_per_s']:,}", f"{median([row[f'{key}_p50_ms'] for row in result['rounds']]):.2f}")
        for key, name in (("local", "executors of the gateway"), ("ray", "executors on one node of Ray"))
    ]
    return [Table(("calls run by", "calls/s", "p50 of a single call, ms"), rows)]


@contextmanager
def _local_server() -> Iterator[Service]:
    with service.running(flags=FLAGS) as server:
        yield server


@contextmanager
def _ray_server() -> Iterator[Service]:
    with RayCluster() as cluster:
        cluster.add_node(machine.granted_cores())
        with service.running(flags=[*FLAGS, "--cluster", f"ray={cluster.address}"]) as server:
            yield server


async def _load(server: Service, calls: int, on_answer: OnAnswer) -> dict[str, float]:
    async with http_session() as http:

        async def send_all(count: int, seed: int) -> float:
            """Return the seconds that `count` calls take."""
            tally = CallTally(count)
            batches = encoded_batches(list(numbered_calls("print", count, seed)), BATCH, ["application/msgpack"])
            seconds = await closed_loop(
                iter(batches), lambda batch: send_batch(http, server.url, batch, tally, on_answer), BATCHES_IN_FLIGHT
            )
            if tally.correct < count:
                raise command.BenchFailed(f"{count - tally.correct} of {count} calls failed: {tally.examples[:1]}")
            return seconds

        await send_all(WARM_UP_CALLS, 0)
        seconds = await send_all(calls, 1)
        latencies_ms = []
        for number in range(SINGLE_CALLS):
            start = asyncio.get_running_loop().time()
            result = await execute(http, server.url, {"code": f"print({number})"})
            latencies_ms.append((asyncio.get_running_loop().time() - start) * 1e3)
            assert result["stdout"] == f"{number}\n"
            on_answer()
    return {"per_s": calls / seconds, "p50_ms": median(latencies_ms)}
