"""Socket pairs carry data of any size, although the filter refuses sendmsg."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.calling import OWN_PYTHON, Caller, executor

STREAMS = """
import asyncio, socket
async def main():
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    reader, _ = await asyncio.open_connection(sock=theirs)
    writer.write(b"x" * (1 << 20))
    writer.writelines([b"y" * 1000] * 3)
    writer.write_eof()
    return len(await reader.read())
asyncio.run(main())
"""


@pytest.fixture(scope="module", params=["own", "runtime"])
def each_python(request: pytest.FixtureRequest) -> Iterator[Caller]:
    """An executor with the tests' Python, and one with the guest runtime's: asyncio uses sendmsg since Python 3.12."""
    python: str | Path = OWN_PYTHON if request.param == "own" else request.getfixturevalue("guest_python")
    with executor(python) as caller:
        yield caller


def test_asyncio_streams_work(each_python: Caller) -> None:
    assert each_python.run(STREAMS).value == str((1 << 20) + 3000)


SENDING = """
import socket
def send_and_receive(timeout, flags):
    ours, theirs = socket.socketpair()
    ours.settimeout(timeout)
    return ours.sendmsg([b"x", bytearray(b"yz")], (), flags), theirs.recvmsg(9)[0]
[send_and_receive(timeout, flags) for timeout in (None, 0, 1) for flags in (0, socket.MSG_DONTWAIT)]
"""


def test_sendmsg_sends_data_but_no_descriptors(each_python: Caller) -> None:
    assert each_python.run(SENDING).value == repr([(3, b"xyz")] * 6)
    error = each_python.run("import socket\nsocket.send_fds(socket.socketpair()[0], [b'x'], [1])").error
    assert error is not None
    assert (error.type, error.message[:9]) == ("PermissionError", "[Errno 1]")
