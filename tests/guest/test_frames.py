"""Tests that the guest receives and sends frames of any size. It uses memory that a fork does not inherit."""

from __future__ import annotations

import ctypes
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
    """The guest's modules, imported by bare name from their directory, as the guest imports them."""
    monkeypatch.syspath_prepend(str(GUEST))
    names = ("protocol", "wiped_memory", "frames")
    assert not set(names) & set(sys.modules)
    yield SimpleNamespace(**{name: __import__(name) for name in names})
    for name in names:
        del sys.modules[name]


def _blobs(sizes: tuple[int, ...]) -> list[bytes]:
    return [bytes([ord("A") + number]) * size for number, size in enumerate(sizes)]


def _copy(call_record: Any, record: memoryview) -> None:
    """Copy a record as `fork_batch` does before a fork."""
    source, target, size, zeros = call_record.prepare_copy(record)
    ctypes.memmove(target, source, size)
    ctypes.memset(target + size, 0, zeros)


def test_frames_of_any_size_arrive_whole(guest: Any) -> None:
    ours, theirs = socket.socketpair()
    stream = b"".join(zygote_frames.pack(dict(HEADER), _blobs(sizes)) for sizes in SIZES * 2)
    sender = threading.Thread(target=ours.sendall, args=(stream,))
    with ours, theirs:
        sender.start()
        reader, received = guest.frames.FrameReader(theirs), []
        while len(received) < 2 * len(SIZES):
            for header, body, record in reader.receive():
                assert bytes(record[len(record) - len(body) :]) == bytes(body)
                received.append((header, [bytes(blob) for blob in guest.frames.split_blobs(body, header["blobs"])]))
        sender.join()
        ours.close()
        with pytest.raises(EOFError):
            reader.receive()
    assert received == [({**HEADER, "blobs": list(sizes)}, _blobs(sizes)) for sizes in SIZES * 2]


def test_frames_of_any_size_leave_whole_and_in_order(guest: Any, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    unpacker, received = zygote_frames.Unpacker(), []
    unpacker.max_body_bytes = 1 << 23

    def receive_all() -> None:
        while data := ours.recv(1 << 16):
            unpacker.feed(data)
            received.extend(unpacker)

    thread = threading.Thread(target=receive_all)
    with ours, theirs:
        thread.start()
        writer = guest.frames.FrameWriter(theirs)
        for sizes in SIZES * 2:
            files = []
            for number, blob in enumerate(_blobs(sizes)):
                (tmp_path / str(number)).write_bytes(blob + b"bytes beyond the given length")
                files.append((os.open(tmp_path / str(number), os.O_RDONLY), len(blob)))
            writer.add(dict(HEADER), files)
            for fd, _ in files:
                os.close(fd)
        writer.flush()
        theirs.close()
        thread.join()
    assert received == [({**HEADER, "blobs": list(sizes)}, _blobs(sizes)) for sizes in SIZES * 2]


def test_a_file_that_is_too_short_is_filled_with_zeros(guest: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"ab")
    target = memoryview(bytearray(b"other calls"))
    with (tmp_path / "f").open("rb") as file:
        guest.frames.read_into(file.fileno(), target[:5])
    assert bytes(target) == b"ab\0\0\0 calls"


def test_a_fork_inherits_its_own_record_and_zeros_instead_of_all_other_data(guest: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, writer = guest.frames.FrameReader(theirs), guest.frames.FrameWriter(theirs)
        call_record = guest.wiped_memory.CallRecord()
        other, own = b"other " * 100, b"mine"
        ours.sendall(zygote_frames.pack(dict(HEADER), [other]) + zygote_frames.pack(dict(HEADER), [own]))
        (*_, other_record), (*_, own_record) = reader.receive()
        _copy(call_record, other_record)
        _copy(call_record, own_record)
        own_size = len(own_record)
        writer.add({"op": "secret"})
        read_fd, write_fd = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                buffers = bytes(reader._buffer) + bytes(writer._buffer)
                inherited = any(buffers), b"other" in call_record._pages[:], bytes(call_record.read(own_size))[-4:]
                os.write(write_fd, b"%d %d %s" % inherited)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read_fd, 100) == b"0 0 mine"
        assert any(reader._buffer), "the parent still has the bytes"
        assert any(writer._buffer), "the parent still has the bytes"
        os.close(read_fd)
        os.close(write_fd)


def test_only_a_frame_that_fits_into_the_usual_buffer_is_usual(guest: Any) -> None:
    """The template of a zygote can read the usual buffer, and no other."""
    ours, theirs = socket.socketpair()
    usual = memoryview(bytearray(guest.wiped_memory.USUAL_BYTES))
    with ours, theirs:
        reader = guest.frames.FrameReader(theirs, usual)
        empty = len(zygote_frames.pack(dict(HEADER), [b""]))
        for size in (10, len(usual) - empty - 20, len(usual), 10):
            sender = threading.Thread(target=ours.sendall, args=(zygote_frames.pack(dict(HEADER), [b"x" * size]),))
            sender.start()
            received: list[Any] = []
            while not received:
                received = reader.receive()
            sender.join()
            record = received[0][2]
            in_usual = record.obj is usual.obj
            assert reader.is_usual(record) == in_usual == (size < len(usual))
