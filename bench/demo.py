"""A whole server on this machine, a sample of tool calls through it, and a table of what came back.

    python -m bench.demo [--calls FILE.jsonl] [--n 500] [--json]

It starts `rstar-sandbox serve` on a free port, sends batches of 64 as a trainer does, and stops it again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.workloads.tool_calls import labelled_calls, load_calls
from sandbox.client import AsyncClient
from sandbox.errors import SandboxError
from sandbox.local import local_service
from sandbox.types import Call, Result, Status

BATCH = 64
"""Calls in one request, as rStar2-Agent's send workers gather them."""


class DemoFailed(Exception):
    """There is nothing to show."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A call's result, and when it was here, counted from the moment that all calls were sent."""

    result: Result
    after_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    """The demonstration; 0 if every call got a verdict."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description="A server, a sample of calls, a table.")
    parser.add_argument("--calls", metavar="FILE", help="JSONL with a 'code' in each row (default: a made-up sample)")
    parser.add_argument("--n", type=int, default=500, help="how many calls of the made-up sample (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="which made-up sample (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args(argv)
    try:
        return asyncio.run(_demo(args))
    except KeyboardInterrupt:
        return 130
    except (DemoFailed, SandboxError, OSError, ValueError) as why:
        print(f"demo: {why}", file=sys.stderr)
        return 1


async def _demo(args: argparse.Namespace) -> int:
    if args.calls:
        calls, expected = load_calls(args.calls), None
    else:
        labelled = list(labelled_calls(args.n, args.seed))
        calls, expected = [call for _, call in labelled], [template.status for template, _ in labelled]
    if not calls:
        raise DemoFailed("expected at least one call, got none")
    async with local_service() as url, AsyncClient(url, batch_size=BATCH) as client:
        answers = await _send(client, [Call.decode(call) for call in calls])
    figures = summarise(answers, expected)
    _show(figures)
    if args.json:
        print(json.dumps(figures))
    return 1 if figures["statuses"].get(Status.UNAVAILABLE) else 0


async def _send(client: AsyncClient, calls: Sequence[Call]) -> list[Answered]:
    """All at once, as a training step's burst comes; answers in the order of the calls."""
    answers: dict[int, Answered] = {}
    start = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("calls", total=len(calls))
        async for index, result in client.stream(calls):
            answers[index] = Answered(result, (time.perf_counter() - start) * 1000)
            progress.advance(bar)
    return [answers[index] for index in range(len(calls))]


def summarise(answers: Sequence[Answered], expected: Sequence[str] | None) -> dict[str, Any]:
    """The figures of a run; times in milliseconds. `expected` holds the statuses that the calls should have had."""
    results = [answer.result for answer in answers]
    usages = [result.usage for result in results]
    wall_s = max(answer.after_ms for answer in answers) / 1000
    figures: dict[str, Any] = {
        "calls": len(results),
        "seconds": round(wall_s, 3),
        "calls_per_s": round(len(results) / wall_s, 1),
        "statuses": dict(Counter(result.status.value for result in results).most_common()),
        "cpu_ms_per_call": round(sum(usage.cpu_ms for usage in usages) / len(usages), 3),
        "run_ms": _percentiles([usage.run_ms for usage in usages]),
        "queue_ms": _percentiles([usage.queue_ms for usage in usages]),
        "answer_ms": _percentiles([answer.after_ms for answer in answers]),
        "peak_memory_mb": max(usage.peak_memory_mb for usage in usages),
    }
    if expected is not None:
        figures["as_expected"] = sum(r.status.value == status for r, status in zip(results, expected, strict=True))
    return figures


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 3) for p in (50, 99)}


def _show(figures: dict[str, Any]) -> None:
    table = Table(title=f"{figures['calls']} calls in {figures['seconds']:.2f} s", box=None, show_header=False)
    table.add_row("calls/s", f"[bold]{figures['calls_per_s']:,.0f}[/bold]")
    for status, count in figures["statuses"].items():
        table.add_row(status, f"{count}")
    if "as_expected" in figures:
        table.add_row("verdicts as expected", f"{figures['as_expected']} of {figures['calls']}")
    for name, label in (
        ("answer_ms", "answered after"),
        ("queue_ms", "of that, in the queue"),
        ("run_ms", "of that, running"),
    ):
        p50, p99 = figures[name]["p50"], figures[name]["p99"]
        table.add_row(label, f"p50 {p50:,.1f} ms, p99 {p99:,.1f} ms")
    table.add_row("CPU per call", f"{figures['cpu_ms_per_call']:.1f} ms")
    table.add_row("most memory", f"{figures['peak_memory_mb']:.0f} MiB")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
