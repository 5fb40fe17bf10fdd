"""Frames between executor and zygote, guest side: two little-endian u32 lengths, a JSON header, then raw bytes.

What has a structure is in the header; code, input, output and files follow as bytes, cut apart by the lengths that the
header lists under "blobs". The executor has its own copy of this and trusts nothing that comes out of here.
"""

from __future__ import annotations

import json
import socket
import struct

_LENGTHS = struct.Struct("<II")
_FD = struct.Struct("i")
_FD_ROOM = socket.CMSG_SPACE(_FD.size)
_CHUNK = 1 << 18


def pack(header: dict, *blobs: bytes) -> bytes:
    """One frame."""
    header["blobs"] = [len(blob) for blob in blobs]
    head = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([_LENGTHS.pack(len(head), sum(header["blobs"])), head, *blobs])


class Frames:
    """Whole frames out of a blocking socket, and in `fds` the descriptors that came with them."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fds: list[int] = []
        self._buffer = bytearray()

    def receive(self) -> list[tuple[dict, list[bytes]]]:
        """Wait for bytes once; return the frames that are now whole. Raises EOFError when the peer has gone."""
        data, ancillary, _flags, _address = self.sock.recvmsg(_CHUNK, _FD_ROOM)
        for _level, _type, fd in ancillary:  # one descriptor at a time is all that the executor sends
            self.fds.append(_FD.unpack(fd)[0])
        if not data:
            raise EOFError
        buffer = self._buffer
        buffer += data
        frames, start = [], 0
        while len(buffer) - start >= 8:
            head_size, body_size = _LENGTHS.unpack_from(buffer, start)
            body = start + 8 + head_size
            if len(buffer) < body + body_size:
                break
            header = json.loads(buffer[start + 8 : body])
            frames.append((header, _cut(buffer, body, header["blobs"])))
            start = body + body_size
        del buffer[:start]
        return frames


def _cut(buffer: bytearray, start: int, sizes: list[int]) -> list[bytes]:
    blobs = []
    for size in sizes:
        blobs.append(bytes(buffer[start : start + size]))
        start += size
    return blobs
