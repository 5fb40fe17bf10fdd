"""The same work for this service and for what others use, each over its own HTTP interface, where they are running.

    python -m bench.peers [--code-judge URL] [--sandbox-fusion URL] [--url URL] [--seconds 5] [--at-once 64] [--json]

Our service is started unless `--url` names one; a fresh interpreter per call, without isolation, is always there; a
peer without a URL has no row. All take turns within a round, for as long each, with as many calls in flight, in the
way that suits them: ours streams batches, code-judge takes `/run/long-batch`, SandboxFusion one `/run_code` per call,
and of the fresh interpreters as many run as there are cores. A verdict is right if it is the one that the call must
have, and its output that of a fresh interpreter. code-judge has one time limit of its own for all calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol

import aiohttp

from bench.harness import command
from bench.servers import service
from bench.servers.fresh_interpreter import Fresh, interpreters
from bench.throughput import KINDS
from bench.workloads.tool_calls import labelled_calls
from sandbox.client import AsyncClient
from sandbox.errors import SandboxError
from sandbox.types import DEFAULT_LIMITS, Call

OURS, FRESH = "rstar-sandbox", "fresh interpreter"
BATCHES = 4
"""Requests at once of those that take batches."""
MIX = 384
PATIENCE_S = 120.0
"""For one request; what has no answer then has none."""
SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What a system made of a call: "ok", "error", "timeout", or no verdict, and why not."""

    status: str
    stdout: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """A call, and what must become of it; its output only where it is known."""

    call: Mapping[str, Any]
    status: str
    stdout: str | None = None

    def is_right(self, answer: Answer) -> bool:
        return answer.status == self.status and self.stdout in (None, answer.stdout)


Answers = AsyncGenerator[tuple[int, Answer], None]


class System(Protocol):
    """One that runs calls."""

    name: str
    in_flight: int
    batch: int
    """Calls in one request."""

    def ask(self, calls: Sequence[Mapping[str, Any]]) -> Answers:
        """The answers by index, as they come. Whatever is raised leaves the rest without."""
        ...


class Ours:
    """`/v1/batch`, streamed."""

    name = OURS

    def __init__(self, client: AsyncClient, at_once: int) -> None:
        self.in_flight, self.batch = at_once, _batch(at_once)
        self._client = client

    async def ask(self, calls: Sequence[Mapping[str, Any]]) -> Answers:
        asked = [Call.decode({**call, "echo": False}) for call in calls]
        async for index, result in self._client.stream(asked):
            if result.status.value == "unavailable":
                yield index, Answer("", why=str(result.error and result.error.message))
            else:
                yield index, Answer(result.status.value, result.stdout)


class CodeJudge:
    """`/run/long-batch`: results in order, when all are done."""

    name = "code-judge"

    def __init__(self, http: aiohttp.ClientSession, url: str, at_once: int) -> None:
        self.in_flight, self.batch = at_once, _batch(at_once)
        self._http, self._url = http, url

    async def ask(self, calls: Sequence[Mapping[str, Any]]) -> Answers:
        submissions = [
            {"type": "python", "solution": call["code"], "input": call.get("stdin") or None} for call in calls
        ]
        body = {"type": "batch", "submissions": submissions}
        results = (await _post(self._http, f"{self._url}/run/long-batch", body))["results"]
        for index, result in enumerate(results):
            yield index, _of_code_judge(result)


class SandboxFusion:
    """`/run_code`, a request for each call."""

    name = "SandboxFusion"
    batch = 1

    def __init__(self, http: aiohttp.ClientSession, url: str, at_once: int) -> None:
        self.in_flight = at_once
        self._http, self._url = http, url

    async def ask(self, calls: Sequence[Mapping[str, Any]]) -> Answers:
        for index, call in enumerate(calls):
            body = {"code": call["code"], "language": "python", "run_timeout": _timeout_s(call)}
            body["stdin"] = call.get("stdin")
            yield index, _of_sandbox_fusion(await _post(self._http, f"{self._url}/run_code", body))


class FreshInterpreter:
    """No HTTP: `bench.servers.fresh_interpreter`, which is the least that a call can cost without a warm
    interpreter."""

    name = FRESH
    batch = 1

    def __init__(self, fresh: Fresh) -> None:
        self.in_flight = len(os.sched_getaffinity(0))
        self._fresh = fresh

    async def ask(self, calls: Sequence[Mapping[str, Any]]) -> Answers:
        for index, call in enumerate(calls):
            run = await asyncio.to_thread(self._fresh.run, call)
            status = "timeout" if run.timed_out else "error" if run.exit_code else "ok"
            yield index, Answer(status, run.stdout)


@dataclass(slots=True)
class Tally:
    """What one system did in one round."""

    calls: int = 0
    right: int = 0
    wrong: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    why: Counter[str] = field(default_factory=Counter)
    """Of calls without a verdict."""

    def count(self, work: Work, answer: Answer, seconds: float) -> None:
        """One call, `seconds` after it was sent."""
        if not answer.status:
            self.why[answer.why] += 1
            return
        self.latencies_ms.append(seconds * 1e3)
        if work.is_right(answer):
            self.right += 1
        else:
            self.wrong += 1


