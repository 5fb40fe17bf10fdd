"""Starts an executor process and exchanges frames with it, in place of a gateway."""

from __future__ import annotations

import itertools
import os
import select
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sandbox import wire
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from sandbox.settings.server import ExecutorConfig
from sandbox.types import Call, CellResult, EncodedCall, Limits, Result, used_up_result
from tests.jail.jails import tree_pids

DEADLINE_S = 60
"""Seconds after which a test gives up waiting for an executor or a process."""
OWN_PYTHON: str = os.environ.get("GUEST_PYTHON") or sys._base_executable  # type: ignore[attr-defined]
"""Python for calls, without packages: the base interpreter of this environment, or the one in `GUEST_PYTHON`."""


class Attempts:
    """Sends the lost calls of an executor again and counts their attempts, in place of the gateway's call table."""

    def __init__(self, max_attempts: int, send: Callable[[int, dict[str, Any]], None]) -> None:
        self._max_attempts = max_attempts
        self._send = send
        """Called with the seq and the encoded call of each attempt."""
        self._calls: dict[int, dict[str, Any]] = {}
        self._counts: Counter[int] = Counter()
        self._have_started: set[int] = set()

    def start(self, seq: int, encoded: dict[str, Any]) -> None:
        self._calls[seq] = encoded
        self._counts[seq] += 1
        self._send(seq, encoded)

    def decode(self, seq: int, result: Any) -> Result:
        """Return the result of a call."""
        return Result.decode({**result, "attempts": self._counts[seq]})

    def lost(self, seq: int, reason: str, has_started: bool) -> Result | None:
        """Start the next attempt of a lost call. If the call has no attempt left, return its result."""
        self._have_started |= {seq} if has_started else set()
        if self._counts[seq] < self._max_attempts:
            self.start(seq, self._calls[seq])
            return None
        return used_up_result("", self._counts[seq], reason, has_started=seq in self._have_started)


NO_CGROUPS = """
from sandbox import errors, jail
class NoCgroups:
    def __init__(self): raise errors.IsolationError("cgroups: hidden")
jail.CgroupTree = NoCgroups
"""
"""Code for `executor_after`. The executor finds no cgroups."""


def executor_after(*codes: str, python: Sequence[str] = (sys.executable,)) -> tuple[str, ...]:
    """Return a command for `server` of `executor`. It runs these codes, and then the executor in the same process."""
    start = (
        "import runpy, sys",
        "del sys.argv[:2]",  # -m sandbox.executor
        'runpy.run_module("sandbox.executor", run_name="__main__", alter_sys=True)',
    )
    return *python, "-c", "\n".join((*codes, *start))


