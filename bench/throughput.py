"""Calls per second over HTTP, isolated, beside a fresh interpreter per call without isolation.

    python -m bench.throughput [--kinds print,numpy,sympy,mix] [--calls FILE.jsonl] [--scale 0.5] [--json]

The service gets batches of 64 from `sandbox.client` on the same cores, four at a time; the fresh interpreters run the
same code, as many at once as there are cores (`bench.servers.fresh_interpreter`). The two take turns within a round,
and medians over the
rounds of each round's own ratio are what counts. Memory is taken in a pass of its own, since looking costs time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bench.harness import command
from bench.probes import processes
from bench.servers import service
from bench.servers.fresh_interpreter import Fresh, interpreters
from bench.workloads.tool_calls import load_calls, sample_calls
from sandbox.client import AsyncClient
from sandbox.types import Call, Status

BATCH = 64
IN_FLIGHT = 4
"""Batches at once: enough that the service never waits for the client."""
SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of call: how many of them a round has for either side, and the ratio that the project promises."""

    name: str
    code: str
    calls: int
    fresh_calls: int
    at_least: float | None = None


KINDS = (
    Kind("print", "print(1 + 1)\n", 1024, 128, 8),
    Kind("numpy", "import numpy as np\nprint(np.linalg.det(np.array([[2.0, 1.0], [1.0, 3.0]])))\n", 768, 32, 32),
    Kind("sympy", "from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6, x))\n", 256, 12, 28),
    Kind("mix", "", 384, 96),
)


@dataclass(frozen=True, slots=True)
class Pace:
    """One round of one side."""

    calls_per_s: float
    cpu_ms: float
    latencies_ms: tuple[float, ...]
    statuses: Counter[str]


