"""What does each layer of a call cost: CPU and wall time from a bare fork up to a batch over HTTP?

    python -m bench.layers [--calls N] [--rounds R] [--profiles bare,numeric] [--json]

Every step adds one thing to the step before, with the same warm interpreter and the same code:

    floor       fork(2), compile and run the code with stdout on a memory file, exit; no isolation
    os.fork     the floor with Python's own os.fork, for comparison; later steps build on the floor
    namespaces  own PID, mount, IPC and UTS namespaces
    tmpfs       a private scratch directory
    identity    uid, capabilities, rlimits, no_new_privs
    seccomp     the system call filter
    groups      a control group with limits, entered, set and read; nothing where none can be created
    runner      the whole guest: script semantics, echo, report, output files, result
    executor    the zygote's loop and the executor process, calls in frames
    http        the gateway too: HTTP in batches of 64 from a client on the same cores

The CPU time is that of the service's side: the calls' own processes, as the kernel accounts for them, and zygote,
executor and gateway by `sum_exec_runtime`; the client is left out. The steps in the jail run on every core at once, as
the last two do, since cores share caches and often more (`--in-flight 1` runs them alone). Steps take turns within a
round, rounds are short and many, and medians over rounds are compared, so that what else the machine does hits all
steps alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import marshal
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness import tables as harness_tables
from bench.harness.rounds import median_of_ratios
from bench.harness.statistics import median
from bench.harness.tables import Block, Result, Table
from bench.probes import processes
from bench.servers import service
from bench.workloads.code_kinds import PROFILE_CODES
from sandbox import jail, wire
from sandbox.client import AsyncClient
from sandbox.config import ZYGOTE_PROFILES, ExecutorConfig
from sandbox.errors import IsolationError
from sandbox.executor.call_state import CallRequest
from sandbox.executor.executor import GUEST_ENV
from sandbox.types import Call

IN_JAIL = ("floor", "os.fork", "namespaces", "tmpfs", "identity", "seccomp", "groups", "runner")
STEPS = (*IN_JAIL, "executor", "http")
MAX_RATIO = 1.6
"""Promised bound on the CPU of a call over HTTP, as a multiple of os.fork, run and exit of the same zygote. The ratio
to the floor, which is lower (fork by machine code), is reported only."""
RATIOS = {"os.fork": "ratio_os_fork", "floor": "ratio"}
BATCH = 64
WAIT_S = 120.0
_LENGTHS = struct.Struct("<II")
FIRST_JAIL = 900
"""Number of the first jail here. Jails of servers count from 0, and jails with equal numbers share uids."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds per call."""

    cpu_ms: float
    wall_ms: float
    ticks_cpu_ms: float | None = None
    """The CPU time again, in clock ticks over the whole process tree. None inside the jail."""
    faults: float | None = None
    """Page faults of call and zygote: a fork's shared pages are copied on first write. None outside the jail."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement; exit code 1 if a profile's ratio to os.fork exceeds `--at-most`."""
    parser = _parser()
    return command.run_benchmark(parser, parser.parse_args(argv), _measure, tables, draw)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("layers", __doc__)
    arguments.add_python(parser)
    arguments.add_in_flight(parser, len(os.sched_getaffinity(0)), "zygotes that fork, or calls,")
    parser.add_argument("--calls", type=arguments.count, default=64, help="calls per step and round (default: 64)")
    parser.add_argument("--rounds", type=arguments.count, default=25, help="rounds (default: 25)")
    names = ",".join(PROFILE_CODES)
    profiles = arguments.names_of(PROFILE_CODES)
    parser.add_argument("--profiles", type=profiles, default=tuple(PROFILE_CODES), help=f"of {names}")
    parser.add_argument("--at-most", type=float, default=MAX_RATIO, help=f"bound on the ratio (default: {MAX_RATIO:g})")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if jail.choose_level("auto").level is not jail.Level.NAMESPACES:
        raise command.BenchFailed("expected isolation=namespaces on this machine; see `rstar-sandbox doctor`")
    python = service.guest_python(args.python)
    costs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    with ExitStack() as stack:
        jails = {
            name: [stack.enter_context(_jail(python, name, number)) for number in range(args.in_flight)]
            for name in args.profiles
        }
        executor = stack.enter_context(_executor(python))
        server = stack.enter_context(service.running(python))
        bar = stack.enter_context(command.progress())
        task = bar.add_task("steps", total=(args.rounds + 1) * len(args.profiles) * len(STEPS))
        for turn in range(args.rounds + 1):  # the first round warms up and is not counted
            for name in args.profiles:
                for step, cost in _round(jails[name], executor, server, name, args.calls if turn else BATCH):
                    bar.advance(task)
                    if turn:
                        costs[name, step].append(cost)
    result = summarize(costs, args)
    harness_tables.show(_step_tables(result))
    return result


