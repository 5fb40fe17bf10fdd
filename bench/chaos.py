"""Whether every call gets its one answer while the server's processes are killed at random.

    python -m bench.chaos [--calls 20000] [--kill-every 1] [--kill-gateway 30] [--json]

Calls are riddles, of which each has an answer of its own (`bench.workloads.checked_calls`). They go over HTTP in
every form there is,
while zygotes, jails and executors of the server die by SIGKILL (`bench.probes.fault_injector`), and some requests
are given up
half-way. A call is lost if it is not answered on a connection that holds, doubled if it is answered twice in one
response, mixed up if its answer is not its own. `unavailable` is an answer: it says that there is no verdict.

When a gateway is killed too, its connections break, nothing of it may be left, and what it had not answered is asked
of the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgpack

from bench.harness import command
from bench.probes import processes
from bench.probes.fault_injector import BELOW, Monkey, victims
from bench.probes.leftovers import Leftovers, still_there
from bench.servers import service
from bench.workloads import checked_calls
from bench.workloads.checked_calls import Riddle
from sandbox.types import Result, Status

BATCHES = (1, 1, 7, 64)
"""Calls in one request."""
IN_FLIGHT = 256
EXECUTORS = 2
GIVEN_UP = 0.1
"""The share of requests whose client hangs up after the first answer, and asks for the others anew."""
PAUSE_S = 0.2
"""After a refusal or a broken connection."""
REST_S = 60.0
STREAMS = {
    "application/x-ndjson": lambda: _Lines(),
    "application/x-msgpack-stream": lambda: msgpack.Unpacker(max_buffer_size=1 << 30),
}
BODIES: dict[str, Callable[[bytes], Any]] = {"application/json": json.loads, "application/msgpack": msgpack.unpackb}
SHOWN = 5

Step = Callable[[], None]
Running = contextlib.AbstractContextManager[service.Service]


@dataclass(slots=True)
class Tally:
    """What has come of the calls."""

    calls: int
    answered: int = 0
    doubled: int = 0
    mixed_up: int = 0
    retried: int = 0
    """Calls that the service had to try more than once."""
    resent: int = 0
    """Requests repeated, since the gateway was gone."""
    given_up: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    unavailable: Counter[str] = field(default_factory=Counter)
    """Why calls got no verdict, by type."""
    latencies_ms: list[float] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    """Of what must not be."""

    @property
    def lost(self) -> int:
        return self.calls - self.answered

    def take(self, riddle: Riddle, result: Result, waited_s: float) -> None:
        """The first answer to a riddle."""
        self.answered += 1
        self.retried += result.attempts > 1
        self.statuses[result.status.value] += 1
        self.latencies_ms.append(waited_s * 1e3)
        if result.status is Status.UNAVAILABLE and result.id == riddle.call.id:
            self.unavailable[result.error.type if result.error else "?"] += 1
        elif not riddle.is_solved_by(result):
            self.mixed_up += 1
            self.examples.append(f"asked {riddle}, answered {result}")


class Target:
    """The server under attack: another one, elsewhere, each time its gateway has been killed."""

    def __init__(self, life: ExitStack, start: Callable[[], Running]) -> None:
        self.left_behind: list[str] = []
        self._life = life
        self._start = start
        self._server = life.enter_context(start())

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int:
        return self._server.pid

    def check_is_alive(self) -> None:
        """Raises `BenchFailed` if it ended, which nobody did to it."""
        if processes.state(self.pid) in ("", "Z"):
            raise command.BenchFailed("the gateway has ended by itself")

    def processes(self) -> list[int]:
        return self._server.processes()

    def come_to_rest(self, executors: int) -> None:
        """Wait until all executors are back: the next one clears away what one that was killed could not."""
        give_up = time.monotonic() + REST_S
        while time.monotonic() < give_up:
            states = [processes.state(pid) for pid in victims(self.pid)["executor"]]
            with urllib.request.urlopen(f"{self.url}/metrics") as metrics:
                said = metrics.read().decode()
            if "Z" not in states and f"\nrstar_sandbox_executors_ready {executors}.0\n" in said:
                return
            time.sleep(0.1)
        raise command.BenchFailed(f"after the attack not all {executors} executors are back within {REST_S:g} s")

    def kill_gateway(self) -> None:
        """End it as it would itself never, look for what it has left, and start another."""
        pids = self.processes()
        os.kill(self.pid, signal.SIGKILL)
        self._life.close()
        self.left_behind += [f"process: {processes.command(pid)}" for pid in still_there(pids)]
        self._server = self._life.enter_context(self._start())


class Load:
    """Asks all riddles, a bounded number at once."""

    def __init__(self, target: Target, asked: Iterator[Riddle], tally: Tally, rng: random.Random, step: Step) -> None:
        self._target = target
        self._asked = asked
        self._tally = tally
        self._rng = rng
        self._step = step

    async def run(self, in_flight: int) -> None:
        """Until every riddle is answered."""
        workers = max(1, in_flight * len(BATCHES) // sum(BATCHES))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http, asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(http))

    async def _work(self, http: aiohttp.ClientSession) -> None:
        while batch := list(itertools.islice(self._asked, self._rng.choice(BATCHES))):
            begun = time.monotonic()
            left = dict(enumerate(batch))
            while left:
                try:
                    await self._ask(http, left, begun)
                except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError):
                    self._target.check_is_alive()
                    self._tally.resent += 1
                    await asyncio.sleep(PAUSE_S)

    async def _ask(self, http: aiohttp.ClientSession, left: dict[int, Riddle], begun: float) -> None:
        """Send what is left; take from `left` what is answered."""
        sent = list(left.items())
        answered: set[int] = set()
        one = len(sent) == 1 and self._rng.random() < 0.5
        accept = self._rng.choice([*BODIES, *({} if one else STREAMS)])
        is_given_up = not one and self._rng.random() < GIVEN_UP
        calls = [riddle.call.encode(binary=True) for _, riddle in sent]
        body = io.BytesIO(msgpack.packb(calls[0] if one else {"calls": calls}))
        headers = {"Content-Type": "application/msgpack", "Accept": accept}
        url = f"{self._target.url}/v1/{'execute' if one else 'batch'}"
        async with http.post(url, data=body, headers=headers) as got:
            if got.status != 200:
                self._tally.refused[got.status] += 1
                if got.status not in (429, 503):
                    raise command.BenchFailed(f"answered {got.status}: {(await got.text())[:500]}")
                await asyncio.sleep(PAUSE_S)
                return
            async for place, raw in _answers(got, accept, one):
                number, riddle = sent[place]
                if place in answered:
                    self._tally.doubled += 1
                    self._tally.examples.append(f"{riddle} answered again with {raw}")
                    continue
                answered.add(place)
                del left[number]
                self._tally.take(riddle, Result.decode(raw), time.monotonic() - begun)
                self._step()
                if is_given_up and left:
                    self._tally.given_up += 1
                    got.close()
                    return
        if len(answered) < len(sent):
            raise command.BenchFailed(f"{len(sent)} calls sent, {len(answered)} answered, and the response is complete")


async def _answers(got: aiohttp.ClientResponse, kind: str, one: bool) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Which of the calls, and its answer, as they come."""
    if kind in STREAMS:
        stream = STREAMS[kind]()
        async for chunk in got.content.iter_any():
            stream.feed(chunk)
            for line in stream:
                if line is not None:
                    yield line["index"], line
        return
    whole = BODIES[kind](await got.read())
    for index, result in enumerate([whole] if one else whole["results"]):
        yield index, result


