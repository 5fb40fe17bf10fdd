"""Frames between executor and zygote, on the guest's side. `protocol` has their layout.

Headers contain only numbers, and names that this project defines. Data of a call (code, input, file names, output) is
in the body. The body consists of blobs, whose lengths the header contains as `blobs`. A body is only in memory that a
fork does not inherit. The executor has its own decoder and trusts nothing that a zygote sends.
"""

from __future__ import annotations

import json
import marshal
import os
import socket
import struct

import wiped_memory
from protocol import ENDED, ENDED_KIND, LENGTHS, STDERR_TRUNCATED, STDOUT_TRUNCATED

_FD = struct.Struct("i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_FD.size)
_sendmsg = socket.socket.sendmsg  # kept here because `runner` replaces the method


class FrameReader:
    """Reads whole frames from a blocking socket. `fds` holds the received descriptors in order of arrival."""

    def __init__(self, sock: socket.socket, usual_buffer: memoryview | None = None) -> None:
        """Create a reader. `usual_buffer` has `USUAL_BYTES`, and holds frames that are not larger."""
        self.sock = sock
        self.fds: list[int] = []
        self._buffer = self._usual_buffer = usual_buffer or wiped_memory.wiped_buffer()
        self._start = self._end = 0  # bounds of the bytes that are received and not returned yet

    def receive(self) -> list[tuple[dict, memoryview, memoryview]]:
        """Wait for bytes once. Return the complete frames as (header, body, record). Raises EOFError if the peer has
        closed.

        The record is the encoded header and the body. Both views are valid until the next `receive`.
        """
        self._compact()
        size, ancillary, _flags, _address = self.sock.recvmsg_into([self._buffer[self._end :]], _ANCILLARY_BYTES)
        for _level, _type, fd in ancillary:  # the executor sends one descriptor per frame
            self.fds.append(_FD.unpack(fd)[0])
        if not size:
            raise EOFError
        self._end += size
        frames = []
        while self._end - self._start >= LENGTHS.size:
            header_size, body_size = LENGTHS.unpack_from(self._buffer, self._start)
            body = self._start + LENGTHS.size + header_size
            if self._end - body < body_size:
                break
            record = self._buffer[self._start + LENGTHS.size : body + body_size]
            frames.append((marshal.loads(record[:header_size]), record[header_size:], record))
            self._start = body + body_size
        return frames

    def is_usual(self, record: memoryview) -> bool:
        """Return whether a record is in the usual buffer. A larger frame has a buffer of its own."""
        return len(record) <= len(self._usual_buffer) - LENGTHS.size

    def _compact(self) -> None:
        """Move the bytes of an incomplete frame to the start of a buffer that can hold the rest of it."""
        received, old, size = self._buffer[self._start : self._end], self._buffer, wiped_memory.USUAL_BYTES
        if len(received) >= LENGTHS.size:
            size = max(size, LENGTHS.size + sum(LENGTHS.unpack_from(received)))  # of the whole frame
        if len(old) != size:
            is_usual = size == wiped_memory.USUAL_BYTES
            self._buffer = self._usual_buffer if is_usual else wiped_memory.wiped_buffer(size)
        if self._start or self._buffer is not old:
            self._buffer[: len(received)] = received
            self._start, self._end = 0, len(received)


class FrameWriter:
    """Collects frames and sends them together over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = wiped_memory.wiped_buffer()
        self._end = 0

    def add(self, header: dict, files: list[tuple[int, int]] | tuple = ()) -> None:
        """Queue a frame. For each (descriptor, length) in `files`, it gets a blob with the first bytes of this file."""
        header["blobs"] = [size for _, size in files]
        is_short = header["op"] == "ended" and "state" not in header  # the end of a cell has further fields
        head = _encode_ended(header) if is_short else json.dumps(header).encode()
        body_size = sum(header["blobs"])
        frame_size = LENGTHS.size + len(head) + body_size
        if self._end + frame_size > len(self._buffer):
            self.flush()
            if frame_size > len(self._buffer):
                self._buffer = wiped_memory.wiped_buffer(frame_size)
        buffer, position = self._buffer, self._end
        LENGTHS.pack_into(buffer, position, len(head), body_size)
        position += LENGTHS.size
        buffer[position : position + len(head)] = head
        position += len(head)
        for fd, size in files:
            if size:
                read_into(fd, buffer[position : position + size])
                position += size
        self._end = position

    def send_with_fd(self, header: dict, fd: int) -> None:
        """Send all queued frames, and after them a frame with a descriptor."""
        self.add(header)
        queued = self._buffer[: self._end]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))
        sent = _sendmsg(self._sock, [queued], [rights])
        self._sock.sendall(queued[sent:])
        self._end = 0

    def flush(self) -> None:
        """Send all queued frames."""
        if self._end:
            self._sock.sendall(self._buffer[: self._end])
            self._end = 0
            if len(self._buffer) > wiped_memory.USUAL_BYTES:
                self._buffer = wiped_memory.wiped_buffer()

    def first_header(self) -> bytes:
        """Return the header of the first queued frame."""
        header_size, _ = LENGTHS.unpack_from(self._buffer)
        return bytes(self._buffer[LENGTHS.size : LENGTHS.size + header_size])


def _encode_ended(header: dict) -> bytes:
    """Encode an `ended` header (`protocol.ENDED`)."""
    exit_code, term_signal, sizes = header["exit_code"], header["signal"], header["blobs"]
    return ENDED.pack(
        ENDED_KIND,
        header["run_id"],
        -1 if exit_code is None else exit_code,
        -1 if term_signal is None else term_signal,
        round(header["wall_ms"] * 1e3),
        round(header["cpu_ms"] * 1e3),
        header["peak_kb"],
        STDOUT_TRUNCATED * header["stdout_truncated"] | STDERR_TRUNCATED * header["stderr_truncated"],
    ) + struct.pack(f"<{len(sizes)}Q", *sizes)


def read_into(fd: int, target: memoryview) -> None:
    """Fill `target` with the first bytes of a file, and with zeros if the file is shorter."""
    done = 0
    while done < len(target):
        size = os.preadv(fd, [target[done:]], done)
        if not size:
            target[done:] = bytes(len(target) - done)
            return
        done += size


def split_blobs(body: memoryview, sizes: list[int]) -> list[memoryview]:
    """Split a body into blobs of these sizes."""
    blobs, start = [], 0
    for size in sizes:
        blobs.append(body[start : start + size])
        start += size
    return blobs
