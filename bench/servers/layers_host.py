"""The processes that `bench.layers` measures, seen from the host: a jail with a measuring zygote, and an executor.

Both are started without a gateway and get the frames that they get in a server.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.command import BenchFailed
from bench.probes import processes
from bench.servers import service
from bench.workloads.code_kinds import PROFILE_CODES
from sandbox import jail, wire
from sandbox.errors import IsolationError
from sandbox.executor import zygote_frames
from sandbox.executor.call_state import CallRequest
from sandbox.executor.executor import GUEST_ENV
from sandbox.settings.server import ExecutorConfig

BATCH = 64
"""Calls in a frame to the executor, and in a request over HTTP."""
ANSWER_TIMEOUT_S = 120.0
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
    """Page faults of call and zygote, most of them first writes to pages that they share. None outside the jail."""


def cost_of(meter: processes.CpuMeter, wall_s: float, calls: Sequence[tuple[str, float]]) -> Cost:
    """The cost per call of `calls`, each given as its status and the CPU milliseconds of its own processes.

    Raises `BenchFailed` if a call did not end as `ok`.
    """
    own_s, total_s, n = meter.own_s(), meter.total_s(), len(calls)
    if bad := [status for status, _ in calls if status != "ok"]:
        raise BenchFailed(f"{len(bad)} of {n} calls ended as {bad[0]}, expected ok")
    cpu_ms = own_s * 1e3 + sum(cpu_ms for _, cpu_ms in calls)
    return Cost(cpu_ms / n, wall_s * 1e3 / n, total_s * 1e3 / n)


class MeasuringJail:
    """A jail with a measuring zygote (`bench.servers.layers_guest`) of one profile."""

    def __init__(self, sock: socket.socket, plan: Mapping[str, Any], cgroups: jail.CgroupTree | None) -> None:
        self._sock = sock
        self._plan = plan
        self._cgroups = cgroups
        self._calls = 0
        self._unpacker = zygote_frames.Unpacker()

    def configure(self, profile: str, process: subprocess.Popen[bytes]) -> None:
        """Warm the zygote up and give it the control group of its slot."""
        self._send({"op": "configure", "plan": self._plan, "profile": profile})
        self._receive("ready")
        for procs_fd in self._cgroups.open_procs_files(0) if self._cgroups else ():
            socket.send_fds(self._sock, [zygote_frames.pack({"op": "cgroup_procs", "slot": 0})], [procs_fd])
            os.close(procs_fd)
        pages = max(_mapped_pages(pid) for pid in processes.tree(process.pid))
        space = pages * os.sysconf("SC_PAGE_SIZE")
        self._send({"op": "start", "address_space_bytes": space, "report_after_s": ANSWER_TIMEOUT_S})

    def start(self, step: str, code: str, calls: int) -> None:
        """Start `calls` calls that go as far as `step`."""
        self._calls = calls
        call_frame = CallRequest.decode(0, {"code": code}).encode_start(1, 0)
        self._send({"op": "measure", "step": step, "calls": calls}, call_frame)

    def cost(self, step: str) -> Cost:
        """Wait for those calls and return their cost. Raises `BenchFailed` if one failed."""
        measured, calls = self._receive("measured"), self._calls
        if measured["failed"]:
            raise BenchFailed(f"{step}: {measured['failed']} of {calls} calls failed")
        cpu_ms = (measured["cpu_ms"] + measured["own_cpu_ms"]) / calls
        if step == "groups" and self._cgroups:
            cpu_ms += _cgroup_cpu_ms(self._cgroups.cgroup(0), calls)
        return Cost(cpu_ms, measured["wall_ms"] / calls, faults=measured["faults"] / calls)

    def _send(self, header: dict[str, Any], *blobs: bytes) -> None:
        self._sock.sendall(zygote_frames.pack(header, blobs))

    def _receive(self, expected: str) -> dict[str, Any]:
        while not (headers := [header for header, _ in self._unpacker]):
            self._unpacker.feed(_receive_bytes(self._sock, "measuring zygote"))
        (header,) = headers
        if header["op"] != expected:
            raise BenchFailed(f"expected {expected} from the measuring zygote, got {header}")
        return header


@contextmanager
def measuring_jail(python: str, profile: str, number: int) -> Iterator[MeasuringJail]:
    """A jail with the guest's code, where the measuring zygote replaces the zygote."""
    with tempfile.TemporaryDirectory(prefix="bench-layers-") as directory, _cgroups() as cgroups:
        for path in (*jail.GUEST_SOURCE_DIR.glob("*.py"), Path(__file__).with_name("layers_guest.py")):
            shutil.copy(path, directory)
        jail_number = FIRST_JAIL + number * len(PROFILE_CODES) + list(PROFILE_CODES).index(profile)
        base, count = jail.host_uids(jail_number, 1)
        interpreter = jail.Interpreter.find(python)
        argv = ("/python/bin/python3", "-s", "-B", "/guest/layers_guest.py", "--fd", "{fd}")
        spec = jail.JailSpec(
            jail.Level.NAMESPACES, interpreter, directory, env=GUEST_ENV, argv=argv, uid_base=base, uid_count=count
        )
        own_end, jail_end = socket.socketpair()
        with own_end:
            with jail_end:
                process = subprocess.Popen(jail.launch_argv(spec, jail_end.fileno()), pass_fds=[jail_end.fileno()])
            try:
                guest = MeasuringJail(own_end, jail.confinement_plan(spec), cgroups)
                guest.configure(profile, process)
                yield guest
            finally:
                process.kill()
                process.wait()


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


