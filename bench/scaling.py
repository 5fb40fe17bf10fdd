"""How many cores a step's calls need: what was measured of calls here, replayed on as many cores as it takes.

    python -m bench.scaling [--calls 45000] [--p99-s 1] [--results FOLDER] [--json]

It measures nothing itself. From `bench/results/`: burst.json says what a `print` costs, all together and its executor
alone, and what memory one in flight takes; burst-mix.json, if it is there, what memory a call of the mix takes;
mixed.json what such a call costs, how that varies, and how many bytes it is on the wire; gateway.json what a gateway
moves. The calls of a step come in one way or another and are served by C like cores, in the order in which they came,
each by one core to its end. The smallest C that answers 99 of 100 in time is shown.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import command as output

RESULTS = Path(__file__).with_name("results")
SOURCES = {
    "burst": "python -m bench.burst --json",
    "mixed": "python -m bench.mixed --json",
    "gateway": "python -m bench.gateway --json",
}
"""What is needed, and what prints it."""
BURST_OF_MIX = "burst-mix"
MEMORY = {"print": "burst", "mix": BURST_OF_MIX}
CALLS = 45_000
P99_S = 1.0
WAVES, WAVES_S = 10, 60.0
SPANS_S = (10.0, 60.0, 300.0)
ENDLESS_SHARE, ENDLESS_S = 0.01, 10.0

Arrivals = list[float]
"""Seconds from the beginning of the step, in order."""


def main(argv: Sequence[str] | None = None) -> int:
    """The estimate; 1 if a measurement that it needs is missing."""
    args = _parser().parse_args(argv)
    return output.run_as_command("scaling", lambda: _estimate(args))


def _parser() -> argparse.ArgumentParser:
    parser = output.parser("scaling", __doc__ or "")
    parser.add_argument("--calls", type=output.count, default=CALLS, help=f"of one step (default: {CALLS})")
    parser.add_argument("--p99-s", type=output.seconds, default=P99_S, help="for 99 of 100 of them (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="(default: bench/results)")
    parser.add_argument("--seed", type=int, default=0, help="which call comes when (default: 0)")
    return parser


def _estimate(args: argparse.Namespace) -> int:
    measured = {name: _read(args.results / f"{name}.json", command) for name, command in SOURCES.items()}
    if (args.results / f"{BURST_OF_MIX}.json").exists():
        measured[BURST_OF_MIX] = _read(args.results / f"{BURST_OF_MIX}.json", f"{SOURCES['burst']} --kind mix")
    with output.progress() as bar:
        ways = arrivals(args.calls, args.seed)
        task = bar.add_task("ways of arriving", total=2 * len(ways))
        burst, mix = measured["burst"], measured["mixed"]["traffic"]["without_loops"]
        kinds = {
            name: estimate(call_cpu_ms, cpu_ms, ways, args.p99_s, args.seed, lambda: bar.advance(task))
            for name, call_cpu_ms, cpu_ms in (
                ("print", burst["call_cpu_ms"], burst["burst"]["cpu_ms"]),
                ("mix", mix["call_cpu_ms"], mix["cpu_ms"]),
            )
        }
    figures = {
        "bench": "scaling",
        "calls": args.calls,
        "p99_s": args.p99_s,
        "kinds": kinds,
        "gateway": at_the_gateway(measured["gateway"]["calls_per_core_s"], mix["bytes"], ways),
        "executor": executor(burst["steady"]["executor_cpu_ms"]),
        "memory": {kind: memory(measured[name], args.calls) for kind, name in MEMORY.items() if name in measured},
        "endless_core_s": round(args.calls * ENDLESS_SHARE * ENDLESS_S),
        "measured_on": {name: figures["machine"] for name, figures in measured.items()},
    }
    _show(figures)
    output.finish(figures, _parser(), args)
    return 0


def _read(file: Path, command: str) -> dict[str, Any]:
    try:
        figures: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise output.BenchFailed(
            f"expected {file}, which is not there; `{command} | tail -1 > {file}` makes it"
        ) from None
    return figures


def arrivals(calls: int, seed: int) -> dict[str, Arrivals]:
    """Ways in which the calls of a step may come."""
    rng = random.Random(seed)
    ways = {
        "all at once": [0.0] * calls,
        f"in {WAVES} waves over {WAVES_S:g} s": [n * WAVES // calls * WAVES_S / WAVES for n in range(calls)],
    }
    for span_s in SPANS_S:
        ways[f"at random over {span_s:g} s"] = sorted(rng.uniform(0, span_s) for _ in range(calls))
    return ways


def estimate(
    call_cpu_ms: Sequence[float],
    cpu_ms: float,
    ways: Mapping[str, Arrivals],
    p99_s: float,
    seed: int,
    step: Callable[[], None],
) -> dict[str, Any]:
    """What one kind of call takes, and the cores that it needs for each way of arriving."""
    count = len(next(iter(ways.values())))
    needs_s = needs(call_cpu_ms, cpu_ms, count, seed)
    rows = {}
    for name, due in ways.items():
        rows[name] = {
            "cores_for_answer": cores_for(due, needs_s, p99_s, wait_only=False),
            "cores_for_wait": cores_for(due, needs_s, p99_s, wait_only=True),
        }
        step()
    return {
        "cpu_ms": cpu_ms,
        "own_p99_s": round(p99(needs_s), 3),
        "core_s": round(sum(needs_s)),
        "ways": rows,
    }


def needs(call_cpu_ms: Sequence[float], cpu_ms: float, count: int, seed: int) -> list[float]:
    """Seconds of CPU of `count` calls as varied as those measured: their own, and an equal share of the service's.

    `call_cpu_ms` are quantiles at even steps; `cpu_ms` is what a call cost on average, all included.
    """
    service_ms = max(0.0, cpu_ms - statistics.fmean(call_cpu_ms))
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        place = rng.random() * (len(call_cpu_ms) - 1)
        low = min(math.floor(place), len(call_cpu_ms) - 2)
        own_ms = call_cpu_ms[low] + (place - low) * (call_cpu_ms[low + 1] - call_cpu_ms[low])
        found.append((own_ms + service_ms) / 1e3)
    return found


def cores_for(due: Arrivals, needs_s: Sequence[float], p99_s: float, *, wait_only: bool) -> int | None:
    """The fewest cores with which 99 of 100 calls are answered (or begun) within `p99_s`; None if no number does it."""

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
    """How long each call waits for one of so many cores, first come, first served."""
    free_at = [0.0] * cores
    waits = []
    for at_s, need_s in zip(due, needs_s, strict=True):
        begun = max(at_s, free_at[0])
        heapq.heapreplace(free_at, begun + need_s)
        waits.append(begun - at_s)
    return waits


def p99(values: Sequence[float]) -> float:
    """What 99 of 100 do not exceed."""
    return sorted(values)[math.ceil(len(values) * 0.99) - 1]


def at_the_gateway(calls_per_core_s: float, size: float, ways: Mapping[str, Arrivals]) -> dict[str, Any]:
    """How many gateways the calls take as they come, and how many bytes a second go over the wire."""
    rates = {name: most_in_a_second(due) for name, due in ways.items()}
    return {
        "calls_per_core_s": calls_per_core_s,
        "bytes": size,
        "ways": {
            name: {
                "calls_per_s": rate,
                "gateways": math.ceil(rate / calls_per_core_s),
                "mb_per_s": round(rate * size / 1e6, 1),
            }
            for name, rate in rates.items()
        },
    }


def executor(cpu_ms: float) -> dict[str, float]:
    """What an executor moves that has a core of its own, given the CPU of its process for one call."""
    return {"cpu_ms": cpu_ms, "calls_per_core_s": round(1e3 / cpu_ms)}


def most_in_a_second(due: Arrivals) -> int:
    """The most calls that come within one second."""
    most, first = 0, 0
    for last, at_s in enumerate(due):
        while due[first] <= at_s - 1.0:
            first += 1
        most = max(most, last - first + 1)
    return most


def memory(figures: Mapping[str, Any], calls: int) -> dict[str, Any]:
    """What the server holds without calls, what one in flight adds to the gateway, which has them all, what those that
    ran added beside, and all of it."""
    held, gateway = figures["memory_mb"], figures["gateway_mb"]
    waiting_mb = gateway["peak"] - gateway["idle"]
    each_kb = waiting_mb * 1024 / figures["in_flight"]
    running_mb = max(0.0, held["peak"] - held["idle"] - waiting_mb)
    return {
        "idle_mb": held["idle"],
        "each_kb": round(each_kb, 1),
        "running_mb": round(running_mb),
        "all_mb": round(held["idle"] + running_mb + each_kb * calls / 1024),
    }


def _show(figures: Mapping[str, Any]) -> None:
    gateway = figures["gateway"]
    for name, kind in figures["kinds"].items():
        rows = [
            (way, *(found or "none" for found in cores.values()), *gateway["ways"][way].values())
            for way, cores in kind["ways"].items()
        ]
        title = f"{figures['calls']:,} calls, {name}: {kind['core_s']:,} core seconds, p99 of one {kind['own_p99_s']} s"
        under = f"< {figures['p99_s']:g} s"
        columns = ("they come", f"cores: answer {under}", f"wait {under}", "calls/s", "gateways", "MB/s")
        output.show(title, columns, rows)
    for name, held in figures["memory"].items():
        print(f"memory, {name}: {held['idle_mb']:,} MiB, and {held['each_kb']} KiB a call in flight", file=sys.stderr)


def draw(axes: Any, figures: Mapping[str, Any]) -> None:
    """What a run printed as JSON, as a picture: the cores with which 99 of 100 calls have begun in time."""
    kinds, ways = figures["kinds"], list(figures["gateway"]["ways"])
    for number, (name, kind) in enumerate(kinds.items()):
        places = [place + (number - (len(kinds) - 1) / 2) * 0.4 for place in range(len(ways))]
        axes.bar_label(axes.barh(places, [kind["ways"][way]["cores_for_wait"] or 0 for way in ways], 0.4, label=name))
    axes.set_yticks(range(len(ways)), ways)
    axes.set_xscale("log")
    axes.set_xlabel(f"cores, so that 99 % have begun in {figures['p99_s']:g} s")
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
