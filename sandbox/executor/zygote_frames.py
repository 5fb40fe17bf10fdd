"""Frames between executor and zygote, as the executor encodes and decodes them.

`guest/protocol.py` has the layout of frames, and `guest/frames.py` is the zygote's side. The body of a frame consists
of blobs (byte strings). The field "blobs" of the header contains the lengths of the blobs. The executor's headers are
`marshal` data of version 2, which is the fastest format that every supported Python can read.

A zygote is untrusted. The lengths are checked before a frame is buffered. A header must be an object with the fields
that its kind needs. Any other data raises `ProtocolError`, and the executor then kills the zygote's jail.
"""

from __future__ import annotations

import json
import marshal
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from sandbox.errors import ProtocolError
from sandbox.guest.protocol import ENDED, ENDED_KIND, LENGTHS, STDERR_TRUNCATED, STDOUT_TRUNCATED

MAX_HEADER_BYTES = 1 << 20
"""Maximum size of a header. The longest header, `loaded`, has some hundred names of modules."""
_MAX_TEXT_CHARS = 300
_MAX_NUMBER = 1e15
"""Numbers have to be smaller than this. So they are finite, and their sums and products are finite too."""
Header = dict[str, Any]
_MAX_ENDED_BLOBS = 4


def pack(header: Header, blobs: Sequence[bytes] = ()) -> bytes:
    """Encode one frame. Adds "blobs" to `header`."""
    header["blobs"] = [len(blob) for blob in blobs]
    head = marshal.dumps(header, 2)
    return b"".join([LENGTHS.pack(len(head), sum(header["blobs"])), head, *blobs])


class Unpacker:
    """Splits an untrusted byte stream into frames. `feed` it bytes, then iterate over the complete frames. Each frame
    is a pair (header, blobs)."""

    def __init__(self) -> None:
        self.max_body_bytes = 0
        """Largest body in bytes that is accepted. Raise this number before the zygote may send a larger body."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def __iter__(self) -> Iterator[tuple[Header, list[bytes]]]:
        """Raises `ProtocolError` if a frame is too long or invalid."""
        buffer, start = self._buffer, 0
        try:
            while len(buffer) - start >= 8:  # the size of `LENGTHS`
                head_size, body_size = LENGTHS.unpack_from(buffer, start)
                if head_size > MAX_HEADER_BYTES or body_size > self.max_body_bytes:
                    raise ProtocolError(
                        f"a zygote announced a frame of {head_size} + {body_size} bytes, "
                        f"expected at most {MAX_HEADER_BYTES} + {self.max_body_bytes}"
                    )
                body = start + 8 + head_size
                if len(buffer) < body + body_size:
                    break
                frame = _decode(bytes(buffer[start + 8 : body]), bytes(buffer[body : body + body_size]))
                start = body + body_size
                yield frame
        finally:
            del buffer[:start]


def _decode(head: bytes, body: bytes) -> tuple[Header, list[bytes]]:
    try:
        header = _decode_ended(head) if head[:1] == ENDED_KIND.to_bytes() else json.loads(head)
        sizes = header["blobs"]
        if type(sizes) is not list or any(type(size) is not int or size < 0 for size in sizes):
            raise ValueError("blobs is not a list of lengths")
        if sum(sizes) != len(body):
            raise ValueError(f"blobs add up to {sum(sizes)} bytes, the body has {len(body)}")
        if not isinstance(header["op"], str):
            raise ValueError("op is not text")
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise ProtocolError(f"a zygote sent an invalid frame: {type(error).__name__}: {str(error)[:200]}") from None
    blobs, start = [], 0
    for size in sizes:
        blobs.append(body[start : start + size])
        start += size
    return header, blobs


def _decode_ended(head: bytes) -> Header:
    """Decode the header of an `ended` frame. Raises `ValueError` or `struct.error`."""
    _kind, run_id, exit_code, term_signal, wall_us, cpu_us, peak_kb, flags = ENDED.unpack_from(head)
    blob_count = (len(head) - ENDED.size) // 8
    if blob_count > _MAX_ENDED_BLOBS:
        raise ValueError(f"{blob_count} blobs, expected at most {_MAX_ENDED_BLOBS}")
    return {
        "op": "ended",
        "run_id": run_id,
        "exit_code": exit_code if exit_code >= 0 else None,
        "signal": term_signal if term_signal >= 0 else None,
        "wall_ms": wall_us / 1e3,
        "cpu_ms": cpu_us / 1e3,
        "peak_kb": peak_kb,
        "stdout_truncated": bool(flags & STDOUT_TRUNCATED),
        "stderr_truncated": bool(flags & STDERR_TRUNCATED),
        "blobs": list(struct.unpack(f"<{blob_count}Q", head[ENDED.size :])),
    }


def get_number(header: Header, name: str) -> float:
    """Return a finite number of the header. Raises `ProtocolError`."""
    value: Any = header.get(name)
    if type(value) not in (int, float) or not -_MAX_NUMBER < value < _MAX_NUMBER:
        raise ProtocolError(f"a zygote sent {type(value).__name__} as {name}, expected a finite number")
    return float(value)


def get_text(header: Header, name: str) -> str:
    """Return a text of the header, cut after `_MAX_TEXT_CHARS` and with unprintable characters escaped. Raises
    `ProtocolError`."""
    return _printable(header.get(name), name)


def get_texts(header: Header, name: str) -> list[str]:
    """Return a list of texts, each as `get_text` returns it. Raises `ProtocolError`."""
    values: object = header.get(name)
    if not isinstance(values, list):
        raise ProtocolError(f"a zygote sent {type(values).__name__} as {name}, expected a list")
    return [_printable(value, name) for value in values]


def _printable(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"a zygote sent {type(value).__name__} as {name}, expected text")
    start = value[:_MAX_TEXT_CHARS]
    return start if start.isprintable() else ascii(start)