def _round(
    jails: Sequence[_Jail], executor: _Executor, server: service.Service, profile: str, calls: int
) -> Iterator[tuple[str, Cost]]:
    for step in IN_JAIL:
        for guest in jails:
            guest.start(step, PROFILE_CODES[profile], -(-calls // len(jails)))
        costs = [guest.cost(step) for guest in jails]
        wall_ms = fmean(cost.wall_ms for cost in costs) / len(jails)
        yield (
            step,
            Cost(fmean(cost.cpu_ms for cost in costs), wall_ms, faults=fmean(cost.faults or 0 for cost in costs)),
        )
    yield "executor", executor.measure(PROFILE_CODES[profile], calls)
    yield "http", asyncio.run(_over_http(server, PROFILE_CODES[profile], calls))


def summarize(costs: Mapping[tuple[str, str], Sequence[Cost]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians per step, and the ratios of the last step to both forks (medians of each round's own ratio)."""
    profiles: dict[str, Any] = {}
    for name in args.profiles:
        floor = costs[name, "floor"]
        steps = {}
        for step in STEPS:
            rows = costs[name, step]
            steps[step] = {
                "cpu_ms": median(cost.cpu_ms for cost in rows),
                "wall_ms": median(cost.wall_ms for cost in rows),
                "floors": round(median_of_ratios(rows, floor, _cpu_ratio), 3),
            }
            for extra in ("ticks_cpu_ms", "faults"):
                if values := [value for cost in rows if (value := getattr(cost, extra)) is not None]:
                    steps[step][extra] = median(values)
        profiles[name] = {
            "steps": steps,
            "ratio": steps["http"]["floors"],
            "ratio_os_fork": round(median_of_ratios(costs[name, "http"], costs[name, "os.fork"], _cpu_ratio), 3),
        }
    return {
        "bench": "layers",
        "calls": args.calls,
        "rounds": args.rounds,
        "in_flight": args.in_flight,
        "max_ratio": args.at_most,
        "profiles": profiles,
        "requirements": [
            requirements.at_most(f"CPU of a {name} call over os.fork, run and exit", args.at_most, row["ratio_os_fork"])
            for name, row in profiles.items()
        ],
    }


def _cpu_ratio(cost: Cost, base: Cost) -> float:
    return cost.cpu_ms / base.cpu_ms


class _Jail:
    """A jail with a measuring zygote of one profile."""

    def __init__(self, sock: socket.socket, plan: Mapping[str, Any], cgroups: jail.CgroupTree | None) -> None:
        self._sock = sock
        self._plan = plan
        self._cgroups = cgroups
        self._calls = 0
        self._received = b""

    def configure(self, profile: str, process: subprocess.Popen[bytes]) -> None:
        self._sock.sendall(_frame({"op": "configure", "plan": self._plan, "profile": profile, "blobs": []}))
        header = self._receive()
        if header["op"] != "ready":
            raise command.BenchFailed(f"expected ready from the measuring zygote, got {header}")
        for procs_fd in self._cgroups.open_procs_files(0) if self._cgroups else ():
            socket.send_fds(self._sock, [_frame({"op": "cgroup_procs", "slot": 0, "blobs": []})], [procs_fd])
            os.close(procs_fd)
        pages = max(_mapped_pages(pid) for pid in processes.tree(process.pid))
        space = pages * os.sysconf("SC_PAGE_SIZE")
        self._sock.sendall(_frame({"op": "start", "address_space_bytes": space, "report_after_s": WAIT_S, "blobs": []}))

    def start(self, step: str, code: str, calls: int) -> None:
        """Start `calls` calls that go as far as `step`."""
        order = _first_frame(CallRequest.decode(0, {"code": code}).encode_start(1, 0))
        assert order is not None
        header, body, _ = order
        measure = {**header, "op": "measure", "step": step, "calls": calls, "plan": self._plan}
        self._calls = calls
        self._sock.sendall(_frame(measure, body))

    def cost(self, step: str) -> Cost:
        """The cost of those calls. Raises `BenchFailed` if one failed."""
        took, calls = self._receive(), self._calls
        if took["op"] != "measured":
            raise command.BenchFailed(f"{step}: expected measured, got {took}")
        if took["failed"]:
            raise command.BenchFailed(f"{step}: {took['failed']} of {calls} calls failed")
        cpu_ms = (took["cpu_ms"] + took["own_cpu_ms"]) / calls
        if step == "groups" and self._cgroups:
            cpu_ms += _set_and_read(self._cgroups.cgroup(0), calls)
        return Cost(cpu_ms, took["wall_ms"] / calls, faults=took["faults"] / calls)

    def _receive(self) -> dict[str, Any]:
        while (frame := _first_frame(self._received)) is None:
            _wait_readable(self._sock)
            data = self._sock.recv(1 << 16)
            if not data:
                raise command.BenchFailed("the measuring zygote ended; its output is above")
            self._received += data
        header, _, self._received = frame
        return header


def _set_and_read(group: jail.SlotCgroup, calls: int) -> float:
    """CPU milliseconds that the executor spends on the control group of one call."""
    start = time.process_time_ns()
    for _ in range(calls):
        group.set_limits(1 << 30, 64)
        group.read_usage()
        if not group.is_empty:
            raise command.BenchFailed("expected an empty group, but a process is in it")
    return (time.process_time_ns() - start) / 1e6 / calls


@contextmanager
def _cgroups() -> Iterator[jail.CgroupTree | None]:
    try:
        tree = jail.CgroupTree()
    except IsolationError:
        yield None
        return
    try:
        yield tree
    finally:
        tree.close()


@contextmanager
def _jail(python: str, profile: str, number: int) -> Iterator[_Jail]:
    """A jail with the guest's code, where the measuring zygote replaces the zygote."""
    with tempfile.TemporaryDirectory(prefix="bench-layers-") as directory, _cgroups() as cgroups:
        for path in (*jail.GUEST_SOURCE_DIR.glob("*.py"), Path(__file__).parent / "servers" / "layers_guest.py"):
            shutil.copy(path, directory)
        jail_number = FIRST_JAIL + number * len(PROFILE_CODES) + list(PROFILE_CODES).index(profile)
        base, count = jail.host_uids(jail_number, 1)
        interpreter = jail.Interpreter.find(python)
        argv = ("/python/bin/python3", "-s", "-B", "/guest/layers_guest.py", "--fd", "{fd}")
        spec = jail.JailSpec(
            jail.Level.NAMESPACES, interpreter, directory, env=GUEST_ENV, argv=argv, uid_base=base, uid_count=count
        )
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(jail.launch_argv(spec, theirs.fileno()), pass_fds=[theirs.fileno()])
            try:
                guest = _Jail(ours, jail.confinement_plan(spec), cgroups)
                guest.configure(profile, process)
                yield guest
            finally:
                process.kill()
                process.wait()


class _Executor:
    """An executor process that gets the same frames as from the gateway."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._sock = sock
        self._pid = pid
        self._unpacker = wire.Unpacker()
        self._numbers = iter(range(1, 1 << 60))

    def wait_ready(self, settings: Mapping[str, Any]) -> None:
        self._sock.sendall(wire.pack(["configure", dict(settings)]))
        while (message := self._receive())[0] != "ready":
            if message[0] == "failed":
                raise command.BenchFailed(f"the executor did not start: {message[1]}")

    def measure(self, code: str, calls: int) -> Cost:
        """Send `calls` calls in frames of 64 and wait for their results."""
        numbers = [next(self._numbers) for _ in range(calls)]
        packed = [
            wire.pack(["calls", [[n, {"code": code}] for n in numbers[start : start + BATCH]]])
            for start in range(0, calls, BATCH)
        ]
        meter, start = processes.CpuMeter(self._pid), time.perf_counter()
        self._sock.sendall(b"".join(packed))
        results: list[dict[str, Any]] = []
        while len(results) < calls:
            kind, *rest = self._receive()
            if kind == "results":
                results += [result for _, result in rest[0]]
        wall_s = time.perf_counter() - start
        return _cost(meter, wall_s, [(result["status"], result["usage"]["cpu_ms"]) for result in results])

    def _receive(self) -> list[Any]:
        while True:
            for message in self._unpacker:
                return message
            _wait_readable(self._sock)
            data = self._sock.recv(1 << 18)
            if not data:
                raise command.BenchFailed("the executor ended; its output is above")
            self._unpacker.feed(data)


@contextmanager
def _executor(python: str) -> Iterator[_Executor]:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-m", "sandbox.executor", "--fd", str(fd)]
            process = subprocess.Popen(command, pass_fds=[fd], start_new_session=True, stdin=subprocess.DEVNULL)
        try:
            executor = _Executor(ours, process.pid)
            executor.wait_ready(ExecutorConfig(python=python, isolation=jail.Level.NAMESPACES.value).encode())
            yield executor
        finally:
            ours.close()  # the executor ends when its socket is closed
            try:
                process.wait(service.STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _over_http(server: service.Service, code: str, calls: int) -> Cost:
    async with AsyncClient(server.url, batch_size=BATCH) as client:
        await client.execute("pass")  # connect before the clock starts
        meter, start = processes.CpuMeter(server.pid), time.perf_counter()
        results = await client.run_batch([Call(code)] * calls)
        wall_s = time.perf_counter() - start
    return _cost(meter, wall_s, [(result.status.value, result.usage.cpu_ms) for result in results])


def _cost(meter: processes.CpuMeter, wall_s: float, calls: Sequence[tuple[str, float]]) -> Cost:
    """The cost per call of `calls`, each a status and the CPU ms of its own processes. Raises `BenchFailed` if a call
    did not end as `ok`."""
    own_s, total_s, n = meter.own_s(), meter.total_s(), len(calls)
    if bad := [status for status, _ in calls if status != "ok"]:
        raise command.BenchFailed(f"{len(bad)} of {n} calls ended as {bad[0]}, expected ok")
    cpu_ms = own_s * 1e3 + sum(cpu_ms for _, cpu_ms in calls)
    return Cost(cpu_ms / n, wall_s * 1e3 / n, total_s * 1e3 / n)


def _frame(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """A frame in the format of `guest/frames.py`."""
    head = marshal.dumps(dict(header), 2)
    return _LENGTHS.pack(len(head), len(body)) + head + body


def _first_frame(data: bytes) -> tuple[dict[str, Any], bytes, bytes] | None:
    """(header, body, remaining bytes) of the first frame; None if it is incomplete. Guest frames have JSON headers."""
    if len(data) < _LENGTHS.size:
        return None
    head_size, body_size = _LENGTHS.unpack_from(data)
    body = _LENGTHS.size + head_size
    end = body + body_size
    if len(data) < end:
        return None
    head = data[_LENGTHS.size : body]
    return json.loads(head) if head[:2] == b'{"' else marshal.loads(head), data[body:end], data[end:]


def _wait_readable(sock: socket.socket) -> None:
    if not select.select([sock], [], [], WAIT_S)[0]:
        raise command.BenchFailed(f"no answer within {WAIT_S:g} s")


def _mapped_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    except OSError:
        return 0


def _step_tables(result: Result) -> list[Block]:
    """The cost of every step, a table for each profile."""
    blocks: list[Block] = []
    for name, profile in result["profiles"].items():
        rows, before = [], 0.0
        for step, cost in profile["steps"].items():
            added = "" if step == "os.fork" else f"{cost['cpu_ms'] - before:+.2f}"
            before = before if step == "os.fork" else cost["cpu_ms"]
            faults = f"{cost['faults']:.0f}" if "faults" in cost else "-"
            row = (f"{cost['cpu_ms']:.2f}", added, f"{cost['wall_ms']:.2f}", f"{cost['floors']:.2f}", faults)
            rows.append((step, *row))
        blocks.append(Table(("step", "CPU ms", "added", "wall ms", "floors", "faults"), rows, name))
    return blocks


def tables(result: Result) -> list[Block]:
    """A row for each profile, and which profiles stay below the bound."""
    columns = (
        "warm interpreter",
        "fork, run, exit: CPU ms",
        "by os.fork",
        "whole call, over HTTP",
        "ratio",
        "to os.fork",
    )
    rows = []
    for name, profile in result["profiles"].items():
        costs = (f"{profile['steps'][step]['cpu_ms']:.2f}" for step in ("floor", "os.fork", "http"))
        rows.append((name, *costs, f"{profile['ratio']:.2f}×", f"{profile['ratio_os_fork']:.2f}×"))
    bounds = []
    for fork, ratio in (("by os.fork", "ratio_os_fork"), ("by the cheapest fork", "ratio")):
        above = [name for name, profile in result["profiles"].items() if profile[ratio] > MAX_RATIO]
        bounds.append(f"{fork}: {'all but ' + ', '.join(above) if above else 'all'}")
    return [Table(columns, rows), f"At most {MAX_RATIO:g} times fork, run and exit {'; '.join(bounds)}."]


def draw(axes: Any, result: Result) -> None:
    """A bar for each profile, stacked by the cost that each step adds."""
    profiles = {name: profile["steps"] for name, profile in result["profiles"].items()}
    bottom = [0.0] * len(profiles)
    for step in (step for step in STEPS if step != "os.fork"):
        tops = [steps[step]["cpu_ms"] / steps["os.fork"]["cpu_ms"] for steps in profiles.values()]
        added = [max(0.0, top - low) for top, low in zip(tops, bottom, strict=True)]
        axes.bar(list(profiles), added, bottom=bottom, label=step)
        bottom = [low + height for low, height in zip(bottom, added, strict=True)]
    axes.axhline(MAX_RATIO, linestyle="--", color="gray")
    axes.set_ylabel("CPU per call; os.fork, run and exit = 1")
    axes.legend()


assert set(ZYGOTE_PROFILES) == set(PROFILE_CODES)

if __name__ == "__main__":
    sys.exit(main())
