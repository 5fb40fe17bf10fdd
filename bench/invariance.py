"""Whether a verdict depends on load: the same calls one at a time, then all at once on a machine that is swamped.

    python -m bench.invariance [--calls FILE.jsonl] [--loops 8] [--load 2] [--json]

The calls are a corpus, made up (`bench.workloads.tool_calls`) or one's own, and others that need 0.5 to 2 times
their limit: of CPU,
of sleep, of both in turn, in threads, in children and programs one after another, in children side by side. What they
need is what they need on any machine: they run until the kernel has counted that much CPU time for them, so a slower
clock or a shared cache makes them do less, not need more. Swamped means: endless loops among the calls, and busy
processes outside the service besides.

Status, stdout, value and type of the error are compared. A call that differs runs alone once more, on another server
with other addresses: if it differs from itself, it has no one answer, is named as unstable, and does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.agreement import Outcome, differing
from bench.harness import command
from bench.mixed import LOOPS, STORM_LOOP_S
from bench.servers import service
from bench.workloads.tool_calls import load_calls, sample_calls
from sandbox.client import AsyncClient
from sandbox.types import Call, Result

FACTORS = (0.5, 0.7, 0.9, 1.1, 1.3, 2.0)
"""How much of its limit a call needs. Nearer to 1 is what it takes to start, which is not the call's own doing."""
LIMIT_S = 1.0
TURNS = 4
SIDE_BY_SIDE = 2
NEEDS = {
    "CPU": "while time.process_time() < NEED: pass",
    "sleep": "time.sleep(NEED)",
    "both in turn": "for n in range(1, 6):\n    while time.process_time() < n * NEED / 10: pass\n"
    "    time.sleep(NEED / 10)",
    "threads": "import threading\ndef work():\n    while time.process_time() < NEED: pass\n"
    "threads = [threading.Thread(target=work) for _ in range(2)]\n"
    "for thread in threads: thread.start()\nfor thread in threads: thread.join()",
    "children in turn": f"for _ in range({TURNS}):\n    if os.fork() == 0:\n"
    f"        while time.process_time() < NEED / {TURNS}: pass\n        os._exit(0)\n    os.wait()",
    "programs in turn": "import subprocess, sys\nfor _ in range(2):\n    subprocess.run([sys.executable, '-c', "
    "f'import time\\nwhile time.process_time() < {NEED / 2}: pass'], check=True)",
    "children side by side": f"for _ in range({SIDE_BY_SIDE}):\n    if os.fork() == 0:\n"
    f"        while time.process_time() < NEED: pass\n        os._exit(0)\nfor _ in range({SIDE_BY_SIDE}): os.wait()",
}
"""How a call comes to need NEED seconds of its own clock. CPU time counts from the start of a process."""
LOOP_COUNT = 8
BUSY = "import os\nwhile os.getppid() == {parent}: sum(range(100_000))"
"""Burns a core until whoever started it is gone."""
ENDS = {"timeout": "late"}
AGAIN = 5
"""Times that a call which did not end alike is run alone once more: it may differ from itself now and then, as one that
needs just about its limit does."""
SHOWN = 20
Take = Callable[[int, Result], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A call, and the status that it must end with, where that is known."""

    name: str
    call: dict[str, Any]
    status: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A call that did not end alike."""

    name: str
    fields: tuple[str, ...]
    idle: Outcome
    swamped: Outcome


def main(argv: Sequence[str] | None = None) -> int:
    """The comparison; 1 if a verdict changed, or one that is known is wrong."""
    args = _parser().parse_args(argv)
    return command.run_as_command("invariance", lambda: _compare(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("invariance", __doc__ or "")
    parser.add_argument(
        "--calls", type=command.file, metavar="FILE", help="JSONL that takes the place of the made-up corpus"
    )
    parser.add_argument("--n", type=command.count, help="so many calls of the corpus (default: all; 300 if made up)")
    parser.add_argument("--repeat", type=command.count, default=1, help="of each call with a known need (default: 1)")
    parser.add_argument("--needs", type=_needs, default=tuple(NEEDS), help=f"of {','.join(NEEDS)} (default: all)")
    parser.add_argument("--limit-s", type=command.seconds, default=LIMIT_S, help="their time-out (default: 1)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--loops", type=command.count, default=LOOP_COUNT, help="endless loops (default: 8)")
    parser.add_argument("--load", type=command.count, default=cores, help="busy processes (default: one a core)")
    parser.add_argument("--isolation", default="auto", help="level of the server (default: auto)")
    parser.add_argument("--lean", action="store_true", help="only zygotes of the standard library, no made-up corpus")
    parser.add_argument("--seed", type=int, default=0, help="which made-up corpus (default: 0)")
    return parser


def _needs(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in NEEDS]:
        raise argparse.ArgumentTypeError(f"unknown need {unknown[0]!r}; expected some of {', '.join(NEEDS)}")
    return names


def _compare(args: argparse.Namespace) -> int:
    cases = [*_corpus(args), *needing(args.needs, args.limit_s, args.repeat)]
    flags = ["--isolation", args.isolation, "--queue-timeout-s", "86400"]
    flags += ["--profiles", "bare"] if args.lean else []
    with command.progress() as bar:

        def run(name: str, server: service.Service, some: Sequence[Case], *, alone: bool) -> list[Result]:
            task = bar.add_task(name, total=len(some))
            calls = [Call.decode(case.call) for case in some]
            results: dict[int, Result] = {}

            def take(index: int, result: Result) -> None:
                results[index] = result
                bar.advance(task)

            if alone:
                asyncio.run(_one_by_one(server.url, calls, take))
            else:
                asyncio.run(_at_once(server.url, calls, take, args.loops, args.seed))
            return [results[index] for index in range(len(some))]

        with service.running(args.python, flags) as server:
            idle = run("alone", server, cases, alone=True)
            with busy(args.load):
                swamped = run("swamped", server, cases, alone=False)
        changes = compare(cases, idle, swamped)
        names = {change.name for change in changes}
        suspects = [(case, result) for case, result in zip(cases, idle, strict=True) if case.name in names] * AGAIN
        again: list[Result] = []
        if suspects:
            with service.running(args.python, flags) as server:
                again = run("alone again", server, [case for case, _ in suspects], alone=True)
    unstable = compare([case for case, _ in suspects], [result for _, result in suspects], again)
    figures = {
        "bench": "invariance",
        "corpus": {"from": _source(args), "calls": sum(case.status is None for case in cases)},
        "limit_s": args.limit_s,
        "loops": args.loops,
        "load": args.load,
        **summarise(cases, idle, swamped, {change.name for change in unstable}),
    }
    _show(figures, cases, idle, swamped)
    command.finish(figures, _parser(), args)
    return 0 if figures["holds"] else 1


def _source(args: argparse.Namespace) -> str:
    return Path(args.calls).name if args.calls else f"made up, seed {args.seed}"


def _corpus(args: argparse.Namespace) -> list[Case]:
    if args.lean and not args.calls:
        return []
    calls = load_calls(args.calls)[: args.n] if args.calls else sample_calls(args.n or 300, args.seed)
    return [Case(f"corpus {number}", call) for number, call in enumerate(calls)]


def needing(needs: Sequence[str], limit_s: float, repeat: int = 1) -> list[Case]:
    """Calls that need each of `FACTORS` of their limit, in each of these ways. Side by side takes a core for each."""
    side_by_side = len(os.sched_getaffinity(0)) >= SIDE_BY_SIDE
    return [
        Case(f"{factor:g} {need} #{number}", _needing(need, factor, limit_s), "ok" if factor < 1 else "timeout")
        for need in needs
        for factor in FACTORS
        for number in range(repeat)
        if side_by_side or need != "children side by side"
    ]


def _needing(need: str, factor: float, limit_s: float) -> dict[str, Any]:
    code = f"import os, time\nNEED = {factor * limit_s!r}\n{NEEDS[need]}\nprint('had', NEED)\n"
    return {"code": code, "limits": {"timeout_s": limit_s}}


async def _one_by_one(url: str, calls: Sequence[Call], take: Take) -> None:
    async with AsyncClient(url) as client:
        for index, call in enumerate(calls):
            take(index, await client.execute(call))


async def _at_once(url: str, calls: Sequence[Call], take: Take, loops: int, seed: int) -> None:
    """In no particular order, and among endless loops, which were asked before them and last longer."""
    endless = [Call.decode({"code": LOOPS["plain"], "limits": {"timeout_s": STORM_LOOP_S}})] * loops
    order = random.Random(seed).sample(range(len(calls)), len(calls))
    async with AsyncClient(url) as client, asyncio.TaskGroup() as group:
        looping = group.create_task(client.run_batch(endless))
        await asyncio.sleep(0)
        async for place, result in client.stream([calls[index] for index in order]):
            take(order[place], result)
        looping.cancel()


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that burn a core each, meanwhile."""
    code = BUSY.format(parent=os.getpid())
    processes = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare(cases: Sequence[Case], idle: Sequence[Result], swamped: Sequence[Result]) -> list[Change]:
    """The calls that did not end alike."""
    changes = []
    for case, *both in zip(cases, idle, swamped, strict=True):
        one, other = map(Outcome.of_service, both)
        if fields := differing(one, other):
            changes.append(Change(case.name, fields, one, other))
    return changes


def summarise(
    cases: Sequence[Case], idle: Sequence[Result], swamped: Sequence[Result], unstable: set[str]
) -> dict[str, Any]:
    """The figures. A call with a known status is never unstable: whichever run misses that is at fault."""
    known = {case.name for case in cases if case.status}
    changes = [
        change for change in compare(cases, idle, swamped) if change.name in known or change.name not in unstable
    ]
    misjudged = [
        f"{case.name}: expected {case.status}, got {_ended(one)} alone and {_ended(other)} swamped"
        for case, one, other in zip(cases, idle, swamped, strict=True)
        if case.status and {one.status.value, other.status.value} != {case.status}
    ]
    return {
        "calls": len(cases),
        "known": len(known),
        "changed": [_row(change) for change in changes],
        "misjudged": misjudged,
        "unstable": sorted(unstable - known),
        "statuses": {
            name: dict(Counter(result.status.value for result in results).most_common())
            for name, results in (("idle", idle), ("swamped", swamped))
        },
        "run_ms": {
            name: command.percentiles((result.usage.run_ms for result in results), (50, 90, 99))
            for name, results in (("idle", idle), ("swamped", swamped))
        },
        "holds": not changes and not misjudged,
    }


def _ended(result: Result) -> str:
    why = f" ({result.error.message:.200})" if result.error else ""
    return f"{result.status.value}{why} after {result.usage.run_ms:.0f} ms and {result.usage.cpu_ms:.0f} of CPU"


def _row(change: Change) -> dict[str, Any]:
    sides = {"idle": asdict(change.idle), "swamped": asdict(change.swamped)}
    differ = {side: {name: f"{values[name]!s:.300}" for name in change.fields} for side, values in sides.items()}
    return {"name": change.name, **differ}


def _show(figures: Mapping[str, Any], cases: Sequence[Case], idle: Sequence[Result], swamped: Sequence[Result]) -> None:
    ends: dict[tuple[str, str], set[str]] = {}
    for case, *results in zip(cases, idle, swamped, strict=True):
        if case.status:
            factor, need = case.name.rpartition(" #")[0].split(" ", 1)
            both = [ENDS.get(result.status.value, result.status.value) for result in results]
            ends.setdefault((need, factor), set()).add("→".join(dict.fromkeys(both)))
    rows = [
        [need, *("|".join(sorted(ends[need, f"{factor:g}"])) for factor in FACTORS)]
        for need in dict.fromkeys(need for need, _ in ends)
    ]
    command.show("needs so much of its limit, alone→swamped", ("", *map("{:g}".format, FACTORS)), rows)
    command.show(
        f"{figures['calls']} calls",
        ("", ""),
        [
            ("changed", len(figures["changed"])),
            ("wrong, where it is known", len(figures["misjudged"])),
            ("unstable by themselves", len(figures["unstable"])),
            *((f"run p90 ms, {name}", f"{points['p90']:,.0f}") for name, points in figures["run_ms"].items()),
        ],
    )
    for change in [change for change in figures["changed"] if change["name"].startswith("corpus")][:SHOWN]:
        print(f"invariance: {change['name']}: alone {change['idle']}, swamped {change['swamped']}", file=sys.stderr)
    for line in figures["misjudged"][:SHOWN]:
        print(f"invariance: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
