"""Does the service give a call the same result as a fresh interpreter: status, stdout, value, type of the error?

    python -m bench.agreement [--calls FILE.jsonl] [--n 500] [--json]

A call whose two fresh runs differ from each other (random numbers, clocks, addresses) has no single right result. It is
counted as unstable and left out of the share that must reach `MIN_AGREEMENT`. All other differences are listed by
cause.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
"""Time-out of calls that have none of their own."""
CELL_CHARS = 60
"""Characters of an outcome that a table cell shows."""
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_RANDOM = re.compile(r"\brandom\b|\bshuffle\b|\buuid|\bsecrets\b|\burandom\b")
_CLOCK = re.compile(r"\btime\b|\bdatetime\b|\bperf_counter\b|%timeit")


@dataclass(frozen=True, slots=True)
class Difference:
    """A call on which fresh interpreter and service differ, and the cause as far as the outcomes show it."""

    index: int
    cause: str
    fields: tuple[str, ...]
    fresh: CallOutcome
    service: CallOutcome
    message: str
    """The error message of the service's result."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Return exit code 1 if too few calls agree."""
    return command.run_benchmark(_parser(), argv, _measure, tables, draw)


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
    differences = [
        Difference(
            i,
            cause(calls[i]["code"], first[i], outcomes[i], i in unstable),
            differing_fields(first[i], outcomes[i]),
            first[i],
            outcomes[i],
            error.message if (error := results[i].error) else "",
        )
        for i in suspects
    ]
    result = summarize(len(calls), differences, unstable)
    result["differences"] = [_row(difference) for difference in differences if difference.index not in unstable]
    result["requirements"] = [requirements.at_least("share of calls that agree", MIN_AGREEMENT, result["agreement"])]
    return result


def cause(code: str, fresh: CallOutcome, served: CallOutcome, is_unstable: bool) -> str:
    """The cause of a difference between a fresh interpreter and the service, as far as code and outcomes show it."""
    if "timeout" in (fresh.status, served.status):
        return "one of them timed out"
    if served.status in ("memory_limit", "output_limit", "unavailable", "killed") or fresh.status == "killed":
        return f"service: {served.status}, fresh: {fresh.status}"
    if _ADDRESS.sub("", str(asdict(fresh))) == _ADDRESS.sub("", str(asdict(served))):
        return "memory addresses"
    if {"ModuleNotFoundError", "ImportError"} & {fresh.error, served.error}:
        return "missing module"
    if is_unstable:
        for pattern, name in ((_RANDOM, "random numbers"), (_CLOCK, "clock")):
            if pattern.search(code):
                return name
        return "fresh runs differ from each other"
    if fresh.error != served.error:
        return f"{fresh.error or fresh.status} became {served.error or served.status}"
    return "output"


def summarize(num_calls: int, differences: Sequence[Difference], unstable: set[int]) -> dict[str, Any]:
    """The counts of a comparison of `num_calls` calls."""
    num_stable = num_calls - len(unstable)
    num_different = sum(difference.index not in unstable for difference in differences)
    return {
        "calls": num_calls,
        "equal": num_calls - len(differences),
        "unstable": len(unstable),
        "different": num_different,
        "agreement": round((num_stable - num_different) / num_stable, 5) if num_stable else 1.0,
        "causes": dict(Counter(difference.cause for difference in differences).most_common()),
    }


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


def _row(difference: Difference) -> dict[str, Any]:
    row = {"index": difference.index, "cause": difference.cause, "fields": list(difference.fields)}
    for name in difference.fields:
        row[name] = [shortened(getattr(side, name)) for side in (difference.fresh, difference.service)]
    return row | ({"message": shortened(difference.message)} if difference.message else {})


def tables(result: Result) -> list[Block]:
    """A sentence, and a row for each difference."""
    rows = [
        (str(row["index"]), row["cause"], name, *(repr(shortened(side, CELL_CHARS)) for side in row[name]))
        for row in result.get("differences", ())
        for name in row["fields"][:1]
    ]
    sentence = (
        f"{result['calls']:,} calls beside a fresh interpreter: {result['equal']:,} with the same status and output, "
        f"{result['different']:,} with another, {result['unstable']:,} that differ from run to run."
    )
    return [sentence, *([Table(("call", "cause", "field", "fresh", "service"), rows)] if rows else [])]


def draw(axes: Any, result: Result) -> None:
    """Differences by cause."""
    causes = list(result["causes"])[::-1]
    axes.barh(causes, [result["causes"][name] for name in causes])
    axes.set_xlabel("calls that differ")


if __name__ == "__main__":
    raise SystemExit(main())
