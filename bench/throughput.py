"""How many isolated calls per second over HTTP, beside a fresh interpreter per call without isolation?

    python -m bench.throughput [--kinds print,numpy,sympy,mix] [--calls FILE.jsonl] [--scale 0.5] [--json]

The service gets batches of 64 calls from `sandbox.client`, four batches at a time. The client runs on the same cores.
The fresh interpreters run the same code, one per core at a time (`bench.servers.fresh_interpreter`). The two sides take
turns within a round. The result is the median over rounds of each round's own ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.load import Answers, closed_loop
from bench.harness.rounds import median_of_ratios
from bench.harness.statistics import median, percentiles
from bench.harness.tables import Block, Result, Table, number, percentile_list
from bench.probes import processes
from bench.servers import service
from bench.servers.fresh_interpreter import FreshInterpreters, interpreters
from bench.workloads.code_kinds import CODES, KIND_NAMES
from bench.workloads.tool_calls import load_calls, sample_calls
from sandbox.client import AsyncClient
from sandbox.types import Call, Status

BATCH = 64
"""Calls in one request."""
IN_FLIGHT = 4
"""Batches in flight, enough that the service never waits for the client."""
MIN_JUDGED_SCALE = 0.5
"""From this `--scale` on, the ratios must reach the promised ones. Shorter rounds vary too much."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The calls of a round, and the ratio that the project promises."""

    calls: int
    fresh_calls: int
    """Calls of the fresh interpreters in a round: fewer, because they take longer."""
    min_ratio: float | None = None


KINDS = {
    "print": Kind(calls=1024, fresh_calls=128, min_ratio=8),
    "numpy": Kind(calls=768, fresh_calls=32, min_ratio=32),
    "sympy": Kind(calls=256, fresh_calls=12, min_ratio=28),
    "mix": Kind(calls=384, fresh_calls=96),
}


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one side."""

    calls_per_s: float
    cpu_ms: float
    """CPU per call."""
    latencies_ms: tuple[float, ...]
    statuses: Counter[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Return exit code 1 if a promised ratio is not reached."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("throughput", __doc__, "python", "seed")
    names = ",".join(KINDS)
    parser.add_argument("--kinds", type=arguments.names_of(KINDS), default=tuple(KINDS), help=f"of {names}")
    parser.add_argument("--calls", type=arguments.file, metavar="FILE", help="JSONL to use for the mix")
    parser.add_argument("--rounds", type=arguments.count, default=5, help="rounds (default: 5)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of calls (default: 1)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    calls = {kind: _calls_of(kind, args) for kind in args.kinds}
    python = service.guest_python(args.python)
    ours: dict[str, list[Round]] = {kind: [] for kind in args.kinds}
    fresh: dict[str, list[Round]] = {kind: [] for kind in args.kinds}
    with ExitStack() as stack:
        server = stack.enter_context(service.running(python))
        interpreter = stack.enter_context(interpreters(python))
        advance = stack.enter_context(command.counted_progress("rounds", 2 * len(args.kinds) * args.rounds))
        for _ in range(args.rounds):
            for kind in args.kinds:
                ours[kind].append(asyncio.run(_over_http(server, calls[kind])))
                advance()
                num_fresh = _scaled(KINDS[kind].fresh_calls, args.scale)
                fresh[kind].append(_in_fresh_interpreters(interpreter, calls[kind][:num_fresh]))
                advance()
    rows = {kind: summarize(KINDS[kind], ours[kind], fresh[kind]) for kind in args.kinds}
    return {
        "rounds": args.rounds,
        "scale": args.scale,
        "batch": BATCH,
        "in_flight": IN_FLIGHT,
        "kinds": rows,
        "requirements": ratio_requirements(rows) if args.scale >= MIN_JUDGED_SCALE else [],
    }


def ratio_requirements(rows: Mapping[str, Mapping[str, Any]]) -> list[requirements.Requirement]:
    """The promised ratios of the measured kinds."""
    bounds = {kind: KINDS[kind].min_ratio for kind in rows}
    return [
        requirements.at_least(f"ratio of {kind}", bound, rows[kind]["ratio"])
        for kind, bound in bounds.items()
        if bound is not None
    ]


def _calls_of(kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    count = _scaled(KINDS[kind].calls, args.scale)
    if kind != "mix":
        return [{"code": CODES[kind]}] * count
    return load_calls(args.calls)[:count] if args.calls else sample_calls(count, args.seed)


def _scaled(count: int, scale: float) -> int:
    return max(2, round(count * scale))


async def _over_http(server: service.Service, raw_calls: Sequence[dict[str, Any]]) -> Round:
    """All calls in batches of `BATCH`, `IN_FLIGHT` of them at a time."""
    calls = [Call.decode(call) for call in raw_calls]
    batches = iter([calls[start : start + BATCH] for start in range(0, len(calls), BATCH)])
    answers = Answers()
    async with AsyncClient(server.url, batch_size=BATCH) as client:
        await client.execute("pass")  # connect before the clock starts
        meter = processes.CpuMeter(server.pid)
        wall_s = await closed_loop(batches, partial(answers.receive, client), IN_FLIGHT)
        cpu_s = meter.total_s()
    if unavailable := answers.statuses[Status.UNAVAILABLE.value]:
        raise command.BenchFailed(f"{unavailable} of {len(calls)} calls were unavailable, expected none")
    return Round(len(calls) / wall_s, cpu_s * 1e3 / len(calls), tuple(answers.latencies_ms), answers.statuses)


def _in_fresh_interpreters(fresh: FreshInterpreters, calls: Sequence[dict[str, Any]]) -> Round:
    start = time.perf_counter()
    runs = fresh.run_all(calls)
    wall_s = time.perf_counter() - start
    cpu_ms = sum(run.cpu_s for run in runs) * 1e3 / len(runs)
    statuses = Counter(run.status for run in runs)
    return Round(len(runs) / wall_s, cpu_ms, tuple(run.wall_s * 1e3 for run in runs), statuses)


def summarize(kind: Kind, ours: Sequence[Round], fresh: Sequence[Round]) -> dict[str, Any]:
    """The result for one kind of call over all rounds."""
    ratio = median_of_ratios(ours, fresh, lambda a, b: a.calls_per_s / b.calls_per_s)
    return {
        **_side(ours),
        "statuses": dict(sum((row.statuses for row in ours), Counter())),
        "fresh": _side(fresh),
        "ratio": round(ratio, 2),
        "min_ratio": kind.min_ratio,
    }


def _side(rounds: Sequence[Round]) -> dict[str, Any]:
    return {
        "calls": sum(len(row.latencies_ms) for row in rounds),
        "calls_per_s": median((row.calls_per_s for row in rounds), 1),
        "cpu_ms": median(row.cpu_ms for row in rounds),
        "latency_ms": percentiles([ms for row in rounds for ms in row.latencies_ms]),
    }


def tables(result: Result) -> list[Block]:
    """A row for each kind of call."""
    rows = [
        {
            "calls": KIND_NAMES[kind],
            "calls/s": number(row["calls_per_s"]),
            "fresh/s": number(row["fresh"]["calls_per_s"]),
            "ratio": f"{row['ratio']:.1f}×",
            "p50 / p99 ms": percentile_list(row["latency_ms"], "p50", "p99"),
            "CPU ms": f"{row['cpu_ms']:.1f}",
            "fresh CPU ms": f"{row['fresh']['cpu_ms']:.0f}",
        }
        for kind, row in result["kinds"].items()
    ]
    return [Table.from_cells(rows), *requirements.unmet(result)]


if __name__ == "__main__":
    raise SystemExit(main())
