"""How many calls per second does one gateway process handle, with stub executors: HTTP in, frames out and back, HTTP
out?

    python -m bench.gateway [--calls 64000] [--batch 64] [--in-flight 8] [--json]
    python -m bench.gateway --workers 2 --batch 1 --calls 8000 --in-flight 64

The second form compares `serve --workers N` with one worker, in turns.

Each gateway, each executor (`bench.servers.stub_executor`) and the client are one process each. The client sends
batches as msgpack over HTTP and checks every result, which contains the code of its own call. The CPU time is that of
the gateway process alone. 1 / (CPU time per call) is the rate that the gateway could reach with a core of its own. With
several workers, the busiest one sets the rate, since the kernel divides connections among them at random.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.load import ask, closed_loop, http_session
from bench.harness.rounds import median_of_rows
from bench.harness.tables import Block, Result
from bench.probes import processes
from bench.servers import stub_executor

MIN_CALLS_PER_S = 8_000
"""Calls per second that the project promises of one gateway process."""
MIN_WORKER_SHARE = 0.8
"""Minimum rate of N workers, as a share of N times the rate of one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement. Return exit code 1 if the gateway is slower than required."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("gateway", __doc__)
    arguments.add_in_flight(parser, 8, "requests")
    parser.add_argument("--calls", type=arguments.count, default=64_000, help="calls of a round (default: 64000)")
    parser.add_argument("--batch", type=arguments.count, default=64, help="calls in one request (default: 64)")
    parser.add_argument("--rounds", type=arguments.count, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--workers", type=arguments.count, default=1, help="compare this number of workers with one (default: 1)"
    )
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    return _measure_gateway(args) if args.workers == 1 else _compare_workers(args)


def _compare_workers(args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[int, list[float]] = {1: [], args.workers: []}
    with command.counted_progress("calls", 2 * args.calls * args.rounds) as advance:
        for _ in range(args.rounds):
            for workers, values in rates.items():
                with stub_executor.serving(workers) as server:
                    gateways = [server.pid] if workers == 1 else processes.children()[server.pid]
                    before = [processes.cpu_s([pid]) for pid in gateways]
                    asyncio.run(send_all(server.url, args, advance))
                    cpu_s = [processes.cpu_s([pid]) - start for pid, start in zip(gateways, before, strict=True)]
                    values.append(args.calls / max(cpu_s))
    one, many = (statistics.median(values) for values in rates.values())
    speedup = round(many / one, 2)
    return {
        "calls": args.calls,
        "batch": args.batch,
        "in_flight": args.in_flight,
        "workers": args.workers,
        "calls_per_core_s": round(one),
        "workers_calls_per_s": round(many),
        "requirements": [requirements.at_least("rate / rate of one", MIN_WORKER_SHARE * args.workers, speedup)],
    }


def _measure_gateway(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    total = args.calls * args.rounds
    with stub_executor.serving() as server, command.counted_progress("calls", total) as advance:
        for _ in range(args.rounds):
            cpu_s = processes.cpu_s([server.pid])
            wall_s = asyncio.run(send_all(server.url, args, advance))
            rows.append(
                {
                    "calls_per_s": args.calls / wall_s,
                    "cpu_us": (processes.cpu_s([server.pid]) - cpu_s) * 1e6 / args.calls,
                }
            )
    medians = median_of_rows(rows, 1)
    return {
        "calls": args.calls,
        "batch": args.batch,
        "in_flight": args.in_flight,
        **medians,
        "calls_per_core_s": round(1e6 / medians["cpu_us"]),
        "requirements": [requirements.at_least("calls/s", MIN_CALLS_PER_S, medians["calls_per_s"])],
    }


async def send_all(url: str, args: argparse.Namespace, on_calls: Callable[[int], object]) -> float:
    """Send the calls of a round. Returns the seconds that they took."""
    async with http_session() as http:

        async def send(start: int) -> None:
            codes = [f"print({number})" for number in range(start, min(start + args.batch, args.calls))]
            request = ask(http, url, [{"code": code} for code in codes], "application/msgpack")
            if [result["stdout"] async for _, result in request] != codes:
                raise command.BenchFailed(f"calls from {start} on: expected each its own result, got others")
            on_calls(len(codes))

        return await closed_loop(iter(range(0, args.calls, args.batch)), send, args.in_flight)


def tables(result: Result) -> list[Block]:
    """The calls per second and the CPU time per call, as text."""
    if "workers" in result:
        return [
            f"Gateways with a core each and stub executors, in batches of {result['batch']}: one "
            f"{result['calls_per_core_s']:,} calls/s, {result['workers']} workers {result['workers_calls_per_s']:,}.",
            *requirements.unmet(result),
        ]
    return [
        f"One gateway process with stub executors, in batches of {result['batch']}: "
        f"{result['calls_per_s']:,.0f} calls/s, {result['cpu_us']:.0f} µs of its CPU per call.",
        *requirements.unmet(result),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
