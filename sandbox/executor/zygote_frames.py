"""Frames between executor and zygote, this side: two little-endian u32 lengths, a header, then raw bytes.

`guest/frames.py` is the same for the other side. What leaves here has a header by `marshal`, the fastest that every
Python has; version 2 is the same in all. What arrives here comes from hostile ground, so it is JSON, or `_DONE`, which
each call is answered by. Lengths are bounded before anything is kept, a header must be an object with the fields its
kind needs, and whatever else is a `ProtocolError`, which costs the zygote its life and nothing more.
"""

from __future__ import annotations

import json
import marshal
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from sandbox.errors import ProtocolError

MAX_HEADER_BYTES = 1 << 20
_LENGTHS = struct.Struct("<II")
_DONE = struct.Struct("<BQiiQQQB")
"""1, id, exit code and signal (-1: none), wall and CPU time in µs, peak in KiB, bits; then a u64 for each blob."""
_DONE_KIND, _OUT_CUT, _ERR_CUT = b"\1", 1, 2
_MOST_DONE_BLOBS = 4


def pack(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """One frame."""
    header["blobs"] = [len(blob) for blob in blobs]
    head = marshal.dumps(header, 2)
    return b"".join([_LENGTHS.pack(len(head), sum(header["blobs"])), head, *blobs])


class Unpacker:
    """Frames out of a hostile byte stream: `feed` bytes, then iterate over (header, blobs) that are whole."""

    def __init__(self) -> None:
        self.max_body_bytes = 0
        """No body may be longer; whoever expects one says so before."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def __iter__(self) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        buffer, start = self._buffer, 0
        try:
            while len(buffer) - start >= 8:
                head_size, body_size = _LENGTHS.unpack_from(buffer, start)
                if head_size > MAX_HEADER_BYTES or body_size > self.max_body_bytes:
                    raise ProtocolError(f"frame of {head_size} + {body_size} bytes from a zygote is over its bounds")
                body = start + 8 + head_size
                if len(buffer) < body + body_size:
                    break
                frame = _decode(bytes(buffer[start + 8 : body]), bytes(buffer[body : body + body_size]))
                start = body + body_size
                yield frame
        finally:
            del buffer[:start]


def _decode(head: bytes, body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    try:
        header = _done(head) if head[:1] == _DONE_KIND else json.loads(head)
        sizes = header["blobs"]
        if type(sizes) is not list or any(type(size) is not int or size < 0 for size in sizes):
            raise ValueError("blobs are no lengths")
        if sum(sizes) != len(body):
            raise ValueError("blobs do not add up")
        if not isinstance(header["op"], str):
            raise ValueError("no op")
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as why:
        raise ProtocolError(f"a zygote sent no valid frame: {type(why).__name__}: {why}") from None
    blobs, start = [], 0
    for size in sizes:
        blobs.append(body[start : start + size])
        start += size
    return header, blobs


def _done(head: bytes) -> dict[str, Any]:
    """The header of an answered call. Raises `ValueError` or `struct.error`."""
    _kind, ticket, code, ended_by, wall_us, cpu_us, peak_kb, bits = _DONE.unpack_from(head)
    count = (len(head) - _DONE.size) // 8
    if count > _MOST_DONE_BLOBS:
        raise ValueError(f"{count} blobs")
    return {
        "op": "ended",
        "run_id": ticket,
        "exit_code": code if code >= 0 else None,
        "signal": ended_by if ended_by >= 0 else None,
        "wall_ms": wall_us / 1e3,
        "cpu_ms": cpu_us / 1e3,
        "peak_kb": peak_kb,
        "stdout_truncated": bool(bits & _OUT_CUT),
        "stderr_truncated": bool(bits & _ERR_CUT),
        "blobs": list(struct.unpack(f"<{count}Q", head[_DONE.size :])),
    }


def number(header: dict[str, Any], name: str) -> float:
    """A finite number out of a header, or `ProtocolError`."""
    value: Any = header.get(name)
    if type(value) not in (int, float) or not -1e15 < value < 1e15:
        raise ProtocolError(f"a zygote sent {type(value).__name__} as {name}, expected a number")
    return float(value)


def text(header: dict[str, Any], name: str) -> str:
    """The beginning of a text out of a header, fit for a log, or `ProtocolError`."""
    return _shown(header.get(name), name)


def texts(header: dict[str, Any], name: str) -> list[str]:
    """The same for a list of texts."""
    values: Any = header.get(name)
    if type(values) is not list:
        raise ProtocolError(f"a zygote sent {type(values).__name__} as {name}, expected a list")
    return [_shown(value, name) for value in values]


def _shown(value: Any, name: str) -> str:
    if type(value) is not str:
        raise ProtocolError(f"a zygote sent {type(value).__name__} as {name}, expected text")
    start = value[:300]
    return start if start.isprintable() else ascii(start)
