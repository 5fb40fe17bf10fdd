"""Whether short calls are held up by those that never end: real traffic at a rate of its own, and a storm of loops.

    python -m bench.mixed [--seconds 60] [--rate 10] [--loops 40] [--json]

First the real mix (`bench.workloads.tool_calls`), of which 10 % end in an error and 0.5 % are bombs: calls arrive at
random moments,
at a rate that does not wait for answers, so a slow server cannot hide its queue; latency counts from the moment at
which a call was due. The same arrivals come twice, the second time with 1 % endless loops among them, whose time-out
is 10 s. Without `--rate` it is 60 % of what the server does when it is asked as fast as it answers.

Then the storm: short calls go out one after another, first without endless loops, then from the moment that `--loops`
of them arrive in one batch. Calls sent in the first second after that and calls sent later are reported apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import math
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgpack

from bench.harness import command
from bench.probes import processes
from bench.servers import service
from bench.workloads.tool_calls import labelled_calls

SHARES = {"short": 0.885, "error": 0.1, "bomb": 0.005, "loop": 0.01}
RARE = ("error", "bomb", "loop")
"""There is one of each at least."""
SHORT = ("short", "error")
"""Those whose latency counts."""
LOOP_S = 10.0
STORM_LOOP_S = 300.0
"""No loop of the storm ends before it is called off."""
LOOPS = {
    "plain": "while True: pass",
    "threads": "import threading\ndef spin():\n    while True: pass\nfor _ in range(3):\n"
    "    threading.Thread(target=spin).start()\nspin()",
    "children": "import os\nfor _ in range(3):\n    if os.fork() == 0: break\nwhile True: pass",
    "own session": "import os\nif os.fork() == 0: os.setsid()\nwhile True: pass",
}
BOMB_LIMITS = {"timeout_s": 1.0, "memory_mb": 64, "disk_mb": 16}
BOMBS = {
    "while True:\n    try: __import__('os').fork()\n    except OSError: pass": {"timeout"},
    "kept = [0]\nwhile True: kept += kept": {"memory_limit", "error"},
    "while True: print('x' * 65536)": {"output_limit"},
    "with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))": {"error", "killed"},
}
CALIBRATION_AT_ONCE = 16
RATE_SHARE = 0.6
MOST_OPEN = 10_000
"""Requests open at once; more is a rate that the server never keeps up with."""
PATIENCE_S = 20.0
"""How long a short call of the storm is waited for."""
HOPELESS = 3
"""So many that waited in vain, and the storm is over."""
SETTLE_S, SETTLE_LOOP_S = 10.0, 0.5
"""How long all loops may take until they run: each has to be demoted before another can have its place."""
ARRIVAL_S = 1.0
"""Length of the storm's first phase, which begins when the loops are sent."""
MAX_P90_RATIO = {"arriving": 5.0, "storm": 2.0}
"""Largest allowed p90 of the short calls in each phase of the storm, over their p90 without loops."""
RATIO_AT_MOST = 1.5
"""How much longer nine of ten short calls may take since there are endless ones among them."""
POINTS = (50, 90, 99)
SHOWN = 5
Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A call that is due at `at_s`, of which group it is, and the statuses that it may end with."""

    at_s: float
    group: str
    family: str
    call: dict[str, Any]
    ends: frozenset[str]


@dataclass(slots=True)
class Tally:
    """What has come of the arrivals."""

    latencies_ms: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """By group and family."""
    statuses: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    answered: int = 0
    wrong: int = 0
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    """What calls used themselves, by group."""
    server_cpu_ms: float = 0.0
    """What the server and all calls used together."""
    body_bytes: float = 0.0
    late_ms: list[float] = field(default_factory=list)
    """How long after it was due a call was sent: our own doing."""
    examples: list[str] = field(default_factory=list)

    def take(self, arrival: Arrival, result: Mapping[str, Any], waited_s: float) -> None:
        self.answered += 1
        self.statuses[result["status"]] += 1
        self.latencies_ms.setdefault((arrival.group, arrival.family), []).append(waited_s * 1e3)
        self.cpu_ms.setdefault(arrival.group, []).append(result["usage"]["cpu_ms"])
        if result["status"] not in arrival.ends:
            self.wrong += 1
            self.examples.append(f"{arrival.group} expected {'|'.join(sorted(arrival.ends))}, got {result}")

    def short_cpu_ms(self) -> list[float]:
        """What each short one used."""
        return [ms for group in SHORT for ms in self.cpu_ms.get(group, ())]

    def service_cpu_ms(self) -> float:
        """What the service itself used for a call, on average."""
        return (self.server_cpu_ms - sum(map(sum, self.cpu_ms.values()))) / max(1, self.answered)

    def short_ms(self, family: str | None = None) -> list[float]:
        """Latencies of the short ones, of one family or all."""
        return [
            ms
            for (group, of), values in self.latencies_ms.items()
            if group in SHORT and family in (None, of)
            for ms in values
        ]


@dataclass(slots=True)
class Storm:
    """Short calls one after another while loops run."""

    loops: int
    running: int = 0
    """How many calls the executors ran at the end of the storm."""
    ended: int = 0
    """Loops that came to an end, which none should."""
    calm_ms: list[float] = field(default_factory=list)
    arriving_ms: list[float] = field(default_factory=list)
    """Latencies of the short calls that were sent in the first `ARRIVAL_S` after the loops."""
    storm_ms: list[float] = field(default_factory=list)
    wrong: int = 0
    in_vain: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Traffic, then the storm; 1 if short calls pay for endless ones, or a verdict is not what it should be."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.isolation == "none":
        parser.error("--isolation none: there are bombs among the calls; expected a level that holds them")
    return command.run_as_command("mixed", lambda: _mixed(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("mixed", __doc__ or "")
    parser.add_argument("--parts", choices=["both", "traffic", "storm"], default="both", help="(default: both)")
    parser.add_argument("--seconds", type=command.seconds, default=60.0, help="of arrivals, twice (default: 60)")
    parser.add_argument("--rate", type=command.seconds, metavar="CALLS_PER_S", help="arrivals (default: 60 %% of most)")
    parser.add_argument("--loop-s", type=command.seconds, default=LOOP_S, help="time-out of the endless (default: 10)")
    parser.add_argument("--calibration", type=command.count, default=200, help="calls to find the most (default: 200)")
    parser.add_argument("--loops", type=command.count, default=40, help="endless loops of the storm (default: 40)")
    parser.add_argument("--loop-kinds", choices=["plain", "all"], default="plain", help="all: threads, children, too")
    parser.add_argument("--short", type=command.count, default=200, help="short calls of the storm (default: 200)")
    parser.add_argument("--isolation", default="auto", help="level of the server, not none (default: auto)")
    parser.add_argument("--lean", action="store_true", help="only zygotes, and the part of the mix, without libraries")
    parser.add_argument("--seed", type=int, default=0, help="which calls, and when (default: 0)")
    return parser


def _mixed(args: argparse.Namespace) -> int:
    flags = ["--isolation", args.isolation, *(["--profiles", "bare"] if args.lean else [])]
    figures: dict[str, Any] = {"bench": "mixed", "isolation": args.isolation, "missed": []}
    examples: list[str] = []
    with service.running(args.python, flags) as server, command.progress() as bar:
        if args.parts != "storm":
            rate, most, without, with_loops = asyncio.run(_traffic(server, args, bar))
            figures["traffic"] = {"seconds": args.seconds, "rate": round(rate, 2), "closed_loop_rate": most}
            figures["traffic"] |= summarise(without, with_loops)
            examples += without.examples + with_loops.examples
        if args.parts != "traffic":
            task = bar.add_task("storm", total=2 * args.short)
            storm = asyncio.run(_storm(server, args, lambda: bar.advance(task)))
            figures["storm"] = summarise_storm(storm)
    for part in ("traffic", "storm"):
        figures["missed"] += figures.get(part, {}).get("missed", [])
    figures["holds"] = not figures["missed"]
    _show(figures, examples)
    command.plot(args.plot, lambda axes: draw(axes, figures))
    command.finish(figures, _parser(), args)
    return 0 if figures["holds"] else 1


# Traffic


def arrivals(
    rate: float, seconds: float, seed: int, loop_s: float = LOOP_S, families: Sequence[str] = ()
) -> list[Arrival]:
    """Calls in the shares of `SHARES`, due at random moments (Poisson), `rate` a second; of some `families` or all."""
    rng = random.Random(seed)
    moments: list[float] = []
    while (at_s := rng.expovariate(rate) + (moments[-1] if moments else 0.0)) < seconds:
        moments.append(at_s)
    groups = [group for group in RARE for _ in range(math.ceil(SHARES[group] * len(moments)))]
    groups += ["short"] * (len(moments) - len(groups))
    rng.shuffle(groups)
    mix = _mix(seed, families)
    return [replace(_call(group, mix, rng, loop_s), at_s=at_s) for at_s, group in zip(moments, groups, strict=False)]


def _call(group: str, mix: Iterator[Arrival], rng: random.Random, loop_s: float) -> Arrival:
    if group == "loop":
        call = {"code": LOOPS["plain"], "limits": {"timeout_s": loop_s}}
        return Arrival(0, group, "loop", call, frozenset({"timeout"}))
    if group == "bomb":
        code, ends = rng.choice(list(BOMBS.items()))
        return Arrival(0, group, "bomb", {"code": code, "limits": BOMB_LIMITS}, frozenset(ends))
    return next(one for one in mix if one.group == group)


def _mix(seed: int, families: Sequence[str]) -> Iterator[Arrival]:
    """The calls of the real mix, one seed after another, but for its own endless ones."""
    while True:
        for template, call in labelled_calls(256, seed):
            if template.status != "timeout" and (not families or template.family in families):
                group = "short" if template.status == "ok" else "error"
                yield Arrival(0, group, template.family, call, frozenset({template.status}))
        seed += 1


async def _traffic(
    server: service.Service, args: argparse.Namespace, bar: Any
) -> tuple[float, float | None, Tally, Tally]:
    """The rate, the most that was found, and what came of the arrivals without and with endless loops."""
    families = ("plain", "math") if args.lean else ()
    async with _http() as http:
        most = None
        if args.rate is None:
            task = bar.add_task("as fast as it goes", total=args.calibration)
            calls = _mix(args.seed + 1, families)
            most = await _most(
                http, server.url, [next(calls) for _ in range(args.calibration)], lambda: bar.advance(task)
            )
        rate = args.rate or most * RATE_SHARE
        due = arrivals(rate, args.seconds, args.seed, args.loop_s, families)
        if not any(one.group in SHORT for one in due):
            raise command.BenchFailed(f"{rate:.2g} calls/s for {args.seconds:g} s are none; expected more of either")
        tallies = []
        for name, some in (("without loops", [one for one in due if one.group != "loop"]), ("with loops", due)):
            task = bar.add_task(name, total=len(some))
            meter, sent = processes.Meter(server.pid), sum(server.body_bytes().values())
            tally = await offer(http, server.url, some, lambda task=task: bar.advance(task))
            tally.server_cpu_ms = meter.whole_s() * 1e3
            tally.body_bytes = sum(server.body_bytes().values()) - sent
            tallies.append(tally)
    return rate, most, *tallies


async def _most(http: aiohttp.ClientSession, url: str, calls: Sequence[Arrival], step: Step) -> float:
    """Calls per second when the next one is sent as soon as one is answered."""
    left, begun = iter(calls), time.perf_counter()

    async def work() -> None:
        for one in left:
            await _execute(http, url, one.call)
            step()

    async with asyncio.TaskGroup() as group:
        for _ in range(CALIBRATION_AT_ONCE):
            group.create_task(work())
    return round(len(calls) / (time.perf_counter() - begun), 2)


async def offer(http: aiohttp.ClientSession, url: str, due: Sequence[Arrival], step: Step) -> Tally:
    """Send every call when it is due, whatever has become of those before, and wait for all answers."""
    tally = Tally(asked=len(due))
    open_now = 0
    begun = time.perf_counter()

    async def ask(one: Arrival) -> None:
        nonlocal open_now
        tally.late_ms.append((time.perf_counter() - begun - one.at_s) * 1e3)
        try:
            result = await _execute(http, url, one.call)
        except (aiohttp.ClientError, OSError, command.BenchFailed) as why:  # it is lost
            tally.examples.append(f"{one.group} without an answer: {why!r}")
        else:
            tally.take(one, result, time.perf_counter() - begun - one.at_s)
        open_now -= 1
        step()

    async with asyncio.TaskGroup() as group:
        for one in due:
            await asyncio.sleep(max(0.0, begun + one.at_s - time.perf_counter()))
            if open_now >= MOST_OPEN:
                tally.examples.append(f"{open_now} requests are open: expected a --rate that the server keeps up with")
                break
            open_now += 1
            group.create_task(ask(one))
    return tally


def summarise(without: Tally, with_loops: Tally) -> dict[str, Any]:
    """The figures of the same arrivals without and with endless loops, and which promises they miss."""
    shorts = [command.percentiles(tally.short_ms(), POINTS) for tally in (without, with_loops)]
    ratios = {name: round(shorts[1][name] / shorts[0][name], 2) for name in shorts[0] if name in shorts[1]}
    tallies = (without, with_loops)
    lost = sum(tally.asked - tally.answered for tally in tallies)
    wrong = sum(tally.wrong for tally in tallies)
    missed = [f"{count} {name}, expected none" for name, count in (("lost", lost), ("wrong", wrong)) if count]
    if ratios.get("p90", math.inf) > RATIO_AT_MOST:
        slower = f"p90 of the short calls is {ratios.get('p90', math.inf)} times that without loops"
        missed.append(f"{slower}, expected at most {RATIO_AT_MOST}")
    families = sorted({family for tally in tallies for group, family in tally.latencies_ms if group in SHORT})
    figures = {"ratio": ratios, "lost": lost, "wrong": wrong, "missed": missed}
    for name, tally, short_ms in zip(("without_loops", "with_loops"), tallies, shorts, strict=True):
        figures[name] = {
            "calls": tally.asked,
            "short_ms": short_ms,
            "by_family_ms": {family: command.percentiles(tally.short_ms(family), POINTS) for family in families},
            "loops": len(tally.latencies_ms.get(("loop", "loop"), ())),
            "loop_ms": command.percentiles(tally.latencies_ms.get(("loop", "loop"), ()), POINTS),
            "bombs": len(tally.latencies_ms.get(("bomb", "bomb"), ())),
            "cpu_ms": round(statistics.fmean(tally.short_cpu_ms() or [0.0]) + tally.service_cpu_ms(), 3),
            "call_cpu_ms": command.quantiles(tally.short_cpu_ms()),
            "bytes": round(tally.body_bytes / max(1, tally.answered)),
            "statuses": dict(tally.statuses.most_common()),
            "sent_late_ms": command.percentiles(tally.late_ms, POINTS),
        }
    return figures


# Storm


async def _storm(server: service.Service, args: argparse.Namespace, step: Step) -> Storm:
    storm = Storm(args.loops)
    kinds = list(LOOPS) if args.loop_kinds == "all" else ["plain"]
    codes = [LOOPS[kinds[n % len(kinds)]] for n in range(args.loops)]
    async with _http() as http:
        storm.calm_ms = await _one_by_one(http, server.url, args.short, args.seed, storm, step)
        loops = asyncio.create_task(_run_loops(http, server.url, codes, storm))
        try:
            until = time.perf_counter() + ARRIVAL_S
            storm.arriving_ms = await _one_by_one(http, server.url, math.inf, args.seed, storm, until=until)
            storm.storm_ms = await _one_by_one(http, server.url, args.short, args.seed, storm, step)
            storm.running = await _settled(server, args.loops)
        finally:
            loops.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loops
    return storm


async def _run_loops(http: aiohttp.ClientSession, url: str, codes: Sequence[str], storm: Storm) -> None:
    """All loops in one request, until it is cancelled; any that ends is counted."""
    limits = {"timeout_s": STORM_LOOP_S}
    async with _posted(http, f"{url}/v1/batch", {"calls": [{"code": code, "limits": limits} for code in codes]}) as got:
        unpacker = msgpack.Unpacker()
        async for chunk in got.content.iter_any():
            unpacker.feed(chunk)
            storm.ended += sum(line is not None for line in unpacker)


async def _settled(server: service.Service, loops: int) -> int:
    """How many calls the executors run, once that is all of the loops, or after a time that is enough."""
    give_up = time.monotonic() + SETTLE_S + SETTLE_LOOP_S * loops
    while True:
        running = await asyncio.to_thread(_running, server.metrics)
        if running >= loops or time.monotonic() > give_up:
            return running
        await asyncio.sleep(0.2)


def _running(metrics: Callable[[], str]) -> int:
    counts = re.findall(r"^rstar_sandbox_executor_running\{.*\} (\d+)\.0$", metrics(), re.MULTILINE)
    return sum(map(int, counts))


async def _one_by_one(
    http: aiohttp.ClientSession,
    url: str,
    count: float,
    seed: int,
    storm: Storm,
    step: Step = lambda: None,
    *,
    until: float = math.inf,
) -> list[float]:
    """Send up to `count` short calls, each after the answer to the one before, until `time.perf_counter()` is `until`.

    Returns their latencies in milliseconds. The latency of a call without an answer is the time that it was waited for.
    """
    took_ms: list[float] = []
    in_vain = 0
    while len(took_ms) < count and time.perf_counter() < until and in_vain < HOPELESS:
        n = len(took_ms)
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE_S):
                result = await _execute(http, url, {"code": f"print({n} * {n} + {seed})"})
                storm.wrong += (result["status"], result["stdout"]) != ("ok", f"{n * n + seed}\n")
        except TimeoutError:
            in_vain += 1
        took_ms.append((time.perf_counter() - begun) * 1e3)
        step()
    storm.in_vain += in_vain
    return took_ms


def summarise_storm(storm: Storm) -> dict[str, Any]:
    """The figures of a storm, and which promises they miss."""
    phases = {"calm": storm.calm_ms, "arriving": storm.arriving_ms, "storm": storm.storm_ms}
    points = {phase: command.percentiles(values, POINTS) for phase, values in phases.items()}
    ratios, missed = {}, []
    for phase, bound in MAX_P90_RATIO.items():
        ratios[phase] = round(points[phase]["p90"] / points["calm"]["p90"], 2)
        if ratios[phase] > bound:
            when = "just after" if phase == "arriving" else f"from {ARRIVAL_S:g} s after"
            missed.append(
                f"p90 of a short call {when} {storm.loops} endless loops arrived is {ratios[phase]} times "
                f"that without, expected at most {bound:g}"
            )
    if storm.running < storm.loops:
        missed.append(f"{storm.running} of {storm.loops} endless loops were running, expected all")
    for count, what in (
        (storm.wrong, "short calls wrong"),
        (storm.in_vain, f"short calls without an answer after {PATIENCE_S:g} s"),
        (storm.ended, "loops ended"),
    ):
        if count:
            missed.append(f"{count} {what}, expected none")
    return {
        "loops": storm.loops,
        "running": storm.running,
        "calls": len(storm.storm_ms),
        **{f"{phase}_ms": values for phase, values in points.items()},
        "p90_ratio": ratios,
        "in_vain": storm.in_vain,
        "wrong": storm.wrong,
        "missed": missed,
    }


def _http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0))


@contextlib.asynccontextmanager
async def _posted(http: aiohttp.ClientSession, url: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    stream = url.endswith("/batch")
    headers = {"Content-Type": "application/msgpack"}
    headers["Accept"] = "application/x-msgpack-stream" if stream else "application/msgpack"
    async with http.post(url, data=io.BytesIO(msgpack.packb(body)), headers=headers) as got:
        if got.status != 200:
            raise command.BenchFailed(f"answered {got.status}: {(await got.text())[:500]}")
        yield got


async def _execute(http: aiohttp.ClientSession, url: str, call: Mapping[str, Any]) -> dict[str, Any]:
    async with _posted(http, f"{url}/v1/execute", call) as got:
        result: dict[str, Any] = msgpack.unpackb(await got.read())
        return result


def _show(figures: Mapping[str, Any], examples: Sequence[str]) -> None:
    columns = ("short calls, ms", "p50", "p90", "p99")
    if traffic := figures.get("traffic"):
        rows: list[list[object]] = []
        for label, name in (("without loops", "without_loops"), ("with loops", "with_loops")):
            part = traffic[name]
            families = part["by_family_ms"].items()
            for row, points in ((label, part["short_ms"]), *((f"  {family}", points) for family, points in families)):
                rows.append([row, *(f"{ms:,.0f}" for ms in points.values())])
        rows.append(["ratio", *traffic["ratio"].values()])
        calls, loops = traffic["with_loops"]["calls"], traffic["with_loops"]["loops"]
        title = f"{traffic['rate']:g} calls/s for {traffic['seconds']:g} s: {calls} calls, {loops} of them endless"
        command.show(title, columns, rows)
    if storm := figures.get("storm"):
        rows = [[label, *(f"{ms:,.0f}" for ms in storm[name].values())] for label, name in STORM_ROWS]
        command.show(f"{storm['running']} of {storm['loops']} endless loops running", columns, rows)
    for line in (*examples[:SHOWN], *figures["missed"]):
        print(f"mixed: {line:.2000}", file=sys.stderr)


STORM_ROWS = (("without them", "calm_ms"), ("in their first second", "arriving_ms"), ("after it", "storm_ms"))


def draw(axes: Any, figures: Mapping[str, Any]) -> None:
    """What a run printed as JSON, as a picture."""
    rows = {}
    if traffic := figures.get("traffic"):
        rows = {"traffic, no loops": traffic["without_loops"]["short_ms"], "traffic": traffic["with_loops"]["short_ms"]}
    if storm := figures.get("storm"):
        rows |= {"one by one": storm["calm_ms"], "loops arrive": storm["arriving_ms"], "storm": storm["storm_ms"]}
    for place, point in enumerate(POINTS):
        values = [points.get(f"p{point}", 0) for points in rows.values()]
        axes.bar([n + (place - 1) * 0.25 for n in range(len(rows))], values, 0.25, label=f"p{point}")
    axes.set_xticks(range(len(rows)), list(rows))
    axes.set_yscale("log")
    axes.set_ylabel("ms until the answer")
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
