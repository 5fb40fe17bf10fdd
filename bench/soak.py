"""A million calls of steady traffic: nothing lost, and nothing that grows over the last half.

    python -m bench.soak [--calls 1000000 | --seconds 3600] [--in-flight 256] [--json]

The calls are riddles, of which each has an answer of its own (`bench.workloads.checked_calls`), asked as
`bench.chaos` asks them, in
every form there is, some requests given up half-way; nothing is killed. Meanwhile memory, descriptors, processes,
zombies, mounts and control groups of the server are looked at, and what rises over the last half by more than noise
is growth (`bench.harness.statistics`). Four times the traffic rests, and what the server holds then is counted
exactly, as
`bench.leaks` does. After its end nothing may be left. The kernel's slab is shown and not judged: it is the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.chaos import Load, Tally, Target
from bench.harness import command, statistics
from bench.leaks import Holdings, grown, holdings
from bench.probes import processes as procs
from bench.probes.leftovers import Leftovers, cgroups
from bench.probes.sampler import Watch
from bench.servers import service
from bench.workloads import checked_calls
from bench.workloads.checked_calls import Riddle

CALLS = 1_000_000
IN_FLIGHT = 256
STRETCHES = 4
LOOK_EVERY_S = 2.0
STALLED_S = 400.0
"""Without any answer for so long, which is more than a riddle's time-out, what is left is lost."""
CHUNK = 10_000
MEMORY = ("memory_mb", "gateway_mb")
"""What must not rise in a line over the last half, however slowly: 2 MiB in 100,000 calls are 500 MiB in a long run.
That of the gateway alone has a tenth of the noise."""
TOLERANCE = {"descriptors": 1.0, "processes": 1.0, "zombies": 1.0, "mounts": 1.0, "cgroups": 1.0}
"""What is not worth a word over the last half, noise or not."""
MOST_SHOWN = 200
"""Looks that the course of memory is drawn from."""
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Sight:
    """What the server holds at one moment, at work."""

    seconds: float
    calls: int
    memory_mb: float
    descriptors: int
    processes: int
    zombies: int
    mounts: int
    cgroups: int
    slab_mb: float
    gateway_mb: float


def main(argv: Sequence[str] | None = None) -> int:
    """The soak; 1 if an answer is missing or wrong, or something grows or stays."""
    args = _parser().parse_args(argv)
    return command.run_as_command("soak", lambda: _soak(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("soak", __doc__ or "")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--calls", type=command.count, help=f"how many (default: {CALLS})")
    size.add_argument("--seconds", type=command.seconds, help="or for how long")
    parser.add_argument("--in-flight", type=command.count, default=IN_FLIGHT, help=f"calls at once ({IN_FLIGHT})")
    parser.add_argument("--look-every", type=command.seconds, default=LOOK_EVERY_S, metavar="S", help="(default: 2)")
    parser.add_argument("--isolation", default="auto", help="level of the server (default: auto)")
    parser.add_argument("--lean", action="store_true", help="only zygotes and riddles of the standard library")
    parser.add_argument("--seed", type=int, default=0, help="which riddles (default: 0)")
    return parser


def _soak(args: argparse.Namespace) -> int:
    flags = ["--isolation", args.isolation, *(["--profiles", "bare"] if args.lean else [])]
    tally = Tally(0)
    sights: list[Sight] = []
    marks: list[Holdings] = []
    rates: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-soak-") as folder:
        os.chmod(folder, 0o711)  # calls may have to reach it as users of their own
        leftovers = Leftovers(Path(folder))
        with ExitStack() as life, command.progress() as bar:
            target = Target(life, lambda: service.running(args.python, flags, {"TMPDIR": folder}))
            task = bar.add_task("riddles", total=None if args.seconds else args.calls or CALLS)
            begun = time.monotonic()
            for stretch in range(STRETCHES):
                asked = _asked(tally, args, stretch)
                load = Load(target, asked, tally, random.Random(args.seed + stretch), lambda: bar.advance(task))
                before, since = tally.answered, time.monotonic()
                with Watch(lambda: _look(target, tally, begun), args.look_every) as watch:
                    asyncio.run(_until_stalled(load, tally, args.in_flight))
                rates.append(round((tally.answered - before) / (time.monotonic() - since), 1))
                sights += watch.seen[1:-1]  # the first and the last see it without work
                marks.append(holdings(target, tally.answered, leftovers))
                if tally.lost:
                    break
            pids = target.processes()
        left_behind = leftovers.found(pids)
    figures = {
        "bench": "soak",
        "in_flight": args.in_flight,
        "seconds": round(time.monotonic() - begun),
        "calls_per_s": rates,
        **summarise(tally, sights, marks, left_behind),
    }
    _show(figures, tally)
    command.plot(args.plot, lambda axes: draw(axes, figures))
    command.finish(figures, _parser(), args)
    return 0 if figures["holds"] else 1


def _asked(tally: Tally, args: argparse.Namespace, stretch: int) -> Iterator[Riddle]:
    """The riddles of one stretch, counted as they are asked: its share of the calls, or as many as its time allows."""
    kinds = checked_calls.LEAN if args.lean else checked_calls.KINDS
    endless = itertools.count(stretch << 20)
    source = (one for number in endless for one in checked_calls.make(CHUNK, args.seed + number, kinds))
    whole = args.calls or CALLS
    share = whole * (stretch + 1) // STRETCHES - whole * stretch // STRETCHES
    give_up = time.monotonic() + (args.seconds or 0.0) / STRETCHES
    for count, riddle in enumerate(source):
        if (time.monotonic() >= give_up) if args.seconds else (count >= share):
            return
        tally.calls += 1
        yield riddle


async def _until_stalled(load: Load, tally: Tally, in_flight: int) -> None:
    """Ask until all is answered, or nothing has been for too long."""

    async def guard() -> None:
        answered = -1
        while answered < tally.answered:
            answered = tally.answered
            await asyncio.sleep(STALLED_S)
        asking.cancel()

    asking = asyncio.ensure_future(load.run(in_flight))
    guarding = asyncio.ensure_future(guard())
    try:
        await asyncio.wait([asking])
    finally:
        guarding.cancel()
        asking.cancel()
    if not asking.cancelled():
        asking.result()


def _look(target: Target, tally: Tally, begun: float) -> Sight:
    pids = target.processes()
    return Sight(
        seconds=round(time.monotonic() - begun, 1),
        calls=tally.answered,
        memory_mb=round(procs.pss_mb(pids), 2),
        descriptors=sum(map(procs.descriptors, pids)),
        processes=len(pids),
        zombies=sum(map(procs.is_zombie, pids)),
        mounts=procs.mounts(os.getpid()) + sum(map(procs.mounts, pids)),
        cgroups=len(cgroups()),
        slab_mb=_slab_mb(),
        gateway_mb=round(procs.pss_mb([target.pid]), 3),
    )


def _slab_mb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("Slab:")) / 1024, 1)