class _Lines:
    """Lines of JSON out of a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> None:
        self._rest += data

    def __iter__(self) -> Iterator[dict[str, Any]]:
        *whole, self._rest = self._rest.split(b"\n")
        return map(json.loads, filter(None, whole))


def main(argv: Sequence[str] | None = None) -> int:
    """The attack; 1 if a call was lost, doubled or mixed up, or something was left behind."""
    args = _parser().parse_args(argv)
    return command.run_as_command("chaos", lambda: _attack(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("chaos", __doc__ or "")
    parser.add_argument("--calls", type=command.count, default=20_000, help="how many calls (default: 20000)")
    parser.add_argument(
        "--kill-every", type=command.seconds, default=1.0, metavar="S", help="mean seconds between two kills"
    )
    parser.add_argument(
        "--kill-gateway", type=command.seconds, metavar="S", help="kill the gateway, too, so often (default: no)"
    )
    parser.add_argument("--in-flight", type=command.count, default=IN_FLIGHT, help=f"calls at once ({IN_FLIGHT})")
    parser.add_argument("--executors", type=command.count, default=EXECUTORS, help=f"of the server ({EXECUTORS})")
    parser.add_argument("--isolation", default="auto", help="level of the server (default: auto)")
    parser.add_argument("--lean", action="store_true", help="only zygotes and riddles of the standard library")
    parser.add_argument("--seed", type=int, default=0, help="which riddles and which victims (default: 0)")
    parser.add_argument(
        "--most-s", type=command.seconds, help="what is unanswered then is lost (default: 300 and 0.1 per call)"
    )
    return parser


def _attack(args: argparse.Namespace) -> int:
    kinds = checked_calls.LEAN if args.lean else checked_calls.KINDS
    flags = ["--isolation", args.isolation, "--executors", str(args.executors)]
    flags += ["--profiles", "bare"] if args.lean else []
    tally = Tally(args.calls)
    monkey = Monkey(random.Random(args.seed))
    with tempfile.TemporaryDirectory(prefix="bench-chaos-") as folder:
        os.chmod(folder, 0o711)  # calls may have to reach it as users of their own
        leftovers = Leftovers(Path(folder))
        begun = time.monotonic()
        with ExitStack() as life, command.progress() as bar:
            task = bar.add_task("riddles", total=args.calls)
            target = Target(life, lambda: service.running(args.python, flags, {"TMPDIR": folder}))
            asked = checked_calls.make(args.calls, args.seed, kinds)
            load = Load(target, asked, tally, random.Random(args.seed), lambda: bar.advance(task))
            asyncio.run(_under_attack(load, target, monkey, args))
            seconds = time.monotonic() - begun
            target.come_to_rest(args.executors)
            pids = target.processes()
        left_behind = target.left_behind + leftovers.found(pids)
    figures = _figures(args, tally, monkey, seconds, left_behind)
    _show(figures, tally)
    command.finish(figures, _parser(), args)
    return 0 if figures["holds"] else 1


async def _under_attack(load: Load, target: Target, monkey: Monkey, args: argparse.Namespace) -> None:
    async def strike() -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1 / args.kill_every))
            monkey.strike(target.pid)

    async def strike_gateways() -> None:
        while True:
            await asyncio.sleep(args.kill_gateway)
            monkey.kills["gateway"] += 1
            target.kill_gateway()

    rng = random.Random(args.seed)
    most_s = args.most_s or 300 + 0.1 * args.calls
    with contextlib.suppress(TimeoutError):  # what is lost is counted
        async with asyncio.timeout(most_s), asyncio.TaskGroup() as group:
            attacks = [group.create_task(strike())]
            if args.kill_gateway:
                attacks.append(group.create_task(strike_gateways()))
            await load.run(args.in_flight)
            for attack in attacks:
                attack.cancel()


def _figures(
    args: argparse.Namespace, tally: Tally, monkey: Monkey, seconds: float, left_behind: list[str]
) -> dict[str, Any]:
    return {
        "bench": "chaos",
        "calls": tally.calls,
        "kill_every_s": args.kill_every,
        "seconds": round(seconds, 1),
        "lost": tally.lost,
        "doubled": tally.doubled,
        "mixed_up": tally.mixed_up,
        "unavailable": dict(tally.unavailable),
        "statuses": dict(tally.statuses.most_common()),
        "retried_calls": tally.retried,
        "resent_requests": tally.resent,
        "given_up_requests": tally.given_up,
        "refused_requests": {str(status): count for status, count in tally.refused.items()},
        "kills": {kind: monkey.kills[kind] for kind in (*BELOW, "gateway")},
        "latency_ms": command.percentiles(tally.latencies_ms),
        "left_behind": left_behind,
        "holds": not (tally.lost or tally.doubled or tally.mixed_up or left_behind),
    }


def _show(figures: Mapping[str, Any], tally: Tally) -> None:
    names = ("calls", "seconds", "lost", "doubled", "mixed_up", "retried_calls", "resent_requests", "given_up_requests")
    command.show("under attack", ("", ""), [(name.replace("_", " "), figures[name]) for name in names])
    command.show("killed", ("", "times"), figures["kills"].items())
    command.show("calls ended as", ("status", "calls"), figures["statuses"].items())
    for line in (*tally.examples[:SHOWN], *(f"left behind: {line}" for line in figures["left_behind"])):
        print(f"chaos: {line:.2000}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
