"""How many calls per second does one gateway process handle, with stub executors: HTTP in, frames out and back, HTTP
out?

    python -m bench.gateway [--calls 64000] [--batch 64] [--in-flight 8] [--json]

Gateway, executor (`bench.servers.stub_executor`) and client are one process each. The client sends batches as msgpack
over HTTP and checks every result, which contains the code of its own call. The CPU time is that of the gateway process
alone. 1 / (CPU time per call) is the rate that the gateway could reach with a core of its own.
"""

from __future__ import annotations

import argparse
import asyncio
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement. Return exit code 1 if the gateway is slower than required."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("gateway", __doc__)
    arguments.add_in_flight(parser, 8, "requests")
    parser.add_argument("--calls", type=arguments.count, default=64_000, help="calls of a round (default: 64000)")
    parser.add_argument("--batch", type=arguments.count, default=64, help="calls in one request (default: 64)")
    parser.add_argument("--rounds", type=arguments.count, default=3, help="rounds (default: 3)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
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
    return [
        f"One gateway process with stub executors, in batches of {result['batch']}: "
        f"{result['calls_per_s']:,.0f} calls/s, {result['cpu_us']:.0f} µs of its CPU per call.",
        *requirements.unmet(result),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
