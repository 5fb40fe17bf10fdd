"""The guest's end of the frames: whole frames whatever their sizes, in memory that no fork gets."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.executor import zygote_frames

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"
HEADER = {"op": "call", "n": 2**53, "text": "\u00fc"}
SIZES = [(0,), (1, 0, 3), (1 << 18,), (300_000, 5), (1 << 21, 0, 1 << 20), (7,)]


@pytest.fixture
def guest(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The guest's modules, imported as it does: by bare name, from beside each other."""
    monkeypatch.syspath_prepend(str(GUEST))
    names = ("wiped_memory", "frames")
    assert not set(names) & set(sys.modules)
    yield SimpleNamespace(**{name: __import__(name) for name in names})
    for name in names:
        del sys.modules[name]


def _blobs(sizes: tuple[int, ...]) -> list[bytes]:
    return [bytes([65 + number]) * size for number, size in enumerate(sizes)]


def test_frames_of_any_size_arrive_whole(guest: Any) -> None:
    ours, theirs = socket.socketpair()
    stream = b"".join(zygote_frames.pack(dict(HEADER), _blobs(sizes)) for sizes in SIZES * 2)
    sender = threading.Thread(target=ours.sendall, args=(stream,))
    with ours, theirs:
        sender.start()
        incoming, got = guest.frames.Frames(theirs), []
        while len(got) < 2 * len(SIZES):
            for header, body in incoming.receive():
                got.append((header, [bytes(blob) for blob in guest.frames.cut(body, header["blobs"])]))
        sender.join()
        ours.close()
        with pytest.raises(EOFError):
            incoming.receive()
    assert got == [({**HEADER, "blobs": list(sizes)}, _blobs(sizes)) for sizes in SIZES * 2]


def test_frames_of_any_size_leave_whole_and_in_order(guest: Any, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    unpacker, got = zygote_frames.Unpacker(), []
    unpacker.max_body_bytes = 1 << 23

    def read() -> None:
        while data := ours.recv(1 << 16):
            unpacker.feed(data)
            got.extend(unpacker)

    reader = threading.Thread(target=read)
    with ours, theirs:
        reader.start()
        outbox = guest.frames.Outbox(theirs)
        for sizes in SIZES * 2:
            files = []
            for number, blob in enumerate(_blobs(sizes)):
                (tmp_path / str(number)).write_bytes(blob + b"more than is asked for")
                files.append((os.open(tmp_path / str(number), os.O_RDONLY), len(blob)))
            outbox.add(dict(HEADER), files)
            for fd, _ in files:
                os.close(fd)
        outbox.flush()
        theirs.close()
        reader.join()
    assert got == [({**HEADER, "blobs": list(sizes)}, _blobs(sizes)) for sizes in SIZES * 2]


def test_a_file_that_is_too_short_is_filled_with_zeros(guest: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"ab")
    room = memoryview(bytearray(b"other calls"))
    with (tmp_path / "f").open("rb") as file:
        guest.frames.read_whole(file.fileno(), room[:5])
    assert bytes(room) == b"ab\0\0\0 calls"


def test_a_fork_finds_zeros_but_for_its_own_input(guest: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        incoming, outbox, inbox = guest.frames.Frames(theirs), guest.frames.Outbox(theirs), guest.wiped_memory.Inbox()
        long, short = b"other " * 100, b"mine"
        ours.sendall(zygote_frames.pack(dict(HEADER), [long]) + zygote_frames.pack(dict(HEADER), [short]))
        (_, first), (_, second) = incoming.receive()
        inbox.put(first)
        inbox.put(second)
        outbox.add({"op": "secret"})
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                rooms = bytes(incoming._room) + bytes(outbox._room)
                os.write(writable, b"%d %d %s" % (any(rooms), b"other" in inbox._usual[:], bytes(inbox.body)))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(readable, 100) == b"0 0 mine"
        assert any(incoming._room)
        assert any(outbox._room)
        os.close(readable)
        os.close(writable)


def test_large_input_is_held_for_one_call_alone(guest: Any) -> None:
    inbox = guest.wiped_memory.Inbox()
    inbox.put(memoryview(bytearray(b"of the call before")))
    big = bytearray(b"x" * (guest.wiped_memory.ROOM + 1))
    inbox.put(memoryview(big))
    assert bytes(inbox.body) == big
    assert not any(inbox._usual[:])
    inbox.shrink()
    assert len(inbox.body) == 0
    inbox.put(memoryview(bytearray(b"small")))
    inbox.shrink()
    assert bytes(inbox.body) == b"small"
