"""Does a call's result depend on load? The same calls one at a time, then all at once on an overloaded machine.

    python -m bench.invariance [--calls FILE.jsonl] [--loops 8] [--load 2] [--json]

There are two kinds of calls. The first is a corpus: generated calls (`bench.workloads.tool_calls`), or your own. The
second are calls that need 0.5 to 2 times their time limit in different ways (`TIME_USES`). They need this time on any
machine, because they run until the kernel has counted so much CPU time for them. The machine is overloaded by endless
loops among the calls, and by busy processes outside the service.

Status, stdout, value and type of the error are compared. A call whose results differ runs alone several times more, on
another server. If these runs differ from its first run alone, the call has no single result: it is listed as unstable
and does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.call_outcomes import CallOutcome, differing_fields
from bench.harness.tables import Block
from bench.servers import service
from bench.workloads.hostile_calls import BACKGROUND_LOOP
from bench.workloads.tool_calls import load_calls, sample_calls
from sandbox.client import AsyncClient
from sandbox.types import Call, Result

FACTORS = (0.5, 0.7, 0.9, 1.1, 1.3, 2.0)
"""Times that calls need, as multiples of their limit. A process also needs a few milliseconds to start. With factors
closer to 1, these milliseconds would decide whether a call exceeds its limit."""
CHILDREN_IN_TURN = 4
CHILDREN_SIDE_BY_SIDE = 2
TIME_USES = {
    "CPU": "while time.process_time() < NEED: pass",
    "sleep": "time.sleep(NEED)",
    "both in turn": "for n in range(1, 6):\n    while time.process_time() < n * NEED / 10: pass\n"
    "    time.sleep(NEED / 10)",
    "threads": "import threading\ndef work():\n    while time.process_time() < NEED: pass\n"
    "threads = [threading.Thread(target=work) for _ in range(2)]\n"
    "for thread in threads: thread.start()\nfor thread in threads: thread.join()",
    "children in turn": f"for _ in range({CHILDREN_IN_TURN}):\n    if os.fork() == 0:\n"
    f"        while time.process_time() < NEED / {CHILDREN_IN_TURN}: pass\n        os._exit(0)\n    os.wait()",
    # The call formats the program of its child processes, because only the call knows NEED.
    "programs in turn": r"""
