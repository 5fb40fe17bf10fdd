"""A server of its own for the length of a benchmark: `python -m sandbox serve` on a free port.

It is stopped on the way out however that comes about, gracefully first; what it printed goes into the error if it does
not start. It has its own session, so that a Ctrl-C reaches the benchmark alone, which then stops it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from bench.harness.command import BenchFailed
from bench.probes import processes
from sandbox import runtime
from sandbox.gateway.calls.executor_handle import EXECUTOR_MODULE

START_S = 120.0
"""Warming the interpreters takes seconds; on a loaded machine, more of them."""
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Service:
    """A running server."""

    url: str
    pid: int

    def processes(self) -> list[int]:
        """The gateway, its executors, their jails and zygotes, and calls that run now."""
        return processes.tree(self.pid)

    def executors(self) -> list[int]:
        """The executors themselves, without what they start."""
        return [pid for pid in self.processes() if EXECUTOR_MODULE in processes.command(pid)]

    def metrics(self) -> str:
        """What `/metrics` says."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            return str(response.read(), "utf-8")

    def body_bytes(self) -> dict[str, float]:
        """Bytes of bodies so far, by direction, as the gateway counts them."""
        return {
            name: float(n) for name, n in re.findall(r'body_bytes_total\{direction="(\w+)"\} (\S+)', self.metrics())
        }


@contextmanager
def running(
    python: str | None = None, flags: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Iterator[Service]:
    """A server that is ready, its environment ours and `environ`. Raises `BenchFailed` if it does not start."""
    command = [sys.executable, "-m", "sandbox", "serve", "--port", "0", "--python", guest_python(python), *flags]
    with tempfile.TemporaryFile() as said:  # a pipe that nobody reads would stop the server when it is full
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environ or {})},
        )
        try:
            yield Service(address(server, said), server.pid)
        finally:
            stop(server)


def guest_python(asked: str | None = None) -> str:
    """The interpreter that calls run in: the one asked for, or what the server would take."""
    return asked or os.environ.get("RSTAR_SANDBOX_PYTHON") or str(runtime.default_python())


def stop(process: subprocess.Popen[bytes]) -> None:
    """Gracefully, then not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def address(server: subprocess.Popen[bytes], said: BinaryIO) -> str:
    give_up = time.monotonic() + START_S
    text = ""
    while time.monotonic() < give_up:
        has_ended = server.poll() is not None
        text = os.pread(said.fileno(), 1 << 16, 0).decode("utf-8", "replace")
        if found := re.search(r"^rstar-sandbox \S+ on (http://\S+).*\n", text, re.MULTILINE):
            return found.group(1)
        if has_ended:
            raise BenchFailed(f"the server ended (exit {server.returncode}) and said:\n{text}")
        time.sleep(0.05)
    raise BenchFailed(f"the server was not ready after {START_S:g} s and said:\n{text}")