def main(argv: Sequence[str] | None = None) -> int:
    """The comparison; 1 if a promised ratio is missed."""
    args = _parser().parse_args(argv)
    return command.run_as_command("throughput", lambda: _compare(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("throughput", __doc__ or "")
    names = ",".join(kind.name for kind in KINDS)
    parser.add_argument("--kinds", type=_kinds, default=KINDS, help=f"of {names} (default: all)")
    parser.add_argument("--calls", type=command.file, metavar="FILE", help="JSONL that takes the place of the mix")
    parser.add_argument("--seed", type=int, default=0, help="which made-up mix (default: 0)")
    parser.add_argument("--rounds", type=command.count, default=5, help="rounds (default: 5)")
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual number of calls (default: 1)")
    return parser


def _kinds(text: str) -> tuple[Kind, ...]:
    known = {kind.name: kind for kind in KINDS}
    names = text.split(",")
    if unknown := set(names) - set(known):
        raise argparse.ArgumentTypeError(f"unknown kind {min(unknown)!r}; expected some of {', '.join(known)}")
    return tuple(known[name] for name in names)


def _compare(args: argparse.Namespace) -> int:
    calls = {kind.name: _calls_of(kind, args) for kind in args.kinds}
    python = service.guest_python(args.python)
    ours: dict[str, list[Pace]] = {kind.name: [] for kind in args.kinds}
    theirs: dict[str, list[Pace]] = {kind.name: [] for kind in args.kinds}
    with ExitStack() as stack:
        server = stack.enter_context(service.running(python))
        fresh = stack.enter_context(interpreters(python))
        bar = stack.enter_context(command.progress())
        task = bar.add_task("rounds", total=2 * len(args.kinds) * args.rounds + len(args.kinds))
        for _ in range(args.rounds):
            for kind in args.kinds:
                ours[kind.name].append(asyncio.run(_over_http(server, calls[kind.name])))
                bar.advance(task)
                theirs[kind.name].append(_fresh(fresh, calls[kind.name][: _scaled(kind.fresh_calls, args.scale)]))
                bar.advance(task)
        memory_mb = {}
        for kind in args.kinds:
            with _watching_memory(server) as seen:
                asyncio.run(_over_http(server, calls[kind.name]))
            memory_mb[kind.name] = round(max(seen))
            bar.advance(task)
    rows = {k.name: summarise(k, ours[k.name], theirs[k.name], memory_mb[k.name]) for k in args.kinds}
    figures: dict[str, Any] = {"bench": "throughput", "rounds": args.rounds, "scale": args.scale}
    figures |= {"batch": BATCH, "in_flight": IN_FLIGHT, "holds": all(r["holds"] for r in rows.values()), "kinds": rows}
    _show(figures)
    command.plot(args.plot, lambda axes: draw(axes, figures))
    command.finish(figures, _parser(), args)
    return 0 if figures["holds"] else 1


def _calls_of(kind: Kind, args: argparse.Namespace) -> list[dict[str, Any]]:
    n = _scaled(kind.calls, args.scale)
    if kind.code:
        return [{"code": kind.code}] * n
    calls = load_calls(args.calls)[:n] if args.calls else sample_calls(n, args.seed)
    if not calls:
        raise command.BenchFailed("expected at least one call, got none")
    return calls


def _scaled(n: int, scale: float) -> int:
    return max(2, round(n * scale))


async def _over_http(server: service.Service, raw: Sequence[dict[str, Any]]) -> Pace:
    """All calls in batches of `BATCH`, `IN_FLIGHT` of them at a time."""
    calls = [Call.decode(call) for call in raw]
    batches = iter([calls[start : start + BATCH] for start in range(0, len(calls), BATCH)])
    latencies: list[float] = []
    statuses: Counter[str] = Counter()
    async with AsyncClient(server.url, batch_size=BATCH) as client:
        await client.execute("pass")  # the connection is there before the clock starts

        async def send() -> None:
            for batch in batches:
                sent = time.perf_counter()
                async for _, result in client.stream(batch):
                    latencies.append((time.perf_counter() - sent) * 1e3)
                    statuses[result.status.value] += 1

        meter, start = processes.Meter(server.pid), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(send())
        wall_s, cpu_s = time.perf_counter() - start, meter.whole_s()
    if statuses[Status.UNAVAILABLE.value]:
        raise command.BenchFailed(f"{statuses[Status.UNAVAILABLE.value]} of {len(calls)} calls got no verdict")
    return Pace(len(calls) / wall_s, cpu_s * 1e3 / len(calls), tuple(latencies), statuses)


def _fresh(fresh: Fresh, calls: Sequence[dict[str, Any]]) -> Pace:
    start = time.perf_counter()
    runs = fresh.run_all(calls)
    wall_s = time.perf_counter() - start
    statuses = Counter("timeout" if run.timed_out else "error" if run.exit_code else "ok" for run in runs)
    cpu_ms = sum(run.cpu_s for run in runs) * 1e3 / len(runs)
    return Pace(len(runs) / wall_s, cpu_ms, tuple(run.wall_s * 1e3 for run in runs), statuses)


@contextmanager
def _watching_memory(server: service.Service) -> Iterator[list[float]]:
    """Collects the MiB of the whole tree, twice a second, once at least."""
    seen = [processes.pss_mb(server.processes())]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            seen.append(processes.pss_mb(server.processes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


def summarise(kind: Kind, ours: Sequence[Pace], theirs: Sequence[Pace], memory_mb: float) -> dict[str, Any]:
    """The figures of one kind of call, over all rounds."""
    ratio = statistics.median(a.calls_per_s / b.calls_per_s for a, b in zip(ours, theirs, strict=True))
    latency = command.percentiles([ms for pace in ours for ms in pace.latencies_ms])
    return {
        "calls": sum(len(pace.latencies_ms) for pace in ours),
        "calls_per_s": command.median((pace.calls_per_s for pace in ours), 1),
        "cpu_ms": command.median(pace.cpu_ms for pace in ours),
        "latency_ms": latency,
        "memory_mb": memory_mb,
        "statuses": dict(sum((pace.statuses for pace in ours), Counter())),
        "fresh": {
            "calls": sum(len(pace.latencies_ms) for pace in theirs),
            "calls_per_s": command.median((pace.calls_per_s for pace in theirs), 1),
            "cpu_ms": command.median(pace.cpu_ms for pace in theirs),
            "latency_ms": command.percentiles([ms for pace in theirs for ms in pace.latencies_ms]),
        },
        "ratio": round(ratio, 2),
        "at_least": kind.at_least,
        "holds": kind.at_least is None or ratio >= kind.at_least,
    }


def _show(figures: dict[str, Any]) -> None:
    columns = ("calls", "calls/s", "fresh/s", "ratio", "needed", "p50 ms", "p99 ms", "CPU ms", "fresh CPU", "MiB")
    rows = [
        (
            name,
            f"{row['calls_per_s']:,.0f}",
            f"{row['fresh']['calls_per_s']:,.1f}",
            f"{row['ratio']:.1f}",
            f"{row['at_least']:g}" if row["at_least"] else None,
            f"{row['latency_ms']['p50']:,.0f}",
            f"{row['latency_ms']['p99']:,.0f}",
            f"{row['cpu_ms']:.2f}",
            f"{row['fresh']['cpu_ms']:.1f}",
            row["memory_mb"],
        )
        for name, row in figures["kinds"].items()
    ]
    command.show("isolated over HTTP, beside a fresh interpreter per call", columns, rows)


def draw(axes: Any, figures: Mapping[str, Any]) -> None:
    """What a run printed as JSON, as a picture."""
    rows = figures["kinds"]
    for offset, label, values in (
        (-0.2, "service, isolated", [row["calls_per_s"] for row in rows.values()]),
        (0.2, "fresh interpreter, not isolated", [row["fresh"]["calls_per_s"] for row in rows.values()]),
    ):
        bars = axes.bar([place + offset for place in range(len(rows))], values, 0.4, label=label)
        axes.bar_label(bars, fmt="%.0f")
    axes.set_xticks(range(len(rows)), list(rows))
    axes.set_yscale("log")
    axes.set_ylabel("calls/s")
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
