"""The gateway's end of the Ray driver process, which connects to Ray and owns the actors.

    gateway -> driver   ["start", {address, secret, isolation, python}]  first
    driver -> gateway   ["nodes", [{id, name, address, cpus, state, reason, report}, ...]]  every `POLL_INTERVAL_S`
                        ["failed", message]  no cluster can be used

At EOF the driver kills its actors, stops Ray if it has started Ray, and exits. Then its process group is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Mapping
from typing import Any

from sandbox import wire
from sandbox.errors import ClusterError, NodeError, ProtocolError

START_TIMEOUT_S = 60.0
"""Seconds from the start of the process to the first list of nodes. To start Ray takes about five."""
SILENCE_TIMEOUT_S = 30.0
"""Seconds without a list of nodes after which the driver is started again."""
STOP_TIMEOUT_S = 15.0
"""Seconds from EOF to the kill of the driver."""
RAY_SETTINGS = {"RAY_ENABLE_AUTO_CONNECT": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "PYTHONWARNINGS": "ignore"}
"""Environment of the driver. The first variable keeps Ray from starting a cluster by itself, the second from installing
packages on the nodes."""

MAX_STDERR_BYTES = 1 << 16
FATAL_LINE = re.compile(r"\[[^]]* [CF] \d+ \d+\] ")
"""Start of a line of Ray's own log that reports an error which ends the process."""
NO_NODE_HINT = "; this machine is no node of the cluster: start one with `ray start --address=HOST:PORT --num-cpus=0`"

RawNodes = list[dict[str, Any]]


class RayDriver:
    """Use as `async with RayDriver(start) as driver`; `start` is the content of the "start" frame."""

    def __init__(self, start: Mapping[str, object]) -> None:
        self._start = start
        self._process: asyncio.subprocess.Process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  `__aexit__` closes it
        """Ray writes warnings and stack traces. The operator gets the one line with the reason."""
        self._is_connected = False
        """Whether a list of nodes has come. If so, there may be actors, which the driver must have time to kill."""

    async def __aenter__(self) -> RayDriver:
        own_end, driver_end = socket.socketpair()
        with driver_end:
            fd = driver_end.fileno()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sandbox.cluster",
                f"--fd={fd}",
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=self._stderr,
                pass_fds=(fd,),
                start_new_session=True,
                env=self._environment(),
            )
        self._reader, self._writer = await asyncio.open_unix_connection(sock=own_end)
        self._writer.write(wire.pack(["start", dict(self._start)]))
        return self

    def _environment(self) -> dict[str, str]:
        environ = {**os.environ, **RAY_SETTINGS}
        if self._start["address"] != "auto":
            environ.pop("RAY_ADDRESS", None)  # Ray prefers it in some versions
        return environ

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S if self._is_connected else 0):
                await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._stderr.close()

    async def _describe_end(self) -> str:
        """Return how the driver, which has closed its socket, has ended."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                return f"ended with code {await self._process.wait()}"
        except TimeoutError:
            return "closed its socket"

    def _last_error(self) -> str:
        """Return the line of the driver's stderr with the reason of its end."""
        end = os.fstat(self._stderr.fileno()).st_size
        text = os.pread(self._stderr.fileno(), MAX_STDERR_BYTES, max(0, end - MAX_STDERR_BYTES))
        lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
        fatal = [FATAL_LINE.sub("", line) for line in lines if FATAL_LINE.match(line)]
        line = (fatal or lines or ["it printed nothing"])[-1]
        return (
            f"{line}{NO_NODE_HINT}" if "/sockets/raylet" in line else line
        )  # the socket of the node's own Ray process

    async def snapshots(self) -> AsyncIterator[RawNodes]:
        """Yield the list of nodes each time it comes. Raises `ClusterError` if the cluster cannot be used, and
        `NodeError` if the driver ends or is silent."""
        unpacker, timeout_s = wire.Unpacker(), START_TIMEOUT_S
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    data = await self._reader.read(1 << 16)
            except TimeoutError:
                raise NodeError(f"the Ray driver sent nothing for {timeout_s:g} s") from None
            except OSError as error:
                raise NodeError(f"the Ray driver: {error}") from None
            if not data:
                raise NodeError(f"the Ray driver has {await self._describe_end()}: {self._last_error()}")
            unpacker.feed(data)
            for message in unpacker:
                match message:
                    case ["nodes", list(nodes)]:
                        timeout_s, self._is_connected = SILENCE_TIMEOUT_S, True
                        yield nodes
                    case ["failed", str(reason)]:
                        raise ClusterError(reason)
                    case _:
                        raise ProtocolError(f"unexpected frame {message[0]!r:.40} from the Ray driver")
