"""Tens of thousands of calls in flight at once: each must get its own answer, about as fast as under a steady load.

    python -m bench.burst [--calls 45000] [--kind print] [--loops 0.01] [--batch 5000] [--answers both] [--json]

Every call prints a number that no other call prints: an answer that is missing, doubled, or somebody else's is seen,
whether responses come whole and in order or as a stream with indices. Latency counts from when a call's request is
made, for all of the burst at once. In the same run, half before the burst and half after it, as many calls go through
in the steady way, 256 in flight; the burst's calls/s are held against theirs. `--batch 4` makes the burst one of many
small requests, each with a connection of its own, as far as descriptors allow on both sides. `--loops 0.01` has one
call in a hundred never return: it must end as a timeout, and the latency of the others is shown apart (`--answers
stream`, or they wait for the loops of their request).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgpack

from bench.harness import command
from bench.mixed import LOOPS
from bench.probes import processes
from bench.probes.sampler import Watch
from bench.servers import service
from bench.throughput import KINDS
from bench.workloads.tool_calls import labelled_calls

CALLS = 45_000
BATCH = 5_000
STEADY_BATCH, STEADY_AT_ONCE = 64, 4
FORMS = {"stream": ("application/x-msgpack-stream",), "whole": ("application/msgpack",)}
FORMS["both"] = (*FORMS["stream"], *FORMS["whole"])
SPARE_DESCRIPTORS = 500
"""What a gateway or a client needs besides one for each connection."""
RATIO_AT_LEAST = 0.9
MEMORY_MB_AT_MOST = 1430
"""1.5 GB."""
LOOP_S = 1.0
POINTS = (50, 90, 99)
UNCOMPILED = ("SyntaxError", "IndentationError")
SHOWN = 5

CODES = {kind.name: kind.code for kind in KINDS if kind.code} | {"print": ""}
Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Question:
    """A call with an id of its own, the first line that it alone prints, and the status that it ends with."""

    call: dict[str, Any]
    line: str
    status: str

    @property
    def is_short(self) -> bool:
        return self.status != "timeout"

    def is_answered_by(self, result: Mapping[str, Any]) -> bool:
        said = (result["id"], result["status"], result["stdout"].partition("\n")[0])
        return said == (self.call["id"], self.status, self.line)


@dataclass(slots=True)
class Run:
    """What came of some calls, and what they cost."""

    calls: int = 0
    right: int = 0
    doubled: int = 0
    wrong: int = 0
    seconds: float = 0.0
    server_cpu_s: float = 0.0
    """All of it, with calls and zygotes."""
    gateway_cpu_s: float = 0.0
    executor_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    latencies_ms: list[float] = field(default_factory=list)
    short_ms: list[float] = field(default_factory=list)
    """The same of those that end by themselves."""
    queue_ms: list[float] = field(default_factory=list)
    run_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """What each call used itself."""
    examples: list[str] = field(default_factory=list)
    """Of what must not be."""

    @property
    def lost(self) -> int:
        return self.calls - self.right - self.wrong

    def take(self, question: Question, result: Mapping[str, Any], waited_s: float) -> None:
        """The first answer to a question."""
        self.statuses[result["status"]] += 1
        self.latencies_ms.append(waited_s * 1e3)
        if question.is_short:
            self.short_ms.append(waited_s * 1e3)
        self.queue_ms.append(result["usage"]["queue_ms"])
        self.run_ms.append(result["usage"]["run_ms"])
        self.cpu_ms.append(result["usage"]["cpu_ms"])
        if question.is_answered_by(result):
            self.right += 1
        else:
            self.wrong += 1
            self.examples.append(f"expected {question.line} and {question.status}, got {result}")


@dataclass(frozen=True, slots=True)
class Held:
    """What the server held at one moment."""

    memory_mb: float
    gateway_mb: float
    """Its part of that: calls that wait are its own to hold."""
    descriptors: int
    """Of the gateway."""

    @classmethod
    def by(cls, server: service.Service) -> Held:
        gateway = [server.pid]
        return cls(processes.pss_mb(server.processes()), processes.pss_mb(gateway), processes.descriptors(server.pid))


def main(argv: Sequence[str] | None = None) -> int:
    """The burst; 1 if an answer is missing or wrong, or a promise is missed."""
    parser = _parser()
    args = parser.parse_args(argv)
    if why := too_many(args.calls, args.batch, _most_descriptors()):
        parser.error(why)
    return command.run_as_command("burst", lambda: _burst(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("burst", __doc__ or "")
    parser.add_argument("--calls", type=command.count, default=CALLS, help=f"in the burst (default: {CALLS})")
    parser.add_argument("--kind", choices=[*CODES, "mix"], default="print", help="which calls (default: print)")
    parser.add_argument("--loops", type=_share, default=0.0, help="share of calls that never end (default: 0)")
    parser.add_argument("--loop-s", type=command.seconds, default=LOOP_S, help="their time-out (default: 1)")
    parser.add_argument("--batch", type=command.count, default=BATCH, help=f"calls in one request (default: {BATCH})")
    parser.add_argument("--in-flight", type=command.count, help="calls at once (default: all)")
    parser.add_argument("--answers", choices=[*FORMS], default="both", help="how they come (default: in turn, both)")
    parser.add_argument("--steady", type=command.count, help="calls of the steady load (default: as many)")
    parser.add_argument("--isolation", default="auto", help="level of the server (default: auto)")
    parser.add_argument("--lean", action="store_true", help="only zygotes of the standard library")
    parser.add_argument("--seed", type=int, default=0, help="which numbers, and which mix (default: 0)")
    return parser


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, got {text}")
    return share


def _burst(args: argparse.Namespace) -> int:
    half = math.ceil((args.steady or args.calls) / 2)
    questions = make(args.kind, args.calls + 2 * half, args.seed, args.loops, args.loop_s)
    before, burst, after = (list(itertools.islice(questions, n)) for n in (half, args.calls, half))
    at_once = math.ceil((args.in_flight or args.calls) / args.batch)
    flags = ["--isolation", args.isolation, "--queue-timeout-s", "86400"]  # a burst may take longer than a queue should
    flags += ["--queue-calls", str(max(100_000, 2 * args.calls)), "--batch-calls", str(max(65_536, args.batch))]
    # A client that shares our cores takes its time to open thousands of connections, and to speak on each.
    flags += ["--stall-s", "600", "--connections", str(math.ceil(args.calls / args.batch) + 100)]
    flags += ["--profiles", "bare"] if args.lean else []
    with ExitStack() as stack:
        stack.enter_context(_descriptors())
        server = stack.enter_context(service.running(args.python, flags))
        bar = stack.enter_context(command.progress())
        idle = Held.by(server)

        def run(name: str, asked: Sequence[Question], batch: int, at_once: int) -> Run:
            task = bar.add_task(name, total=len(asked))
            return asyncio.run(_run(server, asked, batch, at_once, FORMS[args.answers], lambda: bar.advance(task)))

        steady = [run("steady load", before, STEADY_BATCH, STEADY_AT_ONCE)]
        with Watch(lambda: Held.by(server)) as watch:
            whole = run("burst", burst, args.batch, at_once)
        steady.append(run("steady load", after, STEADY_BATCH, STEADY_AT_ONCE))
    figures = {
        "bench": "burst",
        "kind": args.kind,
        "loops": args.loops,
        "loop_s": args.loop_s,
        "calls": args.calls,
        "in_flight": min(args.calls, at_once * args.batch),
        "requests": math.ceil(args.calls / args.batch),
        "answers": args.answers,
        **summarise(whole, steady, idle, watch),
    }
    _show(figures, [*whole.examples, *(example for run in steady for example in run.examples)])
    command.plot(args.plot, lambda axes: draw(axes, figures))
    command.finish(figures, _parser(), args)
    return 0 if figures["holds"] else 1


def make(kind: str, count: int, seed: int, loops: float = 0.0, loop_s: float = LOOP_S) -> Iterator[Question]:
    """`count` calls of a kind, each of which first prints its own number, unless it does not compile. A share of them
    never end, evenly spread among the others."""
    mix = labelled_calls(count, seed) if kind == "mix" else None
    for n in range(count):
        template, call = next(mix) if mix else (None, {"code": CODES[kind]})
        line, status = str(n * n + seed), template.status if template else "ok"
        if math.floor((n + 1) * loops) > math.floor(n * loops):
            call, status = {"code": LOOPS["plain"], "limits": {"timeout_s": loop_s}}, "timeout"
        elif template and template.ends in UNCOMPILED:
            line = ""
        code = f"print({n} * {n} + {seed}, flush=True)\n{call['code']}"
        yield Question({**call, "code": code, "id": f"burst-{n}"}, line, status)


def too_many(calls: int, batch: int, most: int) -> str:
    """Why so many requests cannot be open at once, with at most so many descriptors in a process; empty if they can."""
    requests = math.ceil(calls / batch)
    if requests + SPARE_DESCRIPTORS <= most:
        return ""
    enough = math.ceil(calls / (most - SPARE_DESCRIPTORS)) if most > SPARE_DESCRIPTORS else calls
    return (
        f"--calls {calls} --batch {batch} opens {requests} connections at once, and a process here may have {most} "
        f"descriptors, of which {SPARE_DESCRIPTORS} are kept free; expected --batch {enough} or more"
    )


async def _run(
    server: service.Service, asked: Sequence[Question], batch: int, at_once: int, forms: Sequence[str], step: Step
) -> Run:
    """Ask all questions in requests of `batch`, at most `at_once` of them open, the forms of answers taking turns."""
    parts = [asked[start : start + batch] for start in range(0, len(asked), batch)]
    bodies = [msgpack.packb({"calls": [question.call for question in part]}) for part in parts]
    requests = iter(zip(parts, bodies, [forms[n % len(forms)] for n in range(len(parts))], strict=True))
    run = Run(calls=len(asked))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:

        async def work() -> None:
            for part, body, form in requests:
                try:
                    await _ask(http, server.url, part, body, form, run, step)
                except (aiohttp.ClientError, OSError) as why:  # what it has not answered is lost
                    run.examples.append(f"a request of {len(part)} calls broke off: {why!r}")

        own = ([server.pid], server.executors())
        meter, own_s = processes.Meter(server.pid), [processes.cpu_s(pids) for pids in own]
        begun, cpu_s = time.perf_counter(), time.thread_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(parts))):
                group.create_task(work())
        run.seconds = time.perf_counter() - begun
        run.server_cpu_s, run.client_cpu_s = meter.whole_s(), time.thread_time() - cpu_s
        run.gateway_cpu_s, run.executor_cpu_s = (processes.cpu_s(pids) - s for pids, s in zip(own, own_s, strict=True))
    return run


async def _ask(
    http: aiohttp.ClientSession, url: str, part: Sequence[Question], body: bytes, form: str, run: Run, step: Step
) -> None:
    headers = {"Content-Type": "application/msgpack", "Accept": form}
    answered: set[int] = set()
    begun = time.perf_counter()
    async with http.post(f"{url}/v1/batch", data=io.BytesIO(body), headers=headers) as got:
        if got.status != 200:
            run.examples.append(f"a request of {len(part)} calls was answered {got.status}: {await got.text()}")
            return
        async for index, result in _answers(got, form):
            if index in answered:
                run.doubled += 1
                run.examples.append(f"answered again: {result}")
                continue
            answered.add(index)
            run.take(part[index], result, time.perf_counter() - begun)
            step()


async def _answers(got: aiohttp.ClientResponse, form: str) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Which of the calls, and its answer: as they come, or in the order in which they were asked."""
    if form in FORMS["whole"]:
        for index, result in enumerate(msgpack.unpackb(await got.read())["results"]):
            yield index, result
        return
    unpacker = msgpack.Unpacker(max_buffer_size=1 << 30)
    async for chunk in got.content.iter_any():
        unpacker.feed(chunk)
        for line in unpacker:
            if line is not None:
                yield line["index"], line


