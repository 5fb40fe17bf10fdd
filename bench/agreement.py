"""Does the service give a call the same result as a fresh interpreter: status, stdout, value, type of the error?

    python -m bench.agreement [--calls FILE.jsonl] [--n 500] [--json]

A call whose result differs from the fresh one runs a second time in a fresh interpreter. If the two fresh runs differ
from each other (random numbers, clocks, addresses), the call has no single right result. It counts as unstable, and is
left out of the share that must reach `MIN_AGREEMENT`. All other differences are listed.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.call_outcomes import CallOutcome, differing_fields, shortened
from bench.harness.tables import Block, Result, Table
from bench.servers import service
from bench.servers.fresh_interpreter import FreshRun, interpreters
from bench.workloads.tool_calls import load_calls, sample_calls
from sandbox import types as sandbox_types
from sandbox.client import AsyncClient
from sandbox.types import Call

MIN_AGREEMENT = 0.995
"""Required share of the stable calls with equal results."""
TIMEOUT_S = 20.0
"""Time-out in seconds of calls without a time-out of their own."""
CELL_CHARS = 60
"""Characters of an outcome that a table cell shows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Return exit code 1 if too few calls agree."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("agreement", __doc__, "python", "seed")
    parser.add_argument("--calls", type=arguments.file, metavar="FILE", help="JSONL with a 'code' in each row")
    parser.add_argument(
        "--n", type=arguments.count, help="number of calls (default: all of a file; 500 generated ones)"
    )
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    calls = load_calls(args.calls)[: args.n] if args.calls else sample_calls(args.n or 500, args.seed)
    calls = [{**call, "limits": {"timeout_s": TIMEOUT_S} | call.get("limits", {})} for call in calls]
    python = service.guest_python(args.python)
    with service.running(python) as server:
        results = asyncio.run(_through_service(server.url, calls))
    outcomes = [CallOutcome.of_result(result) for result in results]
    first = _run_fresh(calls, python, run=1)
    suspects = [i for i in range(len(calls)) if differing_fields(first[i], outcomes[i])]
    second = _run_fresh([calls[i] for i in suspects], python, run=2)
    unstable = {i for i, outcome in zip(suspects, second, strict=True) if differing_fields(first[i], outcome)}
    different = [i for i in suspects if i not in unstable]
    return {
        **summarize(len(calls), len(different), len(unstable)),
        "differences": [_row(i, first[i], outcomes[i]) for i in different],
    }


def summarize(num_calls: int, num_different: int, num_unstable: int) -> dict[str, Any]:
    """The counts of a comparison of `num_calls` calls, and the requirement."""
    num_stable = num_calls - num_unstable
    agreement = round((num_stable - num_different) / num_stable, 5) if num_stable else 1.0
    return {
        "calls": num_calls,
        "equal": num_stable - num_different,
        "unstable": num_unstable,
        "different": num_different,
        "agreement": agreement,
        "requirements": [requirements.at_least("share of calls that agree", MIN_AGREEMENT, agreement)],
    }


def _row(index: int, fresh: CallOutcome, served: CallOutcome) -> dict[str, Any]:
    fields = differing_fields(fresh, served)
    sides = {name: [shortened(getattr(side, name)) for side in (fresh, served)] for name in fields}
    return {"index": index, "fields": list(fields), **sides}


async def _through_service(url: str, calls: Sequence[Mapping[str, Any]]) -> list[sandbox_types.Result]:
    results: dict[int, sandbox_types.Result] = {}
    with command.counted_progress("service", len(calls)) as advance:
        async with AsyncClient(url) as client:
            async for index, result in client.stream([Call.decode(call) for call in calls]):
                results[index] = result
                advance()
    return [results[index] for index in range(len(calls))]


def _run_fresh(calls: Sequence[Mapping[str, Any]], python: str, *, run: int) -> list[CallOutcome]:
    with (
        command.counted_progress(f"fresh interpreters, run {run}", len(calls)) as advance,
        interpreters(python, wrapped=True) as fresh,
    ):
        return [_outcome_of_fresh(fresh_run) for fresh_run in fresh.run_all(calls, advance)]


def _outcome_of_fresh(run: FreshRun) -> CallOutcome:
    if run.timed_out:
        return CallOutcome("timeout", run.stdout, None, "Timeout")
    if run.exit_code < 0:
        return CallOutcome("killed", run.stdout, None, f"signal {-run.exit_code}")
    value = run.report.get("value") if run.exit_code == 0 else None
    return CallOutcome(run.status, run.stdout, value, str(run.report.get("error", "")))


def tables(result: Result) -> list[Block]:
    """A sentence, and a row for each difference."""
    rows = [
        (str(row["index"]), name, *(repr(shortened(side, CELL_CHARS)) for side in row[name]))
        for row in result.get("differences", ())
        for name in row["fields"][:1]
    ]
    sentence = (
        f"{result['calls']:,} calls beside a fresh interpreter: {result['equal']:,} with the same status and output, "
        f"{result['different']:,} with another, {result['unstable']:,} that differ from run to run."
    )
    return [sentence, *([Table(("call", "field", "fresh", "service"), rows)] if rows else [])]


if __name__ == "__main__":
    raise SystemExit(main())