class Caller:
    """A running executor and the gateway's end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], gateway_sock: socket.socket, max_attempts: int) -> None:
        self.process = process
        self.gateway_sock = gateway_sock
        self.ready: dict[str, Any] = {}
        """Contents of the executor's `ready` frame."""
        self.stats: dict[str, Any] = {}
        """Contents of its last `stats` frame."""
        self.window = 0
        """Contents of its last `window` frame."""
        self.results: dict[int, Result] = {}
        """Results that no method has returned yet, by seq."""
        self.ended_sessions: dict[str, str] = {}
        """Reasons why sessions have ended, by id."""
        self._seqs = itertools.count(1)
        self._attempts = Attempts(max_attempts, lambda seq, encoded: self.send("calls", [[seq, encoded]]))
        self._unpacker = wire.Unpacker()

    def run(self, code: str, *, stdin: str = "", echo: bool = True, **more: Any) -> Result:
        """Run one call and wait for its result. `more` are fields of `Call` and of `Limits`."""
        return self.run_all([call(code, stdin=stdin, echo=echo, **more)])[0]

    def run_all(self, calls: Sequence[Call | EncodedCall]) -> list[Result]:
        """Submit calls at once and wait for their results, in the order of the calls."""
        seqs = [self.submit(submitted) for submitted in calls]
        return [self.result_of(seq) for seq in seqs]

    def submit(self, submitted: Call | EncodedCall) -> int:
        """Submit a call and return its seq."""
        seq = next(self._seqs)
        self._attempts.start(seq, submitted.encode(binary=True) if isinstance(submitted, Call) else submitted)
        return seq

    def result_of(self, seq: int) -> Result:
        """Wait for the result of a call."""
        self.until(lambda: seq in self.results)
        return self.results.pop(seq)

    def send(self, *message: Any) -> None:
        self.gateway_sock.sendall(wire.pack(list(message)))

    def until(self, condition: Callable[[], bool]) -> None:
        """Read frames until `condition()` is true. Fails if the executor ends, or sends nothing for `DEADLINE_S`."""
        while not condition():
            assert self.receive(), f"the executor ended with {self.process.wait(DEADLINE_S)}"

    def receive(self) -> bool:
        """Wait for frames and keep their contents; return False at the end of the stream."""
        data = self.gateway_sock.recv(1 << 18)
        self._unpacker.feed(data)
        for kind, content in self._unpacker:
            self._keep(kind, content)
        return bool(data)

    def _keep(self, kind: str, content: Any) -> None:
        if kind == "results":
            for seq, result in content:
                assert seq not in self.results, "a call got two results"
                decoded = self._attempts.decode(seq, result)
                self.results[seq] = CellResult.decode(result) if "session" in result else decoded
        elif kind == "lost":
            for seq, reason, has_started in content:
                if (unavailable := self._attempts.lost(seq, reason, has_started)) is not None:
                    self.results[seq] = unavailable
        elif kind == "stats":
            self.stats = content
        elif kind == "ready":
            self.ready = content
        elif kind == "session_ended":
            self.ended_sessions[content[0]] = content[1]
        elif kind == "window":
            self.window = content
        else:
            pytest.fail(f"{kind}: {content}")

    def processes(self) -> list[int]:
        """Pids of the executor and all its descendants."""
        return tree_pids(self.process.pid)


def call(code: str, **more: Any) -> Call:
    """Make a call. `more` are fields of `Call` and of `Limits`."""
    limits = Limits(**{name: more.pop(name) for name in Limits.__slots__ if name in more})
    return Call(code, limits=limits, **more)


@cache
def _strongest_level() -> str:
    """The strongest level of this machine. Each choice starts an interpreter that tries all layers."""
    return choose_level("auto").level.value


@contextmanager
def executor(
    python: str | Path = OWN_PYTHON,
    *,
    server: Sequence[str] = (sys.executable,),
    process_options: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Iterator[Caller]:
    """Start an executor and wait until it is ready. Asserts at the end that it exits with 0.

    `settings` are fields of `ExecutorConfig`; the default is one bare zygote and the strongest isolation level.
    `server` is the command that starts the Python of the executor itself; `process_options` are arguments of `Popen`.
    """
    settings = {"isolation": "auto", "profiles": ("bare",), "zygote_pools": 1, "slots": 4, **settings}
    if settings["isolation"] == "auto":
        try:
            settings["isolation"] = _strongest_level()
        except IsolationError as error:
            pytest.skip(str(error))
    config = ExecutorConfig(python=str(python), **settings)
    gateway_sock, executor_sock = socket.socketpair()
    gateway_sock.settimeout(DEADLINE_S)
    with executor_sock:
        argv = [*server, "-m", "sandbox.executor", "--fd", str(executor_sock.fileno())]
        process = subprocess.Popen(argv, pass_fds=[executor_sock.fileno()], stdin=subprocess.DEVNULL, **process_options)
    with gateway_sock, process:
        try:
            caller = Caller(process, gateway_sock, config.attempts)
            caller.send("configure", config.encode())
            caller.until(lambda: bool(caller.ready))
            yield caller
            gateway_sock.close()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def is_gone(pid: int) -> bool:
    """Return whether a process has ended. Zombies (Z) and dead processes (X) have."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pids: list[int]) -> None:
    """Wait until none of these processes exists."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready, _, _ = select.select([fd], [], [], DEADLINE_S)
            assert ready, f"process {pid} is still there"
        finally:
            os.close(fd)
