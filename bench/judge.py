"""How much CPU does /v1/judge need for a program with many tests, compared with a call for each test?

    python -m bench.judge [--tests 100] [--requests 10] [--rounds 5] [--json]

In each round, one program with its inputs is sent to one server in three ways, one after the other:
- one `/v1/judge` for the program;
- one `/v1/batch` with a call for each test;
- one `/v1/execute` for each test, several at a time over kept connections.

The client encodes all bodies before it starts, and checks every outcome or output. The CPU time is that of all
processes of the server. The result is the median over rounds of each round's own ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import msgpack

from bench.harness import arguments, command, requirements
from bench.harness.load import ask, closed_loop, encode_calls, http_session
from bench.harness.rounds import median_of_ratios, median_of_rows
from bench.harness.tables import Block, Result, Table
from bench.probes import processes
from bench.servers import service
from bench.workloads.judged_program import PROGRAM, make_tests

MAX_RATIO = 0.7
"""CPU of a judged program as a fraction of the CPU of separate calls, as the project promises."""
IN_FLIGHT = 8
"""Number of separate calls in flight. With this number the server never waits for the client."""
WAYS = {
    "judge": "one `/v1/judge`",
    "batch": "one `/v1/batch`, a call for each test",
    "execute": "one `/v1/execute` for each test",
}
MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Return exit code 1 if the promised ratio is not reached."""
    return command.run_benchmark(_parser(), argv, lambda args: asyncio.run(_measure(args)), tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("judge", __doc__, "python", "isolation", "stdlib-only", "seed")
    parser.add_argument("--tests", type=arguments.count, default=100, help="tests of the program (default: 100)")
    parser.add_argument("--requests", type=arguments.count, default=10, help="programs of a round (default: 10)")
    parser.add_argument("--rounds", type=arguments.count, default=5, help="rounds (default: 5)")
    return parser


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    tests = make_tests(args.tests, args.seed)
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with (
        service.running(args.python, arguments.server_flags(args)) as server,
        command.counted_progress("rounds", len(WAYS) * args.rounds) as advance,
    ):
        async with http_session() as http:
            for way in WAYS:
                await _send(http, server.url, _requests_of(way, tests)[0])  # connect, and warm the server up
            for _ in range(args.rounds):
                for way in WAYS:
                    requests = [request for _ in range(args.requests) for request in _requests_of(way, tests)]
                    meter = processes.CpuMeter(server.pid)
                    wall_s = await closed_loop(
                        iter(requests), partial(_send, http, server.url), IN_FLIGHT if way == "execute" else 1
                    )
                    calls = args.requests * len(tests)
                    rows[way].append({"cpu_ms": meter.total_s() * 1e3 / calls, "tests_per_s": calls / wall_s})
                    advance()
    ratios = {way: round(median_of_ratios(rows["judge"], rows[way], _cpu_ratio), 3) for way in WAYS if way != "judge"}
    return {
        "tests": args.tests,
        "requests": args.requests,
        "rounds": args.rounds,
        "in_flight": IN_FLIGHT,
        "code_lines": PROGRAM.count("\n"),
        "stdin_bytes": round(sum(len(test["stdin"]) for test in tests) / len(tests)),
        "ways": {way: median_of_rows(way_rows, 3) for way, way_rows in rows.items()},
        "ratios": ratios,
        "requirements": [
            requirements.at_most("CPU of judge by CPU of separate calls", MAX_RATIO, ratios["execute"]),
        ],
    }


def _cpu_ratio(ours: Mapping[str, float], others: Mapping[str, float]) -> float:
    return ours["cpu_ms"] / others["cpu_ms"]


class Request(NamedTuple):
    """An encoded request, and the tests whose outcomes its response has."""

    way: str
    body: bytes
    tests: Sequence[Mapping[str, Any]]


def _requests_of(way: str, tests: Sequence[Mapping[str, Any]]) -> list[Request]:
    """Return the requests that judge the program once."""
    if way == "judge":
        return [Request(way, msgpack.packb({"code": PROGRAM, "tests": tests}), tests)]
    calls = [{"code": PROGRAM, "stdin": test["stdin"], "echo": False} for test in tests]
    if way == "batch":
        return [Request(way, encode_calls(calls), tests)]
    return [Request(way, encode_calls([call], single=True), [test]) for call, test in zip(calls, tests, strict=True)]


async def _send(http: aiohttp.ClientSession, url: str, request: Request) -> None:
    """Send a request and check its outcomes."""
    if request.way == "judge":
        async with http.post(f"{url}/v1/judge", data=io.BytesIO(request.body), headers=MSGPACK) as response:
            judged = msgpack.unpackb(await response.read())
        if response.status != 200 or judged["passed"] != len(request.tests):
            raise command.BenchFailed(f"expected {len(request.tests)} passed tests, got {json.dumps(judged):.300}")
        return
    answers = ask(http, url, request.body, MSGPACK["Accept"], single=request.way == "execute")
    results = [result async for _, result in answers]
    for test, result in zip(request.tests, results, strict=True):
        if result["stdout"] != test["expected"]:
            raise command.BenchFailed(f"expected {test['expected']!r}, got {json.dumps(result):.300}")


def tables(result: Result) -> list[Block]:
    """A row for each way."""
    rows = [
        {
            "way": WAYS[way],
            "CPU ms per test": f"{row['cpu_ms']:.2f}",
            "judge by this": f"{result['ratios'][way]:.2f}" if way in result["ratios"] else "",
            "tests/s": f"{row['tests_per_s']:,.0f}",
        }
        for way, row in result["ways"].items()
    ]
    size = (
        f"{result['code_lines']} lines of code, {result['tests']} tests with inputs of {result['stdin_bytes']} bytes."
    )
    return [Table.from_cells(rows), size, *requirements.unmet(result)]


if __name__ == "__main__":
    raise SystemExit(main())
