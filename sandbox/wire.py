"""Frames between gateway and executor: a 4-byte little-endian length, then one msgpack array `[kind, ...]`.

    gateway -> executor                            executor -> gateway
    ["configure", settings, is_replacement] first  ["ready", {slots, long_slots, isolation, cgroups, python, ...}]
    ["calls", [[seq, call], ...]]  64 at most      ["results", [[seq, result], ...]]
    ["cancel", [seq, ...]]                         ["stats", {...}]     once per second
    ["drain"]                                      ["lost", [[seq, reason, has_started], ...]]
                                                   ["window", n]        max calls at the executor from now on
                                                   ["failed", message]  the executor cannot start

- An attempt is one dispatch of a call to an executor. `seq` is the gateway's number of the attempt, never reused on one
  connection. Each attempt ends exactly once, with a result or as lost; a cancelled attempt ends at most once. Attempts
  end in any order.
- An executor starts the code of an attempt once. It starts the code once more if the call starved at a lower CPU
  priority (`executor.time.monitor`).
- An attempt is lost if its code could not be started, or if its code ended without a result (`has_started`): its zygote
  (the process from which it was forked) exited, or an outer memory limit killed it. The executor does not repeat a lost
  attempt. The gateway decides whether the call gets another attempt.
- `call` is `Call.encode(binary=True)`, validated and clamped; `result` is `Result.encode(binary=True)`. A call of
  `sandbox.judging.programs` may also have `compiled` (bytes) or `compile_only`, which no HTTP request can set.
  `request` is the number of the HTTP request of a call.
- An executor with `is_replacement` is ready when its first zygote is ready. Other executors are ready when every zygote
  has been ready.
- `isolation` in the settings is never "auto": the server chooses the level once, before it starts executors.
- The window is the number of calls that an executor accepts at once. It is twice the slots until a "window" frame
  changes it, which may happen at any time after "ready". A smaller window does not affect calls that the executor
  already has.
- In addition to its window, an executor accepts `reserved_slots` calls whose requests have no running call.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from sandbox.errors import ProtocolError

MAX_FRAME_BYTES = 512 << 20
MAX_FRAME_CALLS = 64
"""Maximum number of calls or results in one frame."""
TARGET_FRAME_BYTES = 8 << 20
"""Size in bytes from which a frame gets no further calls or results."""
LARGE_BYTES = 64 << 10
"""The content of a file with at least this many bytes is a part of the frame by itself, so that it is not copied."""
_LENGTH = struct.Struct("<I")
_BYTES_HEADER = struct.Struct(">BI")
"""Header of bytes in msgpack: 0xC6 and the length."""


def pack(message: list[Any]) -> bytes:
    """Encode one frame. Text may contain lone surrogates. Raises `ProtocolError` if the frame exceeds
    `MAX_FRAME_BYTES`."""
    body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return _length_of_frame(len(body)) + body


def pack_calls(calls: list[list[Any]]) -> list[bytes]:
    """Encode the frame `["calls", calls]`, and return its parts. Large files are parts that are not copied, since the
    files of one call may have hundreds of MiB. Raises `ProtocolError` if the frame exceeds `MAX_FRAME_BYTES`."""
    if not any(len(data) >= LARGE_BYTES for _, call in calls for data in call.get("files", {}).values()):
        return [pack(["calls", calls])]
    packer = msgpack.Packer(unicode_errors="surrogatepass", autoreset=False)
    parts: list[bytes] = []
    packer.pack_array_header(2)
    packer.pack("calls")
    packer.pack_array_header(len(calls))
    for seq, call in calls:
        packer.pack_array_header(2)
        packer.pack(seq)
        packer.pack_map_header(len(call))
        for name, value in call.items():
            packer.pack(name)
            if name != "files":
                packer.pack(value)
                continue
            packer.pack_map_header(len(value))
            for path, data in value.items():
                packer.pack(path)
                if len(data) < LARGE_BYTES:
                    packer.pack(data)
                else:  # `Packer` has no method for the header of bytes alone
                    parts += packer.bytes(), _BYTES_HEADER.pack(0xC6, len(data)), data
                    packer.reset()
    parts.append(packer.bytes())
    return [_length_of_frame(sum(map(len, parts))), *parts]


def _length_of_frame(size: int) -> bytes:
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {size} bytes, expected at most {MAX_FRAME_BYTES}; send fewer calls in one")
    return _LENGTH.pack(size)


class Unpacker:
    """Decodes frames from a byte stream: `feed` bytes, then iterate over the complete messages."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max = max_frame_bytes

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield complete messages. Raises `ProtocolError` for a frame that is too long, or that is no array
        `[kind, ...]`.

        If the loop ends early, the next loop continues with the following frame.
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
                with memoryview(buffer) as view, view[start + 4 : start + 4 + length] as body:
                    message = _unpack(body)
                start += 4 + length
                yield message
        finally:
            del buffer[:start]


def _unpack(body: memoryview) -> list[Any]:
    try:
        message = msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"frame of {len(body)} bytes is not msgpack: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ProtocolError(f"expected a frame [kind, ...], got {type(message).__name__}")
    return message
