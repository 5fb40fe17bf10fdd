"""How many calls a second one gateway process moves, its executors stubbed: HTTP in, frames out and back, HTTP out.

    python -m bench.gateway [--calls 64000] [--batch 64] [--in-flight 8] [--json]

Gateway, executor (`bench.servers.stub_executor`) and client are a process each. The client sends batches as msgpack
over HTTP and looks
at every result: each has the code of its own call as output. CPU is that of the gateway's process alone; what it could
do with a core of its own is a second of that.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import msgpack

from bench.harness import command as output
from bench.probes import processes
from bench.servers import service

AT_LEAST = 8_000
"""Calls a second, which the project promises of one gateway process."""
ROUNDS = 3
MSGPACK = {"Content-Type": "application/msgpack"}


def main(argv: Sequence[str] | None = None) -> int:
    """The measurement; 1 if the gateway moves fewer than promised."""
    args = _parser().parse_args(argv)
    return output.run_as_command("gateway", lambda: _measure(args))


def _parser() -> argparse.ArgumentParser:
    parser = output.parser("gateway", __doc__ or "")
    parser.add_argument("--calls", type=output.count, default=64_000, help="calls of a round (default: 64000)")
    parser.add_argument("--batch", type=output.count, default=64, help="calls in one request (default: 64)")
    parser.add_argument("--in-flight", type=output.count, default=8, help="requests at once (default: 8)")
    parser.add_argument("--rounds", type=output.count, default=ROUNDS, help=f"rounds (default: {ROUNDS})")
    return parser


def _measure(args: argparse.Namespace) -> int:
    rows = []
    with _serving() as server, output.progress() as bar:
        task = bar.add_task("calls", total=args.calls * args.rounds)
        for _ in range(args.rounds):
            before, cpu_s = server.body_bytes(), processes.cpu_s([server.pid])
            wall_s = _drive(server.url, args, lambda calls: bar.advance(task, calls))
            after = server.body_bytes()
            rows.append(
                {
                    "calls_per_s": args.calls / wall_s,
                    "cpu_us": (processes.cpu_s([server.pid]) - cpu_s) * 1e6 / args.calls,
                    "bytes_in": (after["in"] - before["in"]) / args.calls,
                    "bytes_out": (after["out"] - before["out"]) / args.calls,
                }
            )
    figures: dict[str, Any] = {"bench": "gateway", **{n: getattr(args, n) for n in ("calls", "batch", "in_flight")}}
    figures |= {name: output.median((row[name] for row in rows), 1) for name in rows[0]}
    figures["calls_per_core_s"] = round(1e6 / figures["cpu_us"])
    figures |= {"rounds": rows, "at_least": AT_LEAST, "holds": figures["calls_per_s"] >= AT_LEAST}
    columns = ("calls/s", "needed", "CPU µs a call", "calls/s of a core", "bytes in", "bytes out")
    row = [f"{figures['calls_per_s']:,.0f}", f"{AT_LEAST:,}", figures["cpu_us"], f"{figures['calls_per_core_s']:,}"]
    output.show("one gateway over stubbed executors", columns, [(*row, figures["bytes_in"], figures["bytes_out"])])
    output.finish(figures, _parser(), args)
    return 0 if figures["holds"] else 1


@contextmanager
def _serving() -> Iterator[service.Service]:
    """A gateway over stubs. Raises `BenchFailed` if it does not start."""
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-m", "bench.servers.stub_executor"]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        try:
            yield service.Service(service.address(server, said), server.pid)
        finally:
            service.stop(server)


def _drive(url: str, args: argparse.Namespace, advance: Any) -> float:
    """All calls of a round, from a process of their own; the seconds that they took."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    client = context.Process(target=_be_client, args=(url, args.calls, args.batch, args.in_flight, theirs), daemon=True)
    client.start()
    theirs.close()
    try:
        while not isinstance(said := ours.recv(), float):
            if isinstance(said, str):
                raise output.BenchFailed(said)
            advance(said)
        return said
    except EOFError:
        raise output.BenchFailed("the client ended; what it printed is above") from None
    finally:
        client.kill()
        client.join()
        ours.close()


def _be_client(url: str, calls: int, batch: int, in_flight: int, parent: Connection) -> None:
    """The client's process: how many calls are done, again and again, then the seconds, or what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        parent.send(asyncio.run(_send_all(url, calls, batch, in_flight, parent)))
    except* (output.BenchFailed, aiohttp.ClientError, OSError) as group:
        why: BaseException = group
        while isinstance(why, BaseExceptionGroup):
            why = why.exceptions[0]
        parent.send(f"{type(why).__name__}: {why}")


async def _send_all(url: str, calls: int, batch: int, in_flight: int, parent: Connection) -> float:
    starts = iter(range(0, calls, batch))
    async with aiohttp.ClientSession(headers=MSGPACK) as http:

        async def send() -> None:
            for start in starts:
                codes = [f"print({number})" for number in range(start, min(start + batch, calls))]
                body = msgpack.packb({"calls": [{"code": code} for code in codes]})
                async with http.post(f"{url}/v1/batch", data=body) as response:
                    answer = await response.read()
                    if response.status != 200:
                        raise output.BenchFailed(f"HTTP {response.status}: {answer[:200]!r}")
                results = msgpack.unpackb(answer)["results"]
                if [result["stdout"] for result in results] != codes:
                    raise output.BenchFailed(f"calls from {start} on: expected each its own answer, got others")
                parent.send(len(codes))

        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(send())
        return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
