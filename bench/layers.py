"""What a call costs, layer by layer: CPU and wall time from a bare fork up to a batch over HTTP.

    python -m bench.layers [--calls N] [--rounds R] [--profiles bare,numeric] [--json]

Every step is the one before and one thing more, on the same warm interpreter and the same code:

    floor       fork(2), compile and run the code with stdout on a memory file, exit; no isolation
    os.fork     the floor with Python's own os.fork, for comparison; later steps build on the floor
    namespaces  own PID, mount, IPC and UTS namespaces
    tmpfs       a private scratch folder
    identity    uid, capabilities, rlimits, no_new_privs
    seccomp     the system call filter
    groups      a control group that counts and bounds, entered, set and read; nothing where none can be made
    runner      the whole guest: script semantics, echo, report, output files, answer
    executor    the zygote's loop and the executor process, calls in frames
    http        the gateway too: HTTP in batches of 64 from a client on the same cores

CPU is everything that the service's side spends: the calls' own processes, as the kernel accounts them, and zygote,
executor and gateway by `sum_exec_runtime`; the client is left out. The first steps run on every core at once as the
last two do, since cores share caches and often more (`--at-once 1` runs them alone). Steps take turns within a round,
rounds are short and many, and medians over them are compared, so that what else the machine does hits all alike.
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
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import command as output
from bench.probes import processes
from bench.servers import service
from sandbox import jail, wire
from sandbox.client import AsyncClient
from sandbox.config import ZYGOTE_PROFILES, ExecutorConfig
from sandbox.errors import IsolationError
from sandbox.executor.call_state import CallRequest
from sandbox.executor.executor import GUEST_ENV
from sandbox.types import Call

CODES = {
    "bare": "print(1 + 1)\n",
    "numeric": "import numpy as np\nprint(np.linalg.det(np.array([[2.0, 1.0], [1.0, 3.0]])))\n",
    "symbolic": "from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6, x))\n",
    "scientific": "from scipy.optimize import fsolve\nprint(fsolve(lambda x: x**2 - 2, 1.0))\n",
}
IN_JAIL = ("floor", "os.fork", "namespaces", "tmpfs", "identity", "seccomp", "groups", "runner")
STEPS = (*IN_JAIL, "executor", "http")
AT_MOST = 1.6
"""CPU of a call over HTTP as a multiple of os.fork, run and exit of the same zygote: what the project promises. Held
against the floor too, which is lower (fork by machine code), and reported."""
RATIOS = {"os.fork": "ratio_os_fork", "floor": "ratio"}
BATCH = 64
WAIT_S = 120.0
_LENGTHS = struct.Struct("<II")
FIRST_JAIL = 900
"""Jails of servers that run beside us count from 0; ours take other uids."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds per call. Where they were taken: `ticks_cpu_ms` is the CPU again, by clock tick over the whole tree,
    and `faults` the page faults of call and zygote: what a fork shares is copied when it is first written to."""

    cpu_ms: float
    wall_ms: float
    ticks_cpu_ms: float | None = None
    faults: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """The measurement; 1 if a profile's whole cost is over `AT_MOST` times that with os.fork."""
    args = _parser().parse_args(argv)
    return output.run_as_command("layers", lambda: _measure(args))


def _parser() -> argparse.ArgumentParser:
    parser = output.parser("layers", __doc__ or "")
    parser.add_argument("--calls", type=output.count, default=64, help="calls per step and round (default: 64)")
    parser.add_argument("--rounds", type=output.count, default=25, help="rounds (default: 25)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--at-once", type=output.count, default=cores, help="zygotes that fork at once (default: cores)"
    )
    parser.add_argument("--profiles", type=_profiles, default=tuple(CODES), help="of " + ",".join(CODES))
    help = f"exit 1 if a call costs more times os.fork, run and exit (default: {AT_MOST:g})"
    parser.add_argument("--at-most", type=float, default=AT_MOST, help=help)
    return parser


