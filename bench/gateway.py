"""How many calls per second does one gateway process handle, with stub executors: HTTP in, frames out and back, HTTP
out?

    python -m bench.gateway [--calls 64000] [--batch 64] [--in-flight 8] [--json]

Gateway, executor (`bench.servers.stub_executor`) and client are one process each. The client sends batches as msgpack
over HTTP and checks every result, which contains the code of its own call. The CPU time is that of the gateway process
alone; its inverse is the rate that the gateway could reach with a core of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import aiohttp

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
            before, cpu_s = server.body_bytes(), processes.cpu_s([server.pid])
            wall_s = run_client(server.url, args, advance)
            after = server.body_bytes()
            rows.append(
                {
                    "calls_per_s": args.calls / wall_s,
                    "cpu_us": (processes.cpu_s([server.pid]) - cpu_s) * 1e6 / args.calls,
                    "bytes_in": (after["in"] - before["in"]) / args.calls,
                    "bytes_out": (after["out"] - before["out"]) / args.calls,
                }
            )
    medians = median_of_rows(rows, 1)
    return {
        "calls": args.calls,
        "batch": args.batch,
        "in_flight": args.in_flight,
        **medians,
        "calls_per_core_s": round(1e6 / medians["cpu_us"]),
        "rounds": rows,
        "requirements": [requirements.at_least("calls/s", MIN_CALLS_PER_S, medians["calls_per_s"])],
    }


def run_client(url: str, args: argparse.Namespace, on_calls: Callable[[int], object]) -> float:
    """Send the calls of a round from a separate process. Returns the seconds that they took."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    client_args = (url, args.calls, args.batch, args.in_flight, sender)
    client = context.Process(target=_client_main, args=client_args, daemon=True)
    client.start()
    sender.close()
    try:
        while not isinstance(message := receiver.recv(), float):
            if isinstance(message, str):
                raise command.BenchFailed(message)
            on_calls(message)
        return message
    except EOFError:
        raise command.BenchFailed("the client process ended; its output is above") from None
    finally:
        client.kill()
        client.join()
        receiver.close()


def _client_main(url: str, calls: int, batch: int, in_flight: int, parent: Connection) -> None:
    """The client process. Sends numbers of finished calls (int), then the seconds (float) or an error (str)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    try:
        parent.send(asyncio.run(_send_all(url, calls, batch, in_flight, parent)))
    except* (command.BenchFailed, aiohttp.ClientError, OSError) as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        parent.send(f"{type(error).__name__}: {error}")


async def _send_all(url: str, calls: int, batch: int, in_flight: int, parent: Connection) -> float:
    async with http_session() as http:

        async def send(start: int) -> None:
            codes = [f"print({number})" for number in range(start, min(start + batch, calls))]
            request = ask(http, url, [{"code": code} for code in codes], "application/msgpack")
            if [result["stdout"] async for _, result in request] != codes:
                raise command.BenchFailed(f"calls from {start} on: expected each its own result, got others")
            parent.send(len(codes))

        return await closed_loop(iter(range(0, calls, batch)), send, in_flight)


def tables(result: Result) -> list[Block]:
    """The calls per second and the CPU time per call, as text."""
    return [
        f"One gateway process with stub executors, in batches of {result['batch']}: "
        f"{result['calls_per_s']:,.0f} calls/s, {result['cpu_us']:.0f} µs of its CPU per call.",
        *requirements.unmet(result),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
