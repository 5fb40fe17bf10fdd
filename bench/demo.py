"""Starts a server on this machine, sends it a sample of tool calls, and prints a table of the results.

python -m bench.demo [--calls FILE.jsonl] [--n 500] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.statistics import percentiles
from bench.harness.tables import Block, Result, Table, show
from bench.workloads.tool_calls import labelled_calls, load_calls
from sandbox.client import AsyncClient
from sandbox.local import local_service
from sandbox.types import Call

BATCH = 64
"""Calls in one request."""
NEXT_STEPS = """Next:
  rstar-sandbox run -c 'print(1 + 1)'  run one call
  rstar-sandbox serve                start a server; its dashboard is on the address that it prints
  make demo CALLS=calls.jsonl        the same demo with your own calls (a "code" in each row)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Return exit code 1 if it failed or a call was unavailable."""
    parser = arguments.parser("demo", __doc__, "seed")
    parser.add_argument("--calls", type=arguments.file, metavar="FILE", help="JSONL with a 'code' in each row")
    parser.add_argument("--n", type=arguments.count, default=500, help="calls of the sample (default: 500)")
    return command.run_benchmark(parser, argv, lambda args: asyncio.run(_measure(args)), tables)


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    labelled = [] if args.calls else list(labelled_calls(args.n, args.seed))
    calls = load_calls(args.calls) if args.calls else [call for _, call in labelled]
    sample = (
        f"the calls of {args.calls}" if args.calls else "typical tool calls. A quarter of the sample fails on purpose"
    )
    show([f"Starting a server, then sending {len(calls)} calls at once: {sample}."])
    results, answered_ms = {}, {}
    with command.counted_progress("calls", len(calls)) as advance:
        async with local_service() as url, AsyncClient(url, batch_size=BATCH) as client:
            start = time.perf_counter()
            async for index, result in client.stream([Call.decode(call) for call in calls]):
                results[index], answered_ms[index] = result, (time.perf_counter() - start) * 1e3
                advance()
    expected = [template.status for template, _ in labelled]
    usages = [result.usage for result in results.values()]
    statuses = Counter(result.status.value for result in results.values())
    return {
        "calls": len(calls),
        "seconds": round(max(answered_ms.values()) / 1e3, 3),
        "statuses": dict(statuses.most_common()),
        "as_expected": sum(results[index].status.value == status for index, status in enumerate(expected)),
        "expected": len(expected),
        "answer_ms": percentiles(answered_ms.values()),
        "queue_ms": percentiles(usage.queue_ms for usage in usages),
        "run_ms": percentiles(usage.run_ms for usage in usages),
        "cpu_ms_per_call": round(sum(usage.cpu_ms for usage in usages) / len(usages), 2),
        "peak_memory_mb": max(usage.peak_memory_mb for usage in usages),
        "requirements": [requirements.at_most("unavailable calls", 0, statuses["unavailable"])],
    }


def tables(result: Result) -> list[Block]:
    """Rates, statuses and times, and what to run next."""
    rows = [("calls per second", f"{result['calls'] / result['seconds']:,.0f}")]
    rows += [(f"status `{status}`", str(count)) for status, count in result["statuses"].items()]
    if result["expected"]:
        rows.append(("status as expected", f"{result['as_expected']} of {result['expected']}"))
    for name, label in (("answer_ms", "answered after"), ("queue_ms", "  in the queue"), ("run_ms", "  running")):
        rows.append((label, f"p50 {result[name]['p50']:,.1f} ms, p99 {result[name]['p99']:,.1f} ms"))
    rows.append(("CPU time per call", f"{result['cpu_ms_per_call']:.1f} ms"))
    rows.append(("largest memory of a call", f"{result['peak_memory_mb']:.0f} MiB"))
    return [Table(("", ""), rows, f"{result['calls']} calls in {result['seconds']:.2f} s"), NEXT_STEPS]


if __name__ == "__main__":
    raise SystemExit(main())
