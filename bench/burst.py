"""Does each of 45,000 calls in flight at once get its own result, about as fast as under a steady load?

    python -m bench.burst [--calls 45000] [--kind print] [--loops 0.01] [--batch 5000] [--answers both] [--json]

Every call prints a number that no other call prints. So a missing result, a doubled result or the result of another
call is detected. This holds for whole responses, which are in order, and for streamed responses, which have indices.
The latency counts from the request.

- The burst sends all calls at once. Before and after the burst there is a steady load, with 256 calls in flight. Each
  of the two has half the number of the burst's calls. The calls/s of the burst and of the steady load are compared.
- `--batch 4` sends many small requests, each on its own connection.
- `--loops 0.01` makes one call in a hundred an endless loop, which must end as `timeout`. The latency of the other
  calls is reported apart. Use it with `--answers stream`, since a whole response is sent only after its loops have
  ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import resource
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.load import (
    ERRORS,
    MSGPACK_STREAM,
    CallTally,
    EncodedBatch,
    OnAnswer,
    closed_loop,
    encoded_batches,
    http_session,
    send_batch,
)
from bench.harness.statistics import percentiles
from bench.harness.tables import Block, Result, Table, count_list, number, percentile_list
from bench.probes import processes
from bench.probes.sampler import PeriodicSampler
from bench.servers import service
from bench.workloads.checked_calls import CheckedCall, numbered_calls
from bench.workloads.code_kinds import CODES

CALLS = 45_000
LOOP_S = 1.0
"""Time-out of the endless loops."""
STEADY_BATCH = 64
"""Calls in a request of the steady load."""
STEADY_REQUESTS = 4
"""Requests in flight of the steady load."""
ACCEPTS: dict[str, tuple[str, ...]] = {"stream": (MSGPACK_STREAM,), "whole": ("application/msgpack",)}
"""Content types that requests accept, by the value of `--answers`."""
ACCEPTS["both"] = (*ACCEPTS["stream"], *ACCEPTS["whole"])
MIN_RATIO = 0.9
"""The requirement on the calls/s of the burst, as a multiple of the steady load's calls/s."""
MAX_MEMORY_MB = 1430
"""Memory that the server may have at the peak."""
POINTS = (50, 90, 99)
"""Percentiles that the result has."""


@dataclass(slots=True)
class MeasuredLoad:
    """The tally of some calls, and the seconds of wall time and CPU time that they took."""

    tally: CallTally = field(default_factory=CallTally)
    seconds: float = 0.0
    server_cpu_s: float = 0.0
    """CPU of the whole server, calls and zygotes included."""
    executor_cpu_s: float = 0.0

    @property
    def calls_per_s(self) -> float:
        return self.tally.calls / self.seconds

    async def run(
        self, server: service.Service, batches: Sequence[EncodedBatch], in_flight: int, on_answer: OnAnswer
    ) -> None:
        """Send all batches, at most `in_flight` of them at a time, and add their results and times."""
        self.tally.calls += sum(len(batch.calls) for batch in batches)
        async with http_session() as http:
            executors = server.executors()
            meter, executor_s = processes.CpuMeter(server.pid), processes.cpu_s(executors)
            self.seconds += await closed_loop(
                iter(batches),
                lambda batch: send_batch(http, server.url, batch, self.tally, on_answer),
                min(in_flight, len(batches)),
            )
            self.server_cpu_s += meter.total_s()
            self.executor_cpu_s += processes.cpu_s(executors) - executor_s