def _profiles(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(CODES):
        raise argparse.ArgumentTypeError(f"unknown profile {min(unknown)!r}; expected some of {', '.join(CODES)}")
    return names


def _measure(args: argparse.Namespace) -> int:
    if jail.choose_level("auto").level is not jail.Level.NAMESPACES:
        raise output.BenchFailed("expected isolation=namespaces on this machine; see `rstar-sandbox doctor`")
    python = service.guest_python(args.python)
    costs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    with ExitStack() as stack:
        jails = {
            name: [stack.enter_context(_jail(python, name, number)) for number in range(args.at_once)]
            for name in args.profiles
        }
        executor = stack.enter_context(_executor(python))
        server = stack.enter_context(service.running(python))
        bar = stack.enter_context(output.progress())
        task = bar.add_task("steps", total=(args.rounds + 1) * len(args.profiles) * len(STEPS))
        for turn in range(args.rounds + 1):  # the first warms everything up and is not counted
            for name in args.profiles:
                for step, cost in _round(jails[name], executor, server, name, args.calls if turn else BATCH):
                    bar.advance(task)
                    if turn:
                        costs[name, step].append(cost)
    figures = summarise(costs, args)
    _show(figures)
    output.plot(args.plot, lambda axes: draw(axes, figures))
    output.finish(figures, _parser(), args)
    return 0 if figures["holds"] else 1


def _round(
    jails: Sequence[_Jail], executor: _Executor, server: service.Service, profile: str, calls: int
) -> Iterator[tuple[str, Cost]]:
    for step in IN_JAIL:
        for guest in jails:
            guest.start(step, CODES[profile], -(-calls // len(jails)))
        costs = [guest.cost(step) for guest in jails]
        wall_ms = _mean(cost.wall_ms for cost in costs) / len(jails)
        yield (
            step,
            Cost(_mean(cost.cpu_ms for cost in costs), wall_ms, faults=_mean(cost.faults or 0 for cost in costs)),
        )
    yield "executor", executor.measure(CODES[profile], calls)
    yield "http", asyncio.run(_over_http(server, CODES[profile], calls))


def summarise(costs: Mapping[tuple[str, str], Sequence[Cost]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians per step, what each adds, and the ratios to both floors (medians of each round's own ratio)."""
    profiles: dict[str, Any] = {}
    for name in args.profiles:
        floor = [cost.cpu_ms for cost in costs[name, "floor"]]
        steps = {}
        for step in STEPS:
            taken = costs[name, step]
            steps[step] = {
                "cpu_ms": output.median(cost.cpu_ms for cost in taken),
                "wall_ms": output.median(cost.wall_ms for cost in taken),
                "floors": output.median(cost.cpu_ms / least for cost, least in zip(taken, floor, strict=True)),
            }
            for extra in ("ticks_cpu_ms", "faults"):
                if values := [value for cost in taken if (value := getattr(cost, extra)) is not None]:
                    steps[step][extra] = output.median(values)
        os_fork = zip(costs[name, "http"], costs[name, "os.fork"], strict=True)
        profiles[name] = {
            "steps": steps,
            "ratio": steps["http"]["floors"],
            "ratio_os_fork": output.median(whole.cpu_ms / least.cpu_ms for whole, least in os_fork),
        }
    over = {
        floor: [name for name, profile in profiles.items() if profile[ratio] > args.at_most]
        for floor, ratio in RATIOS.items()
    }
    return {
        "bench": "layers",
        "calls": args.calls,
        "rounds": args.rounds,
        "at_once": args.at_once,
        "at_most": args.at_most,
        "over": over,
        "holds": not over["os.fork"],
        "profiles": profiles,
    }


class _Jail:
    """A jail with a measuring zygote of one profile, and our end of its socket."""

    def __init__(self, sock: socket.socket, plan: Mapping[str, Any], groups: jail.CgroupTree | None) -> None:
        self._sock = sock
        self._plan = plan
        self._groups = groups
        self._calls = 0
        self._received = b""

    def configure(self, profile: str, process: subprocess.Popen[bytes]) -> None:
        self._sock.sendall(_frame({"op": "configure", "plan": self._plan, "profile": profile, "blobs": []}))
        header = self._receive()
        if header["op"] != "ready":
            raise output.BenchFailed(f"expected ready from the measuring zygote, got {header}")
        for door in self._groups.open_procs_files(0) if self._groups else ():
            socket.send_fds(self._sock, [_frame({"op": "cgroup_procs", "slot": 0, "blobs": []})], [door])
            os.close(door)
        pages = max(_mapped_pages(pid) for pid in processes.tree(process.pid))
        space = pages * os.sysconf("SC_PAGE_SIZE")
        self._sock.sendall(_frame({"op": "start", "address_space_bytes": space, "report_after_s": WAIT_S, "blobs": []}))

    def start(self, step: str, code: str, calls: int) -> None:
        """Have it run `calls` calls as far as `step`."""
        order = _first_frame(CallRequest.decode(0, {"code": code}).encode_start(1, 0))
        assert order is not None
        header, body, _ = order
        measure = {**header, "op": "measure", "step": step, "calls": calls, "plan": self._plan}
        self._calls = calls
        self._sock.sendall(_frame(measure, body))

    def cost(self, step: str) -> Cost:
        """What those calls have cost. Raises `BenchFailed` if one failed."""
        took, calls = self._receive(), self._calls
        if took["op"] != "measured":
            raise output.BenchFailed(f"{step}: expected measured, got {took}")
        if took["failed"]:
            raise output.BenchFailed(f"{step}: {took['failed']} of {calls} calls failed")
        cpu_ms = (took["cpu_ms"] + took["own_cpu_ms"]) / calls
        if step == "groups" and self._groups:
            cpu_ms += _set_and_read(self._groups.cgroup(0), calls)
        return Cost(cpu_ms, took["wall_ms"] / calls, faults=took["faults"] / calls)

    def _receive(self) -> dict[str, Any]:
        while (frame := _first_frame(self._received)) is None:
            _wait_readable(self._sock)
            data = self._sock.recv(1 << 16)
            if not data:
                raise output.BenchFailed("the measuring zygote ended; what it printed is above")
            self._received += data
        header, _, self._received = frame
        return header


def _set_and_read(group: jail.SlotCgroup, calls: int) -> float:
    """Milliseconds of CPU, as the executor spends them on each call."""
    start = time.process_time_ns()
    for _ in range(calls):
        group.set_limits(1 << 30, 64)
        group.read_usage()
        if not group.is_empty:
            raise output.BenchFailed("expected an empty group, but a process is in it")
    return (time.process_time_ns() - start) / 1e6 / calls


@contextmanager
def _groups() -> Iterator[jail.CgroupTree | None]:
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
    """The guest's own code in a jail of its own, with the measuring zygote in the place of the zygote."""
    with tempfile.TemporaryDirectory(prefix="bench-layers-") as folder, _groups() as groups:
        for path in (*jail.GUEST_SOURCE_DIR.glob("*.py"), Path(__file__).parent / "servers" / "layers_guest.py"):
            shutil.copy(path, folder)
        place = FIRST_JAIL + number * len(CODES) + list(CODES).index(profile)
        base, count = jail.host_uids(place, 1)
        interpreter = jail.Interpreter.find(python)
        argv = ("/python/bin/python3", "-s", "-B", "/guest/layers_guest.py", "--fd", "{fd}")
        spec = jail.JailSpec(
            jail.Level.NAMESPACES, interpreter, folder, env=GUEST_ENV, argv=argv, uid_base=base, uid_count=count
        )
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(jail.launch_argv(spec, theirs.fileno()), pass_fds=[theirs.fileno()])
            try:
                guest = _Jail(ours, jail.confinement_plan(spec), groups)
                guest.configure(profile, process)
                yield guest
            finally:
                process.kill()
                process.wait()


class _Executor:
    """The executor process, driven as the gateway drives it."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._sock = sock
        self._pid = pid
        self._unpacker = wire.Unpacker()
        self._numbers = iter(range(1, 1 << 60))

    def wait_ready(self, settings: Mapping[str, Any]) -> None:
        self._sock.sendall(wire.pack(["configure", dict(settings)]))
        while (message := self._receive())[0] != "ready":
            if message[0] == "failed":
                raise output.BenchFailed(f"the executor did not start: {message[1]}")

    def measure(self, code: str, calls: int) -> Cost:
        """Send `calls` calls in frames of 64 and take their results."""
        numbers = [next(self._numbers) for _ in range(calls)]
        packed = [
            wire.pack(["calls", [[n, {"code": code}] for n in numbers[start : start + BATCH]]])
            for start in range(0, calls, BATCH)
        ]
        meter, start = processes.Meter(self._pid), time.perf_counter()
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
                raise output.BenchFailed("the executor ended; what it printed is above")
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
            ours.close()  # it ends by itself
            try:
                process.wait(service.STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _over_http(server: service.Service, code: str, calls: int) -> Cost:
    async with AsyncClient(server.url, batch_size=BATCH) as client:
        await client.execute("pass")  # the connection is there before the clock starts
        meter, start = processes.Meter(server.pid), time.perf_counter()
        results = await client.run_batch([Call(code)] * calls)
        wall_s = time.perf_counter() - start
    return _cost(meter, wall_s, [(result.status.value, result.usage.cpu_ms) for result in results])


def _cost(meter: processes.Meter, wall_s: float, calls: Sequence[tuple[str, float]]) -> Cost:
    """What `calls` (status, CPU ms) have cost each: their own as the zygote had it from the kernel, by the microsecond,
    and the service's. Raises `BenchFailed` if one did not end well."""
    own_s, whole_s, n = meter.own_s(), meter.whole_s(), len(calls)
    if bad := [status for status, _ in calls if status != "ok"]:
        raise output.BenchFailed(f"{len(bad)} of {n} calls ended as {bad[0]}, expected ok")
    cpu_ms = own_s * 1e3 + sum(cpu_ms for _, cpu_ms in calls)
    return Cost(cpu_ms / n, wall_s * 1e3 / n, whole_s * 1e3 / n)


def _frame(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """As `guest/frames.py` reads it."""
    head = marshal.dumps(dict(header), 2)
    return _LENGTHS.pack(len(head), len(body)) + head + body


def _first_frame(data: bytes) -> tuple[dict[str, Any], bytes, bytes] | None:
    """(header, body, what comes after) of the first frame, ours or the guest's, if it is whole."""
    if len(data) < _LENGTHS.size:
        return None
    head_size, body_size = _LENGTHS.unpack_from(data)
    body = _LENGTHS.size + head_size
    end = body + body_size
    if len(data) < end:
        return None
    head = data[_LENGTHS.size : body]
    return json.loads(head) if head[:2] == b'{"' else marshal.loads(head), data[body:end], data[end:]


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _wait_readable(sock: socket.socket) -> None:
    if not select.select([sock], [], [], WAIT_S)[0]:
        raise output.BenchFailed(f"no answer within {WAIT_S:g} s")


def _mapped_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    except OSError:
        return 0


def _show(figures: Mapping[str, Any]) -> None:
    for name, profile in figures["profiles"].items():
        rows, before = [], 0.0
        for step, cost in profile["steps"].items():
            added = "" if step == "os.fork" else f"{cost['cpu_ms'] - before:+.2f}"
            before = before if step == "os.fork" else cost["cpu_ms"]
            faults = f"{cost['faults']:.0f}" if "faults" in cost else None
            numbers = (f"{cost[unit]:.2f}" for unit in ("wall_ms", "floors"))
            rows.append((step, f"{cost['cpu_ms']:.2f}", added, *numbers, faults))
        found = (f"{profile[ratio]:.2f} times the {floor}" for floor, ratio in RATIOS.items())
        output.show(f"{name}: {', '.join(found)}", ("step", "CPU ms", "added", "wall ms", "floors", "faults"), rows)
    for floor, over in figures["over"].items():
        verdict = f"missed by {', '.join(over)}" if over else "holds for all"
        print(f"layers: at most {figures['at_most']:g} times the {floor}: {verdict}", file=sys.stderr)


def draw(axes: Any, figures: Mapping[str, Any]) -> None:
    """What a run printed as JSON: one bar per profile, stacked by what each step adds."""
    steps = {name: profile["steps"] for name, profile in figures["profiles"].items()}
    names = list(steps)
    bottom = [0.0] * len(names)
    for step in (step for step in STEPS if step != "os.fork"):
        tops = [its[step]["cpu_ms"] / its["os.fork"]["cpu_ms"] for its in steps.values()]
        added = [max(0.0, top - low) for top, low in zip(tops, bottom, strict=True)]
        axes.bar(names, added, bottom=bottom, label=step)
        bottom = [low + more for low, more in zip(bottom, added, strict=True)]
    axes.axhline(AT_MOST, linestyle="--", color="gray")
    axes.set_ylabel("CPU per call, os.fork, run and exit = 1")
    axes.legend()


assert set(ZYGOTE_PROFILES) == set(CODES)

if __name__ == "__main__":
    sys.exit(main())