import subprocess, sys
program = f'import time\nwhile time.process_time() < {NEED / 2}: pass'
for _ in range(2): subprocess.run([sys.executable, '-c', program], check=True)
""",
    # On cores of their own, all children run at the same time, so together they use NEED seconds of the limit.
    "children side by side": f"for _ in range({CHILDREN_SIDE_BY_SIDE}):\n    if os.fork() == 0:\n"
    f"        while time.process_time() < NEED: pass\n        os._exit(0)\n"
    f"for _ in range({CHILDREN_SIDE_BY_SIDE}): os.wait()",
}
"""Programs that use NEED seconds of their time limit. The limit is in virtual time, the time that a program would take
on an idle machine. The clock of `time.process_time` starts at 0 in each process, and counts all threads of the
process."""
BUSY = "import os\nwhile os.getppid() == {parent}: sum(range(100_000))"
"""A program that uses a core until its parent process is gone."""
LIMIT_S = 1.0
"""Time limit in seconds of the calls that need a known share of their limit."""
REPEATS = 5
"""Number of further runs of a call whose results differed. One run is not enough, since a call that needs about its
limit has another result only now and then."""


@dataclass(frozen=True, slots=True)
class Case:
    """A call, and the status that it must end with, if that is known."""

    name: str
    call: dict[str, Any]
    status: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A call whose outcome differs between the two runs."""

    name: str
    fields: tuple[str, ...]
    idle: CallOutcome
    overloaded: CallOutcome


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return exit code 1 if a result changed, or if a call whose status is known ended with
    another."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("invariance", __doc__, *arguments.SERVER_OPTIONS, "seed")
    count, uses = arguments.count, arguments.names_of(TIME_USES)
    parser.add_argument("--calls", type=arguments.file, metavar="FILE", help="JSONL to use as the corpus")
    parser.add_argument("--n", type=count, help="calls of the corpus (default: all of a file; 300 generated ones)")
    parser.add_argument(
        "--uses", type=uses, default=tuple(TIME_USES), help=f"some of {','.join(TIME_USES)} (default: all)"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--loops", type=count, default=8, help="endless loops (default: 8)")
    parser.add_argument("--load", type=count, default=cores, help="busy processes (default: one per core)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    cases = [*_corpus(args), *calls_using(args.uses, LIMIT_S)]
    flags = [*arguments.server_flags(args), "--queue-timeout-s", "86400"]  # no call may time out in the queue
    with service.running(args.python, flags) as server:
        idle = asyncio.run(_one_by_one("idle", server.url, cases))
        with busy_processes(args.load):
            overloaded = asyncio.run(_all_at_once(server.url, cases, args.loops, args.seed))
    changed = {change.name for change in compare(cases, idle, overloaded)}
    suspects = [(case, result) for case, result in zip(cases, idle, strict=True) if case.name in changed] * REPEATS
    suspect_cases = [case for case, _ in suspects]
    again: list[Result] = []
    if suspects:
        with service.running(args.python, flags) as server:
            again = asyncio.run(_one_by_one("idle again", server.url, suspect_cases))
    unstable = compare(suspect_cases, [result for _, result in suspects], again)
    result = {
        "corpus": {
            "from": Path(args.calls).name if args.calls else f"generated, seed {args.seed}",
            "calls": sum(case.status is None for case in cases),
        },
        "loops": args.loops,
        "load": args.load,
        **summarize(cases, idle, overloaded, {change.name for change in unstable}),
    }
    corpus_changes = [str(change) for change in result["changed"] if change["name"].startswith("corpus")]
    command.print_examples("invariance", [*corpus_changes, *result["misjudged"]])
    return result


def _corpus(args: argparse.Namespace) -> list[Case]:
    if args.stdlib_only and not args.calls:  # the generated calls import libraries
        return []
    calls = load_calls(args.calls)[: args.n] if args.calls else sample_calls(args.n or 300, args.seed)
    return [Case(f"corpus {number}", call) for number, call in enumerate(calls)]


def calls_using(uses: Sequence[str], limit_s: float) -> list[Case]:
    """A call for each use and each of `FACTORS`. "children side by side" is left out if there is no core per child."""
    has_cores = len(os.sched_getaffinity(0)) >= CHILDREN_SIDE_BY_SIDE
    return [
        Case(f"{factor:g} {use}", call_using(use, factor, limit_s), "ok" if factor < 1 else "timeout")
        for use in uses
        for factor in FACTORS
        if has_cores or use != "children side by side"
    ]


def call_using(use: str, factor: float, limit_s: float) -> dict[str, Any]:
    """A call that needs `factor` times its limit."""
    code = f"import os, time\nNEED = {factor * limit_s!r}\n{TIME_USES[use]}\nprint('used', NEED)\n"
    return {"code": code, "limits": {"timeout_s": limit_s}}


async def _one_by_one(description: str, url: str, cases: Sequence[Case]) -> list[Result]:
    results = []
    async with AsyncClient(url) as client:
        with command.counted_progress(description, len(cases)) as advance:
            for case in cases:
                results.append(await client.execute(Call.decode(case.call)))
                advance()
    return results


async def _all_at_once(url: str, cases: Sequence[Case], loops: int, seed: int) -> list[Result]:
    """Send the calls in random order, after endless loops that outlast them."""
    order = random.Random(seed).sample(range(len(cases)), len(cases))
    results: dict[int, Result] = {}
    with command.counted_progress("overloaded", len(cases)) as advance:
        async with AsyncClient(url) as client, asyncio.TaskGroup() as group:
            looping = group.create_task(client.run_batch([Call.decode(BACKGROUND_LOOP)] * loops))
            await asyncio.sleep(0)  # lets that task send the loops first
            async for position, result in client.stream([Call.decode(cases[index].call) for index in order]):
                results[order[position]] = result
                advance()
            looping.cancel()
    return [results[index] for index in range(len(cases))]


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that use a core each."""
    code = BUSY.format(parent=os.getpid())
    processes = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare(cases: Sequence[Case], idle: Sequence[Result], overloaded: Sequence[Result]) -> list[Change]:
    """The calls whose outcomes differ."""
    changes = []
    for case, *results in zip(cases, idle, overloaded, strict=True):
        idle_outcome, overloaded_outcome = map(CallOutcome.of_result, results)
        if fields := differing_fields(idle_outcome, overloaded_outcome):
            changes.append(Change(case.name, fields, idle_outcome, overloaded_outcome))
    return changes


def summarize(
    cases: Sequence[Case], idle: Sequence[Result], overloaded: Sequence[Result], unstable: set[str]
) -> dict[str, Any]:
    """The result. A call with a known status is never unstable: a run with another status is wrong."""
    known = {case.name for case in cases if case.status}
    changes = [
        change for change in compare(cases, idle, overloaded) if change.name in known or change.name not in unstable
    ]
    misjudged = [
        f"{case.name}: expected {case.status}, got {_described(first)} idle and {_described(second)} overloaded"
        for case, first, second in zip(cases, idle, overloaded, strict=True)
        if case.status and {first.status.value, second.status.value} != {case.status}
    ]
    return {
        "calls": len(cases),
        "known": len(known),
        "changed": [_row(change) for change in changes],
        "misjudged": misjudged,
        "unstable": sorted(unstable - known),
        "requirements": requirements.none_of({"changed results": len(changes), "misjudged calls": len(misjudged)}),
    }


def _described(result: Result) -> str:
    message = f" ({result.error.message:.200})" if result.error else ""
    return f"{result.status.value}{message} after {result.usage.run_ms:.0f} ms and {result.usage.cpu_ms:.0f} ms of CPU"


def _row(change: Change) -> dict[str, Any]:
    sides = {"idle": asdict(change.idle), "overloaded": asdict(change.overloaded)}
    differing = {side: {name: f"{values[name]!s:.300}" for name in change.fields} for side, values in sides.items()}
    return {"name": change.name, **differing}


def tables(result: Mapping[str, Any]) -> list[Block]:
    """The numbers of changed and misjudged results, as text."""
    num_known, corpus = result["known"], result["corpus"]
    return [
        f"{result['calls']:,} calls alone, then all at once beside {result['loops']} endless loops and "
        f"{result['load']} busy processes: {len(result['changed'])} statuses or outputs changed; "
        f"{len(result['unstable'])} calls that differ from themselves are left out. "
        f"{result['calls'] - num_known:,} of the calls are a corpus ({corpus['from']}); {num_known:,} need a known "
        f"share of their limit, from 0.5 to 2 times: {len(result['misjudged'])} misjudged."
    ]


if __name__ == "__main__":
    raise SystemExit(main())
