"""The socket under frames and descriptors: order kept, nothing lost half-way, nothing leaked."""

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
    return len(os.listdir("/proc/self/fd"))


@trio_fixture
async def pair() -> AsyncIterator[tuple[UnixStream, socket.socket]]:
    before = open_fds()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    link = UnixStream(ours)
    with theirs:
        yield link, theirs
        link.close()
    assert open_fds() == before, "descriptors leaked"


@pytest.fixture
def null() -> Iterator[int]:
    with open(os.devnull) as file:
        yield file.fileno()


def received(theirs: socket.socket) -> tuple[bytes, list[int]]:
    """All that is there now."""
    data, fds = b"", []
    while True:
        try:
            more, came, _, _ = socket.recv_fds(theirs, 1 << 20, 10)
        except BlockingIOError:
            return data, fds
        data, fds = data + more, fds + came


async def test_what_does_not_fit_goes_later_in_order(pair: tuple[UnixStream, socket.socket], null: int) -> None:
    link, theirs = pair
    sent = [bytes([n]) * 300_000 for n in range(10)]
    for n, data in enumerate(sent):
        link.write(data, null if n in (0, 7) else None)
    data, fds = b"", []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.flush_forever)
        nursery.start_soon(link.flushed)
        while len(data) < 3_000_000:
            await trio.testing.wait_all_tasks_blocked()
            more, came = received(theirs)
            data, fds = data + more, fds + came
        await link.flushed()
        nursery.cancel_scope.cancel()
    assert data == b"".join(sent)
    assert len(fds) == 2
    for fd in fds:
        os.close(fd)


async def test_flushed_returns_when_the_link_breaks(pair: tuple[UnixStream, socket.socket]) -> None:
    link, theirs = pair
    link.write(bytes(10 << 20))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.flush_forever)
        nursery.start_soon(link.flushed)
        await trio.testing.wait_all_tasks_blocked()
        theirs.close()


async def test_closing_wakes_the_reader_and_the_flusher(pair: tuple[UnixStream, socket.socket]) -> None:
    link, _theirs = pair
    link.write(bytes(10 << 20), link.sock.fileno())
    link.write(b"later", link.sock.fileno())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.flush_forever)
        nursery.start_soon(link.flushed)
        nursery.start_soon(link.read)
        await trio.testing.wait_all_tasks_blocked()
        link.close()
        link.close()
    link.write(b"no more")
    assert await link.read() == b""


async def test_writing_to_a_peer_that_is_gone_ends_the_link(pair: tuple[UnixStream, socket.socket]) -> None:
    link, theirs = pair
    theirs.close()
    link.write(b"x")
    assert not link.is_open
    assert await link.read() == b""


async def test_descriptors_come_with_their_bytes_and_are_not_inherited(
    pair: tuple[UnixStream, socket.socket], null: int
) -> None:
    link, theirs = pair
    socket.send_fds(theirs, [b"x"], [null])
    assert await link.read() == b"x"
    (fd,) = link.received_fds
    assert not os.get_inheritable(fd)


async def read_on(link: UnixStream) -> None:
    while await link.read():
        pass


async def test_descriptors_that_nobody_takes_are_bounded(pair: tuple[UnixStream, socket.socket], null: int) -> None:
    link, theirs = pair
    before = open_fds()
    for _ in range(20):
        socket.send_fds(theirs, [b"x"], [null] * 100)
    with pytest.raises(ProtocolError, match="unexpected descriptors"):
        await read_on(link)
    assert open_fds() - before <= 2 * MAX_FDS
    link.close()
    assert link.received_fds == []


async def test_the_kernel_says_who_writes(pair: tuple[UnixStream, socket.socket]) -> None:
    link, theirs = pair
    link.enable_credentials()
    theirs.send(b"x")
    await link.read()
    assert link.peer_pid == os.getpid()
