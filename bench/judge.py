"""How much CPU does /v1/judge need for a program with many tests, compared with a call for each test?

    python -m bench.judge [--tests 100] [--requests 10] [--rounds 5] [--json]

The same program and inputs take three ways to the same server, one after the other in each round: one `/v1/judge` per
program; one `/v1/batch` of a call for each test; and one `/v1/execute` for each test, several at a time over kept
connections. The client encodes all bodies before it starts, and checks every outcome or output. The CPU time is that of
all processes of the server. The result is the median over rounds of each round's own ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import aiohttp
import msgpack

from bench.harness import arguments, command, requirements
from bench.harness.load import closed_loop, encode_calls, http_session
from bench.harness.statistics import median
from bench.harness.tables import Block, Result, Table
from bench.probes import processes
from bench.servers import service
from bench.workloads.judged_program import PROGRAM, make_tests

MAX_RATIO = 0.7
"""CPU of a judged program as a fraction of the CPU of separate calls, as the project promises."""
IN_FLIGHT = 8
"""Separate calls at a time: enough that the server never waits for the client."""
WAYS = {
    "judge": "one `/v1/judge`",
    "batch": "one `/v1/batch`, a call for each test",
    "execute": "one `/v1/execute` for each test",
}
MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}

Test = dict[str, Any]
Send = Callable[[aiohttp.ClientSession, str], Awaitable[None]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Return exit code 1 if the promised ratio is not reached."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("judge", __doc__, "python", "isolation", "stdlib-only", "seed")
    parser.add_argument("--tests", type=arguments.count, default=100, help="tests of the program (default: 100)")
    parser.add_argument("--requests", type=arguments.count, default=10, help="programs of a round (default: 10)")
    parser.add_argument("--rounds", type=arguments.count, default=5, help="rounds (default: 5)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    return asyncio.run(_measure_ways(args))


async def _measure_ways(args: argparse.Namespace) -> dict[str, Any]:
    tests = make_tests(args.tests, args.seed)
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with (
        service.running(args.python, arguments.server_flags(args)) as server,
        command.counted_progress("rounds", len(WAYS) * args.rounds) as advance,
    ):
        async with http_session() as http:
            for way in WAYS:
                await _requests_of(way, tests)[0](http, server.url)  # connect, and warm the server up
            for _ in range(args.rounds):
                for way in WAYS:
                    rows[way].append(await _measure_way(way, tests, args.requests, server, http))
                    advance()
    result = {
        "tests": args.tests,
        "requests": args.requests,
        "rounds": args.rounds,
        "in_flight": IN_FLIGHT,
        "code_lines": PROGRAM.count("\n"),
        "stdin_bytes": round(sum(len(test["stdin"]) for test in tests) / len(tests)),
        "ways": {way: _summary(rows[way]) for way in WAYS},
        "ratios": {way: _ratio(rows["judge"], rows[way]) for way in WAYS if way != "judge"},
    }
    requirement = requirements.at_most("CPU of judge by CPU of separate calls", MAX_RATIO, result["ratios"]["execute"])
    return {**result, "requirements": [requirement]}


async def _measure_way(
    way: str, tests: Sequence[Test], requests: int, server: service.Service, http: aiohttp.ClientSession
) -> dict[str, float]:
    """Judge the program `requests` times, and return CPU and wall milliseconds per test."""
    bodies = [send for _ in range(requests) for send in _requests_of(way, tests)]

    async def send_one(send: Send) -> None:
        await send(http, server.url)

    meter = processes.CpuMeter(server.pid)
    start = time.perf_counter()
    await closed_loop(iter(bodies), send_one, IN_FLIGHT if way == "execute" else 1)
    wall_s = time.perf_counter() - start
    calls = requests * len(tests)
    return {"cpu_ms": meter.total_s() * 1e3 / calls, "wall_ms": wall_s * 1e3 / calls}


def _requests_of(way: str, tests: Sequence[Test]) -> list[Send]:
    """Return the requests that judge the program once."""
    calls = [{"code": PROGRAM, "stdin": test["stdin"], "echo": False} for test in tests]
    if way == "judge":
        return [_judge(msgpack.packb({"code": PROGRAM, "tests": tests}), len(tests))]
    if way == "batch":
        return [_run("batch", encode_calls(calls), tests)]
    return [_run("execute", encode_calls([call], single=True), [test]) for call, test in zip(calls, tests, strict=True)]


def _judge(body: bytes, tests: int) -> Send:
    async def send(http: aiohttp.ClientSession, url: str) -> None:
        judged = await _post(http, f"{url}/v1/judge", body)
        if judged["passed"] != tests:
            raise command.BenchFailed(
                f"the program passed {judged['passed']} of {tests} tests: {json.dumps(judged):.300}"
            )

    return send


def _run(path: str, body: bytes, tests: Sequence[Test]) -> Send:
    async def send(http: aiohttp.ClientSession, url: str) -> None:
        answer = await _post(http, f"{url}/v1/{path}", body)
        results: Iterable[Any] = answer["results"] if path == "batch" else [answer]
        for test, result in zip(tests, results, strict=True):
            if result["stdout"] != test["expected"]:
                raise command.BenchFailed(f"expected {test['expected']!r}, got {json.dumps(result):.300}")

    return send


async def _post(http: aiohttp.ClientSession, url: str, body: bytes) -> Any:
    async with http.post(url, data=io.BytesIO(body), headers=MSGPACK) as response:
        data = await response.read()
        if response.status != 200:
            raise command.BenchFailed(f"{url} answered {response.status}: {data[:300]!r}")
        return msgpack.unpackb(data)


def _summary(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        "cpu_ms": median(row["cpu_ms"] for row in rows),
        "tests_per_s": median((1e3 / row["wall_ms"] for row in rows), 1),
    }


def _ratio(ours: Sequence[dict[str, float]], others: Sequence[dict[str, float]]) -> float:
    return median(mine["cpu_ms"] / theirs["cpu_ms"] for mine, theirs in zip(ours, others, strict=True))


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