def summarise(burst: Run, steady: Sequence[Run], idle: Held, watch: Watch[Held]) -> dict[str, Any]:
    """The figures of a burst beside a steady load, and which promises they miss."""
    runs = (burst, *steady)
    calm = _joined(steady)
    bad = {name: sum(getattr(run, name) for run in runs) for name in ("lost", "doubled", "wrong")}
    ratio = (burst.calls / burst.seconds) / (calm.calls / calm.seconds)
    peak_mb = max(held.memory_mb for held in watch.seen)
    missed = [f"{count} {name}, expected none" for name, count in bad.items() if count]
    if ratio < RATIO_AT_LEAST:
        missed.append(f"{ratio:.2f} of the steady load's calls/s, expected at least {RATIO_AT_LEAST}")
    if peak_mb > MEMORY_MB_AT_MOST:
        missed.append(f"{peak_mb:.0f} MiB of memory, expected at most {MEMORY_MB_AT_MOST}")
    return {
        "right": burst.right,
        **bad,
        "statuses": dict(burst.statuses.most_common()),
        "burst": _pace(burst),
        "steady": _pace(calm),
        "call_cpu_ms": command.quantiles(burst.cpu_ms),
        "ratio": round(ratio, 3),
        "ratio_at_least": RATIO_AT_LEAST,
        "memory_mb": {"idle": round(idle.memory_mb), "peak": round(peak_mb), "at_most": MEMORY_MB_AT_MOST},
        "gateway_mb": {"idle": round(idle.gateway_mb, 1), "peak": round(max(h.gateway_mb for h in watch.seen), 1)},
        "memory_looks": len(watch.seen),
        "memory_looks_share": round(watch.took_s / burst.seconds, 4),
        "gateway_descriptors": max(held.descriptors for held in watch.seen),
        "missed": missed,
        "holds": not missed,
    }