def summarise(
    tally: Tally, sights: Sequence[Sight], marks: Sequence[Holdings], left_behind: Sequence[str]
) -> dict[str, Any]:
    """The figures of a soak, and which promises it misses."""
    half = [sight for sight in sights if sight.calls >= tally.answered / 2]
    rises = growths(half)
    bad = {
        "lost": tally.lost,
        "doubled": tally.doubled,
        "mixed_up": tally.mixed_up,
        "unavailable": sum(tally.unavailable.values()),
        "left_behind": len(left_behind),
    }
    at_rest = grown(marks, marks[len(marks) // 2 - 1].calls)
    missed = [f"{count} {name.replace('_', ' ')}, expected none" for name, count in bad.items() if count]
    if not rises:
        missed.append(
            f"{len(half)} looks in the last half, expected {statistics.LEAST} at least: more calls, or more looks"
        )
    for name, rise in rises.items():
        if rise.is_line if name in MEMORY else name in TOLERANCE and rise.is_over(TOLERANCE[name]):
            missed.append(f"{name} grew by {rise.by:.1f} over the last half, where noise makes {rise.noise:.1f}")
    missed += [f"{name} at rest grew from {then:g} to {now:g}" for name, (then, now) in at_rest.items()]
    return {
        "calls": tally.calls,
        "answered": tally.answered,
        **{name: count for name, count in bad.items() if name != "left_behind"},
        "statuses": dict(tally.statuses.most_common()),
        "given_up_requests": tally.given_up,
        "latency_ms": command.percentiles(tally.latencies_ms, (50, 90, 99)),
        "looks": len(sights),
        "last_half": {
            name: {
                "median": sorted(getattr(sight, name) for sight in half)[len(half) // 2],
                "growth": round(rise.by, 2),
                "noise": round(rise.noise, 2),
                "tolerance": TOLERANCE.get(name),
            }
            for name, rise in rises.items()
        },
        "at_work": [(sight.calls, sight.memory_mb) for sight in sights[:: -(-len(sights) // MOST_SHOWN) or 1]],
        "at_rest": [asdict(mark) for mark in marks],
        "left_behind": list(left_behind),
        "missed": missed,
        "holds": not missed,
    }


def growths(sights: Sequence[Sight]) -> dict[str, statistics.Growth]:
    """Growth of each number that is looked at; none if there are too few looks."""
    if len(sights) < statistics.LEAST:
        return {}
    return {
        name: statistics.of([getattr(sight, name) for sight in sights]) for name in (*MEMORY, *TOLERANCE, "slab_mb")
    }


def _show(figures: Mapping[str, Any], tally: Tally) -> None:
    rows = [
        (name.replace("_", " "), f"{row['median']:,}", f"{row['growth']:+,}", f"{row['noise']:,}")
        for name, row in figures["last_half"].items()
    ]
    command.show("over the last half", ("", "median", "growth", "noise"), rows)
    marks = figures["at_rest"]
    command.show("held at rest", list(marks[0]), [[f"{mark[name]:,}" for name in mark] for mark in marks])
    names = ("calls", "seconds", "lost", "doubled", "mixed_up", "unavailable", "given_up_requests", "looks")
    rows = [(name.replace("_", " "), f"{figures[name]:,}") for name in names]
    command.show("in all", ("", ""), [*rows, ("calls/s by quarter", " ".join(map(str, figures["calls_per_s"])))])
    for line in (*tally.examples[:SHOWN], *figures["left_behind"][:SHOWN], *figures["missed"]):
        print(f"soak: {line:.2000}", file=sys.stderr)


def draw(axes: Any, figures: Mapping[str, Any]) -> None:
    """What a run printed as JSON, as a picture."""
    marks = figures["at_rest"]
    axes.plot([mark["calls"] for mark in marks], [mark["memory_mb"] for mark in marks], "o--", label="at rest")
    if course := figures.get("at_work"):
        axes.plot([calls for calls, _ in course], [memory_mb for _, memory_mb in course], label="at work")
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    axes.set_xlabel("calls")
    axes.set_ylabel("memory of the server, MiB")
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
