"""Does a server still hold the same resources after ten thousand calls as after two thousand?

    python -m bench.leaks [--calls 10000] [--json]

The calls are the mix of real traffic. Some of them are hostile: they leave something behind if the sandbox does not
remove it (`bench.workloads.hostile_calls`). In between, whole batches are abandoned and zygotes are killed. After every
`--every` calls the server comes to rest. Then its processes, descriptors, mounts, control groups, temporary files and
memory are counted. When the server has ended, everything that it created must be gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.tables import Block, Result
from bench.probes import processes
from bench.probes.resource_growth import growth_at_rest
from bench.probes.resources import ResourceSnapshot
from bench.servers.server_under_test import ServerUnderTest
from bench.workloads.hostile_calls import HOSTILE_CALLS, SHORT_LIMITS
from bench.workloads.tool_calls import sample_calls
from sandbox.client import AsyncClient
from sandbox.types import Call, Status

BATCH = 64
HOSTILE_SHARE = 0.1
"""Share of hostile calls."""
ABANDON_AFTER_S = 0.2
"""Seconds after which the client abandons a batch. Only a part of its calls has ended then."""
KILL_AFTER_S = 0.5
"""Seconds after the start of a stretch of traffic at which a zygote is killed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return exit code 1 if a resource has grown or something is left behind."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("leaks", __doc__, "python", "seed")
    count = arguments.count
    parser.add_argument("--calls", type=count, default=10_000, help="number of calls (default: 10000)")
    parser.add_argument("--every", type=count, default=1000, help="calls between two counts (default: 1000)")
    parser.add_argument(
        "--warm-up", type=count, default=2000, help="calls until pools are filled and caches warm (default: 2000)"
    )
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.calls < args.warm_up + args.every:
        raise command.BenchFailed(f"--calls {args.calls}: expected at least {args.warm_up + args.every} calls")
    snapshots: list[ResourceSnapshot] = []
    with ServerUnderTest(args.python) as server, command.counted_progress("calls", args.calls) as advance:
        load = _LeakLoad(server, args, advance)
        for done in range(0, args.calls, args.every):
            asyncio.run(load.run(min(args.every, args.calls - done)))
            snapshots.append(server.snapshot_at_rest(load.calls))
    grown = growth_at_rest(snapshots, args.warm_up)
    command.print_examples("leaks", [*(f"unavailable: {error}" for error in load.unavailable), *server.leftovers])
    return {
        "calls": load.calls,
        "warm_up": args.warm_up,
        "abandoned_batches": load.abandoned,
        "killed_zygotes": load.killed,
        "statuses": dict(load.statuses.most_common()),
        "unavailable": dict(load.unavailable.most_common(20)),
        "snapshots": [asdict(snapshot) for snapshot in snapshots],
        "grown": grown,
        "leftovers": server.leftovers,
        "requirements": [
            # `grown` has only resources beyond their tolerance, so each of these requirements is unmet.
            *(requirements.at_most(name, bound=before, measured=after) for name, (before, after) in grown.items()),
            *requirements.none_of({"leftovers": len(server.leftovers)}),
        ],
    }


class _LeakLoad:
    """Sends the calls, abandons batches, and kills zygotes."""

    def __init__(self, server: ServerUnderTest, args: argparse.Namespace, on_answer: Callable[[], object]) -> None:
        self.calls = self.abandoned = self.killed = 0
        self.statuses: Counter[str] = Counter()
        self.unavailable: Counter[str] = Counter()
        """Error messages of unavailable calls."""
        self._server = server
        self._rng = random.Random(args.seed)
        self._on_answer = on_answer

    async def run(self, count: int) -> None:
        """Send `count` calls in batches; abandon one batch half-way and kill one zygote."""
        calls = self._calls(count)
        pids = self._server.processes()
        killing = asyncio.get_running_loop().call_later(KILL_AFTER_S, self._kill_one_zygote, pids)
        async with AsyncClient(self._server.url, batch_size=BATCH) as client:
            await self._abandon(client, calls[:BATCH])
            async for _, result in client.stream(calls):
                self.calls += 1
                self.statuses[result.status.value] += 1
                if result.status is Status.UNAVAILABLE and result.error:
                    self.unavailable[result.error.message] += 1
                self._on_answer()
        killing.cancel()

    def _calls(self, count: int) -> list[Call]:
        seed = self._rng.randrange(1 << 30)
        calls = sample_calls(count, seed)
        for index, call in enumerate(calls):
            if call.get("limits"):  # `sample_calls` gives limits only to endless loops
                call["limits"] = SHORT_LIMITS
            if self._rng.random() < HOSTILE_SHARE:
                calls[index] = self._rng.choice(HOSTILE_CALLS)
        return [Call.decode(call) for call in calls]

    async def _abandon(self, client: AsyncClient, calls: Sequence[Call]) -> None:
        results = client.stream(calls)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABANDON_AFTER_S):
                async for _ in results:
                    pass
        await results.aclose()
        self.abandoned += 1

    def _kill_one_zygote(self, pids_at_rest: Sequence[int]) -> None:
        """Kill one of the processes that were zygotes while no call ran."""
        zygotes = [pid for pid in pids_at_rest if "zygote.py" in processes.command(pid)]
        if zygotes:
            self.killed += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._rng.choice(zygotes), signal.SIGKILL)


def tables(result: Result) -> list[Block]:
    """The resources that have grown and the leftovers, as text."""
    grown, leftovers = (", ".join(result[name]) or "nothing" for name in ("grown", "leftovers"))
    memory = [row["memory_mb"] for row in result["snapshots"] if row["calls"] >= result["warm_up"]]
    return [
        f"Resources of the server that grew during {result['calls']:,} calls by more than allocators and connections "
        f"explain: {grown} (memory by {memory[-1] - memory[0]:+.1f} MiB to {memory[-1]:,.0f}). "
        f"Left behind after its end: {leftovers}."
    ]


if __name__ == "__main__":
    raise SystemExit(main())
