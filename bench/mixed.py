"""Do calls that never end, or that sleep, delay short ones? Real traffic, then short calls beside a background.

    python -m bench.mixed [--parts traffic,loops,tenants] [--seconds 60] [--rate 10] [--loops 40] [--json]

Part `traffic`. Calls of the real mix (`bench.workloads.tool_calls`) arrive at random moments (open loop), so a slow
server cannot hide its queue. Of these calls, 10 % end in an error and 0.5 % are resource bombs. The latency counts from
the moment at which a call was due. The arrivals are sent twice, the second time with 1 % endless loops (time-out 10 s).
Without `--rate`, the rate is 60 % of the throughput in a closed loop.

Part `loops`. Short calls are sent one after another: first without endless loops, then beside `--loops` endless loops
that arrive in one batch. Calls that are sent in the first second after the batch are reported apart from later calls.

Part `tenants`. It runs only if `--parts` names it. Short calls of one tenant are sent one after another: first alone,
then beside `--sleeping` calls of another tenant, each of which sleeps for 2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from rich.progress import Progress

from bench.harness import arguments, command, requirements
from bench.harness.load import CallTally, OnAnswer, Refused, ask, closed_loop, execute, http_session, open_loop
from bench.harness.statistics import percentiles
from bench.harness.tables import Block, Result, Table
from bench.probes import processes
from bench.servers import service
from bench.workloads.checked_calls import CheckedCall, ExpectedResult
from bench.workloads.hostile_calls import BACKGROUND_LOOP, BOMB_LIMITS, ENDLESS_LOOP, RESOURCE_BOMBS
from bench.workloads.tool_calls import labelled_calls

SHARES = {"short": 0.885, "error": 0.1, "bomb": 0.005, "loop": 0.01}
"""Shares of the groups of calls in the traffic."""
RARE = ("error", "bomb", "loop")
"""Groups of which each traffic has at least one call, even if it is short."""
SHORT = ("short", "error")
"""Groups of calls whose latency has a requirement."""
CALIBRATION_CALLS = 200
"""Calls of the closed loop that measures the throughput."""
CALIBRATION_IN_FLIGHT = 16
"""Calls of this loop that are in flight at once."""
RATE_SHARE = 0.6
"""Arrival rate as a share of the throughput in a closed loop."""
MAX_OPEN = 10_000
"""The load stops at this number of open requests, because the server does not keep up with the rate."""
ANSWER_TIMEOUT_S = 20.0
"""Seconds that one short call beside endless loops may take."""
MAX_TIMEOUTS = 3
"""The measurement ends when this number of short calls have timed out."""
START_TIMEOUT_S = 10.0
"""All loops must run after this number of seconds plus `START_TIMEOUT_PER_LOOP_S` for each loop."""
START_TIMEOUT_PER_LOOP_S = 0.5
"""Seconds for each loop. Loops start one after the other, since a loop must become a long call (demoted) before another
loop gets its slot."""
ARRIVAL_S = 1.0
"""Length of the first phase, which begins when the loops are sent."""
MAX_P90_RATIO = {"arriving": 5.0, "under_loops": 2.0}
"""The requirement for each phase beside loops: the p90 of short calls, divided by their p90 without loops, is at most
this."""
SLEEP_S = 2.0
"""Seconds of each call of the part `tenants` that sleeps."""
MAX_TENANT_DELAY_MS = 50.0
"""The requirement for the part `tenants`: the median latency of a short call beside sleeping calls of another tenant,
minus its median alone, is at most this."""
PARTS = ("traffic", "loops", "tenants")
MAX_TRAFFIC_RATIO = 1.5
"""The requirement for the part `traffic`: the p90 of short calls with endless loops, divided by their p90 without
loops, is at most this."""
POINTS = (50, 90, 99)
Arrivals = list[tuple[float, CheckedCall]]
"""Seconds after the start at which each call is due, in order."""


@dataclass(slots=True)
class TrafficRun:
    """The tally of the arrivals, and the CPU time and body bytes of the server."""

    tally: CallTally = field(default_factory=CallTally)
    server_cpu_ms: float = 0.0
    """CPU of the server and all calls."""
    body_bytes: float = 0.0

    def short_ms(self) -> list[float]:
        """Latencies of the short calls."""
        return self.tally.latencies_ms(SHORT)

    def short_cpu_ms(self) -> list[float]:
        """CPU time of each short call's own processes."""
        return [times.cpu_ms for times in self.tally.times if times.group in SHORT]

    def service_cpu_ms(self) -> float:
        """Mean CPU time of the service itself per call."""
        calls_ms = sum(times.cpu_ms for times in self.tally.times)
        return (self.server_cpu_ms - calls_ms) / max(1, self.tally.answered)


