"""Whether a server that has run ten thousand calls still holds what it held after two thousand.

    python -m bench.leaks [--calls 10000] [--json]

The calls are the real mix and, among them, everything that leaves something behind if it can: endless loops, sleepers,
floods, crashes, children that outlive their parent, threads, temporary files, memory hogs. Between them whole batches
are abandoned and zygotes are killed. At every mark the server is left to come to rest, and then processes, descriptors,
mounts, cgroups, temporary files and memory are counted. After its end nothing may be left at all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from bench.harness import command
from bench.probes import processes as procs
from bench.probes.leftovers import Leftovers, cgroups
from bench.servers import service
from bench.workloads.tool_calls import load_calls, sample_calls
from sandbox.client import AsyncClient
from sandbox.types import Call, Status

MARK = 1000
"""Calls between two counts."""
SETTLED = 2000
"""By then every pool is filled and every cache is warm; nothing may grow after it."""
TOLERANCE = {"processes": 0, "zombies": 0, "descriptors": 4, "mounts": 0, "cgroups": 0, "temporary_files": 0}
"""How much more there may be of each. Descriptors: the client's connections come and go."""
MEMORY_MB, MEMORY_SHARE = 16.0, 0.1
"""How much more memory there may be: for allocators and for pages that zygotes cease to share."""
BATCH = 64
CRUEL_SHARE = 0.1
SHORT = {"timeout_s": 0.2}
CRUEL: tuple[dict[str, Any], ...] = (
    {"code": "while True: pass", "limits": SHORT},
    {"code": "import time; time.sleep(60)", "limits": SHORT},
    {"code": "print('x' * 10_000_000)"},
    {"code": "import os; os.kill(os.getpid(), 9)"},
    {"code": "import os\nif os.fork() == 0:\n    import time; time.sleep(600)"},
    {"code": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"},
    {"code": "import threading, time\nfor _ in range(8): threading.Thread(target=time.sleep, args=(0.01,)).start()"},
    {"code": "import tempfile\nfor _ in range(20): tempfile.NamedTemporaryFile(delete=False).write(b'x' * 10_000)"},
    {"code": "import os\nfor _ in range(1000): os.memfd_create('kept')"},
    {"code": "kept = bytearray(1 << 40)"},
    {"code": "kept = [0]\nwhile True: kept += kept", "limits": {"memory_mb": 128}},
    {"code": "import ctypes; ctypes.string_at(0)"},
    {"code": "open('out.txt', 'w').write('x' * 1000)", "files": {"in.txt": b"y"}, "return_files": ["out.txt"]},
    {"code": "import socket; kept = [socket.socketpair() for _ in range(50)]"},
    {"code": "def deeper(n): return deeper(n + 1)\ndeeper(0)"},
)
REST_S = 30.0
"""A server at rest has had the same processes for a second. It gets so long to come to it."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a server at rest holds."""

    calls: int
    processes: int
    zombies: int
    descriptors: int
    mounts: int
    cgroups: int
    temporary_files: int
    memory_mb: float


def main(argv: Sequence[str] | None = None) -> int:
    """The search; 1 if something has grown or stayed."""
    args = _parser().parse_args(argv)
    return command.run_as_command("leaks", lambda: _search(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("leaks", __doc__ or "")
    parser.add_argument("--calls", type=command.count, default=10_000, help="how many calls (default: 10000)")
    parser.add_argument(
        "--from", dest="from_", type=command.file, metavar="FILE", help="JSONL that takes the place of the mix"
    )
    parser.add_argument("--mark", type=command.count, default=MARK, help="calls between two counts (default: 1000)")
    parser.add_argument(
        "--settled", type=command.count, default=SETTLED, help="growth counts from here (default: 2000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which made-up mix (default: 0)")
    return parser


def _search(args: argparse.Namespace) -> int:
    n = args.calls
    if n < args.settled + args.mark:
        raise command.BenchFailed(f"--calls {n}: expected at least --settled + --mark = {args.settled + args.mark}")
    marks: list[Holdings] = []
    statuses: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="bench-leaks-") as folder:
        leftovers = Leftovers(Path(folder))
        with service.running(args.python, environ={"TMPDIR": folder}) as server, command.progress() as bar:
            load = _Load(server, args, bar, bar.add_task("calls", total=n))
            for done in range(0, n, args.mark):
                statuses += asyncio.run(load.run(min(args.mark, n - done)))
                marks.append(holdings(server, load.calls, leftovers))
            pids = server.processes()
        left = leftovers.found(pids)
    leaks = grown(marks, args.settled)
    figures = {
        "bench": "leaks",
        "calls": load.calls,
        "settled": args.settled,
        "abandoned_batches": load.abandoned,
        "killed_zygotes": load.killed,
        "statuses": dict(statuses.most_common()),
        "unavailable": dict(load.unavailable.most_common(20)),
        "marks": [asdict(mark) for mark in marks],
        "grown": leaks,
        "left_behind": left,
        "holds": not leaks and not left,
    }
    _show(figures)
    command.plot(args.plot, lambda axes: draw(axes, figures))
    command.finish(figures, _parser(), args)
    return 0 if figures["holds"] else 1


class _Load:
    """Sends the calls, and does to the server what a server must bear."""

    def __init__(self, server: service.Service, args: argparse.Namespace, bar: Progress, task: TaskID) -> None:
        self.calls = self.abandoned = self.killed = 0
        self.unavailable: Counter[str] = Counter()
        """Why calls got no verdict, which none should."""
        self._server = server
        self._source = args.from_
        self._rng = random.Random(args.seed)
        self._bar = bar
        self._task = task

    async def run(self, n: int) -> Counter[str]:
        """`n` calls in batches, one batch abandoned half-way, and one zygote killed."""
        calls = self._mixed(n)
        statuses: Counter[str] = Counter()
        killing = asyncio.get_running_loop().call_later(0.5, self._kill_a_zygote, procs.tree(self._server.pid))
        async with AsyncClient(self._server.url, batch_size=BATCH) as client:
            await self._abandon(client, calls[:BATCH])
            async for _, result in client.stream(calls):
                statuses[result.status.value] += 1
                self.calls += 1
                if result.status is Status.UNAVAILABLE:
                    assert result.error is not None
                    self.unavailable[result.error.message] += 1
                self._bar.advance(self._task)
        killing.cancel()
        return statuses

    def _mixed(self, n: int) -> list[Call]:
        seed = self._rng.randrange(1 << 30)
        raw = load_calls(self._source)[:n] if self._source else sample_calls(n, seed)
        raw += raw[: n - len(raw)]
        for place in range(len(raw)):
            if raw[place].get("limits"):  # the mix's own endless loops: more often, but shorter
                raw[place]["limits"] = SHORT
            if self._rng.random() < CRUEL_SHARE:
                raw[place] = self._rng.choice(CRUEL)
        return [Call.decode(call) for call in raw]

    async def _abandon(self, client: AsyncClient, calls: Sequence[Call]) -> None:
        results = client.stream(calls)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                async for _ in results:
                    pass
        await results.aclose()
        self.abandoned += 1

    def _kill_a_zygote(self, at_rest: Sequence[int]) -> None:
        """One of the processes that were zygotes while no call ran."""
        zygotes = [pid for pid in at_rest if "zygote.py" in procs.command(pid)]
        if zygotes:
            self.killed += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._rng.choice(zygotes), signal.SIGKILL)


def grown(marks: Sequence[Holdings], settled: int) -> dict[str, list[float]]:
    """What there is more of at the end than at the first mark from `settled` on, as [then, at the end].

    The end is the smallest of the last three marks: a leak is in all of them.
    """
    later = [mark for mark in marks if mark.calls >= settled]
    base, last = later[0], later[1:][-3:] or later
    found: dict[str, list[float]] = {}
    for name, most in TOLERANCE.items():
        then, now = getattr(base, name), min(getattr(mark, name) for mark in last)
        if now > then + most:
            found[name] = [then, now]
    memory = min(mark.memory_mb for mark in last)
    if memory > base.memory_mb + max(MEMORY_MB, MEMORY_SHARE * base.memory_mb):
        found["memory_mb"] = [base.memory_mb, memory]
    return found


def holdings(server: service.Service, calls: int, leftovers: Leftovers) -> Holdings:
    pids = _at_rest(server)
    return Holdings(
        calls=calls,
        processes=len(pids),
        zombies=sum(procs.is_zombie(pid) for pid in pids),
        descriptors=sum(map(procs.descriptors, pids)),
        mounts=procs.mounts(os.getpid()) + sum(map(procs.mounts, pids)),
        cgroups=len(cgroups()),
        temporary_files=len(leftovers.files()),
        memory_mb=round(procs.pss_mb(pids), 1),
    )


def _at_rest(server: service.Service) -> list[int]:
    """The server's processes once they have been the same for a second, or after `REST_S` whatever they are."""
    give_up = time.monotonic() + REST_S
    pids, since = server.processes(), time.monotonic()
    while time.monotonic() < min(give_up, since + 1.0):
        time.sleep(0.1)
        if (now := server.processes()) != pids:
            pids, since = now, time.monotonic()
    return pids


def _show(figures: Mapping[str, Any]) -> None:
    marks = figures["marks"]
    names = list(marks[0])
    command.show("held by the server at rest", names, [[f"{mark[name]:,}" for name in names] for mark in marks])
    command.show("calls ended as", ("status", "calls"), figures["statuses"].items())
    for why, calls in figures["unavailable"].items():
        print(f"leaks: {calls} calls got no verdict: {why}", file=sys.stderr)
    for name, (then, now) in figures["grown"].items():
        print(f"leaks: {name} grew from {then:,} to {now:,}", file=sys.stderr)
    for line in figures["left_behind"]:
        print(f"leaks: left behind: {line}", file=sys.stderr)


def draw(axes: Any, figures: Mapping[str, Any]) -> None:
    """What a run printed as JSON, as a picture."""
    marks = figures["marks"]
    axes.plot([mark["calls"] for mark in marks], [mark["memory_mb"] for mark in marks], marker="o")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("calls")
    axes.set_ylabel("memory of the server at rest, MiB")


if __name__ == "__main__":
    sys.exit(main())
