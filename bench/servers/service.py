"""A server for the duration of a benchmark: `python -m sandbox serve` on a free port.

The server is always stopped at the end, also after an error: first gracefully, then by SIGKILL. It has its own session,
so Ctrl-C reaches only the benchmark, which then stops the server.
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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from bench.harness.command import BenchFailed
from bench.probes import processes
from sandbox.gateway.calls.executor_handle import EXECUTOR_MODULE
from sandbox.held_signals import held_signals
from sandbox.runtime import build as runtime

START_TIMEOUT_S = 120.0
"""Seconds until a server must be ready. Warming the interpreters takes seconds, and longer on a loaded machine."""
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Service:
    """A running server."""

    url: str
    pid: int
    """Process id of the gateway."""

    def processes(self) -> list[int]:
        """The gateway, its executors, their jails and zygotes, and running calls."""
        return processes.tree(self.pid)

    def executors(self) -> list[int]:
        """The executor processes alone."""
        return [pid for pid in self.processes() if EXECUTOR_MODULE in processes.command(pid)]

    def metrics(self) -> str:
        """The text of `/metrics`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            return str(response.read(), "utf-8")

    def body_bytes(self) -> float:
        """Bytes of request and response bodies since the start, as the gateway counts them."""
        return sum(map(float, re.findall(r"body_bytes_total\{.*\} (\S+)", self.metrics())))

    def num_running_calls(self) -> int:
        """Calls that run now, over all executors."""
        counts = re.findall(r"^rstar_sandbox_executor_running\{.*\} (\d+)\.0$", self.metrics(), re.MULTILINE)
        return sum(map(int, counts))


def running(
    python: str | None = None, flags: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> AbstractContextManager[Service]:
    """A server that is ready, with `environ` added to its environment. Raises `BenchFailed` if it does not start."""
    command = ["-m", "sandbox", "serve", "--port", "0", "--python", guest_python(python), *flags]
    return started(command, environ)


@contextmanager
def started(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[Service]:
    """A server started by `python ARGUMENTS`, once it has printed its address."""
    # A pipe that nobody reads would block the server when it is full.
    with tempfile.TemporaryFile() as log, held_signals() as release_signals:
        server = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environ or {})},
        )
        try:
            release_signals()
            yield Service(_wait_for_address(server, log), server.pid)
        finally:
            _stop(server)


def guest_python(requested: str | None = None) -> str:
    """The interpreter that calls run in: the requested one, or the server's default."""
    return requested or os.environ.get("RSTAR_SANDBOX_PYTHON") or str(runtime.default_python())


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop gracefully, then by SIGKILL to the session."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for_address(server: subprocess.Popen[bytes], log: BinaryIO) -> str:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    text = ""
    while time.monotonic() < give_up_at:
        has_ended = server.poll() is not None
        text = os.pread(log.fileno(), 1 << 16, 0).decode("utf-8", "replace")
        if match := re.search(r"^rstar-sandbox \S+ on (http://\S+).*\n", text, re.MULTILINE):
            return match.group(1)
        if has_ended:
            raise BenchFailed(f"the server ended (exit {server.returncode}) and printed:\n{text}")
        time.sleep(0.05)
    raise BenchFailed(f"the server was not ready after {START_TIMEOUT_S:g} s and printed:\n{text}")
