"""Does a tenant whose calls sleep in all its slots delay the short calls of another tenant?

    python -m bench.tenants [--sleeping 1000] [--sleep-s 2] [--short 200] [--json]

The short calls of one tenant are sent at fixed moments (open loop), so a slow server cannot hide its queue: first
alone, then while `--sleeping` calls of `time.sleep`, which another tenant sends in one request, wait and run. The delay
is the difference of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.harness import arguments, command, requirements
from bench.harness.load import OnAnswer, ask, execute, http_session
from bench.harness.plots import percentile_bars
from bench.harness.statistics import percentiles
from bench.harness.tables import Block, Result, Table
from bench.servers import service

MAX_DELAY_MS = 50.0
"""Largest allowed median of a short call beside the sleeping calls, less that alone."""
INTERVAL_S = 0.05
"""Seconds between two short calls."""
POINTS = (50, 90, 99)


@dataclass(slots=True)
class TenantsRun:
    """Latencies of the short calls in milliseconds, and what became of the calls that sleep."""

    sleeping: int
    alone_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    queue_ms: list[float] = field(default_factory=list)
    """Milliseconds that each short call waited for a slot, in the order of the answers."""
    num_slept: int = 0
    """Calls that slept and ended as ok."""
    mismatched: int = 0
    """Short calls with a wrong result."""
    slept_s: float = 0.0
    """Seconds until all sleeping calls had ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure. Return exit code 1 if the sleeping calls delay the short ones too much, or a result is wrong."""
    return command.run_benchmark(_parser(), argv, _measure, tables, draw)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("tenants", __doc__, *arguments.SERVER_OPTIONS)
    parser.add_argument("--sleeping", type=arguments.count, default=1000, help="calls that sleep (default: 1000)")
    parser.add_argument("--sleep-s", type=arguments.seconds, default=2.0, help="seconds of each sleep (default: 2)")
    parser.add_argument("--short", type=arguments.count, default=200, help="short calls alone (default: 200)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    with service.running(args.python, arguments.server_flags(args)) as server, command.progress() as bar:
        task = bar.add_task("short calls", total=None)
        run = asyncio.run(measure(server.url, args.sleeping, args.sleep_s, args.short, lambda: bar.advance(task)))
    return {"isolation": args.isolation, **summarize(run)}


async def measure(url: str, sleeping: int, sleep_s: float, short: int, on_answer: OnAnswer) -> TenantsRun:
    """Send short calls alone, then beside the calls that sleep."""
    run = TenantsRun(sleeping)
    async with http_session() as http:
        numbers = itertools.count()
        await _send_short(http, url, run, run.alone_ms, lambda: next(numbers) < short, on_answer)
        started = time.perf_counter()
        sleepers = asyncio.create_task(_sleep(http, url, sleep_s, run))
        try:
            await _send_short(http, url, run, run.beside_ms, lambda: not sleepers.done(), on_answer)
            await sleepers
        finally:
            sleepers.cancel()
        run.slept_s = time.perf_counter() - started
    return run


async def _sleep(http: aiohttp.ClientSession, url: str, sleep_s: float, run: TenantsRun) -> None:
    call = {"code": f"import time\ntime.sleep({sleep_s})", "tenant": "sleeping"}
    async for _, result in ask(http, url, [call] * run.sleeping):
        run.num_slept += result["status"] == "ok"


async def _send_short(
    http: aiohttp.ClientSession,
    url: str,
    run: TenantsRun,
    latencies_ms: list[float],
    more: Callable[[], bool],
    on_answer: OnAnswer,
) -> None:
    """Send a short call every `INTERVAL_S` while `more` returns True, and wait for all answers. The latency counts from
    the moment at which a call was due."""

    async def send(n: int, due: float) -> None:
        result = await execute(http, url, {"code": f"print({n} * {n})", "tenant": "short"})
        latencies_ms.append((time.perf_counter() - due) * 1e3)
        run.queue_ms.append(result["usage"]["queue_ms"])
        run.mismatched += (result["status"], result["stdout"]) != ("ok", f"{n * n}\n")
        on_answer()

    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for n in itertools.count():
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if not more():
                return
            group.create_task(send(n, due))
            due += INTERVAL_S


def summarize(run: TenantsRun) -> dict[str, Any]:
    """The result and its requirements."""
    delay_ms = round(statistics.median(run.beside_ms) - statistics.median(run.alone_ms), 2)
    return {
        "sleeping": run.sleeping,
        "slept_s": round(run.slept_s, 2),
        "calls_beside": len(run.beside_ms),
        "alone_ms": percentiles(run.alone_ms, POINTS),
        "beside_ms": percentiles(run.beside_ms, POINTS),
        "beside_queue_ms": percentiles(run.queue_ms[len(run.alone_ms) :], POINTS),
        "max_beside_ms": round(max(run.beside_ms), 2),
        "delay_ms": delay_ms,
        "requirements": [
            requirements.at_most("median delay of a short call in ms", MAX_DELAY_MS, delay_ms),
            requirements.at_least("calls that slept", run.sleeping, run.num_slept),
            *requirements.none_of({"mismatched short calls": run.mismatched}),
        ],
    }


def _rows(result: Result) -> dict[str, dict[str, float]]:
    """Latencies of the short calls by situation."""
    return {
        f"a `print` every {INTERVAL_S * 1e3:g} ms": result["alone_ms"],
        f"the same beside {result['sleeping']:,} sleeping calls of another tenant": result["beside_ms"],
    }


_POINT_NAMES = tuple(f"p{point}" for point in POINTS)


def tables(result: Result) -> list[Block]:
    """A row of latencies for each situation."""
    return [Table.of_percentiles("short calls", _rows(result), _POINT_NAMES), *requirements.unmet(result)]


def draw(axes: Any, result: Result) -> None:
    """Latency percentiles for each situation."""
    percentile_bars(axes, _rows(result), _POINT_NAMES)


if __name__ == "__main__":
    raise SystemExit(main())
