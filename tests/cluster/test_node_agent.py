"""Tests of the node agent, which starts executors on a node, and of the gateway's connections to it.

The tests use real TCP but no Ray. The executors are `tests.fakes` processes, which run no Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from bench.probes import processes
from sandbox import wire
from sandbox.cluster import handshake, node_agent
from sandbox.cluster.handshake import ExecutorStart
from sandbox.cluster.node_agent import NodeAgent
from sandbox.cluster.remote_executor import RemoteExecutor
from sandbox.errors import NodeError, ProtocolError
from sandbox.gateway.calls.executor_handle import EXECUTOR_MODULE
from tests.cluster.processes import children, until_gone

SECRET, WRONG_SECRET = b"s" * 32, b"w" * 32
FAKE = (sys.executable, "-m", "tests.fakes")


@pytest.fixture
def agent() -> Iterator[NodeAgent]:
    with closing(NodeAgent(SECRET, "127.0.0.1", FAKE)) as agent:
        yield agent


async def launch(agent: NodeAgent, executor: int = 0, generation: int = 1, secret: bytes = SECRET) -> RemoteExecutor:
    return await RemoteExecutor.launch(*agent.address, secret, ExecutorStart(executor, generation))


class Frames:
    """Sends and receives frames on a launched executor."""

    def __init__(self, executor: RemoteExecutor) -> None:
        self._sock, self._unpacker = executor.socket, wire.Unpacker()
        self._loop = asyncio.get_running_loop()

    async def send(self, *message: Any) -> None:
        await self._loop.sock_sendall(self._sock, wire.pack(list(message)))

    async def receive(self) -> list[Any]:
        """Return the next frame, or an empty list at EOF or after a reset."""
        async with asyncio.timeout(20):
            while True:
                try:
                    data = await self._loop.sock_recv(self._sock, 1 << 16)
                except ConnectionError:
                    return []
                if not data:
                    return []
                self._unpacker.feed(data)
                for message in self._unpacker:
                    return message


@asynccontextmanager
async def running(agent: NodeAgent, **start: Any) -> AsyncIterator[tuple[RemoteExecutor, Frames, int]]:
    """An executor that is ready: its gateway end, its frames and its process id."""
    before = children(os.getpid())
    executor = await launch(agent, **start)
    frames = Frames(executor)
    try:
        await frames.send("configure", {"long_slots": 0}, False)
        assert (await frames.receive())[0] == "ready"
        (pid,) = children(os.getpid()) - before
        yield executor, frames, pid
    finally:
        executor.kill()
        executor.socket.close()


@pytest.mark.asyncio
async def test_an_executor_serves_frames_on_the_socket_of_the_handshake(agent: NodeAgent) -> None:
    async with running(agent) as (_, frames, _):
        await frames.send("calls", [[7, {"code": "hello"}]])
        kind, [[seq, result]] = await frames.receive()
        assert (kind, seq, result["stdout"]) == ("results", 7, "hello")


@pytest.mark.asyncio
async def test_a_wrong_secret_is_refused_and_starts_nothing(agent: NodeAgent) -> None:
    before = children(os.getpid())
    with pytest.raises(NodeError, match="closed the connection before the handshake was complete"):
        await launch(agent, secret=WRONG_SECRET)
    assert children(os.getpid()) == before


@pytest.mark.asyncio
async def test_an_agent_that_does_not_know_the_secret_is_refused() -> None:
    """The agent accepts every request, but replies with an HMAC of another secret."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def be_an_impostor() -> None:
            peer, _ = listener.accept()
            with peer:
                hello = handshake.MAGIC + bytes(handshake.NONCE_BYTES)
                peer.sendall(hello)
                request = peer.recv(handshake.REQUEST_BYTES, socket.MSG_WAITALL)
                peer.sendall(handshake.encode_reply(WRONG_SECRET, hello, request))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(be_an_impostor))
            with pytest.raises(NodeError, match="does not know the secret"):
                await RemoteExecutor.launch(*listener.getsockname(), SECRET, ExecutorStart(0, 1))


@pytest.mark.asyncio
async def test_a_server_that_is_no_agent_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def be_a_web_server() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(be_a_web_server))
            with pytest.raises(NodeError, match="expected an agent of rstar-sandbox"):
                await RemoteExecutor.launch(*listener.getsockname(), SECRET, ExecutorStart(0, 1))


@pytest.mark.asyncio
async def test_a_silent_server_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.05)
    silent = r"no answer from 127\.0\.0\.1:\d+ within 0\.05 s"
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(NodeError, match=silent):
        await RemoteExecutor.launch(*listener.getsockname(), SECRET, ExecutorStart(0, 1))


def test_a_client_that_sends_nothing_is_closed_in_time(monkeypatch: pytest.MonkeyPatch, agent: NodeAgent) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.05)
    with socket.create_connection(agent.address, timeout=10) as client:
        assert client.recv(handshake.HELLO_BYTES, socket.MSG_WAITALL).startswith(handshake.MAGIC)
        assert client.recv(1) == b""


def test_connections_without_a_handshake_are_bounded(monkeypatch: pytest.MonkeyPatch, agent: NodeAgent) -> None:
    monkeypatch.setattr(node_agent, "MAX_UNAUTHENTICATED", 2)
    clients = [socket.create_connection(agent.address, timeout=10) for _ in range(3)]
    try:
        assert [bool(client.recv(1)) for client in clients] == [True, True, False]
    finally:
        for client in clients:
            client.close()


