"""What does each layer of a call cost: CPU and wall time from a bare fork up to a batch over HTTP?

    python -m bench.layers [--calls N] [--rounds R] [--profiles bare,numeric] [--json]

Every step adds one thing to the step before, with the same warm interpreter and the same code:

    floor       fork(2), compile and run the code with stdout on a memory file, exit; no isolation
    os.fork     the floor with Python's own os.fork, for comparison; later steps build on the floor
    namespaces  own PID, mount, IPC and UTS namespaces
    tmpfs       a private scratch directory
    identity    uid, capabilities, rlimits, no_new_privs
    seccomp     the system call filter
    groups      a control group with limits, entered, set and read; nothing where none can be created
    runner      the whole guest: script semantics, echo, report, output files, result
    executor    the zygote's loop and the executor process, calls in frames
    http        the gateway too: HTTP in batches of 64 from a client on the same cores

The CPU time is that of the service's side: the calls' own processes, as the kernel accounts for them, and zygote,
executor and gateway by `sum_exec_runtime`; the client is left out. The steps in the jail run on every core at once, as
the last two do, since cores share caches (`--in-flight 1` runs them on one core). Steps take turns within a round,
rounds are short and many, and medians over rounds are compared, so that other load on the machine affects all steps
alike.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness import tables as harness_tables
from bench.harness.rounds import median_of_ratios
from bench.harness.statistics import median
from bench.harness.tables import Block, Result, Table
from bench.probes import processes
from bench.servers import service
from bench.servers.layers_host import BATCH, BareExecutor, Cost, MeasuringJail, bare_executor, cost_of, measuring_jail
from bench.workloads.code_kinds import PROFILE_CODES
from sandbox import jail
from sandbox.client import AsyncClient
from sandbox.settings.server import ZYGOTE_PROFILES
from sandbox.types import Call

IN_JAIL = ("floor", "os.fork", "namespaces", "tmpfs", "identity", "seccomp", "groups", "runner")
STEPS = (*IN_JAIL, "executor", "http")
MAX_RATIO = 1.6
"""Promised bound on the CPU of a call over HTTP, as a multiple of os.fork, run and exit of the same zygote. The ratio
to the floor, which is lower (fork by machine code), is reported only."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement. Return exit code 1 if a profile's ratio to os.fork exceeds `--at-most`."""
    return command.run_benchmark(_parser(), argv, _measure, tables, draw)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("layers", __doc__, "python")
    arguments.add_in_flight(parser, len(os.sched_getaffinity(0)), "zygotes that fork, or calls,")
    parser.add_argument("--calls", type=arguments.count, default=64, help="calls per step and round (default: 64)")
    parser.add_argument("--rounds", type=arguments.count, default=25, help="rounds (default: 25)")
    names = ",".join(PROFILE_CODES)
    profiles = arguments.names_of(PROFILE_CODES)
    parser.add_argument("--profiles", type=profiles, default=tuple(PROFILE_CODES), help=f"of {names}")
    parser.add_argument("--at-most", type=float, default=MAX_RATIO, help=f"bound on the ratio (default: {MAX_RATIO:g})")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if jail.choose_level("auto").level is not jail.Level.NAMESPACES:
        raise command.BenchFailed("expected isolation=namespaces on this machine; see `rstar-sandbox doctor`")
    python = service.guest_python(args.python)
    costs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    with ExitStack() as stack:
        jails = {
            name: [stack.enter_context(measuring_jail(python, name, index)) for index in range(args.in_flight)]
            for name in args.profiles
        }
        executor = stack.enter_context(bare_executor(python))
        server = stack.enter_context(service.running(python))
        num_steps = (args.rounds + 1) * len(args.profiles) * len(STEPS)
        advance = stack.enter_context(command.counted_progress("steps", num_steps))
        for number in range(args.rounds + 1):  # round 0 warms up and is not counted
            for name in args.profiles:
                for step, cost in _round(jails[name], executor, server, name, args.calls if number else BATCH):
                    advance()
                    if number:
                        costs[name, step].append(cost)
    result = summarize(costs, args)
    harness_tables.show(_step_tables(result))
    return result