@dataclass(frozen=True, slots=True)
class Memory:
    """The server's memory at one moment."""

    server_mb: float
    gateway_mb: float

    @classmethod
    def of(cls, server: service.Service) -> Memory:
        return cls(processes.pss_mb(server.processes()), processes.pss_mb([server.pid]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the burst. Return exit code 1 if a result is missing or wrong, or a requirement is not met."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("burst", __doc__, *arguments.SERVER_OPTIONS, "seed")
    count = arguments.count
    parser.add_argument("--calls", type=count, default=CALLS, help=f"calls of the burst (default: {CALLS})")
    parser.add_argument("--kind", choices=[*CODES, "mix"], default="print", help="kind of call (default: print)")
    parser.add_argument("--loops", type=arguments.fraction, default=0.0, help="share of endless loops (default: 0)")
    parser.add_argument("--batch", type=count, default=5000, help="calls in one request (default: 5000)")
    parser.add_argument("--answers", choices=[*ACCEPTS], default="both", help="form of responses (default: both)")
    parser.add_argument("--steady", type=count, help="calls of the steady load (default: as many)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    half = math.ceil((args.steady or args.calls) / 2)
    calls = numbered_calls(args.kind, args.calls + 2 * half, args.seed, args.loops, LOOP_S)
    before, burst_calls, after = (list(itertools.islice(calls, n)) for n in (half, args.calls, half))
    requests = math.ceil(args.calls / args.batch)
    with ExitStack() as stack:
        stack.enter_context(_raised_descriptor_limit())
        server = stack.enter_context(service.running(args.python, _flags(args)))
        bar = stack.enter_context(command.progress())
        idle = Memory.of(server)

        def run(load: MeasuredLoad, name: str, calls: Sequence[CheckedCall], batch: int, in_flight: int) -> None:
            task = bar.add_task(name, total=len(calls))
            batches = encoded_batches(calls, batch, ACCEPTS[args.answers])
            asyncio.run(load.run(server, batches, in_flight, lambda: bar.advance(task)))

        burst, steady = MeasuredLoad(), MeasuredLoad()
        run(steady, "steady load", before, STEADY_BATCH, STEADY_REQUESTS)
        with PeriodicSampler(lambda: Memory.of(server)) as sampler:
            run(burst, "burst", burst_calls, args.batch, requests)
        run(steady, "steady load", after, STEADY_BATCH, STEADY_REQUESTS)
    command.print_examples("burst", [*burst.tally.examples, *steady.tally.examples])
    return {
        "kind": args.kind,
        "loops": args.loops,
        "loop_s": LOOP_S,
        "calls": args.calls,
        "in_flight": args.calls,
        "requests": requests,
        "answers": args.answers,
        **summarize(burst, steady, idle, sampler),
    }


def _flags(args: argparse.Namespace) -> list[str]:
    flags = [*arguments.server_flags(args), "--queue-timeout-s", "86400"]  # a burst may take longer than a queue should
    flags += ["--queue-calls", str(max(100_000, 2 * args.calls)), "--batch-calls", str(max(65_536, args.batch))]
    # A client on the server's cores needs time to open thousands of connections and to write on each.
    return [*flags, "--stall-s", "600", "--connections", str(math.ceil(args.calls / args.batch) + 100)]


def summarize(
    burst: MeasuredLoad, steady: MeasuredLoad, idle: Memory, sampler: PeriodicSampler[Memory]
) -> dict[str, Any]:
    """The result of a burst beside a steady load, and its requirements."""
    counts = {name: burst.tally.errors[name] + steady.tally.errors[name] for name in ERRORS}
    ratio = burst.calls_per_s / steady.calls_per_s
    peak_mb = max(sample.server_mb for sample in sampler.samples)
    return {
        "correct": burst.tally.correct,
        **counts,
        "statuses": dict(burst.tally.statuses.most_common()),
        "burst": _rates(burst),
        "steady": _rates(steady),
        "ratio": round(ratio, 3),
        "memory_mb": {"idle": round(idle.server_mb), "peak": round(peak_mb)},
        "gateway_mb": {
            "idle": round(idle.gateway_mb, 1),
            "peak": round(max(sample.gateway_mb for sample in sampler.samples), 1),
        },
        "requirements": [
            *requirements.none_of(counts),
            requirements.at_least("calls/s of the burst over those of the steady load", MIN_RATIO, round(ratio, 3)),
            requirements.at_most("MiB of memory at the peak", MAX_MEMORY_MB, round(peak_mb)),
        ],
    }


def _rates(load: MeasuredLoad) -> dict[str, Any]:
    tally = load.tally
    return {
        "calls": tally.calls,
        "seconds": round(load.seconds, 2),
        "calls_per_s": round(load.calls_per_s, 1),
        "cpu_ms": round(load.server_cpu_s * 1e3 / tally.calls, 4),
        "executor_cpu_ms": round(load.executor_cpu_s * 1e3 / tally.calls, 4),
        "latency_ms": percentiles(tally.latencies_ms(), POINTS),
        "short_ms": percentiles(tally.latencies_ms(["short"]), POINTS),
    }


@contextlib.contextmanager
def _raised_descriptor_limit() -> Iterator[None]:
    """Raise our descriptor limit, and that of the server that we start, to the hard limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def tables(result: Result) -> list[Block]:
    """The burst beside the steady load, and sentences about results, loops and memory."""
    rows = [
        (
            name,
            f"{rates['calls']:,}",
            number(rates["calls_per_s"]),
            percentile_list(rates["latency_ms"], "p50", "p99"),
            f"{rates['cpu_ms']:.2f}",
        )
        for name, rates in (("all at once", result["burst"]), ("a steady load", result["steady"]))
    ]
    blocks: list[Block] = [Table(("", "calls", "calls/s", "p50 / p99 ms", "CPU ms per call"), rows)]
    if share := result.get("loops"):
        at_once, steady = (percentile_list(result[name]["short_ms"], *_POINT_NAMES) for name in ("burst", "steady"))
        blocks.append(
            f"{100 * share:g} % are endless loops; each ends as `timeout` after {result['loop_s']:g} s of virtual "
            "time. "
            f"p50 / p90 / p99 of the other calls: {at_once} ms at once, {steady} ms in the steady load."
        )
    memory = result["memory_mb"]
    blocks.append(
        f"{count_list(result, ERRORS)}; {result['ratio']:.2f} of the steady load's calls/s; "
        f"{memory['idle']:,} MiB idle, {memory['peak']:,} MiB at the peak."
    )
    return [*blocks, *requirements.unmet(result)]


_POINT_NAMES = tuple(f"p{point}" for point in POINTS)


if __name__ == "__main__":
    raise SystemExit(main())
