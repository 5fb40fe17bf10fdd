"""An executor in its process, spoken to as a gateway does, but by a test that can wait."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sandbox import wire
from sandbox.config import ExecutorConfig
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from sandbox.types import Call, Limits, Result
from tests.jail.jails import descendants

DEADLINE_S = 60
OWN_PYTHON: str = os.environ.get("GUEST_PYTHON") or sys._base_executable  # type: ignore[attr-defined]
"""A guest without packages: the interpreter under this test's environment, or the one that `GUEST_PYTHON` names."""


class Caller:
    """A running executor and the gateway's end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.process = process
        self.link = link
        self.ready: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.window = 0
        self.answers: dict[int, Result] = {}
        self._seqs = itertools.count(1)
        self._unpacker = wire.Unpacker()

    def run(self, code: str, *, stdin: str = "", echo: bool = True, **more: Any) -> Result:
        """One call, waited for; what is not a field of a call is one of its limits."""
        return self.run_all([call(code, stdin=stdin, echo=echo, **more)])[0]

    def run_all(self, calls: list[Call]) -> list[Result]:
        """Calls at once, waited for; results in their order."""
        seqs = [self.submit(one) for one in calls]
        return [self.answer(seq) for seq in seqs]

    def submit(self, one: Call) -> int:
        seq = next(self._seqs)
        self.send("calls", [[seq, one.encode(binary=True)]])
        return seq

    def answer(self, seq: int) -> Result:
        self.until(lambda: seq in self.answers)
        return self.answers.pop(seq)

    def send(self, *message: Any) -> None:
        self.link.sendall(wire.pack(list(message)))

    def until(self, claim: Callable[[], bool]) -> None:
        """Read frames until `claim` holds. Ends the test when the executor ends or stays silent."""
        while not claim():
            assert self.receive(), f"the executor ended with {self.process.wait(DEADLINE_S)}"

    def receive(self) -> bool:
        """Whatever comes next; False at the end."""
        data = self.link.recv(1 << 18)
        self._unpacker.feed(data)
        for kind, what in self._unpacker:
            if kind == "results":
                for seq, result in what:
                    assert seq not in self.answers, "answered twice"
                    self.answers[seq] = Result.decode(result)
            elif kind == "stats":
                self.stats = what
            elif kind == "ready":
                self.ready = what
            elif kind == "window":
                self.window = what
            else:
                pytest.fail(f"{kind}: {what}")
        return bool(data)

    def processes(self) -> list[int]:
        """The executor, its jails, and all in them."""
        return descendants(self.process.pid)


def call(code: str, **more: Any) -> Call:
    limits = Limits(**{name: more.pop(name) for name in Limits.__slots__ if name in more})
    return Call(code, limits=limits, **more)


@contextmanager
def executor(
    python: str | Path = OWN_PYTHON,
    *,
    server: Sequence[str] = (sys.executable,),
    process_options: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Iterator[Caller]:
    """An executor that is ready, with `settings` of an `ExecutorConfig`; of one lean zygote if nothing else is said.

    `server` is the command that its own Python is, `process_options` are those of its `Popen`.
    """
    settings = {"isolation": "auto", "profiles": ("bare",), "zygote_pools": 1, "slots": 4, **settings}
    if settings["isolation"] == "auto":
        try:
            settings["isolation"] = choose_level("auto").level.value
        except IsolationError as why:
            pytest.skip(str(why))
    config = ExecutorConfig(python=str(python), **settings)
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_S)
    with theirs:
        argv = [*server, "-m", "sandbox.executor", "--fd", str(theirs.fileno())]
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, **process_options)
    with ours, process:
        try:
            caller = Caller(process, ours)
            caller.send("configure", config.encode())
            caller.until(lambda: bool(caller.ready))
            yield caller
            ours.close()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pids: list[int]) -> None:
    """Until none of these processes is left; the kernel wakes us, not a clock."""
    import select

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
