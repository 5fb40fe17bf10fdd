"""Tests of `UnixStream`. It sends all bytes and descriptors in order, and leaks no descriptor."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import trio
import trio.testing
from pytest_trio import trio_fixture

from sandbox.errors import ProtocolError
from sandbox.executor.unix_stream import MAX_FDS, UnixStream

pytestmark = pytest.mark.trio


def open_fds() -> int:
    """Number of descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@trio_fixture
async def pair() -> AsyncIterator[tuple[UnixStream, socket.socket]]:
    """A stream and the socket of its peer."""
    fds_before = open_fds()
    our_sock, peer = socket.socketpair()
    peer.setblocking(False)
    stream = UnixStream(our_sock)
    with peer:
        yield stream, peer
        stream.close()
    assert open_fds() == fds_before, "descriptors leaked"


@pytest.fixture
def null_fd() -> Iterator[int]:
    """A descriptor to send."""
    with open(os.devnull) as file:
        yield file.fileno()


def receive_all(peer: socket.socket) -> tuple[bytes, list[int]]:
    """Return all bytes and descriptors that have arrived."""
    data, fds = b"", list[int]()
    while True:
        try:
            new_data, new_fds, _, _ = socket.recv_fds(peer, 1 << 20, 10)
        except BlockingIOError:
            return data, fds
        data, fds = data + new_data, fds + new_fds


async def test_bytes_that_the_socket_refuses_are_sent_later_in_order(
    pair: tuple[UnixStream, socket.socket], null_fd: int
) -> None:
    stream, peer = pair
    chunks = [bytes([n]) * 300_000 for n in range(10)]  # more than the buffer of the socket takes
    for n, chunk in enumerate(chunks):
        stream.write(chunk, null_fd if n in (0, 7) else None)
    data, fds = b"", list[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.flush_forever)
        nursery.start_soon(stream.flushed)
        while len(data) < 3_000_000:
            await trio.testing.wait_all_tasks_blocked()
            new_data, new_fds = receive_all(peer)
            data, fds = data + new_data, fds + new_fds
        await stream.flushed()
        nursery.cancel_scope.cancel()
    assert data == b"".join(chunks)
    assert len(fds) == 2, "with chunks 0 and 7"
    for fd in fds:
        os.close(fd)


async def test_flushed_returns_when_the_peer_closes(pair: tuple[UnixStream, socket.socket]) -> None:
    stream, peer = pair
    stream.write(bytes(10 << 20))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.flush_forever)
        nursery.start_soon(stream.flushed)
        await trio.testing.wait_all_tasks_blocked()
        peer.close()


async def test_closing_wakes_the_reader_and_the_flusher(pair: tuple[UnixStream, socket.socket]) -> None:
    stream, _peer = pair
    stream.write(bytes(10 << 20), stream.sock.fileno())
    stream.write(b"later", stream.sock.fileno())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.flush_forever)
        nursery.start_soon(stream.flushed)
        nursery.start_soon(stream.read)
        await trio.testing.wait_all_tasks_blocked()
        stream.close()
        stream.close()  # has no effect
    stream.write(b"has no effect")
    assert await stream.read() == b""


async def test_writing_to_a_closed_peer_closes_the_stream(pair: tuple[UnixStream, socket.socket]) -> None:
    stream, peer = pair
    peer.close()
    stream.write(b"x")
    assert not stream.is_open
    assert await stream.read() == b""


async def test_received_descriptors_are_not_inheritable(pair: tuple[UnixStream, socket.socket], null_fd: int) -> None:
    stream, peer = pair
    socket.send_fds(peer, [b"x"], [null_fd])
    assert await stream.read() == b"x"
    (fd,) = stream.received_fds
    assert not os.get_inheritable(fd)


async def read_to_end(stream: UnixStream) -> None:
    while await stream.read():
        pass


async def test_too_many_received_descriptors_are_a_protocol_error(
    pair: tuple[UnixStream, socket.socket], null_fd: int
) -> None:
    stream, peer = pair
    fds_before = open_fds()
    for _ in range(5):  # the kernel allows a user who is not root as many in flight as RLIMIT_NOFILE, often 1024
        socket.send_fds(peer, [b"x"], [null_fd] * 100)
    with pytest.raises(ProtocolError, match="unexpected descriptors"):
        await read_to_end(stream)
    assert open_fds() - fds_before <= 2 * MAX_FDS, "at most that many before the last read, and in it"
    stream.close()
    assert stream.received_fds == []


async def test_the_pid_of_the_sender_is_received(pair: tuple[UnixStream, socket.socket]) -> None:
    stream, peer = pair
    stream.enable_credentials()
    peer.send(b"x")
    await stream.read()
    assert stream.peer_pid == os.getpid()
