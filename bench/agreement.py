"""Whether the service says of a call what a fresh interpreter says: status, stdout, value, type of the error.

    python -m bench.agreement [--calls FILE.jsonl] [--at-least 0.995] [--fresh-cache FILE] [--json]

A call whose two fresh runs differ from each other (random numbers, clocks, addresses) has no right answer: it is
counted as unsettled and left out of the share that `--at-least` is about. Other differences are shown, by cause.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness import command
from bench.servers import service
from bench.servers.fresh_interpreter import FreshRun, interpreters
from bench.workloads.tool_calls import load_calls, sample_calls
from sandbox.client import AsyncClient
from sandbox.types import Call, Result, Status

SHOWN_CHARACTERS = 60
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_RANDOM = re.compile(r"\brandom\b|\bshuffle\b|\buuid|\bsecrets\b|\burandom\b")
_CLOCK = re.compile(r"\btime\b|\bdatetime\b|\bperf_counter\b|%timeit")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is compared."""

    status: str
    stdout: str
    value: str | None
    error: str

    @classmethod
    def of_fresh(cls, run: FreshRun) -> Outcome:
        if run.timed_out:
            return cls("timeout", run.stdout, None, "Timeout")
        if run.exit_code < 0:
            return cls("killed", run.stdout, None, f"signal {-run.exit_code}")
        error = str(run.report.get("error", ""))
        value = run.report.get("value") if run.exit_code == 0 else None
        return cls("error" if run.exit_code else "ok", run.stdout, value, error)

    @classmethod
    def of_service(cls, result: Result) -> Outcome:
        error = result.error.type if result.error else ""
        if result.status is Status.KILLED:
            error = f"signal {result.signal}"
        return cls(result.status.value, result.stdout, result.value, error)


@dataclass(frozen=True, slots=True)
class Difference:
    """One call on which the two disagree, and why as far as one can tell from outside."""

    index: int
    cause: str
    fields: tuple[str, ...]
    fresh: Outcome
    service: Outcome
    message: str
    """What the service's error says."""


def main(argv: Sequence[str] | None = None) -> int:
    """The comparison; 1 if too few calls agree."""
    args = _parser().parse_args(argv)
    return command.run_as_command("agreement", lambda: _compare(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("agreement", __doc__ or "")
    parser.add_argument(
        "--calls", type=command.file, metavar="FILE", help="JSONL with a 'code' in each row (default: a made-up sample)"
    )
    parser.add_argument("--n", type=command.count, help="only the first N of them (default: all; 500 of the sample)")
    parser.add_argument("--seed", type=int, default=0, help="which made-up sample (default: 0)")
    parser.add_argument("--at-least", type=float, default=0.995, metavar="SHARE", help="exit 1 below (default: 0.995)")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="limit of a call that brings none (default: 20)")
    parser.add_argument("--fresh-cache", metavar="FILE", help="keep the fresh side here and take it from there")
    return parser


def _compare(args: argparse.Namespace) -> int:
    calls = load_calls(args.calls)[: args.n] if args.calls else sample_calls(args.n or 500, args.seed)
    if not calls:
        raise command.BenchFailed("expected at least one call, got none")
    calls = [{**call, "limits": {"timeout_s": args.timeout_s} | call.get("limits", {})} for call in calls]
    python = service.guest_python(args.python)
    with service.running(python) as server:
        results = asyncio.run(_through_service(server.url, calls))
    outcomes = [Outcome.of_service(result) for result in results]
    cache = _Cache(args.fresh_cache, python)
    first = _fresh_all(calls, python, cache, turn=1)
    suspects = [i for i in range(len(calls)) if differing(first[i], outcomes[i])]
    again = _fresh_all([calls[i] for i in suspects], python, cache, turn=2)
    unsettled = {i for i, second in zip(suspects, again, strict=True) if differing(first[i], second)}
    differences = [
        Difference(
            i,
            cause(calls[i]["code"], first[i], outcomes[i], i in unsettled),
            differing(first[i], outcomes[i]),
            first[i],
            outcomes[i],
            error.message if (error := results[i].error) else "",
        )
        for i in suspects
    ]
    figures = summarise(len(calls), differences, unsettled)
    _show(figures, [d for d in differences if d.index not in unsettled])
    figures["differences"] = [_row(difference) for difference in differences if difference.index not in unsettled]
    command.plot(args.plot, lambda axes: _draw(axes, figures["causes"]))
    command.finish(figures, _parser(), args)
    if figures["agreement"] < args.at_least:
        print(f"agreement: {figures['agreement']:.4f} is under {args.at_least}", file=sys.stderr)
        return 1
    return 0


def differing(fresh: Outcome, ours: Outcome) -> tuple[str, ...]:
    """The names of the fields on which two outcomes differ; how far a time-out got is no difference."""
    if fresh.status == ours.status == "timeout":
        return ()
    one, other = asdict(fresh), asdict(ours)
    return tuple(name for name in one if one[name] != other[name])


def cause(code: str, fresh: Outcome, ours: Outcome, is_unsettled: bool) -> str:
    """Why two outcomes differ, as far as their text tells."""
    if "timeout" in (fresh.status, ours.status):
        return "one of them timed out"
    if ours.status in ("memory_limit", "output_limit", "unavailable", "killed") or fresh.status == "killed":
        return f"service: {ours.status}, fresh: {fresh.status}"
    if _ADDRESS.sub("", str(asdict(fresh))) == _ADDRESS.sub("", str(asdict(ours))):
        return "memory addresses"
    if {"ModuleNotFoundError", "ImportError"} & {fresh.error, ours.error}:
        return "missing module"
    if is_unsettled:
        for pattern, name in ((_RANDOM, "random numbers"), (_CLOCK, "clock")):
            if pattern.search(code):
                return name
        return "fresh runs differ, too"
    return (
        f"{fresh.error or fresh.status} became {ours.error or ours.status}" if fresh.error != ours.error else "output"
    )


def summarise(n: int, differences: Sequence[Difference], unsettled: set[int]) -> dict[str, Any]:
    """The figures of a comparison of `n` calls."""
    settled = n - len(unsettled)
    wrong = sum(d.index not in unsettled for d in differences)
    return {
        "bench": "agreement",
        "calls": n,
        "equal": n - len(differences),
        "unsettled": len(unsettled),
        "different": wrong,
        "agreement": round((settled - wrong) / settled, 5) if settled else 1.0,
        "causes": dict(Counter(d.cause for d in differences).most_common()),
    }


async def _through_service(url: str, calls: Sequence[Mapping[str, Any]]) -> list[Result]:
    results: dict[int, Result] = {}
    with command.progress() as progress:
        bar = progress.add_task("service", total=len(calls))
        async with AsyncClient(url) as client:
            async for index, result in client.stream([Call.decode(call) for call in calls]):
                results[index] = result
                progress.advance(bar)
    return [results[index] for index in range(len(calls))]


class _Cache:
    """Fresh outcomes by call, interpreter and turn, in a JSONL file that only grows."""

    def __init__(self, path: str | None, python: str) -> None:
        self._path = Path(path) if path else None
        self._python = python
        self.known: dict[str, Outcome] = {}
        if self._path and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                key = row.pop("key")
                self.known[key] = Outcome(**row)

    def key(self, call: Mapping[str, Any], turn: int) -> str:
        what = json.dumps([turn, self._python, call["code"], call.get("stdin", ""), call["limits"]["timeout_s"]])
        return hashlib.sha256(what.encode()).hexdigest()

    def keep(self, key: str, outcome: Outcome) -> None:
        self.known[key] = outcome
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **asdict(outcome)}) + "\n")