@pytest.mark.asyncio
async def test_an_old_generation_is_refused(agent: NodeAgent) -> None:
    async with running(agent, generation=5):
        for generation in (4, 5):
            with pytest.raises(NodeError, match="closed the connection"):
                await launch(agent, generation=generation)


@pytest.mark.asyncio
async def test_a_new_generation_kills_the_executor_of_the_old_one(agent: NodeAgent) -> None:
    async with (
        running(agent, generation=1) as (_, old_frames, old_pid),
        running(agent, generation=2) as (_, frames, _),
    ):
        assert await old_frames.receive() == []
        await until_gone([old_pid])
        await frames.send("calls", [[1, {"code": "new"}]])
        assert (await frames.receive())[0] == "results"


@pytest.mark.asyncio
async def test_an_executor_that_is_stopped_dies_with_its_connection(agent: NodeAgent) -> None:
    """A stopped executor (SIGSTOP) can neither read EOF nor end by itself."""
    async with running(agent) as (executor, _, pid):
        os.kill(pid, signal.SIGSTOP)
        executor.kill()
        executor.socket.close()
        await until_gone([pid])


@pytest.mark.asyncio
async def test_the_gateway_gets_eof_when_an_executor_is_killed(agent: NodeAgent) -> None:
    """The agent holds a descriptor of the connection too, and has to shut it down."""
    async with running(agent) as (executor, frames, pid):
        os.kill(pid, signal.SIGKILL)
        assert await frames.receive() == []
        async with asyncio.timeout(10):
            assert await executor.wait() is None


@pytest.mark.asyncio
async def test_an_executor_that_ignores_eof_is_killed(monkeypatch: pytest.MonkeyPatch, agent: NodeAgent) -> None:
    monkeypatch.setattr(node_agent, "STOP_TIMEOUT_S", 0.1)
    async with running(agent) as (executor, _, pid):
        os.kill(pid, signal.SIGSTOP)
        executor.socket.shutdown(socket.SHUT_WR)
        await until_gone([pid])


@pytest.mark.asyncio
async def test_closing_the_agent_kills_its_executors() -> None:
    agent = NodeAgent(SECRET, "127.0.0.1", FAKE)
    assert agent.is_alive
    async with running(agent) as (_, _, pid):
        os.kill(pid, signal.SIGSTOP)
        await asyncio.to_thread(agent.close)
        assert not agent.is_alive
        await until_gone([pid])


AGENT_PROCESS = """
import sys, time
from sandbox.cluster.node_agent import NodeAgent
agent = NodeAgent(b"s" * 32, "127.0.0.1")
print(*agent.address, flush=True)
time.sleep(600)
"""


@pytest.mark.asyncio
async def test_an_executor_dies_with_the_process_of_its_agent() -> None:
    """This is a real executor, because the executor itself asks the kernel to be killed with its parent."""
    command = [sys.executable, "-c", AGENT_PROCESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        try:
            host, port = process.stdout.readline().split()
            executor = await RemoteExecutor.launch(host, int(port), SECRET, ExecutorStart(0, 1))
            pids = await _until(lambda: children(process.pid))
            for pid in pids:  # a stopped executor cannot end by itself at EOF
                await _until(lambda pid=pid: _has_event_loop(pid))
                os.kill(pid, signal.SIGSTOP)
        finally:
            process.kill()
        await until_gone(pids)
        executor.kill()
        executor.socket.close()


def test_ray_variables_do_not_reach_executors() -> None:
    environ = {"RAY_AUTH_TOKEN": "secret", "RAY_ADDRESS": "there", "PATH": "/bin", "ARRAY_SIZE": "1"}
    assert node_agent.environment_without_ray(environ) == {"PATH": "/bin", "ARRAY_SIZE": "1"}


@pytest.mark.parametrize("changed", range(0, handshake.REQUEST_BYTES, 7))
def test_a_request_changed_on_the_way_is_refused(changed: int) -> None:
    hello = handshake.MAGIC + bytes(handshake.NONCE_BYTES)
    request = bytearray(handshake.encode_request(SECRET, hello, b"n" * 32, ExecutorStart(3, 9)))
    assert handshake.decode_request(SECRET, hello, bytes(request)) == ExecutorStart(3, 9)
    request[changed] ^= 1
    with pytest.raises(ProtocolError):
        handshake.decode_request(SECRET, hello, bytes(request))


def test_a_request_cannot_be_replayed_on_another_connection() -> None:
    hellos = [handshake.MAGIC + bytes([n]) * handshake.NONCE_BYTES for n in range(2)]
    request = handshake.encode_request(SECRET, hellos[0], b"n" * 32, ExecutorStart(3, 9))
    with pytest.raises(ProtocolError):
        handshake.decode_request(SECRET, hellos[1], request)


def test_a_cut_connection_ends_within_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sock:
        handshake.set_tcp_options(sock)
        sock.connect(listener.getsockname())
        idle, interval, count = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 10
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000


async def _until(read: Callable[[], Any]) -> Any:
    """Return what `read` returns once it is true."""
    give_up_at = time.monotonic() + 20
    while not (value := read()):
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.02)
    return value


def _has_event_loop(pid: int) -> bool:
    """Return whether the executor has started Trio, which it does after its PR_SET_PDEATHSIG. /proc shows the event
    loop, but not PR_SET_PDEATHSIG."""
    fds = f"/proc/{pid}/fd"
    if EXECUTOR_MODULE not in processes.command(pid):  # still a fork of the agent
        return False
    with contextlib.suppress(FileNotFoundError):
        return any("eventpoll" in os.readlink(f"{fds}/{fd}") for fd in os.listdir(fds))
    return False
