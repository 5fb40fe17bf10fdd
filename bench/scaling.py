"""How many cores do the calls of a training step need? Calls with measured costs are simulated on more cores.

    python -m bench.scaling [--calls 45000] [--p99-s 1] [--results DIR] [--json]

This measures nothing. It reads from `bench/results/`:

| file | gives |
|---|---|
| burst.json | the cost of a `print`, in total and of its executor, and the memory per call in flight |
| burst-mix.json (optional) | the memory per call of the mix |
| mixed.json | the cost of a call of the mix, its variance, and its bytes on the wire |
| gateway.json | the rate of a gateway |

The calls of a step arrive in several patterns and are served by C equal cores, in the order of arrival, each by one
core to its end. The result is the smallest C that answers 99 of 100 calls in time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import arguments, command
from bench.harness.tables import Block, Result, Table
from bench.workloads.code_kinds import KIND_NAMES

RESULTS = Path(__file__).with_name("results")
SOURCES = {
    "burst": "python -m bench.burst --json",
    "mixed": "python -m bench.mixed --json",
    "gateway": "python -m bench.gateway --json",
}
"""Required results, and the commands that measure them."""
BURST_OF_MIX = "burst-mix"
MEMORY = {"print": "burst", "mix": BURST_OF_MIX}
"""The result that has the memory of a kind of call."""
WAVES = 10
"""Number of the waves in which calls arrive."""
WAVES_S = 60.0
"""Seconds over which the waves are spread."""
SPANS_S = (10.0, 60.0, 300.0)
"""Seconds over which calls arrive at random."""
ENDLESS_SHARE = 0.01
"""Assumed share of endless loops."""
ENDLESS_S = 10.0
"""Assumed time-out of endless loops."""

Arrivals = list[float]
"""Seconds after the start of the step, in order."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compute the estimate. Return exit code 1 if a measurement is missing."""
    return command.run_benchmark(_parser(), argv, _measure, tables, draw)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("scaling", __doc__, "seed")
    parser.add_argument("--calls", type=arguments.count, default=45_000, help="calls of one step (default: 45000)")
    parser.add_argument("--p99-s", type=arguments.seconds, default=1.0, help="seconds for 99 of 100 calls (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="(default: bench/results)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    measured = {name: _read(args.results / f"{name}.json", source) for name, source in SOURCES.items()}
    if (args.results / f"{BURST_OF_MIX}.json").exists():
        measured[BURST_OF_MIX] = _read(args.results / f"{BURST_OF_MIX}.json", f"{SOURCES['burst']} --kind mix")
    arrival_patterns = arrivals(args.calls, args.seed)
    with command.counted_progress("arrival patterns", 2 * len(arrival_patterns)) as advance:
        burst, mix = measured["burst"], measured["mixed"]["traffic"]["without_loops"]
        kinds = {
            name: estimate(call_cpu_ms, cpu_ms, arrival_patterns, args.p99_s, args.seed, advance)
            for name, call_cpu_ms, cpu_ms in (
                ("print", burst["call_cpu_ms"], burst["burst"]["cpu_ms"]),
                ("mix", mix["call_cpu_ms"], mix["cpu_ms"]),
            )
        }
    executor_cpu_ms = burst["steady"]["executor_cpu_ms"]
    return {
        "calls": args.calls,
        "p99_s": args.p99_s,
        "kinds": kinds,
        "gateway": gateway_needs(measured["gateway"]["calls_per_core_s"], mix["bytes"], arrival_patterns),
        "executor": {"cpu_ms": executor_cpu_ms, "calls_per_core_s": round(1e3 / executor_cpu_ms)},
        "memory": {kind: memory_needs(measured[name], args.calls) for kind, name in MEMORY.items() if name in measured},
        "endless_core_s": round(args.calls * ENDLESS_SHARE * ENDLESS_S),
        "measured_on": {name: result["machine"] for name, result in measured.items()},
    }


def _read(file: Path, source: str) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise command.BenchFailed(
            f"expected {file}, which does not exist; `{source} | tail -1 > {file}` makes it"
        ) from None
    return result


def arrivals(calls: int, seed: int) -> dict[str, Arrivals]:
    """Patterns in which the calls of a step may arrive."""
    rng = random.Random(seed)
    patterns = {
        "all at once": [0.0] * calls,
        f"in {WAVES} waves over {WAVES_S:g} s": [n * WAVES // calls * WAVES_S / WAVES for n in range(calls)],
    }
    for span_s in SPANS_S:
        patterns[f"at random over {span_s:g} s"] = sorted(rng.uniform(0, span_s) for _ in range(calls))
    return patterns


def estimate(
    call_cpu_ms: Sequence[float],
    cpu_ms: float,
    patterns: Mapping[str, Arrivals],
    p99_s: float,
    seed: int,
    on_pattern: Callable[[], object],
) -> dict[str, Any]:
    """The cost of one kind of call, and the cores that it needs for each arrival pattern."""
    count = len(next(iter(patterns.values())))
    needs_s = needs(call_cpu_ms, cpu_ms, count, seed)
    rows = {}
    for name, due in patterns.items():
        rows[name] = {
            "cores_for_answer": cores_for(due, needs_s, p99_s, wait_only=False),
            "cores_for_wait": cores_for(due, needs_s, p99_s, wait_only=True),
        }
        on_pattern()
    return {
        "cpu_ms": cpu_ms,
        "own_p99_s": round(p99(needs_s), 3),
        "core_s": round(sum(needs_s)),
        "arrival_patterns": rows,
    }


def needs(call_cpu_ms: Sequence[float], cpu_ms: float, count: int, seed: int) -> list[float]:
    """CPU seconds of `count` calls: their own, drawn from the measured distribution, and an equal share of the
    service's.

    `call_cpu_ms` are quantiles at even steps; `cpu_ms` is the mean cost of a call with the service's share.
    """
    service_ms = max(0.0, cpu_ms - statistics.fmean(call_cpu_ms))
    rng = random.Random(seed)
    values_s = []
    for _ in range(count):
        position = rng.random() * (len(call_cpu_ms) - 1)
        low = min(math.floor(position), len(call_cpu_ms) - 2)
        own_ms = call_cpu_ms[low] + (position - low) * (call_cpu_ms[low + 1] - call_cpu_ms[low])
        values_s.append((own_ms + service_ms) / 1e3)
    return values_s


def cores_for(due: Arrivals, needs_s: Sequence[float], p99_s: float, *, wait_only: bool) -> int | None:
    """The smallest number of cores that answers 99 of 100 calls within `p99_s`, or starts them if `wait_only`.

    None if no number of cores is enough.
    """

    def holds(cores: int) -> bool:
        waits = waits_s(due, needs_s, cores)
        return p99(waits if wait_only else [wait + need for wait, need in zip(waits, needs_s, strict=True)]) <= p99_s

    low, high = 1, len(due)
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def waits_s(due: Arrivals, needs_s: Sequence[float], cores: int) -> list[float]:
    """The time that each call waits for a core, in the order of arrival."""
    free_at = [0.0] * cores
    waits = []
    for at_s, need_s in zip(due, needs_s, strict=True):
        start_s = max(at_s, free_at[0])
        heapq.heapreplace(free_at, start_s + need_s)
        waits.append(start_s - at_s)
    return waits


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return sorted(values)[math.ceil(len(values) * 0.99) - 1]


def gateway_needs(calls_per_core_s: float, size: float, patterns: Mapping[str, Arrivals]) -> dict[str, Any]:
    """The rate of a gateway, the bytes of a call, and for each arrival pattern its calls/s and MB/s on the wire."""
    rates = {name: max_in_a_second(due) for name, due in patterns.items()}
    return {
        "calls_per_core_s": calls_per_core_s,
        "bytes": size,
        "arrival_patterns": {
            name: {
                "calls_per_s": rate,
                "mb_per_s": round(rate * size / 1e6, 1),
            }
            for name, rate in rates.items()
        },
    }


def max_in_a_second(due: Arrivals) -> int:
    """The maximum of arrivals within one second."""
    maximum, first = 0, 0
    for last, at_s in enumerate(due):
        while due[first] <= at_s - 1.0:
            first += 1
        maximum = max(maximum, last - first + 1)
    return maximum


def memory_needs(burst: Result, calls: int) -> dict[str, Any]:
    """The server's memory without calls, per call in flight (which the gateway holds), of running calls, and in
    total."""
    server, gateway = burst["memory_mb"], burst["gateway_mb"]
    waiting_mb = gateway["peak"] - gateway["idle"]
    call_kb = waiting_mb * 1024 / burst["in_flight"]
    running_mb = max(0.0, server["peak"] - server["idle"] - waiting_mb)
    return {
        "idle_mb": server["idle"],
        "call_kb": round(call_kb, 1),
        "running_mb": round(running_mb),
        "total_mb": round(server["idle"] + running_mb + call_kb * calls / 1024),
    }


def tables(result: Result) -> list[Block]:
    """A table for each kind of call, and sentences on memory and rates."""
    gateway, in_time = result["gateway"], f"{result['p99_s']:g} s"
    columns = ("arrivals", "calls/s", f"cores: 99 % started in {in_time}", "answered", "MB/s")
    blocks: list[Block] = []
    for name, kind in result["kinds"].items():
        rows = []
        for pattern, cores in kind["arrival_patterns"].items():
            flow = gateway["arrival_patterns"][pattern]
            needed = [f"{cores[part]:,}" if cores[part] else "-" for part in ("cores_for_wait", "cores_for_answer")]
            rows.append((pattern, f"{flow['calls_per_s']:,}", *needed, f"{flow['mb_per_s']:.1f}"))
        cost = f"{kind['cpu_ms']:.1f} ms of CPU per call, 99 % of them within {kind['own_p99_s']:.3g} s"
        title = f"{result['calls']:,} calls of {KIND_NAMES[name]}: {cost}, {kind['core_s']:,} core seconds"
        blocks.append(Table(columns, rows, title))
    memory = " and ".join(
        f"{row['call_kb']:.1f} KiB per call of {KIND_NAMES[name]} in flight, {row['total_mb']:,} MiB in total"
        + (f" ({row['running_mb']:,} of it for running calls)" if row.get("running_mb") else "")
        for name, row in result["memory"].items()
    )
    sources = ", ".join(f"{name} of {machine['commit']}" for name, machine in result["measured_on"].items())
    return [
        *blocks,
        f"Memory: {result['memory']['print']['idle_mb']:,} MiB without calls, {memory}. "
        f"A gateway's core handles {gateway['calls_per_core_s']:,} calls/s, an executor's "
        f"{result['executor']['calls_per_core_s']:,} of {KIND_NAMES['print']}; "
        f"a call of the mix is {gateway['bytes']:,} bytes on the wire, in both directions. "
        f"If 1 % of the calls are endless loops with a time-out of 10 s, they need {result['endless_core_s']:,} "
        "further core seconds.",
        f"Computed from measurements at these commits: {sources}.",
    ]


def draw(axes: Any, result: Result) -> None:
    """The cores that start 99 of 100 calls in time, by arrival pattern."""
    kinds, patterns = result["kinds"], list(result["gateway"]["arrival_patterns"])
    for number, (name, kind) in enumerate(kinds.items()):
        positions = [position + (number - (len(kinds) - 1) / 2) * 0.4 for position in range(len(patterns))]
        cores = [kind["arrival_patterns"][pattern]["cores_for_wait"] or 0 for pattern in patterns]
        axes.bar_label(axes.barh(positions, cores, 0.4, label=name))
    axes.set_yticks(range(len(patterns)), patterns)
    axes.set_xscale("log")
    axes.set_xlabel(f"cores that start 99 % of the calls in {result['p99_s']:g} s")
    axes.legend()


if __name__ == "__main__":
    raise SystemExit(main())
