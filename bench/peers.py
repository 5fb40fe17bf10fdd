"""How fast do this service and its peers do the same work, each over its own HTTP interface?

    python -m bench.peers [--code-judge URL] [--sandbox-fusion URL] [--scalebox URL] [--url URL] [--json]

Our service is started unless `--url` names one. A peer takes part if its URL is given. Fresh interpreters, one per call
and without isolation, always take part. The systems take turns within a round. Each runs for an equal time, with an
equal number of calls in flight, and by the interface that suits it best: our service streams batches, code-judge gets
`/run/long-batch`, and SandboxFusion gets one `/run_code` per call. code-judge has one time limit for all calls. A
result is correct if it has the status that the call must have, and the output of a fresh interpreter.

Then each system gets the two loads of `LOADS`, one after the other. The first has many short calls at once. The second
has calls at once, each of which would need far less than its time limit if it ran alone. A call without a correct
result counts as lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice, repeat, takewhile
from typing import Any

import aiohttp

from bench.harness import arguments, command, requirements
from bench.harness.statistics import median, percentiles
from bench.harness.tables import Block, Result, Table, number
from bench.servers import service
from bench.servers.fresh_interpreter import FreshInterpreters, interpreters
from bench.workloads.code_kinds import CODES, KIND_NAMES
from bench.workloads.tool_calls import labelled_calls
from sandbox.client import AsyncClient
from sandbox.errors import SandboxError
from sandbox.types import DEFAULT_LIMITS, Call

OURS, FRESH = "rstar-sandbox", "fresh interpreter"
PEERS = ("code-judge", "SandboxFusion", "ScaleBox")
BATCHES = 4
"""Requests in flight of systems that take batches."""
MIX_CALLS = 384
"""Different calls of the mix. They are sent again and again."""
SLOW_TIMEOUT_S = 4.0
"""Time limit of the load `slow`: ten times what its call needs in a fresh interpreter on an idle core."""
REQUEST_TIMEOUT_S = 120.0
RETRY_DELAY_S = 0.1
"""Delay after a failed request, so that a system that refuses is not flooded."""
MAX_CHARS = 200
"""Characters of an error that are kept."""
FAILURES = (aiohttp.ClientError, SandboxError, TimeoutError, ValueError, KeyError, TypeError)
"""Errors of a request, and of a response in another form than expected."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A system's result of a call. Its status is "ok", "error" or "timeout". Without a result, the status is empty and
    there is a reason."""

    status: str
    stdout: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PeerCall:
    """A call and its required status. `stdout` is the required output. It is None if any output is accepted."""

    call: Mapping[str, Any]
    status: str
    stdout: str | None = None

    def matches(self, answer: Answer) -> bool:
        return answer.status == self.status and self.stdout in (None, answer.stdout)


@dataclass(frozen=True, slots=True)
class Load:
    """A fixed number of calls of one kind."""

    kind: str
    calls: int
    in_flight: int
    limits: Mapping[str, float]
    title: str


_SLOW_TITLE = f"200 `sympy.solve`, 64 at once, limit {SLOW_TIMEOUT_S:g} s"
LOADS = {
    "burst": Load("print", 1000, 256, {}, "1,000 `print`, 256 at once"),
    "slow": Load("sympy", 200, 64, {"timeout_s": SLOW_TIMEOUT_S}, _SLOW_TITLE),
}
"""The loads that show losses and wrong time-outs, by name."""

Answers = AsyncGenerator[tuple[int, Answer], None]


@dataclass(frozen=True, slots=True)
class System:
    """A system that runs calls."""

    name: str
    in_flight: int
    batch: int
    """Calls in one request."""
    run: Callable[[Sequence[Mapping[str, Any]]], Answers]
    """Yields (index of a call, answer) as answers come. If it raises, the calls without an answer so far get none."""


def our_service(client: AsyncClient, in_flight: int) -> System:
    """This project's `/v1/batch`, streamed."""

    async def run(calls: Sequence[Mapping[str, Any]]) -> Answers:
        decoded = [Call.decode({**call, "echo": False}) for call in calls]
        async for index, result in client.stream(decoded):
            if result.status.value == "unavailable":
                yield index, Answer("", reason=str(result.error and result.error.message))
            else:
                yield index, Answer(result.status.value, result.stdout)

    return System(OURS, in_flight, _batch_size(in_flight), run)


