"""Starts a server on this machine, and compares it with a fresh interpreter per call: three kinds of calls.

python -m bench.demo [--calls FILE.jsonl] [--seconds 1.5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.load import Answers, closed_loop
from bench.harness.statistics import percentiles
from bench.harness.tables import Block, Result, Table, number, show
from bench.servers import service
from bench.servers.fresh_interpreter import FreshInterpreters, interpreters
from bench.workloads.code_kinds import CODES, KIND_NAMES
from bench.workloads.tool_calls import load_calls, sample_calls
from sandbox.client import AsyncClient, Call
from sandbox.local import local_service

KINDS = {"print": (64, 1), "numpy": (64, 1), "mix": (4, 2)}
"""Kinds of calls, each with the number of calls in a request, and its share of the time. Calls of the mix are long and
differ from each other: more of them should be answered, and few of them left when the time is up."""
REQUESTS = 4
"""Requests in flight."""
MIX_CALLS = 512
"""Calls of the mix, which are repeated until the time is up."""
EXPLANATION = """In flight: calls sent and not answered yet. p50: the time within which half of the calls were answered.
A fresh interpreter is `python main.py`, not isolated, one per core at a time. A quarter of the mix fails on purpose."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Return exit code 1 if it failed or a call was unavailable."""
    parser = arguments.parser("demo", __doc__, "seed")
    parser.add_argument("--calls", type=arguments.file, metavar="FILE", help="JSONL with a 'code' in each row")
    text = "seconds for each kind of call and each side, for the mix twice as many (default: 1.5)"
    parser.add_argument("--seconds", type=arguments.seconds, default=1.5, help=text)
    return command.run_benchmark(parser, argv, lambda args: asyncio.run(_measure(args)), tables)


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    calls = {kind: [{"code": CODES[kind]}] for kind in KINDS if kind in CODES}
    calls["mix"] = load_calls(args.calls) if args.calls else sample_calls(MIX_CALLS, args.seed)
    shares = sum(share for _, share in KINDS.values())
    show([f"Starting a server, then measuring for {2 * shares * args.seconds:.0f} s."])
    rows: dict[str, dict[str, Any]] = {}
    with interpreters(service.guest_python(None)) as fresh, command.progress() as bar:
        task = bar.add_task("starting", total=2 * shares)
        async with local_service() as url:
            for kind, (batch, share) in KINDS.items():
                bar.update(task, description=f"{kind}: server")
                row = await _on_server(url, calls[kind], batch, share * args.seconds)
                bar.update(task, description=f"{kind}: fresh interpreters", advance=share)
                fresh_per_s = await asyncio.to_thread(_in_fresh_interpreters, fresh, calls[kind], share * args.seconds)
                bar.advance(task, share)
                rows[kind] = {**row, "fresh_per_s": fresh_per_s, "ratio": round(row["calls_per_s"] / fresh_per_s, 1)}
    unavailable = sum(row["statuses"].get("unavailable", 0) for row in rows.values())
    is_own = args.calls is not None
    return {
        "kinds": rows,
        "own_calls": is_own,
        "requirements": [requirements.at_most("unavailable calls", 0, unavailable)],
    }


async def _on_server(url: str, calls: Sequence[dict[str, Any]], batch: int, seconds: float) -> dict[str, Any]:
    """Keep `REQUESTS` requests of `batch` calls in flight, and send none after `seconds`."""
    answers = Answers()
    repeated = cycle([Call.decode(call) for call in calls])
    async with AsyncClient(url, batch_size=batch) as client:
        await client.execute("pass")  # connect before the clock starts

        stop_at = time.perf_counter() + seconds

        def requests() -> Iterator[list[Call]]:
            while time.perf_counter() < stop_at:
                yield [next(repeated) for _ in range(batch)]

        wall_s = await closed_loop(requests(), partial(answers.receive, client), REQUESTS)
    return {
        "calls": len(answers.latencies_ms),
        "calls_per_s": round(len(answers.latencies_ms) / wall_s, 1),
        "in_flight": REQUESTS * batch,
        "answer_ms": percentiles(answers.latencies_ms),
        "statuses": dict(answers.statuses.most_common()),
    }


def _in_fresh_interpreters(fresh: FreshInterpreters, calls: Sequence[dict[str, Any]], seconds: float) -> float:
    """Return calls per second."""
    start = time.perf_counter()
    runs = fresh.run_all(list(calls) * max(1, 4096 // len(calls)), seconds=seconds)
    return round(len(runs) / (time.perf_counter() - start), 1)


def tables(result: Result) -> list[Block]:
    """A row for each kind of call, and what to run next."""
    rows = [
        {
            "calls": "your calls" if kind == "mix" and result["own_calls"] else KIND_NAMES[kind],
            "isolated calls/s": number(row["calls_per_s"]),
            "fresh interpreters/s": number(row["fresh_per_s"]),
            "ratio": f"{row['ratio']:.1f}×",
            "in flight": str(row["in_flight"]),
            "p50 ms": number(row["answer_ms"]["p50"]),
            "ended as": ", ".join(f"{count} {status}" for status, count in row["statuses"].items()),
        }
        for kind, row in result["kinds"].items()
    ]
    return [Table.from_cells(rows), EXPLANATION, _next_steps()]


def _next_steps() -> str:
    """Commands that work as they are printed, in the directory of this process."""
    script = Path(sys.executable).with_name("rstar-sandbox")
    on_path = shutil.which("rstar-sandbox")
    if on_path is not None and script.exists() and os.path.samefile(on_path, script):
        name = "rstar-sandbox"
    else:
        name = os.path.relpath(script) if script.exists() else f"{sys.executable} -m sandbox"
    return f"""Next:
  {name} run -c 'print(1 + 1)'
  {name} serve                       # its dashboard is on the address that it prints
  make demo CALLS=FILE.jsonl         # the third line with your own calls (a "code" in each row)"""


if __name__ == "__main__":
    raise SystemExit(main())