def main(argv: Sequence[str] | None = None) -> int:
    """The comparison; 1 if our own service left a call without its right verdict."""
    args = _parser().parse_args(argv)
    return command.run_as_command("peers", lambda: asyncio.run(_compare(args)))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("peers", __doc__ or "")
    names = [kind.name for kind in KINDS]
    parser.add_argument("--url", type=command.url, help="our service (default: one is started)")
    parser.add_argument("--code-judge", type=command.url, metavar="URL", help="a code-judge that runs there")
    parser.add_argument("--sandbox-fusion", type=command.url, metavar="URL", help="a SandboxFusion that runs there")
    parser.add_argument("--kinds", nargs="+", choices=names, default=names, help="kinds of calls (default: all)")
    parser.add_argument("--seconds", type=command.seconds, default=5.0, help="of each in each round (default: 5)")
    parser.add_argument("--rounds", type=command.count, default=3, help="rounds (default: 3)")
    parser.add_argument("--at-once", type=command.count, default=64, help="calls in flight (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="which made-up mix (default: 0)")
    return parser


async def _compare(args: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        fresh = stack.enter_context(interpreters(service.guest_python(args.python)))
        systems = await _systems(stack, args, FreshInterpreter(fresh))
        works = {kind: await _works(kind, fresh, args.seed) for kind in args.kinds}
        for system in systems:
            await _check(system)
        bar = stack.enter_context(command.progress())
        task = bar.add_task("rounds", total=args.rounds * len(works) * len(systems))
        tallies: dict[str, dict[str, list[Tally]]] = {kind: {s.name: [] for s in systems} for kind in works}
        for _ in range(args.rounds):
            for kind, work in works.items():
                for system in systems:
                    tallies[kind][system.name].append(await drive(system, work, args.seconds))
                    bar.advance(task)
    figures: dict[str, Any] = {"bench": "peers"}
    figures |= {name: getattr(args, name) for name in ("seconds", "rounds", "at_once")}
    figures |= summarise(tallies)
    _show(figures)
    command.plot(args.plot, lambda axes: draw(axes, figures))
    command.finish(figures, _parser(), args)
    return 0 if figures["holds"] else 1


async def _systems(stack: AsyncExitStack, args: argparse.Namespace, fresh: FreshInterpreter) -> list[System]:
    url = args.url or stack.enter_context(service.running(args.python)).url
    token = os.environ.get("RSTAR_SANDBOX_TOKEN")
    client = await stack.enter_async_context(AsyncClient(url, token=token, batch_size=_batch(args.at_once)))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
    systems: list[System] = [Ours(client, args.at_once)]
    if args.code_judge:
        systems.append(CodeJudge(http, args.code_judge, args.at_once))
    if args.sandbox_fusion:
        systems.append(SandboxFusion(http, args.sandbox_fusion, args.at_once))
    return [*systems, fresh]


async def _works(kind: str, fresh: Fresh, seed: int) -> list[Work]:
    if kind == "mix":
        return [Work(call, template.status) for template, call in labelled_calls(MIX, seed)]
    call = {"code": next(one.code for one in KINDS if one.name == kind)}
    run = await asyncio.to_thread(fresh.run, call)
    if run.exit_code:
        raise command.BenchFailed(
            f"{kind}: expected exit code 0 of a fresh interpreter, got {run.exit_code}:\n{run.stderr}"
        )
    return [Work(call, "ok", run.stdout)]


async def _check(system: System) -> None:
    """Raises `BenchFailed` if it cannot do the least."""
    work = Work({"code": "print(6 * 7)\n"}, "ok", "42\n")
    try:
        answers = [answer async for _, answer in system.ask([work.call])]
    except (aiohttp.ClientError, SandboxError, TimeoutError, ValueError, KeyError, TypeError) as why:
        raise command.BenchFailed(f"{system.name}: expected an answer, got {_reason(why)}") from None
    if not answers or not work.is_right(answers[0]):
        raise command.BenchFailed(f"{system.name}: expected 42, got {answers}")


async def drive(system: System, works: Sequence[Work], seconds: float) -> Tally:
    """Keep `in_flight` calls of `works`, over and over, with `system`, until the time is over and all are answered."""
    tally, turn = Tally(), cycle(works)
    began, cpu_s = time.perf_counter(), _busy_s()

    async def send() -> None:
        while True:
            await _request(system, [next(turn) for _ in range(system.batch)], tally)
            if time.perf_counter() - began > seconds:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(max(1, system.in_flight // system.batch)):
            group.create_task(send())
    tally.seconds, tally.cpu_s = time.perf_counter() - began, _busy_s() - cpu_s
    return tally


async def _request(system: System, works: Sequence[Work], tally: Tally) -> None:
    sent = time.perf_counter()
    open_ = dict(enumerate(works))
    why = "no answer"
    try:
        async with aclosing(system.ask([work.call for work in works])) as answers:
            async for index, answer in answers:
                tally.count(open_.pop(index), answer, time.perf_counter() - sent)
    except (aiohttp.ClientError, SandboxError, TimeoutError, ValueError, KeyError, TypeError) as failure:
        why = _reason(failure)
        await asyncio.sleep(0.1)  # one that refuses is not to be flooded
    tally.calls += len(works)
    if open_:
        tally.why[why] += len(open_)


async def _post(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Any:
    async with http.post(url, json=body) as response:
        text = await response.text()
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {text[:SHOWN_CHARS]}")
        return json.loads(text)


def _of_code_judge(result: Mapping[str, Any]) -> Answer:
    reason = result["reason"]
    if result["run_success"]:
        return Answer("ok", result["stdout"])
    if reason == "worker_timeout":
        return Answer("timeout", result["stdout"])
    return Answer("", why=reason) if reason else Answer("error", result["stdout"])


def _of_sandbox_fusion(answer: Mapping[str, Any]) -> Answer:
    if answer["status"] == "SandboxError":
        return Answer("", why=f"SandboxError: {answer['message'][:SHOWN_CHARS]}")
    run = answer["run_result"]
    if run["status"] == "TimeLimitExceeded":
        return Answer("timeout", run["stdout"] or "")
    return Answer("ok" if answer["status"] == "Success" else "error", run["stdout"] or "")


def _batch(at_once: int) -> int:
    return max(1, at_once // BATCHES)


def _timeout_s(call: Mapping[str, Any]) -> float:
    return float(call.get("limits", {}).get("timeout_s", DEFAULT_LIMITS.timeout_s))


def _reason(why: BaseException) -> str:
    return f"{type(why).__name__}: {why}"[:SHOWN_CHARS]


def _busy_s() -> float:
    """Seconds that the cores of this machine have worked, whoever for."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def summarise(tallies: Mapping[str, Mapping[str, Sequence[Tally]]]) -> dict[str, Any]:
    """The figures by kind and system, medians over the rounds, and where ours is not the fastest."""
    kinds = {kind: {name: _row(rounds) for name, rounds in by_name.items()} for kind, by_name in tallies.items()}
    faster = [
        f"{kind}: {name} makes {row['calls_per_s']:g} calls/s, {OURS} {rows[OURS]['calls_per_s']:g}"
        for kind, rows in kinds.items()
        for name, row in rows.items()
        if row["calls_per_s"] > rows[OURS]["calls_per_s"]
    ]
    missed = [
        f"{kind}: {row['wrong']} wrong and {row['unanswered']} without a verdict, expected none"
        for kind, row in ((kind, rows[OURS]) for kind, rows in kinds.items())
        if row["wrong"] or row["unanswered"]
    ]
    systems = list(next(iter(kinds.values())))
    return {"systems": systems, "kinds": kinds, "faster": faster, "missed": missed, "holds": not missed}


def _row(rounds: Sequence[Tally]) -> dict[str, Any]:
    """Only calls with a verdict count for the rate."""
    why = sum((tally.why for tally in rounds), Counter[str]())
    return {
        "calls": sum(tally.calls for tally in rounds),
        "calls_per_s": command.median(((tally.right + tally.wrong) / tally.seconds for tally in rounds), 1),
        "machine_cpu_ms": command.median((tally.cpu_s * 1e3 / max(1, tally.calls) for tally in rounds), 2),
        "latency_ms": command.percentiles([ms for tally in rounds for ms in tally.latencies_ms]),
        "right": sum(tally.right for tally in rounds),
        "wrong": sum(tally.wrong for tally in rounds),
        "unanswered": why.total(),
        "why": dict(why.most_common(5)),
    }


def _show(figures: Mapping[str, Any]) -> None:
    columns = ("", "calls/s", "p50 ms", "p99 ms", "CPU ms a call", "calls", "wrong", "without verdict")
    for kind, rows in figures["kinds"].items():
        shown = []
        for name, row in rows.items():
            times = [f"{row['latency_ms'].get(point, 0):,.0f}" for point in ("p50", "p99")]
            counts = (f"{row[count]:,}" for count in ("calls", "wrong", "unanswered"))
            shown.append((name, f"{row['calls_per_s']:,.1f}", *times, row["machine_cpu_ms"], *counts))
        command.show(kind, columns, shown)
    for line in figures["faster"] + figures["missed"]:
        print(f"peers: {line}", file=sys.stderr)
    for kind, rows in figures["kinds"].items():
        for name, row in rows.items():
            for why, count in row["why"].items():
                print(f"peers: {kind}: {name}: {count} without a verdict: {why}", file=sys.stderr)


def draw(axes: Any, figures: Mapping[str, Any]) -> None:
    """What a run printed as JSON, as a picture."""
    kinds, systems = figures["kinds"], figures["systems"]
    width = 0.8 / len(systems)
    for number, name in enumerate(systems):
        places = [place + (number - (len(systems) - 1) / 2) * width for place in range(len(kinds))]
        bars = axes.bar(places, [rows[name]["calls_per_s"] for rows in kinds.values()], width, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize="small")
    axes.set_xticks(range(len(kinds)), list(kinds))
    axes.set_yscale("log")
    axes.set_ylabel("calls/s")
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