def code_judge(http: aiohttp.ClientSession, url: str, in_flight: int) -> System:
    """code-judge's `/run/long-batch`, which responds with all results in order when all calls have ended."""

    async def run(calls: Sequence[Mapping[str, Any]]) -> Answers:
        submissions = [
            {"type": "python", "solution": call["code"], "input": call.get("stdin") or None} for call in calls
        ]
        body = {"type": "batch", "submissions": submissions}
        for index, result in enumerate((await _post(http, f"{url}/run/long-batch", body))["results"]):
            yield index, _code_judge_answer(result)

    return System("code-judge", in_flight, _batch_size(in_flight), run)


def sandbox_fusion(http: aiohttp.ClientSession, url: str, in_flight: int, name: str = "SandboxFusion") -> System:
    """Return the system behind the `/run_code` of SandboxFusion or ScaleBox, which gets one request per call."""

    async def run(calls: Sequence[Mapping[str, Any]]) -> Answers:
        for index, call in enumerate(calls):
            timeout_s = float(call.get("limits", {}).get("timeout_s", DEFAULT_LIMITS.timeout_s))
            body = {"code": call["code"], "language": "python", "run_timeout": timeout_s, "stdin": call.get("stdin")}
            yield index, _sandbox_fusion_answer(await _post(http, f"{url}/run_code", body))

    return System(name, in_flight, 1, run)


def fresh_interpreters(fresh: FreshInterpreters) -> System:
    """`bench.servers.fresh_interpreter` without HTTP: the lowest cost of a call without a warm interpreter."""

    async def run(calls: Sequence[Mapping[str, Any]]) -> Answers:
        for index, call in enumerate(calls):
            fresh_run = await asyncio.to_thread(fresh.run, call)
            yield index, Answer(fresh_run.status, fresh_run.stdout)

    return System(FRESH, len(os.sched_getaffinity(0)), 1, run)


