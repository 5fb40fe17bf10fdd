"""How much CPU time does a call over HTTP take, compared with fork, run and exit of the same warm interpreter?

    python -m bench.layers [--calls N] [--rounds R] [--profiles bare,numeric] [--json]

Three ways run the same code:

    floor       fork(2), compile and run the code with stdout on a memory file, exit; no isolation
    os.fork     the same with Python's own os.fork
    http        a call of the service: HTTP in batches of 64 from a client on the same cores

A zygote is the preloaded interpreter that forks once per call. The CPU time includes the calls' own processes, as the
kernel counts them, and zygote, executor and gateway by `sum_exec_runtime`. It does not include the client.

`http` runs on every core at once, and cores share caches. So `floor` and `os.fork` run on every core at once too
(`--in-flight 1` runs them on one core). The ways take turns within a round, there are many short rounds, and medians
over rounds are compared. So other load on the machine affects all ways equally.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.rounds import median_of_ratios
from bench.harness.statistics import median
from bench.harness.tables import Block, Result, Table
from bench.probes import processes
from bench.servers import service
from bench.servers.layers_host import MeasuringJail, measuring_jail
from bench.workloads.code_kinds import PROFILE_CODES
from sandbox import jail
from sandbox.client import AsyncClient
from sandbox.settings.server import ZYGOTE_PROFILES
from sandbox.types import Call, Status

BATCH = 64
"""Calls in a request, and in the round that warms up."""
FORKS = ("floor", "os.fork")
STEPS = (*FORKS, "http")
MAX_RATIO = 1.6
"""Promised bound on the CPU time of a call over HTTP, as a multiple of `os.fork`: fork, run and exit of the same
zygote. The ratio to `floor` has no bound and is only reported. The CPU time of `floor` is lower, since it forks by
machine code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement. Return exit code 1 if a profile's ratio to os.fork exceeds `MAX_RATIO`."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("layers", __doc__, "python")
    arguments.add_in_flight(parser, len(os.sched_getaffinity(0)), "zygotes that fork")
    parser.add_argument("--calls", type=arguments.count, default=64, help="calls per step and round (default: 64)")
    parser.add_argument("--rounds", type=arguments.count, default=25, help="rounds (default: 25)")
    names = ",".join(PROFILE_CODES)
    profiles = arguments.names_of(PROFILE_CODES)
    parser.add_argument("--profiles", type=profiles, default=tuple(PROFILE_CODES), help=f"of {names}")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if jail.choose_level("auto").level is not jail.Level.NAMESPACES:
        raise command.BenchFailed("expected isolation=namespaces on this machine; see `rstar-sandbox doctor`")
    python = service.guest_python(args.python)
    cpu_ms: dict[tuple[str, str], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        jails = {
            name: [stack.enter_context(measuring_jail(python, name, index)) for index in range(args.in_flight)]
            for name in args.profiles
        }
        server = stack.enter_context(service.running(python))
        num_steps = (args.rounds + 1) * len(args.profiles) * len(STEPS)
        advance = stack.enter_context(command.counted_progress("steps", num_steps))
        for number in range(args.rounds + 1):  # round 0 warms up and is not counted
            for name in args.profiles:
                for step, step_cpu_ms in _round(jails[name], server, name, args.calls if number else BATCH):
                    advance()
                    if number:
                        cpu_ms[name, step].append(step_cpu_ms)
    return summarize(cpu_ms, args)


def _round(
    jails: Sequence[MeasuringJail], server: service.Service, profile: str, calls: int
) -> Iterator[tuple[str, float]]:
    for fork in FORKS:
        for guest in jails:
            guest.start(fork, -(-calls // len(jails)))
        yield fork, fmean(guest.cpu_ms() for guest in jails)
    yield "http", asyncio.run(_over_http(server, PROFILE_CODES[profile], calls))


def summarize(cpu_ms: Mapping[tuple[str, str], Sequence[float]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians per step, and the ratios of the last step to both forks (medians of each round's own ratio)."""
    profiles = {
        name: {
            "steps": {step: {"cpu_ms": median(cpu_ms[name, step])} for step in STEPS},
            "ratio": _ratio(cpu_ms, name, "floor"),
            "ratio_os_fork": _ratio(cpu_ms, name, "os.fork"),
        }
        for name in args.profiles
    }
    return {
        "calls": args.calls,
        "rounds": args.rounds,
        "in_flight": args.in_flight,
        "profiles": profiles,
        "requirements": [
            requirements.at_most(f"CPU of a {name} call over os.fork, run and exit", MAX_RATIO, row["ratio_os_fork"])
            for name, row in profiles.items()
        ],
    }


def _ratio(cpu_ms: Mapping[tuple[str, str], Sequence[float]], profile: str, fork: str) -> float:
    return round(median_of_ratios(cpu_ms[profile, "http"], cpu_ms[profile, fork], lambda call, bare: call / bare), 3)


async def _over_http(server: service.Service, code: str, calls: int) -> float:
    """CPU milliseconds per call."""
    async with AsyncClient(server.url, batch_size=BATCH) as client:
        await client.execute("pass")  # connect before the clock starts
        meter = processes.CpuMeter(server.pid)
        results = await client.run_batch([Call(code)] * calls)
        own_ms = meter.own_s() * 1e3
    if bad := [result.status.value for result in results if result.status is not Status.OK]:
        raise command.BenchFailed(f"{len(bad)} of {calls} calls ended as {bad[0]}, expected ok")
    return (own_ms + sum(result.usage.cpu_ms for result in results)) / calls


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


assert set(ZYGOTE_PROFILES) == set(PROFILE_CODES), "every profile needs a program in PROFILE_CODES"

if __name__ == "__main__":
    raise SystemExit(main())
