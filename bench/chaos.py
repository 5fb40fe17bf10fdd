"""Does every call get exactly one result, its own, while the server's processes are killed at random?

    python -m bench.chaos [--calls 20000] [--kill-every 1] [--kill-gateway 30] [--json]

Every call has a result that no other call has (`bench.workloads.checked_calls`). The calls go over HTTP in every form
of request and response, and some requests are abandoned half-way. Meanwhile three kinds of processes are killed by
SIGKILL (`bench.probes.fault_injector`): executors, their jails, and the zygotes in them, from which calls are forked.

- A call is lost if it has no answer although its connection did not break.
- A call is doubled if it has two answers in one response.
- A call is mismatched if its result is not its own. `unavailable` is no mismatch, since it is no result of the code.

With `--kill-gateway` the gateway is killed too. Its connections break, and its unanswered calls are sent to the next
gateway. A killed gateway must leave no process, file or mount behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.load import CallTally
from bench.harness.tables import Block, Result
from bench.probes.fault_injector import KILLABLE, FaultInjector
from bench.servers.server_under_test import CheckedLoad, ServerUnderTest
from bench.workloads.checked_calls import KIND_WEIGHTS, STDLIB_WEIGHTS, checked_calls

MAX_S = 300.0
"""Calls without an answer count as lost after this number of seconds plus `MAX_S_PER_CALL` for each call."""
MAX_S_PER_CALL = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return exit code 1 if a call was lost, doubled or mismatched, or something is left behind."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("chaos", __doc__, *arguments.SERVER_OPTIONS, "seed")
    arguments.add_in_flight(parser, 256)
    seconds = arguments.seconds
    parser.add_argument("--calls", type=arguments.count, default=20_000, help="number of calls (default: 20000)")
    parser.add_argument("--kill-every", type=seconds, default=1.0, metavar="S", help="mean seconds between two kills")
    parser.add_argument("--kill-gateway", type=seconds, metavar="S", help="seconds between gateway kills (default: no)")
    parser.add_argument("--executors", type=arguments.count, default=2, help="executors of the server (default: 2)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    tally = CallTally(args.calls)
    injector = FaultInjector(random.Random(args.seed))
    flags = [*arguments.server_flags(args), "--executors", str(args.executors)]
    with ServerUnderTest(args.python, flags) as server, command.counted_progress("calls", args.calls) as advance:
        calls = checked_calls(args.calls, args.seed, STDLIB_WEIGHTS if args.stdlib_only else KIND_WEIGHTS)
        load = CheckedLoad(server, calls, tally, random.Random(args.seed), advance)
        start = time.monotonic()
        asyncio.run(_attack(load, server, injector, args))
        seconds = time.monotonic() - start
        server.wait_until_ready(args.executors)
    command.print_examples("chaos", [*tally.examples, *(f"left behind: {line}" for line in server.leftovers)])
    return {
        "calls": tally.calls,
        "kill_every_s": args.kill_every,
        "seconds": round(seconds, 1),
        **tally.errors,
        "unavailable": dict(tally.unavailable),
        "statuses": dict(tally.statuses.most_common()),
        "kills": {kind: injector.kills[kind] for kind in (*KILLABLE, "gateway")},
        "leftovers": server.leftovers,
        "requirements": requirements.none_of({**tally.errors, "leftovers": len(server.leftovers)}),
    }


async def _attack(
    load: CheckedLoad, server: ServerUnderTest, injector: FaultInjector, args: argparse.Namespace
) -> None:
    """Run the load while processes are killed, for at most `MAX_S` seconds and `MAX_S_PER_CALL` for each call."""

    async def kill_processes() -> None:
        rng = random.Random(args.seed)
        while True:
            await asyncio.sleep(rng.expovariate(1 / args.kill_every))
            injector.kill_one(server.pid)

    async def kill_gateways() -> None:
        while True:
            await asyncio.sleep(args.kill_gateway)
            injector.kills["gateway"] += 1
            server.kill_gateway()

    with contextlib.suppress(TimeoutError):  # the unanswered calls count as lost
        async with asyncio.timeout(MAX_S + MAX_S_PER_CALL * args.calls), asyncio.TaskGroup() as group:
            killers = [group.create_task(kill_processes())]
            if args.kill_gateway:
                killers.append(group.create_task(kill_gateways()))
            await load.run(args.in_flight)
            for killer in killers:
                killer.cancel()


def tables(result: Result) -> list[Block]:
    """The numbers of kills and of lost, doubled and mismatched calls, as text."""
    return [
        f"{sum(result['statuses'].values()):,} calls while a process of the server was killed every "
        f"{result['kill_every_s']:g} s ({sum(result['kills'].values()):,} kills): {result['lost']:,} lost, "
        f"{result['doubled']:,} doubled, {result['mismatched']:,} mismatched, "
        f"{result['statuses'].get('unavailable', 0):,} `unavailable`."
    ]


if __name__ == "__main__":
    raise SystemExit(main())