@dataclass(slots=True)
class SystemRound:
    """One round of one system."""

    calls: int = 0
    correct: int = 0
    mismatched: int = 0
    seconds: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    unanswered: Counter[str] = field(default_factory=Counter)
    """Calls without a result, by reason."""

    def record(self, call: PeerCall, answer: Answer, latency_s: float) -> None:
        """Count one answer."""
        if not answer.status:
            self.unanswered[answer.reason] += 1
            return
        self.latencies_ms.append(latency_s * 1e3)
        if call.matches(answer):
            self.correct += 1
        else:
            self.mismatched += 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Return exit code 1 if a call of our own service has no correct result."""
    return command.run_benchmark(_parser(), argv, lambda args: asyncio.run(_measure(args)), tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("peers", __doc__, "python", "seed")
    arguments.add_in_flight(parser, 64)
    kinds, url = (*CODES, "mix"), arguments.url
    parser.add_argument("--url", type=url, help="our service (default: one is started)")
    parser.add_argument("--code-judge", type=url, metavar="URL", help="a running code-judge")
    parser.add_argument("--sandbox-fusion", type=url, metavar="URL", help="a running SandboxFusion")
    parser.add_argument("--scalebox", type=url, metavar="URL", help="a running ScaleBox")
    parser.add_argument("--kinds", type=arguments.names_of(kinds), default=kinds, help=f"of {','.join(kinds)}")
    parser.add_argument("--loads", type=arguments.names_of(LOADS), default=LOADS, help=f"of {','.join(LOADS)}")
    parser.add_argument("--seconds", type=arguments.seconds, default=5.0, help="per system and round (default: 5)")
    parser.add_argument("--rounds", type=arguments.count, default=3, help="rounds (default: 3)")
    return parser


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        fresh = stack.enter_context(interpreters(service.guest_python(args.python)))
        makers = await _http_systems(stack, args)
        systems = [*(make(args.in_flight) for make in makers), fresh_interpreters(fresh)]
        calls = {kind: await _calls(kind, fresh, args.seed) for kind in args.kinds}
        for system in systems:
            await check(system)
        num_rounds = args.rounds * len(calls) * len(systems) + len(args.loads) * len(makers)
        advance = stack.enter_context(command.counted_progress("rounds", num_rounds))
        rounds: dict[str, dict[str, list[SystemRound]]] = {kind: {s.name: [] for s in systems} for kind in calls}
        for _ in range(args.rounds):
            for kind, kind_calls in calls.items():
                for system in systems:
                    rounds[kind][system.name].append(await drive(system, kind_calls, args.seconds))
                    advance()
        loads: dict[str, dict[str, SystemRound]] = {name: {} for name in args.loads}
        for name, rows in loads.items():
            (call,) = await _calls(LOADS[name].kind, fresh, args.seed)
            for make in makers:
                system = make(LOADS[name].in_flight)
                rows[system.name] = await run_load(system, call, LOADS[name])
                advance()
    sizes = {name: getattr(args, name) for name in ("seconds", "rounds", "in_flight")}
    return {**sizes, **summarize(rounds, loads)}


async def _http_systems(stack: AsyncExitStack, args: argparse.Namespace) -> list[Callable[[int], System]]:
    """Return for our service and each peer the function that builds it for a number of calls in flight."""
    url = args.url or stack.enter_context(service.running(args.python)).url
    token = os.environ.get("RSTAR_SANDBOX_TOKEN")
    client = await stack.enter_async_context(AsyncClient(url, token=token, batch_size=_batch_size(args.in_flight)))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
    peers = (
        (args.code_judge, partial(code_judge, http, args.code_judge)),
        (args.sandbox_fusion, partial(sandbox_fusion, http, args.sandbox_fusion)),
        (args.scalebox, partial(sandbox_fusion, http, args.scalebox, name="ScaleBox")),
    )
    return [partial(our_service, client), *(maker for peer_url, maker in peers if peer_url)]


async def _calls(kind: str, fresh: FreshInterpreters, seed: int) -> list[PeerCall]:
    if kind == "mix":
        return [PeerCall(call, template.status) for template, call in labelled_calls(MIX_CALLS, seed)]
    call = {"code": CODES[kind]}
    run = await asyncio.to_thread(fresh.run, call)
    if run.exit_code:
        text = f"{kind}: expected exit code 0 of a fresh interpreter, got {run.exit_code}:\n{run.stderr}"
        raise command.BenchFailed(text)
    return [PeerCall(call, "ok", run.stdout)]


async def check(system: System) -> None:
    """Raises `BenchFailed` if the system cannot run one simple call."""
    call = PeerCall({"code": "print(6 * 7)\n"}, "ok", "42\n")
    try:
        answers = [answer async for _, answer in system.run([call.call])]
    except FAILURES as error:
        raise command.BenchFailed(f"{system.name}: expected an answer, got {_reason(error)}") from None
    if not answers or not call.matches(answers[0]):
        raise command.BenchFailed(f"{system.name}: expected 42, got {answers}")


async def drive(system: System, calls: Sequence[PeerCall], seconds: float) -> SystemRound:
    """Keep `system.in_flight` calls in flight for `seconds`, then wait for their answers."""
    end, endless = time.perf_counter() + seconds, cycle(calls)
    return await _send_all(system, takewhile(lambda _: time.perf_counter() < end, endless))


async def run_load(system: System, call: PeerCall, load: Load) -> SystemRound:
    """Send the calls of a load, `system.in_flight` at once."""
    limited = replace(call, call={**call.call, "limits": load.limits})
    return await _send_all(system, repeat(limited, load.calls))


async def _send_all(system: System, calls: Iterator[PeerCall]) -> SystemRound:
    row = SystemRound()
    start = time.perf_counter()

    async def work() -> None:
        while batch := list(islice(calls, system.batch)):
            await _send(system, batch, row)

    async with asyncio.TaskGroup() as group:
        for _ in range(max(1, system.in_flight // system.batch)):
            group.create_task(work())
    row.seconds = time.perf_counter() - start
    return row


async def _send(system: System, calls: Sequence[PeerCall], row: SystemRound) -> None:
    sent_at = time.perf_counter()
    unanswered = dict(enumerate(calls))
    reason = "no answer"
    try:
        async with aclosing(system.run([call.call for call in calls])) as answers:
            async for index, answer in answers:
                row.record(unanswered.pop(index), answer, time.perf_counter() - sent_at)
    except FAILURES as error:
        reason = _reason(error)
        await asyncio.sleep(RETRY_DELAY_S)
    row.calls += len(calls)
    if unanswered:
        row.unanswered[reason] += len(unanswered)


async def _post(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Any:
    async with http.post(url, json=body) as response:
        text = await response.text()
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {text[:MAX_CHARS]}")
        return json.loads(text)


def _code_judge_answer(result: Mapping[str, Any]) -> Answer:
    reason = result["reason"]
    if result["run_success"]:
        return Answer("ok", result["stdout"])
    if reason == "worker_timeout":
        return Answer("timeout", result["stdout"])
    return Answer("", reason=reason) if reason else Answer("error", result["stdout"])


def _sandbox_fusion_answer(answer: Mapping[str, Any]) -> Answer:
    if answer["status"] == "SandboxError":
        return Answer("", reason=f"SandboxError: {answer['message'][:MAX_CHARS]}")
    run = answer["run_result"]
    if run["status"] == "TimeLimitExceeded":
        return Answer("timeout", run["stdout"] or "")
    return Answer("ok" if answer["status"] == "Success" else "error", run["stdout"] or "")


def _batch_size(in_flight: int) -> int:
    return max(1, in_flight // BATCHES)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_CHARS]


def summarize(
    rounds: Mapping[str, Mapping[str, Sequence[SystemRound]]], loads: Mapping[str, Mapping[str, SystemRound]]
) -> dict[str, Any]:
    """The result by kind and system, medians over the rounds, and by load and system."""
    kinds = {kind: {name: _row(rows) for name, rows in systems.items()} for kind, systems in rounds.items()}
    load_rows = {load: {name: _row([row]) for name, row in systems.items()} for load, systems in loads.items()}
    counts = {
        f"{kind}: {name} calls of ours": rows[OURS][name]
        for kind, rows in {**kinds, **load_rows}.items()
        for name in ("mismatched", "unanswered")
    }
    return {
        "systems": list(next(iter(kinds.values()))),
        "kinds": kinds,
        "loads": load_rows,
        "requirements": requirements.none_of(counts),
    }


def _row(rounds: Sequence[SystemRound]) -> dict[str, Any]:
    """One system over all rounds. The rate counts only calls that have a result, whether it is correct or not."""
    reasons = sum((row.unanswered for row in rounds), Counter[str]())
    return {
        "calls": sum(row.calls for row in rounds),
        "calls_per_s": median(((row.correct + row.mismatched) / row.seconds for row in rounds), 1),
        "latency_ms": percentiles([ms for row in rounds for ms in row.latencies_ms]),
        "correct": sum(row.correct for row in rounds),
        "mismatched": sum(row.mismatched for row in rounds),
        "unanswered": reasons.total(),
        "reasons": dict(reasons.most_common(5)),
    }


def tables(result: Result) -> list[Block]:
    """A row for each kind of call and each load, a column for each system."""
    systems = result["systems"]
    rows = [(KIND_NAMES[kind], *(_cell(row.get(name)) for name in systems)) for kind, row in result["kinds"].items()]
    load_rows = [
        (LOADS[name].title, *(_load_cell(row.get(system)) for system in systems))
        for name, row in result["loads"].items()
    ]
    blocks: list[Block] = [
        Table(("calls/s (without a correct result)", *systems), rows),
        Table(("calls with the correct result (p50 in s)", *systems), load_rows),
    ]
    if absent := [name for name in PEERS if name not in systems]:
        blocks.append(f"Not running there: {', '.join(absent)}.")
    return [*blocks, *requirements.unmet(result)]


def _cell(row: Result | None) -> str:
    if row is None:
        return "-"
    share = 100 * (row["mismatched"] + row["unanswered"]) / row["calls"]
    return number(row["calls_per_s"]) + (f" ({share:.1f} %)" if share else "")


def _load_cell(row: Result | None) -> str:
    if row is None:
        return "-"
    return f"{100 * row['correct'] / row['calls']:.1f} % ({row['latency_ms']['p50'] / 1e3:.2g})"


if __name__ == "__main__":
    raise SystemExit(main())
