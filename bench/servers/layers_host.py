"""The jail that `bench.layers` measures, seen from the host. It gets the frames that a zygote gets in a server."""

from __future__ import annotations

import select
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness.command import BenchFailed
from bench.workloads.code_kinds import PROFILE_CODES
from sandbox import jail
from sandbox.executor import zygote_frames
from sandbox.executor.pool_plan import GUEST_ENV

ANSWER_TIMEOUT_S = 120.0
FIRST_JAIL = 900
"""Number of the first jail here. Jails of servers count from 0, and jails with equal numbers share uids."""


class MeasuringJail:
    """A jail with a measuring zygote (`bench.servers.layers_guest`) of one profile."""

    def __init__(self, sock: socket.socket, plan: Mapping[str, Any], profile: str) -> None:
        self._sock, self._code, self._calls = sock, PROFILE_CODES[profile], 0
        self._unpacker = zygote_frames.Unpacker()
        self._send({"op": "configure", "plan": plan, "profile": profile})
        self._receive("loaded")

    def start(self, fork: str, calls: int) -> None:
        """Start `calls` calls that are forked in this way."""
        self._calls = calls
        self._send({"op": "measure", "fork": fork, "calls": calls, "source": self._code})

    def cpu_ms(self) -> float:
        """Wait for those calls and return their CPU milliseconds per call. Raises `BenchFailed` if one failed."""
        measured = self._receive("measured")
        if measured["failed"]:
            raise BenchFailed(f"{measured['failed']} of {self._calls} calls failed")
        return float(measured["cpu_ms"] + measured["own_cpu_ms"]) / self._calls

    def _send(self, header: dict[str, Any]) -> None:
        self._sock.sendall(zygote_frames.pack(header))

    def _receive(self, expected: str) -> dict[str, Any]:
        while not (headers := [header for header, _ in self._unpacker]):
            if not select.select([self._sock], [], [], ANSWER_TIMEOUT_S)[0]:
                raise BenchFailed(f"no answer from the measuring zygote within {ANSWER_TIMEOUT_S:g} s")
            if not (data := self._sock.recv(1 << 18)):
                raise BenchFailed("the measuring zygote ended; its output is above")
            self._unpacker.feed(data)
        (header,) = headers
        if header["op"] != expected:
            raise BenchFailed(f"expected {expected} from the measuring zygote, got {header}")
        return header


@contextmanager
def measuring_jail(python: str, profile: str, number: int) -> Iterator[MeasuringJail]:
    """A jail with the guest's code, where the measuring zygote replaces the zygote."""
    with tempfile.TemporaryDirectory(prefix="bench-layers-") as directory:
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
                yield MeasuringJail(own_end, jail.confinement_plan(spec), profile)
            finally:
                process.kill()
                process.wait()