def _round(
    jails: Sequence[MeasuringJail], executor: BareExecutor, server: service.Service, profile: str, calls: int
) -> Iterator[tuple[str, Cost]]:
    for step in IN_JAIL:
        for guest in jails:
            guest.start(step, PROFILE_CODES[profile], -(-calls // len(jails)))
        costs = [guest.cost(step) for guest in jails]
        wall_ms = fmean(cost.wall_ms for cost in costs) / len(jails)
        yield (
            step,
            Cost(fmean(cost.cpu_ms for cost in costs), wall_ms, faults=fmean(cost.faults or 0 for cost in costs)),
        )
    yield "executor", executor.measure(PROFILE_CODES[profile], calls)
    yield "http", asyncio.run(_over_http(server, PROFILE_CODES[profile], calls))


def summarize(costs: Mapping[tuple[str, str], Sequence[Cost]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians per step, and the ratios of the last step to both forks (medians of each round's own ratio)."""
    profiles: dict[str, Any] = {}
    for name in args.profiles:
        floor = costs[name, "floor"]
        steps = {}
        for step in STEPS:
            rows = costs[name, step]
            steps[step] = {
                "cpu_ms": median(cost.cpu_ms for cost in rows),
                "wall_ms": median(cost.wall_ms for cost in rows),
                "floors": round(median_of_ratios(rows, floor, _cpu_ratio), 3),
            }
            for extra in ("ticks_cpu_ms", "faults"):
                if values := [value for cost in rows if (value := getattr(cost, extra)) is not None]:
                    steps[step][extra] = median(values)
        profiles[name] = {
            "steps": steps,
            "ratio": steps["http"]["floors"],
            "ratio_os_fork": round(median_of_ratios(costs[name, "http"], costs[name, "os.fork"], _cpu_ratio), 3),
        }
    return {
        "calls": args.calls,
        "rounds": args.rounds,
        "in_flight": args.in_flight,
        "max_ratio": args.at_most,
        "profiles": profiles,
        "requirements": [
            requirements.at_most(f"CPU of a {name} call over os.fork, run and exit", args.at_most, row["ratio_os_fork"])
            for name, row in profiles.items()
        ],
    }


def _cpu_ratio(cost: Cost, base: Cost) -> float:
    return cost.cpu_ms / base.cpu_ms


async def _over_http(server: service.Service, code: str, calls: int) -> Cost:
    async with AsyncClient(server.url, batch_size=BATCH) as client:
        await client.execute("pass")  # connect before the clock starts
        meter, start = processes.CpuMeter(server.pid), time.perf_counter()
        results = await client.run_batch([Call(code)] * calls)
        wall_s = time.perf_counter() - start
    return cost_of(meter, wall_s, [(result.status.value, result.usage.cpu_ms) for result in results])


def _step_tables(result: Result) -> list[Block]:
    """The cost of every step, a table for each profile."""
    blocks: list[Block] = []
    for name, profile in result["profiles"].items():
        rows, before = [], 0.0
        for step, cost in profile["steps"].items():
            added = "" if step == "os.fork" else f"{cost['cpu_ms'] - before:+.2f}"
            before = before if step == "os.fork" else cost["cpu_ms"]
            faults = f"{cost['faults']:.0f}" if "faults" in cost else "-"
            row = (f"{cost['cpu_ms']:.2f}", added, f"{cost['wall_ms']:.2f}", f"{cost['floors']:.2f}", faults)
            rows.append((step, *row))
        blocks.append(Table(("step", "CPU ms", "added", "wall ms", "floors", "faults"), rows, name))
    return blocks


def tables(result: Result) -> list[Block]:
    """A row for each profile, and which profiles stay below the bound."""
    rows = [
        {
            "warm interpreter": name,
            "fork, run, exit: CPU ms": f"{profile['steps']['floor']['cpu_ms']:.2f}",
            "by os.fork": f"{profile['steps']['os.fork']['cpu_ms']:.2f}",
            "whole call, over HTTP": f"{profile['steps']['http']['cpu_ms']:.2f}",
            "ratio": f"{profile['ratio']:.2f}×",
            "to os.fork": f"{profile['ratio_os_fork']:.2f}×",
        }
        for name, profile in result["profiles"].items()
    ]
    bounds = []
    for fork, ratio in (("by os.fork", "ratio_os_fork"), ("by the cheapest fork", "ratio")):
        above = [name for name, profile in result["profiles"].items() if profile[ratio] > MAX_RATIO]
        bounds.append(f"{fork}: {'all but ' + ', '.join(above) if above else 'all'}")
    return [Table.from_cells(rows), f"At most {MAX_RATIO:g} times fork, run and exit {'; '.join(bounds)}."]


def draw(axes: Any, result: Result) -> None:
    """A bar for each profile, stacked by the cost that each step adds."""
    profiles = {name: profile["steps"] for name, profile in result["profiles"].items()}
    bottom = [0.0] * len(profiles)
    for step in (step for step in STEPS if step != "os.fork"):
        tops = [steps[step]["cpu_ms"] / steps["os.fork"]["cpu_ms"] for steps in profiles.values()]
        added = [max(0.0, top - low) for top, low in zip(tops, bottom, strict=True)]
        axes.bar(list(profiles), added, bottom=bottom, label=step)
        bottom = [low + height for low, height in zip(bottom, added, strict=True)]
    axes.axhline(MAX_RATIO, linestyle="--", color="gray")
    axes.set_ylabel("CPU per call; os.fork, run and exit = 1")
    axes.legend()


assert set(ZYGOTE_PROFILES) == set(PROFILE_CODES), "every profile needs a program in PROFILE_CODES"

if __name__ == "__main__":
    raise SystemExit(main())
