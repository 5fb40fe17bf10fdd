"""Does a server lose calls or grow during a million calls of steady traffic?

    python -m bench.soak [--calls 1000000 | --seconds 3600] [--in-flight 256] [--json]

The calls and the forms of requests are those of `bench.chaos`, but nothing is killed. Meanwhile the server's memory,
descriptors, processes, zombies, mounts and control groups are sampled. A rise over the last half that exceeds the noise
is growth (`bench.harness.statistics`). The traffic pauses four times, and the resources at rest are compared as in
`bench.leaks`. After the server's end, everything that it created must be gone. The kernel's slab is shown but not
judged, since it belongs to the whole machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.harness import arguments, command, requirements, statistics
from bench.harness.load import ERRORS, CallTally
from bench.harness.tables import Block, Result, Table, count_list, number
from bench.probes.resource_growth import growth_at_rest
from bench.probes.resources import ResourceSnapshot
from bench.probes.sampler import PeriodicSampler
from bench.servers.server_under_test import CheckedLoad, ServerUnderTest
from bench.workloads.checked_calls import KIND_WEIGHTS, STDLIB_WEIGHTS, CheckedCall, checked_calls

CALLS = 1_000_000
NUM_QUARTERS = 4
STALL_TIMEOUT_S = 400.0
"""Seconds without an answer after which the remaining calls are lost. Every call's time-out is shorter."""
CHUNK = 10_000
"""Checked calls that are generated at a time."""
MEMORY = ("memory_mb", "gateway_mb")
"""Resources that may not rise in a line over the last half, however slowly: 2 MiB in 100,000 calls are 500 MiB in 25
million calls. The gateway's memory is judged by itself as well, because it has a tenth of the noise."""
TOLERANCE = {"descriptors": 1.0, "processes": 1.0, "zombies": 1.0, "mounts": 1.0, "cgroups": 1.0}
"""Rise over the last half that is allowed besides noise."""
SAMPLE_INTERVAL_S = 2.0
MAX_PLOTTED_SAMPLES = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak. Return exit code 1 if a result is missing or wrong, or something grows or is left behind."""
    return command.run_benchmark(_parser(), argv, _measure, tables, draw)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("soak", __doc__, *arguments.SERVER_OPTIONS, "seed")
    arguments.add_in_flight(parser, 256)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--calls", type=arguments.count, help=f"number of calls (default: {CALLS})")
    size.add_argument("--seconds", type=arguments.seconds, help="or the duration")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    tally = CallTally()
    samples: list[ResourceSnapshot] = []
    at_rest: list[ResourceSnapshot] = []
    rates: list[float] = []
    start = time.monotonic()
    total = None if args.seconds else args.calls or CALLS
    with (
        ServerUnderTest(args.python, arguments.server_flags(args)) as server,
        command.counted_progress("calls", total) as advance,
    ):
        for quarter in range(NUM_QUARTERS):
            calls, rng = _quarter_calls(tally, args, quarter), random.Random(args.seed + quarter)
            load = CheckedLoad(server, calls, tally, rng, advance)
            answered, quarter_start = tally.answered, time.monotonic()
            take_sample = lambda: ResourceSnapshot.take(server.pid, tally.answered)  # noqa: E731
            with PeriodicSampler(take_sample, SAMPLE_INTERVAL_S) as sampler:
                asyncio.run(_until_stalled(load, tally, args.in_flight))
            rates.append(round((tally.answered - answered) / (time.monotonic() - quarter_start), 1))
            samples += sampler.samples[1:-1]  # the first and the last are taken without load
            at_rest.append(server.snapshot_at_rest(tally.answered))
            if tally.lost:
                break
    command.print_examples("soak", [*tally.examples, *server.leftovers])
    return {
        "in_flight": args.in_flight,
        "seconds": round(time.monotonic() - start),
        "calls_per_s": rates,
        **summarize(tally, samples, at_rest, server.leftovers),
    }


def _quarter_calls(tally: CallTally, args: argparse.Namespace, quarter: int) -> Iterator[CheckedCall]:
    """The calls of one quarter, counted in the tally as they are sent.

    They are a fourth of `--calls`, or as many as are sent in a fourth of `--seconds`.
    """
    weights = STDLIB_WEIGHTS if args.stdlib_only else KIND_WEIGHTS
    seeds = itertools.count(args.seed + (quarter << 20))  # no quarter reaches the seeds of the next one
    calls = (call for seed in seeds for call in checked_calls(CHUNK, seed, weights))
    total = args.calls or CALLS
    share = total * (quarter + 1) // NUM_QUARTERS - total * quarter // NUM_QUARTERS
    give_up_at = time.monotonic() + (args.seconds or 0.0) / NUM_QUARTERS
    for count, call in enumerate(calls):
        if (time.monotonic() >= give_up_at) if args.seconds else (count >= share):
            return
        tally.calls += 1
        yield call


async def _until_stalled(load: CheckedLoad, tally: CallTally, in_flight: int) -> None:
    """Run the load until all calls are answered, or none has been answered for `STALL_TIMEOUT_S`."""

    async def watch() -> None:
        answered = -1
        while answered < tally.answered:
            answered = tally.answered
            await asyncio.sleep(STALL_TIMEOUT_S)
        running.cancel()

    running = asyncio.ensure_future(load.run(in_flight))
    watching = asyncio.ensure_future(watch())
    try:
        await asyncio.wait([running])
    finally:
        watching.cancel()
        running.cancel()
    if not running.cancelled():
        running.result()


def summarize(
    tally: CallTally,
    samples: Sequence[ResourceSnapshot],
    at_rest: Sequence[ResourceSnapshot],
    leftovers: Sequence[str],
) -> dict[str, Any]:
    """The result of a soak, and its requirements."""
    last_half = [sample for sample in samples if sample.calls >= tally.answered / 2]
    growth = estimate_growth(last_half)
    counts = {**tally.errors, "unavailable": tally.unavailable.total()}
    rows = requirements.none_of({**counts, "leftovers": len(leftovers)})
    rows.append(requirements.at_least("samples in the last half", statistics.MIN_VALUES, len(last_half)))
    for name, estimate in growth.items():
        if name in MEMORY:
            rows.append(_growth_requirement(f"growth of {name} in a line", 0.0, estimate, not estimate.is_line))
        elif name in TOLERANCE:
            tolerance = TOLERANCE[name]
            holds = not estimate.is_over(tolerance)
            rows.append(_growth_requirement(f"growth of {name}", tolerance, estimate, holds))
    grown = growth_at_rest(at_rest, at_rest[len(at_rest) // 2 - 1].calls)
    rows += [requirements.at_most(f"{name} at rest", before, after) for name, (before, after) in grown.items()]
    return {
        "calls": tally.calls,
        "answered": tally.answered,
        **counts,
        "statuses": dict(tally.statuses.most_common()),
        "abandoned_requests": tally.abandoned,
        "latency_ms": statistics.percentiles(tally.latencies_ms(), (50, 90, 99)),
        "samples": len(samples),
        "last_half": {
            name: {
                "median": sorted(getattr(sample, name) for sample in last_half)[len(last_half) // 2],
                "growth": round(estimate.rise, 2),
                "noise": round(estimate.noise, 2),
                "tolerance": TOLERANCE.get(name),
            }
            for name, estimate in growth.items()
        },
        "under_load": [
            (sample.calls, sample.memory_mb) for sample in samples[:: -(-len(samples) // MAX_PLOTTED_SAMPLES) or 1]
        ],
        "at_rest": [asdict(snapshot) for snapshot in at_rest],
        "leftovers": list(leftovers),
        "requirements": rows,
    }


def _growth_requirement(
    name: str, tolerance: float, growth: statistics.Growth, holds: bool
) -> requirements.Requirement:
    bound = f"≤ {tolerance:g} + noise of {statistics.SIGNIFICANCE * growth.noise:.1f}"
    return {"name": name, "bound": bound, "measured": round(growth.rise, 2), "holds": holds}


def estimate_growth(samples: Sequence[ResourceSnapshot]) -> Mapping[str, statistics.Growth]:
    """Growth of each sampled resource; empty if there are too few samples."""
    if len(samples) < statistics.MIN_VALUES:
        return {}
    return {
        name: statistics.estimate_growth([getattr(sample, name) for sample in samples])
        for name in (*MEMORY, *TOLERANCE, "slab_mb")
    }


def tables(result: Result) -> list[Block]:
    """A sentence, and a row for each sampled resource."""
    counts = count_list(result, (*ERRORS, "unavailable"))
    rates = ", ".join(map(number, result["calls_per_s"]))
    memory = ", ".join(f"{snapshot['memory_mb']:,.0f}" for snapshot in result["at_rest"])
    rows = [
        (name.replace("_", " "), *(f"{row[part]:,.1f}" for part in ("median", "growth", "noise")))
        for name, row in result["last_half"].items()
    ]
    return [
        f"{result['answered']:,} calls: {counts}; {rates} calls/s in each quarter; {memory} MiB at rest after each.",
        Table(("of the server, in the last half", "median", "growth", "noise"), rows),
    ]


def draw(axes: Any, result: Result) -> None:
    """Memory over the number of calls, at rest and under load."""
    at_rest = result["at_rest"]
    axes.plot([row["calls"] for row in at_rest], [row["memory_mb"] for row in at_rest], "o--", label="at rest")
    axes.plot(*zip(*result["under_load"], strict=True), label="under load")
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    axes.set_xlabel("calls")
    axes.set_ylabel("memory of the server, MiB")
    axes.legend()


if __name__ == "__main__":
    raise SystemExit(main())