@dataclass(slots=True)
class BackgroundRun:
    """Latencies of short calls, one after another, before and while the calls of a background run."""

    background: int
    """Calls of the background: endless loops, or calls that sleep."""
    num_running: int = 0
    """Calls that ran at the end of the measurement."""
    num_ended: int = 0
    """Calls of the background that ended."""
    num_ok: int = 0
    """Calls of the background that ended as ok."""
    alone_ms: list[float] = field(default_factory=list)
    arriving_ms: list[float] = field(default_factory=list)
    """Latencies of the short calls that were sent in the first `ARRIVAL_S` after the background."""
    beside_ms: list[float] = field(default_factory=list)
    mismatched: int = 0
    timed_out: int = 0

    async def run_background(self, http: aiohttp.ClientSession, url: str, call: dict[str, Any]) -> None:
        """Run the background in one request, and count the calls that end."""
        async for _, result in ask(http, url, [call] * self.background):
            self.num_ended += 1
            self.num_ok += result["status"] == "ok"

    async def one_by_one(
        self, http: aiohttp.ClientSession, url: str, more: Callable[[int], bool], on_answer: OnAnswer
    ) -> list[float]:
        """Send short calls one after another, each after the answer to the previous call, while `more(number of
        answers)` returns True.

        Return their latencies in milliseconds. The latency of a call without an answer is the time of the wait for it.
        """
        latencies_ms: list[float] = []
        timed_out = 0
        while more(n := len(latencies_ms)) and timed_out < MAX_TIMEOUTS:
            start = time.perf_counter()
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    result = await execute(http, url, {"code": f"print({n} * {n})"})
                    self.mismatched += (result["status"], result["stdout"]) != ("ok", f"{n * n}\n")
            except TimeoutError:
                timed_out += 1
            latencies_ms.append((time.perf_counter() - start) * 1e3)
            on_answer()
        self.timed_out += timed_out
        return latencies_ms

    def counts(self) -> dict[str, int]:
        """Counts that must be 0."""
        timed_out = f"short calls without an answer after {ANSWER_TIMEOUT_S:g} s"
        return {"mismatched short calls": self.mismatched, timed_out: self.timed_out}