def _cgroup_cpu_ms(cgroup: jail.SlotCgroup, calls: int) -> float:
    """CPU milliseconds that the executor spends on the control group of one call."""
    start = time.process_time_ns()
    for _ in range(calls):
        cgroup.set_limits(1 << 30, 64)
        cgroup.read_usage()
        if not cgroup.is_empty:
            raise BenchFailed("expected an empty group, but a process is in it")
    return (time.process_time_ns() - start) / 1e6 / calls


class BareExecutor:
    """An executor process that gets the same frames as from the gateway."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._sock = sock
        self._pid = pid
        self._unpacker = wire.Unpacker()
        self._num_sent = 0

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Send the settings and wait until the executor is ready."""
        self._sock.sendall(wire.pack(["configure", dict(settings)]))
        while (message := self._receive())[0] != "ready":
            if message[0] == "failed":
                raise BenchFailed(f"the executor did not start: {message[1]}")

    def measure(self, code: str, calls: int) -> Cost:
        """Send `calls` calls in frames of `BATCH` and wait for their results."""
        numbers = range(self._num_sent + 1, self._num_sent + calls + 1)
        self._num_sent += calls
        packed = [
            wire.pack(["calls", [[number, {"code": code}] for number in numbers[start : start + BATCH]]])
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
        return cost_of(meter, wall_s, [(result["status"], result["usage"]["cpu_ms"]) for result in results])

    def _receive(self) -> list[Any]:
        while True:
            for message in self._unpacker:
                return message
            self._unpacker.feed(_receive_bytes(self._sock, "executor"))


@contextmanager
def bare_executor(python: str) -> Iterator[BareExecutor]:
    """A running executor. It ends when its socket is closed."""
    own_end, executor_end = socket.socketpair()
    with own_end:
        with executor_end:
            fd = executor_end.fileno()
            argv = [sys.executable, "-m", "sandbox.executor", "--fd", str(fd)]
            process = subprocess.Popen(argv, pass_fds=[fd], start_new_session=True, stdin=subprocess.DEVNULL)
        try:
            executor = BareExecutor(own_end, process.pid)
            executor.configure(ExecutorConfig(python=python, isolation=jail.Level.NAMESPACES.value).encode())
            yield executor
        finally:
            own_end.close()
            try:
                process.wait(service.STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _receive_bytes(sock: socket.socket, sender: str) -> bytes:
    if not select.select([sock], [], [], ANSWER_TIMEOUT_S)[0]:
        raise BenchFailed(f"no answer from the {sender} within {ANSWER_TIMEOUT_S:g} s")
    if not (data := sock.recv(1 << 18)):
        raise BenchFailed(f"the {sender} ended; its output is above")
    return data


def _mapped_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    except OSError:
        return 0