def _fresh_all(calls: Sequence[Mapping[str, Any]], python: str, cache: _Cache, *, turn: int) -> list[Outcome]:
    keys = [cache.key(call, turn) for call in calls]
    left = [i for i, key in enumerate(keys) if key not in cache.known]
    with command.progress() as progress, interpreters(python, wrapped=True) as fresh:
        bar = progress.add_task(f"fresh interpreters, turn {turn}", total=len(left))

        def done(position: int, run: FreshRun) -> None:
            cache.keep(keys[left[position]], Outcome.of_fresh(run))
            progress.advance(bar)

        fresh.run_all([calls[i] for i in left], done)
    return [cache.known[key] for key in keys]


def _row(difference: Difference) -> dict[str, Any]:
    row = {"index": difference.index, "cause": difference.cause, "fields": list(difference.fields)}
    for name in difference.fields:
        row[name] = [_short(getattr(side, name)) for side in (difference.fresh, difference.service)]
    return row | ({"message": _short(difference.message)} if difference.message else {})


def _short(text: str | None, most: int = 300) -> str | None:
    return text if text is None or len(text) <= most else text[: most // 2] + " ... " + text[-most // 2 :]


def _show(figures: Mapping[str, Any], differences: Sequence[Difference]) -> None:
    n, share = figures["calls"], figures["agreement"]
    command.show(f"{share:.2%} of {n} calls agree", ("cause", "calls"), figures["causes"].items())
    rows = []
    for difference in differences:
        name = difference.fields[0]
        sides = (repr(_short(getattr(side, name), SHOWN_CHARACTERS)) for side in (difference.fresh, difference.service))
        rows.append((difference.index, difference.cause, ", ".join(difference.fields), *sides))
    if rows:
        command.show("where not", ("call", "cause", "fields", "fresh", "service"), rows)


def _draw(axes: Any, causes: Mapping[str, int]) -> None:
    names = list(causes)[::-1]
    axes.barh(names, [causes[name] for name in names])
    axes.set_xlabel("calls that differ")


if __name__ == "__main__":
    sys.exit(main())
