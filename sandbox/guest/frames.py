"""Frames between executor and zygote, guest side: two little-endian u32 lengths, a header, then raw bytes.

What comes has a header by `marshal`, what goes one in JSON, or `_DONE`, which each call is answered by. Headers have
numbers and names of ours alone; what is a call's (code, input, names of files, output) follows as bytes, cut apart by
the lengths that the header lists under "blobs", and never leaves memory that is `apart`. The executor has its own copy
of this and trusts nothing that comes out of here.
"""

from __future__ import annotations

import json
import marshal
import os
import socket
import struct

import wiped_memory

_LENGTHS = struct.Struct("<II")
_DONE = struct.Struct("<BQiiQQQB")
_DONE_KIND, _OUT_CUT, _ERR_CUT = 1, 1, 2
_FD = struct.Struct("i")
_sendmsg = socket.socket.sendmsg  # `runner` puts another in its place
_FD_ROOM = socket.CMSG_SPACE(_FD.size)


class Frames:
    """Whole frames out of a blocking socket, and in `fds` the descriptors that came with them."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fds: list[int] = []
        self._room = wiped_memory.room(wiped_memory.ROOM)
        self._start = self._end = 0  # of what has come and was not given yet

    def receive(self) -> list[tuple[dict, memoryview]]:
        """Wait for bytes once; return the frames that are now whole, as header and body. A body is good until the next
        `receive`. Raises EOFError when the peer has gone."""
        self._make_room()
        size, ancillary, _flags, _address = self.sock.recvmsg_into([self._room[self._end :]], _FD_ROOM)
        for _level, _type, fd in ancillary:  # one descriptor at a time is all that the executor sends
            self.fds.append(_FD.unpack(fd)[0])
        if not size:
            raise EOFError
        self._end += size
        frames = []
        while self._end - self._start >= 8:
            head_size, body_size = _LENGTHS.unpack_from(self._room, self._start)
            body = self._start + 8 + head_size
            if self._end - body < body_size:
                break
            header = marshal.loads(self._room[self._start + 8 : body])
            frames.append((header, self._room[body : body + body_size]))
            self._start = body + body_size
        return frames

    def _make_room(self) -> None:
        """Move what is left to the front, into room that takes the rest of its frame."""
        left, room, size = self._room[self._start : self._end], self._room, wiped_memory.ROOM
        if len(left) >= 8:
            size = max(size, 8 + sum(_LENGTHS.unpack_from(left)))
        if len(room) != size:
            self._room = wiped_memory.room(size)
        if self._start or self._room is not room:
            self._room[: len(left)] = left
            self._start, self._end = 0, len(left)


class Outbox:
    """Frames on their way out of a blocking socket: gathered, then sent together."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._room = wiped_memory.room(wiped_memory.ROOM)
        self._end = 0

    def add(self, header: dict, files: list[tuple[int, int]] | tuple = ()) -> None:
        """Queue a frame whose blobs are the first so many bytes of `files`, (descriptor, length) each."""
        header["blobs"] = [size for _, size in files]
        head = _done(header) if header["op"] == "ended" else json.dumps(header).encode()
        body_size = sum(header["blobs"])
        whole = 8 + len(head) + body_size
        if self._end + whole > len(self._room):
            self.flush()
            if whole > len(self._room):
                self._room = wiped_memory.room(whole)
        room, at = self._room, self._end
        _LENGTHS.pack_into(room, at, len(head), body_size)
        at += 8
        room[at : at + len(head)] = head
        at += len(head)
        for fd, size in files:
            if size:
                read_whole(fd, room[at : at + size])
                at += size
        self._end = at

    def add_with(self, header: dict, fd: int) -> None:
        """Send all, and last a frame that carries a descriptor."""
        self.add(header)
        room = self._room[: self._end]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))
        sent = _sendmsg(self._sock, [room], [rights])
        self._sock.sendall(room[sent:])
        self._end = 0

    def flush(self) -> None:
        """Send what is queued."""
        if self._end:
            self._sock.sendall(self._room[: self._end])
            self._end = 0
            if len(self._room) > wiped_memory.ROOM:
                self._room = wiped_memory.room(wiped_memory.ROOM)


def _done(header: dict) -> bytes:
    """1, id, exit code and signal (-1: none), wall and CPU time in µs, peak in KiB, bits; then a u64 for each blob."""
    code, ended_by, sizes = header["exit_code"], header["signal"], header["blobs"]
    return _DONE.pack(
        _DONE_KIND,
        header["run_id"],
        -1 if code is None else code,
        -1 if ended_by is None else ended_by,
        round(header["wall_ms"] * 1e3),
        round(header["cpu_ms"] * 1e3),
        header["peak_kb"],
        _OUT_CUT * header["stdout_truncated"] | _ERR_CUT * header["stderr_truncated"],
    ) + struct.pack(f"<{len(sizes)}Q", *sizes)


def read_whole(fd: int, into: memoryview) -> None:
    """The first bytes of a file, in place; zeros where it ends before that."""
    done = 0
    while done < len(into):
        got = os.preadv(fd, [into[done:]], done)
        if not got:
            into[done:] = bytes(len(into) - done)
            return
        done += got


def cut(body: memoryview, sizes: list[int]) -> list[memoryview]:
    """A body's blobs."""
    blobs, start = [], 0
    for size in sizes:
        blobs.append(body[start : start + size])
        start += size
    return blobs