def _pace(run: Run) -> dict[str, Any]:
    return {
        "calls": run.calls,
        "seconds": round(run.seconds, 2),
        "calls_per_s": round(run.calls / run.seconds, 1),
        "cpu_ms": round(run.server_cpu_s * 1e3 / run.calls, 3),
        "gateway_cpu_ms": round(run.gateway_cpu_s * 1e3 / run.calls, 4),
        "executor_cpu_ms": round(run.executor_cpu_s * 1e3 / run.calls, 4),
        "client_cpu_ms": round(run.client_cpu_s * 1e3 / run.calls, 3),
        "latency_ms": command.percentiles(run.latencies_ms, POINTS),
        "short_ms": command.percentiles(run.short_ms, POINTS),
        "queue_ms": command.percentiles(run.queue_ms, POINTS),
        "run_ms": command.percentiles(run.run_ms, POINTS),
    }


def _joined(runs: Sequence[Run]) -> Run:
    """One run after another as one."""
    whole = Run()
    for run in runs:
        for name in Run.__slots__:
            setattr(whole, name, getattr(whole, name) + getattr(run, name))
    return whole


def _most_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@contextlib.contextmanager
def _descriptors() -> Iterator[None]:
    """As many as the hard limit allows, for us and for the server that we start."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _show(figures: Mapping[str, Any], examples: Sequence[str]) -> None:
    columns = ("", "calls", "calls/s", "p50 ms", "p90 ms", "p99 ms", "CPU ms", "gateway's", "executor's", "client's")
    rows = []
    for name in ("burst", "steady"):
        pace = figures[name]
        cells = [f"{pace['calls']:,}", f"{pace['calls_per_s']:,.0f}"]
        cells += [f"{pace['latency_ms'].get(f'p{point}', 0):,.0f}" for point in POINTS]
        parts = (f"{pace[f'{part}_cpu_ms']:.3f}" for part in ("gateway", "executor", "client"))
        rows.append((name, *cells, f"{pace['cpu_ms']:.2f}", *parts))
        if figures["loops"]:
            rows.append(("  short ones", "", "", *(f"{ms:,.0f}" for ms in pace["short_ms"].values())))
    command.show(f"{figures['in_flight']:,} calls in flight, in {figures['requests']:,} requests", columns, rows)
    names = ("right", "lost", "doubled", "wrong", "ratio", "gateway_descriptors")
    memory = figures["memory_mb"]
    cells = [(name.replace("_", " "), figures[name]) for name in names]
    command.show("of it", ("", ""), [*cells, ("MiB idle", memory["idle"]), ("MiB at the peak", memory["peak"])])
    for line in (*examples[:SHOWN], *figures["missed"]):
        print(f"burst: {line:.2000}", file=sys.stderr)


def draw(axes: Any, figures: Mapping[str, Any]) -> None:
    """What a run printed as JSON, as a picture."""
    for place, name in enumerate(("burst", "steady")):
        values = [figures[name]["latency_ms"][f"p{point}"] for point in POINTS]
        bars = axes.bar([n + (place - 0.5) * 0.4 for n in range(len(POINTS))], values, 0.4, label=name)
        axes.bar_label(bars, fmt="%.0f")
    axes.set_xticks(range(len(POINTS)), [f"p{point}" for point in POINTS])
    axes.set_yscale("log")
    axes.set_ylabel("ms until the answer")
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