def main(argv: Sequence[str] | None = None) -> int:
    """Run both parts. Return exit code 1 if endless calls delay short ones too much, or a result is wrong."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("mixed", __doc__, *arguments.SERVER_OPTIONS, "seed")
    count, seconds = arguments.count, arguments.seconds
    parts = arguments.names_of(PARTS)
    parser.add_argument("--parts", type=parts, default=PARTS[:2], help=f"of {','.join(PARTS)} (default: the first two)")
    parser.add_argument("--seconds", type=seconds, default=60.0, help="duration of arrivals, twice (default: 60)")
    parser.add_argument(
        "--rate", type=seconds, metavar="CALLS_PER_S", help="arrival rate (default: 60 %% of the throughput)"
    )
    parser.add_argument("--loop-s", type=seconds, default=10.0, help="time-out of the traffic's loops (default: 10)")
    parser.add_argument("--loops", type=count, default=40, help="endless loops of the part loops (default: 40)")
    parser.add_argument("--sleeping", type=count, default=1000, help="calls that sleep (default: 1000)")
    parser.add_argument("--short", type=count, default=200, help="short calls of the other parts (default: 200)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.isolation == "none":
        raise command.Misuse("--isolation none: some calls exhaust resources; expected a level that isolates them")
    result: dict[str, Any] = {"isolation": args.isolation, "requirements": []}
    with service.running(args.python, arguments.server_flags(args)) as server, command.progress() as bar:
        for part in args.parts:
            result[part] = asyncio.run(_MEASURES[part](server, args, bar))
            result["requirements"] += result[part].pop("requirements")
    return result


# Traffic


def arrivals(rate: float, seconds: float, seed: int, loop_s: float = 10.0, families: Sequence[str] = ()) -> Arrivals:
    """Calls in the shares of `SHARES`, due at random moments (Poisson), `rate` per second.

    If `families` is not empty, ordinary calls are only of these families.
    """
    rng = random.Random(seed)
    moments: list[float] = []
    while (at_s := rng.expovariate(rate) + (moments[-1] if moments else 0.0)) < seconds:
        moments.append(at_s)
    groups = [group for group in RARE for _ in range(math.ceil(SHARES[group] * len(moments)))]
    groups += ["short"] * (len(moments) - len(groups))
    rng.shuffle(groups)
    mix = _mix(seed, families)
    return [(at_s, _call(group, mix, rng, loop_s)) for at_s, group in zip(moments, groups, strict=False)]


def _call(group: str, mix: Iterator[CheckedCall], rng: random.Random, loop_s: float) -> CheckedCall:
    if group == "loop":
        call = {"code": ENDLESS_LOOP, "limits": {"timeout_s": loop_s}}
        return CheckedCall(call, "loop", ExpectedResult(("timeout",), {}))
    if group == "bomb":
        code, statuses = rng.choice(list(RESOURCE_BOMBS.items()))
        return CheckedCall({"code": code, "limits": BOMB_LIMITS}, "bomb", ExpectedResult(statuses, {}))
    return next(call for call in mix if call.group == group)


def _mix(seed: int, families: Sequence[str]) -> Iterator[CheckedCall]:
    """Calls of the real mix, without its endless loops. When the calls of a seed are used up, the next seed follows."""
    while True:
        for template, call in labelled_calls(256, seed):
            if template.status != "timeout" and (not families or template.family in families):
                group = "short" if template.status == "ok" else "error"
                yield CheckedCall(call, group, ExpectedResult((template.status,), {}))
        seed += 1


async def _traffic(server: service.Service, args: argparse.Namespace, bar: Progress) -> dict[str, Any]:
    families = ("plain", "math") if args.stdlib_only else ()  # these families import only the standard library
    async with http_session() as http:
        closed_loop_rate = None
        if args.rate is None:
            task = bar.add_task("closed loop", total=CALIBRATION_CALLS)
            mix = _mix(args.seed + 1, families)
            calls = [next(mix) for _ in range(CALIBRATION_CALLS)]

            async def send(call: CheckedCall) -> None:
                await execute(http, server.url, call.call)
                bar.advance(task)

            closed_loop_rate = round(len(calls) / await closed_loop(iter(calls), send, CALIBRATION_IN_FLIGHT), 2)
        rate = args.rate or closed_loop_rate * RATE_SHARE
        due = arrivals(rate, args.seconds, args.seed, args.loop_s, families)
        if not any(call.group in SHORT for _, call in due):
            raise command.BenchFailed(f"{rate:.2g} calls/s for {args.seconds:g} s are no calls; raise either")
        without = [(at_s, call) for at_s, call in due if call.group != "loop"]
        runs = []
        for name, calls_due in (("without loops", without), ("with loops", due)):
            task = bar.add_task(name, total=len(calls_due))
            meter, bytes_before = processes.CpuMeter(server.pid), server.body_bytes()
            run = TrafficRun(await offer(http, server.url, calls_due, lambda task=task: bar.advance(task)))
            run.server_cpu_ms = meter.total_s() * 1e3
            run.body_bytes = server.body_bytes() - bytes_before
            command.print_examples("mixed", run.tally.examples)
            runs.append(run)
    return {
        "seconds": args.seconds,
        "rate": round(rate, 2),
        "closed_loop_rate": closed_loop_rate,
        **summarize_traffic(*runs),
    }


async def offer(http: aiohttp.ClientSession, url: str, due: Arrivals, on_answer: OnAnswer) -> CallTally:
    """Send every call when it is due and wait for all answers."""
    tally = CallTally(calls=len(due))

    async def send(call: CheckedCall, due_at: float) -> None:
        try:
            result = await execute(http, url, call.call)
        except (aiohttp.ClientError, OSError, Refused) as error:  # the call is lost
            tally.examples.append(f"{call.group} without an answer: {error!r}")
        else:
            tally.record(call, result, time.perf_counter() - due_at)
        on_answer()

    await open_loop(due, send, tally, MAX_OPEN)
    return tally


def summarize_traffic(without: TrafficRun, with_loops: TrafficRun) -> dict[str, Any]:
    """The result of the same arrivals without and with endless loops, and its requirements."""
    runs = {"without_loops": without, "with_loops": with_loops}
    short_ms = {name: percentiles(run.short_ms(), POINTS) for name, run in runs.items()}
    before, after = short_ms["without_loops"], short_ms["with_loops"]
    ratios = {name: round(after[name] / before[name], 2) for name in before if name in after}
    counts = {name: sum(getattr(run.tally, name) for run in runs.values()) for name in ("lost", "mismatched")}
    return {
        "ratio": ratios,
        **counts,
        **{name: _traffic_row(run, short_ms[name]) for name, run in runs.items()},
        "requirements": [
            *requirements.none_of(counts),
            requirements.at_most(
                "p90 of short calls with endless loops over that without",
                MAX_TRAFFIC_RATIO,
                ratios.get("p90", math.inf),
            ),
        ],
    }


def _traffic_row(run: TrafficRun, short_ms: dict[str, float]) -> dict[str, Any]:
    return {
        "calls": run.tally.calls,
        "short_ms": short_ms,
        "loops": len(run.tally.latencies_ms(["loop"])),
        "cpu_ms": round(statistics.fmean(run.short_cpu_ms() or [0.0]) + run.service_cpu_ms(), 3),
        "bytes": round(run.body_bytes / max(1, run.tally.answered)),
    }


# Short calls beside a background


async def _beside_loops(server: service.Service, args: argparse.Namespace, bar: Progress) -> dict[str, Any]:
    run, task = BackgroundRun(args.loops), bar.add_task("beside endless loops", total=2 * args.short)
    on_answer = lambda: bar.advance(task)  # noqa: E731
    async with http_session() as http:
        run.alone_ms = await run.one_by_one(http, server.url, lambda n: n < args.short, on_answer)
        loops = asyncio.create_task(run.run_background(http, server.url, BACKGROUND_LOOP))
        try:
            until = time.perf_counter() + ARRIVAL_S
            run.arriving_ms = await run.one_by_one(
                http, server.url, lambda _: time.perf_counter() < until, lambda: None
            )
            run.beside_ms = await run.one_by_one(http, server.url, lambda n: n < args.short, on_answer)
            run.num_running = await _wait_until_running(server, args.loops)
        finally:
            loops.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loops
    return summarize_loops(run)


async def _beside_another_tenant(server: service.Service, args: argparse.Namespace, bar: Progress) -> dict[str, Any]:
    run, task = BackgroundRun(args.sleeping), bar.add_task("beside another tenant", total=None)
    call = {"code": f"import time\ntime.sleep({SLEEP_S})", "tenant": "sleeping"}
    async with http_session() as http, asyncio.TaskGroup() as group:
        run.alone_ms = await run.one_by_one(http, server.url, lambda n: n < args.short, lambda: bar.advance(task))
        sleeping = group.create_task(run.run_background(http, server.url, call))
        run.beside_ms = await run.one_by_one(http, server.url, lambda _: not sleeping.done(), lambda: bar.advance(task))
    return summarize_tenants(run)


_MEASURES = {"traffic": _traffic, "loops": _beside_loops, "tenants": _beside_another_tenant}


async def _wait_until_running(server: service.Service, loops: int) -> int:
    """The number of running calls once it reaches `loops`, or after a timeout."""
    give_up_at = time.monotonic() + START_TIMEOUT_S + START_TIMEOUT_PER_LOOP_S * loops
    while True:
        num_running = await asyncio.to_thread(server.num_running_calls)
        if num_running >= loops or time.monotonic() > give_up_at:
            return num_running
        await asyncio.sleep(0.2)


def summarize_loops(run: BackgroundRun) -> dict[str, Any]:
    """The result of the part `loops`, and its requirements."""
    phases = {"baseline": run.alone_ms, "arriving": run.arriving_ms, "under_loops": run.beside_ms}
    points = {phase: percentiles(latencies_ms, POINTS) for phase, latencies_ms in phases.items()}
    ratios = {phase: round(points[phase]["p90"] / points["baseline"]["p90"], 2) for phase in MAX_P90_RATIO}
    when = {"arriving": "just after", "under_loops": f"from {ARRIVAL_S:g} s after"}
    return {
        "loops": run.background,
        **{f"{phase}_ms": values for phase, values in points.items()},
        "requirements": [
            *(
                requirements.at_most(
                    f"p90 of a short call {when[phase]} {run.background} endless loops arrived, over that without",
                    bound,
                    ratios[phase],
                )
                for phase, bound in MAX_P90_RATIO.items()
            ),
            requirements.at_least("running endless loops", run.background, run.num_running),
            *requirements.none_of({**run.counts(), "ended loops": run.num_ended}),
        ],
    }


def summarize_tenants(run: BackgroundRun) -> dict[str, Any]:
    """The result of the part `tenants`, and its requirements."""
    delay_ms = round(statistics.median(run.beside_ms) - statistics.median(run.alone_ms), 2)
    return {
        "sleeping": run.background,
        "alone_ms": percentiles(run.alone_ms, POINTS),
        "beside_ms": percentiles(run.beside_ms, POINTS),
        "requirements": [
            requirements.at_most("median delay of a short call in ms", MAX_TENANT_DELAY_MS, delay_ms),
            requirements.at_least("calls that slept", run.background, run.num_ok),
            *requirements.none_of(run.counts()),
        ],
    }


def _rows(result: Result) -> dict[str, dict[str, float]]:
    """Latencies of the short calls by situation."""
    rows = {}
    if traffic := result.get("traffic"):
        rows[f"real traffic, {traffic['rate']:g} calls/s"] = traffic["without_loops"]["short_ms"]
        rows[f"the same with {traffic['with_loops']['loops']} endless loops"] = traffic["with_loops"]["short_ms"]
    if loops := result.get("loops"):
        rows["one `print` after another"] = loops["baseline_ms"]
        rows[f"the same in the first second of {loops['loops']} endless loops"] = loops["arriving_ms"]
        rows["the same after that second"] = loops["under_loops_ms"]
    if tenants := result.get("tenants"):
        rows["one `print` after another of one tenant"] = tenants["alone_ms"]
        rows[f"the same beside {tenants['sleeping']:,} sleeping calls of another tenant"] = tenants["beside_ms"]
    return rows


_POINT_NAMES = tuple(f"p{point}" for point in POINTS)


def tables(result: Result) -> list[Block]:
    """A row of latencies for each situation."""
    return [Table.of_percentiles("short calls", _rows(result), _POINT_NAMES), *requirements.unmet(result)]


if __name__ == "__main__":
    raise SystemExit(main())
