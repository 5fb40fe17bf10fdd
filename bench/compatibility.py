"""How many calls per second do the routes of other services run, compared with `/v1/batch` and `/v1/execute`?

    python -m bench.compatibility [--calls 1500] [--batch 50] [--in-flight 4] [--rounds 3] [--json]

One server runs the same programs through each route, in rounds in which the routes take turns. Bodies are JSON, which
is all that the other services have. Each program prints its own number, and every answer is checked. Routes for one
program are compared with `/v1/execute`; `/run_code` gets the fields that verl sends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp

from bench.harness import arguments, command, requirements
from bench.harness.load import closed_loop, http_session
from bench.harness.rounds import median_of_ratios, median_of_rows, rotated
from bench.harness.tables import Block, Result, Table
from bench.probes import processes
from bench.servers import service

BATCH, SINGLE = "/v1/batch", "/v1/execute"
MAX_SLOWDOWN = 1.1
"""Limit of the CPU time of a call through a route, as a multiple of that through the reference."""


class Route(NamedTuple):
    """How a batch of programs, each of which prints its number, is sent through a route, and checked."""

    build: Callable[[Sequence[int]], Any]
    are_correct: Callable[[Sequence[int], Any], bool]
    reference: str = BATCH
    """Route to compare with. Requests of routes that are compared with `SINGLE` have one program."""


def _program(number: int) -> str:
    return f"print({number})"


def _calls(numbers: Sequence[int]) -> Any:
    return {"calls": [{"code": _program(number), "echo": False} for number in numbers]}


def _submissions(numbers: Sequence[int]) -> Any:
    return {
        "type": "batch",
        "submissions": [
            {"type": "python", "solution": _program(number), "input": None, "expected_output": str(number)}
            for number in numbers
        ],
    }


def _call(numbers: Sequence[int]) -> Any:
    return _calls(numbers)["calls"][0]


def _run_code(numbers: Sequence[int]) -> Any:
    seconds = {"run_timeout": 10, "compile_timeout": 10, "memory_limit_MB": 1024}
    fields = {"language": "python", "stdin": None, "files": {}, "fetch_files": []}
    return {"code": _program(numbers[0]), **seconds, **fields}


def _outputs_are_correct(numbers: Sequence[int], body: Any) -> bool:
    return [result["stdout"] for result in body["results"]] == [f"{number}\n" for number in numbers]


def _all_succeeded(numbers: Sequence[int], body: Any) -> bool:
    return len(body["results"]) == len(numbers) and all(result["success"] for result in body["results"])


ROUTES: dict[str, Route] = {
    BATCH: Route(_calls, _outputs_are_correct),
    "/run/long-batch": Route(_submissions, _outputs_are_correct),
    "/judge/long-batch": Route(_submissions, _all_succeeded),
    SINGLE: Route(_call, lambda numbers, body: body["stdout"] == f"{numbers[0]}\n", SINGLE),
    "/run_code": Route(_run_code, lambda numbers, body: body["run_result"]["stdout"] == f"{numbers[0]}\n", SINGLE),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement. Return exit code 1 if a route needs more CPU time than allowed."""
    return command.run_benchmark(_parser(), argv, lambda args: asyncio.run(_measure(args)), tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("compatibility", __doc__, *arguments.SERVER_OPTIONS)
    arguments.add_in_flight(parser, 4, "requests")
    parser.add_argument("--calls", type=arguments.count, default=1500, help="calls per route and round (default: 1500)")
    parser.add_argument("--batch", type=arguments.count, default=50, help="calls in one request (default: 50)")
    parser.add_argument("--rounds", type=arguments.count, default=3, help="rounds (default: 3)")
    return parser


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, list[dict[str, float]]] = {path: [] for path in ROUTES}
    num_calls = args.calls * len(ROUTES) * (args.rounds + 1)
    with (
        service.running(args.python, arguments.server_flags(args)) as server,
        command.counted_progress("calls", num_calls) as advance,
    ):
        async with http_session() as http:
            for turn in range(args.rounds + 1):
                for path in rotated(list(ROUTES), turn):
                    row = await _run(http, server, path, args, advance)
                    if turn:  # the first round warms the server up
                        rows[path].append(row)
    slowdowns = {
        path: round(median_of_ratios(rows[path], rows[ref], lambda row, base: row["cpu_ms"] / base["cpu_ms"]), 3)
        for path, (_, _, ref) in ROUTES.items()
        if path != ref
    }
    return {
        **{name: getattr(args, name) for name in ("calls", "batch", "in_flight")},
        "routes": {path: median_of_rows(path_rows, 3) for path, path_rows in rows.items()},
        "slowdowns": slowdowns,
        "requirements": [
            requirements.at_most(f"CPU time of {path} / {ROUTES[path].reference}", MAX_SLOWDOWN, slowdown)
            for path, slowdown in slowdowns.items()
        ],
    }


async def _run(
    http: aiohttp.ClientSession,
    server: service.Service,
    path: str,
    args: argparse.Namespace,
    advance: Callable[[int], object],
) -> dict[str, float]:
    """Run all calls through a route. Returns calls per second, and CPU milliseconds per call of all processes of the
    server and of the gateway alone."""
    errors: list[str] = []
    size = 1 if ROUTES[path].reference == SINGLE else args.batch

    async def send(start: int) -> None:
        numbers = range(start, min(start + size, args.calls))
        if error := await _send(http, server.url, path, numbers):
            errors.append(f"{path}: {error}")
        advance(len(numbers))

    server_cpu, gateway_s = processes.CpuMeter(server.pid), processes.cpu_s([server.pid])
    wall_s = await closed_loop(iter(range(0, args.calls, size)), send, args.in_flight)
    if errors:
        raise command.BenchFailed(errors[0])
    return {
        "calls_per_s": args.calls / wall_s,
        "cpu_ms": server_cpu.total_s() * 1e3 / args.calls,
        "gateway_cpu_ms": (processes.cpu_s([server.pid]) - gateway_s) * 1e3 / args.calls,
    }


async def _send(http: aiohttp.ClientSession, url: str, path: str, numbers: Sequence[int]) -> str:
    """Run the programs of these numbers. Returns what is wrong with the answer, or an empty text."""
    body = json.dumps(ROUTES[path].build(numbers)).encode()
    async with http.post(url + path, data=body, headers={"Content-Type": "application/json"}) as response:
        text = await response.text()
        is_correct = response.status == 200 and ROUTES[path].are_correct(numbers, json.loads(text))
    if is_correct:
        return ""
    return f"expected the numbers from {numbers[0]} on, got {response.status} {text[:500]}"


def tables(result: Result) -> list[Block]:
    """A row for each route."""
    rows = [
        (
            f"`{path}`",
            f"{row['calls_per_s']:,.0f}",
            f"{row['cpu_ms']:.2f}",
            f"{row['gateway_cpu_ms'] * 1000:.0f}",
            f"{result['slowdowns'][path]:.2f}" if path in result["slowdowns"] else "1",
        )
        for path, row in result["routes"].items()
    ]
    header = ("route", "calls/s", "CPU ms per call", "of it gateway, µs", f"CPU / {BATCH} or {SINGLE}")
    return [Table(header, rows), *requirements.unmet(result)]


if __name__ == "__main__":
    raise SystemExit(main())
