"""How many cores and how much memory do the calls of a training step need, by the measured costs of a call?

    python -m bench.scaling [--calls 45000] [--results DIR] [--json]

This measures nothing. It reads from `bench/results/`:

| file | gives |
|---|---|
| burst.json | the cost of a `print`, in total and of its executor, and the memory per call in flight |
| burst-mix.json | the memory per call of the mix |
| mixed.json | the cost of a call of the mix, and its bytes on the wire |
| gateway.json | the rate of a gateway |

If the calls that arrive within a second shall end within a second, the number of cores must equal their core seconds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import arguments, command
from bench.harness.tables import Block, Result, Table
from bench.workloads.code_kinds import KIND_NAMES

RESULTS = Path(__file__).with_name("results")
SOURCES = {
    "burst": "python -m bench.burst --json",
    "burst-mix": "python -m bench.burst --kind mix --json",
    "mixed": "python -m bench.mixed --json",
    "gateway": "python -m bench.gateway --json",
}
"""Required results, and the commands that measure them."""
MEMORY = {"print": "burst", "mix": "burst-mix"}
"""The result that has the memory of a kind of call."""
ARRIVALS = {"all at once": 1, "in 10 waves": 10, "over 10 s": 10, "over 60 s": 60, "over 300 s": 300}
"""Ways in which calls arrive, and the seconds over which they are spread. A wave counts as one second."""
ENDLESS_SHARE = 0.01
"""Assumed share of endless loops."""
ENDLESS_S = 10.0
"""Assumed time-out of endless loops."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compute the estimate. Return exit code 1 if a measurement is missing."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("scaling", __doc__)
    parser.add_argument("--calls", type=arguments.count, default=45_000, help="calls of one step (default: 45000)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="(default: bench/results)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    measured = {name: _read(args.results / f"{name}.json", source) for name, source in SOURCES.items()}
    mix = measured["mixed"]["traffic"]["without_loops"]
    costs = {"print": measured["burst"]["burst"]["cpu_ms"], "mix": mix["cpu_ms"]}
    return {
        "calls": args.calls,
        "kinds": {name: estimate(args.calls, cpu_ms) for name, cpu_ms in costs.items()},
        "bytes": mix["bytes"],
        "gateway_calls_per_core_s": measured["gateway"]["calls_per_core_s"],
        "executor_calls_per_core_s": round(1e3 / measured["burst"]["steady"]["executor_cpu_ms"]),
        "memory": {kind: memory_needs(measured[name], args.calls) for kind, name in MEMORY.items()},
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


def estimate(calls: int, cpu_ms: float) -> dict[str, Any]:
    """The core seconds of the calls, and the cores that they need in each way of arrival."""
    core_s = calls * cpu_ms / 1e3
    cores = {name: math.ceil(core_s / seconds) for name, seconds in ARRIVALS.items()}
    return {"cpu_ms": cpu_ms, "core_s": round(core_s), "cores": cores}


def memory_needs(burst: Result, calls: int) -> dict[str, Any]:
    """Four sizes of the server's memory: without calls, per call in flight (the gateway holds these), of running calls,
    and in total."""
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
    """A row for each way of arrival, and sentences on costs, memory and rates."""
    kinds, calls = result["kinds"], result["calls"]
    rows = [
        (name, f"{calls / seconds:,.0f}", *(f"{kind['cores'][name]:,}" for kind in kinds.values()),
         f"{calls / seconds * result['bytes'] / 1e6:.1f}")
        for name, seconds in ARRIVALS.items()
    ]  # fmt: skip
    costs = "; ".join(
        f"{KIND_NAMES[name]}: {kind['cpu_ms']:.1f} ms of CPU per call, {kind['core_s']:,} core seconds"
        for name, kind in kinds.items()
    )
    memory = " and ".join(
        f"{row['call_kb']:.1f} KiB per call of {KIND_NAMES[name]} in flight, {row['total_mb']:,} MiB in total "
        f"({row['running_mb']:,} of it for running calls)"
        for name, row in result["memory"].items()
    )
    sources = ", ".join(f"{name} of {machine['commit']}" for name, machine in result["measured_on"].items())
    return [
        f"{calls:,} calls of {costs}.",
        Table(("arrivals", "calls/s", *(f"cores for {KIND_NAMES[name]}" for name in kinds), "MB/s"), rows),
        f"Memory: {result['memory']['print']['idle_mb']:,} MiB without calls, {memory}. "
        f"A gateway's core handles {result['gateway_calls_per_core_s']:,} calls/s, an executor's "
        f"{result['executor_calls_per_core_s']:,} of {KIND_NAMES['print']}; "
        f"a call of the mix is {result['bytes']:,} bytes on the wire, in both directions. "
        f"If 1 % of the calls are endless loops with a time-out of 10 s, they need {result['endless_core_s']:,} "
        "further core seconds.",
        f"Computed from measurements at these commits: {sources}.",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
