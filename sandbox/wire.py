"""Frames between gateway and executor: a 4-byte little-endian length, then one msgpack array `[kind, ...]`.

Kinds, by direction (`seq` is the gateway's own number for a call, never reused on one connection):

    gateway -> executor                            executor -> gateway
    ["configure", settings, is_replacement] first  ["ready", {slots, long_slots, isolation, python, ...}]
    ["calls", [[seq, call], ...]]  64 at most      ["results", [[seq, result], ...]]
    ["cancel", [seq, ...]]                         ["stats", {...}]   about once a second
    ["drain"]                                      ["window", n]   how many calls it wants in hand from now on
                                                   ["failed", message]   the executor cannot start

A `call` is `Call.encode(binary=True)`, already validated and clamped; a `result` is `Result.encode(binary=True)`.
An executor with `is_replacement` is ready with its first zygote; others are ready when every zygote has been ready.
The `isolation` in the settings is a level and never "auto": the server chooses once, before it starts executors.
Until a "window" comes, which it may after "ready" and as often as it changes, the window is twice the slots; calls that
are in hand when it shrinks stay there.
`seq`s may be answered in any order; each is answered exactly once unless cancelled (then at most once).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from sandbox.errors import ProtocolError

MAX_FRAME_BYTES = 512 << 20
MAX_FRAME_CALLS = 64
"""Calls or results in one frame, at most."""
TARGET_FRAME_BYTES = 8 << 20
"""Bytes of calls or results in a frame above which no more are added, so that large ones travel alone."""
_LENGTH = struct.Struct("<I")


def pack(message: list[Any]) -> bytes:
    """One frame. Text may hold lone surrogates, since code may. Raises `ProtocolError` if no peer would take it."""
    body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(body)} bytes, expected at most {MAX_FRAME_BYTES}; send fewer calls in one")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Frames out of a byte stream: `feed` bytes, then iterate over the messages that are whole."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max = max_frame_bytes

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def __iter__(self) -> Iterator[list[Any]]:
        """Raises `ProtocolError` on a frame that is too long or is not an array that starts with its kind.

        Leaving the loop early keeps the frames not yet seen for the next one.
        """
        start = 0
        buffer = self._buffer
        try:
            while len(buffer) - start >= 4:
                (length,) = _LENGTH.unpack_from(buffer, start)
                if length > self._max:
                    raise ProtocolError(f"frame of {length} bytes, expected at most {self._max}")
                if len(buffer) - start - 4 < length:
                    break
                body = bytes(memoryview(buffer)[start + 4 : start + 4 + length])
                start += 4 + length
                yield _unpack(body)
        finally:
            del buffer[:start]


def _unpack(body: bytes) -> list[Any]:
    try:
        message = msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as why:
        raise ProtocolError(f"frame of {len(body)} bytes is not msgpack: {why}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ProtocolError(f"expected a frame [kind, ...], got {type(message).__name__}")
    return message
