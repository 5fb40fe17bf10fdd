"""The agent of a node: accepts connections of one gateway and starts an executor for each connection. The executor uses
the socket of the connection directly.

    accept -> handshake -> spawn `python -m sandbox.executor --fd N` -> wait for exit or hang-up -> kill, close

Invariants:
- An executor ends with its connection. It is killed at once after a reset, and `STOP_TIMEOUT_S` after EOF.
- An executor ends with its agent. The kernel kills the executor when the thread of the agent ends (PR_SET_PDEATHSIG,
  which the executor sets itself). The thread also ends when the process of the agent is killed.
- At most one process runs for an executor's number: the process of the highest generation (`handshake`).
- At most `MAX_UNAUTHENTICATED` connections wait for the handshake, each for at most `handshake.TIMEOUT_S`.

The agent keeps a descriptor of each connection to notice its end, but never reads from it after the handshake.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sandbox.cluster import handshake
from sandbox.cluster.handshake import ExecutorStart
from sandbox.errors import ProtocolError
from sandbox.gateway.calls.executor_handle import EXECUTOR_MODULE

log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 64
"""Maximum connections that may wait for the handshake. Further ones are closed at once."""
STOP_TIMEOUT_S = 8.0
"""Seconds from EOF to the kill. It is longer than the executor's time-out for unsent frames."""
EXECUTOR_COMMAND = (sys.executable, "-m", EXECUTOR_MODULE)


class NodeAgent:
    """Listens on `host` from its creation until `close`, in a thread of its own. `address` is (host, port)."""

    def __init__(self, secret: bytes, host: str, command: Sequence[str] = EXECUTOR_COMMAND) -> None:
        self._secret = secret
        self._command = command
        self._generations: dict[int, int] = {}
        """By executor: the generation of its last start."""
        self._executors: dict[int, _NodeExecutor] = {}
        self._unauthenticated = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_UNAUTHENTICATED)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="node agent", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False after `close`, and after a failure of the agent."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Kill all executors and stop listening."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as connections:
            accepting = connections.create_task(self._accept(connections))
            await self._stop.wait()
            accepting.cancel()
            for executor in self._executors.values():
                executor.kill()
        self._listener.close()

    async def _accept(self, connections: asyncio.TaskGroup) -> None:
        while True:
            try:
                sock, peer = await self._loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is free, or the peer has gone
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(1)
                continue
            if self._unauthenticated >= MAX_UNAUTHENTICATED:
                sock.close()
            else:
                self._unauthenticated += 1
                connections.create_task(self._serve_connection(sock, peer[0]))

    async def _serve_connection(self, sock: socket.socket, peer: str) -> None:
        with sock:
            try:
                async with asyncio.timeout(handshake.TIMEOUT_S):
                    start = await self._authenticate(sock)
            except (TimeoutError, OSError, ProtocolError) as error:
                log.warning("connection from %s refused: %s", peer, error or "no handshake in time")
                return
            finally:
                self._unauthenticated -= 1
            await self._run_executor(sock, start)

    async def _authenticate(self, sock: socket.socket) -> ExecutorStart:
        """Do the handshake. Raises `ProtocolError`."""
        sock.setblocking(False)
        handshake.set_tcp_options(sock)
        hello = handshake.MAGIC + secrets.token_bytes(handshake.NONCE_BYTES)
        await self._loop.sock_sendall(sock, hello)
        request = b""
        while len(request) < handshake.REQUEST_BYTES:
            data = await self._loop.sock_recv(sock, handshake.REQUEST_BYTES - len(request))
            if not data:
                raise ProtocolError("closed before the handshake was complete")
            request += data
        start = handshake.decode_request(self._secret, hello, request)
        if start.generation <= self._generations.get(start.executor, 0):
            raise ProtocolError(f"{start} is not newer than generation {self._generations[start.executor]}")
        self._generations[start.executor] = start.generation
        await self._loop.sock_sendall(sock, handshake.encode_reply(self._secret, hello, request))
        return start

    async def _run_executor(self, sock: socket.socket, start: ExecutorStart) -> None:
        if (previous := self._executors.get(start.executor)) is not None:
            previous.kill()
        try:
            executor = _NodeExecutor(self._command, sock)
        except OSError as error:
            log.warning("%s failed: %s", start, error)
            return
        log.info("%s: process %d", start, executor.process.pid)
        self._executors[start.executor] = executor
        try:
            code = await executor.wait()
            log.info("%s: exited with code %d", start, code)
        finally:
            if self._executors.get(start.executor) is executor:
                del self._executors[start.executor]


class _NodeExecutor:
    """The process of an executor and the socket that it serves."""

    def __init__(self, command: Sequence[str], sock: socket.socket) -> None:
        self._sock = sock
        fd = sock.fileno()
        self.process = subprocess.Popen(
            [*command, "--fd", str(fd), "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=(fd,),
            start_new_session=True,
            env=environment_without_ray(os.environ),
        )
        with suppress(OSError):  # Ray runs its workers at nice 15, and only CAP_SYS_NICE may undo it
            os.setpriority(os.PRIO_PROCESS, self.process.pid, 0)

    def kill(self) -> None:
        """Kill the process group."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for the exit and return its code. Kill the process if the connection ends first."""
        pidfd = os.pidfd_open(self.process.pid)
        try:
            with select.epoll() as hang_ups:
                hang_ups.register(self._sock, select.EPOLLRDHUP)  # not EPOLLIN, which comes with every frame
                if not await _readable_first(pidfd, hang_ups.fileno(), None):
                    hang_ups.modify(self._sock, 0)  # from now on, epoll reports only a reset
                    await _readable_first(pidfd, hang_ups.fileno(), STOP_TIMEOUT_S)
                    self.kill()
                    await _readable_first(pidfd, None, None)
        finally:
            self.kill()
            os.close(pidfd)
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # the gateway gets EOF
        return self.process.wait()


async def _readable_first(fd: int, other: int | None, timeout_s: float | None) -> bool:
    """Wait until one of two descriptors is readable, at most `timeout_s`. Return whether the first one is readable."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    fds = [fd] if other is None else [fd, other]
    for each in fds:
        loop.add_reader(each, readable.set)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await readable.wait()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        for each in fds:
            loop.remove_reader(each)


def environment_without_ray(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without Ray's variables, one of which may be the token of the cluster."""
    return {name: value for name, value in environ.items() if not name.startswith("RAY_")}
