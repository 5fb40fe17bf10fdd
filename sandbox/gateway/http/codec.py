"""HTTP bodies: reads them within limits, decodes them, and encodes results. JSON or msgpack, by the request's headers.

Invariants:
- A body costs at most about 20 times `body_mb` of memory, whatever it contains. Lists of short texts cost so much; most
  bodies cost a small multiple of their size.
- Large bodies are decoded one at a time. Bodies whose calls are not admitted yet have at most `max_total_bytes`
  together.
- A body that cannot be decoded raises an `HttpError` that says where; no body causes a 500.
- Encoding a result never fails: lone surrogates, which code can print, become "?".
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
from aiohttp import web

from sandbox.gateway.http.errors import HttpError

JSON = "application/json"
MSGPACK = "application/msgpack"
NDJSON = "application/x-ndjson"
MSGPACK_STREAM = "application/x-msgpack-stream"
"""Content type of a sequence of msgpack mappings. NDJSON is the same for JSON objects."""

THREADED_DECODE_BYTES = 1 << 20
"""Size from which a body is decoded in a thread. The decoders call hooks that are written in Python, so the
thread does not block the event loop."""
HEARTBEAT_S = 15.0
"""Seconds without a result after which a stream sends a heartbeat (an empty line, or nil in msgpack), so that clients
and proxies can tell a busy server from a dead server."""
HEARTBEAT = {NDJSON: b"\n", MSGPACK_STREAM: b"\xc0", JSON: b"\n"}
"""Heartbeats by content type. JSON parsers skip white space before a value; a msgpack body cannot have heartbeats,
because each byte would be a value."""
RESULTS_PER_YIELD = 64
"""Results encoded before the task yields to the event loop."""
CHUNK_BYTES = 256 << 10
"""Bytes that a client has `stall_s` to send or to read."""
MAX_MAP_LEN = 4096
"""Keys of one msgpack mapping."""
MAX_DIGITS = 4300
"""Characters of a JSON integer. `int` accepts no more."""
MAX_JSON_BRACKETS = 4 << 20
"""Opening brackets in a JSON body. They are counted because the JSON decoder has no hook for lists."""

Json = Any
"""A decoded body, of which nothing is known yet."""
Encoded = Mapping[str, object]
"""An `EncodedResult`, or an encoded `Verdict`."""


class BodyReader:
    """Reads and decodes the bodies of all requests, within shared limits."""

    def __init__(self, max_total_bytes: int, max_body_bytes: int, max_calls: int, stall_s: float = 30.0) -> None:
        self.max_total_bytes = max_total_bytes
        self.max_body_bytes = max_body_bytes
        self.max_calls = max_calls
        self.stall_s = stall_s
        self.buffered_bytes = 0
        """Bytes of bodies that are being read, or were read and not released."""
        self._large = asyncio.Semaphore(1)
        """Held while a large body is decoded, since a hostile body takes many times its size in memory."""

    async def read(self, request: web.Request, max_bytes: int | None = None) -> bytes:
        """Return the body, of at most `max_bytes` (default: `max_body_bytes`). The caller must `release` its size once
        its calls are admitted or rejected.

        Raises `HttpError`: 413 if the body is too long, 429 if all bodies together are too long, and 408 if the client
        needs more than `stall_s` for `CHUNK_BYTES` or for the last part.
        """
        max_bytes = min(self.max_body_bytes, max_bytes or self.max_body_bytes)
        if (length := request.content_length or 0) > max_bytes:
            raise self._too_long(length, max_bytes)
        chunks: list[bytes] = []
        size, is_complete = 0, False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.stall_s) as timeout:
                async for chunk in request.content.iter_any():
                    if (size + len(chunk)) // CHUNK_BYTES > size // CHUNK_BYTES:
                        timeout.reschedule(loop.time() + self.stall_s)
                    chunks.append(chunk)
                    size += len(chunk)
                    self.buffered_bytes += len(chunk)
                    if size > max_bytes:
                        raise self._too_long(size, max_bytes)
                    if self.buffered_bytes > self.max_total_bytes:
                        raise HttpError(
                            429,
                            f"bodies of {self.buffered_bytes} bytes are being received, at most "
                            f"{self.max_total_bytes}; try again in 1 s",
                            {"Retry-After": "1"},
                        )
            is_complete = True
        except TimeoutError:
            raise HttpError(
                408,
                f"the body stopped after {size} bytes: expected the rest, or {CHUNK_BYTES} bytes more, within "
                f"{self.stall_s:g} s; send it faster, or start the server with a larger --stall-s",
            ) from None
        finally:
            if not is_complete:
                self.release(size)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self, size: int) -> None:
        """Count `size` bytes as no longer buffered."""
        self.buffered_bytes -= size

    async def decode(self, body: bytes, content_type: str, max_calls: int | None = None) -> Json:
        """Decode a body. Raises `HttpError`: 400 if it is malformed, 413 if it has more objects than `max_calls` calls
        have."""
        decoder = _decode_msgpack if content_type == MSGPACK else _decode_json
        max_calls = max_calls or self.max_calls
        if len(body) < THREADED_DECODE_BYTES:
            return decoder(body, max_calls)
        async with self._large:
            decoding = asyncio.get_running_loop().run_in_executor(None, decoder, body, max_calls)
            try:
                return await asyncio.shield(decoding)
            finally:  # a thread cannot be cancelled, so a cancelled request waits for it and keeps the semaphore
                await asyncio.gather(decoding, return_exceptions=True)

    def _too_long(self, size: int, max_bytes: int) -> HttpError:
        advice = "send smaller batches, or start the server with a larger --body-mb"
        if max_bytes < self.max_body_bytes:
            advice = "send less"
        return HttpError(413, f"a body of {size} bytes or more, expected at most {max_bytes}; {advice}")


def body_type(request: web.Request) -> str:
    """Return JSON or MSGPACK. Raises `HttpError` 415 for other types, and for compressed bodies, whose real size is not
    known in advance."""
    headers = request.headers
    encoding = headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, f"Content-Encoding is {encoding!r:.80}; send the body uncompressed")
    sent = headers.get("Content-Type", JSON)
    content_type = sent.partition(";")[0].strip().lower()
    if content_type in (JSON, MSGPACK):
        return content_type
    raise HttpError(415, f"Content-Type is {sent!r:.80}, expected {JSON} or {MSGPACK}")


def response_type(request: web.Request, sent: str, offered: tuple[str, ...]) -> str:
    """Return the first of the `offered` types that `Accept` names, else the type that was `sent`."""
    accept = request.headers.get("Accept", "")
    accepted = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    return next((content_type for content_type in offered if content_type in accepted), sent)


def encode(value: object, content_type: str) -> bytes:
    """Encode as JSON or msgpack."""
    return _encode_msgpack(value) if content_type in (MSGPACK, MSGPACK_STREAM) else _encode_json(value)


def encode_result(result: Encoded, content_type: str) -> bytes:
    """Encode the body of a single result."""
    return encode(_with_base64_files(result, content_type), content_type)


async def encode_results(results: Sequence[Encoded], content_type: str) -> bytes:
    """Encode `{"results": results}`, and yield to the event loop after every `RESULTS_PER_YIELD` of them."""
    if len(results) <= RESULTS_PER_YIELD:
        return encode({"results": [_with_base64_files(result, content_type) for result in results]}, content_type)
    is_msgpack = content_type == MSGPACK
    packer = msgpack.Packer()
    head = packer.pack_map_header(1) + packer.pack("results") + packer.pack_array_header(len(results))
    parts: list[bytes] = []
    for start in range(0, len(results), RESULTS_PER_YIELD):
        part = [_with_base64_files(result, content_type) for result in results[start : start + RESULTS_PER_YIELD]]
        # [1:-1] removes the brackets of the list.
        parts.append(b"".join(map(_encode_msgpack, part)) if is_msgpack else _encode_json(part)[1:-1])
        await asyncio.sleep(0)
    return head + b"".join(parts) if is_msgpack else b'{"results":[' + b",".join(parts) + b"]}"


def encode_line(index: int, result: Encoded, content_type: str) -> bytes:
    """Encode one result of a stream."""
    line = encode({"index": index, **_with_base64_files(result, content_type)}, content_type)
    return line + b"\n" if content_type == NDJSON else line


def _decode_json(body: bytes, max_calls: int) -> Json:
    if len(body) > MAX_JSON_BRACKETS and body.count(b"[") > MAX_JSON_BRACKETS:
        raise HttpError(
            413, f"more than {MAX_JSON_BRACKETS} opening brackets; send smaller batches, or send them as msgpack"
        )
    decoder = json.JSONDecoder(object_pairs_hook=_ContainerLimit(max_calls).mapping, parse_int=_parse_int)
    try:
        return decoder.decode(body.decode())
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise HttpError(400, f"malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise HttpError(400, "the JSON is nested too deeply; a batch needs five levels") from None


def _decode_msgpack(body: bytes, max_calls: int) -> Json:
    limit = _ContainerLimit(max_calls)
    try:
        return msgpack.unpackb(
            body,
            object_pairs_hook=limit.mapping,
            list_hook=limit.list,
            unicode_errors="surrogatepass",
            max_array_len=max_calls,
            max_map_len=MAX_MAP_LEN,
            max_ext_len=0,
        )
    except UnicodeDecodeError as error:
        raise HttpError(400, f"malformed msgpack: text that is not UTF-8 ({error.reason})") from None
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise HttpError(400, f"malformed msgpack: {str(error) or type(error).__name__:.200}") from None


class _ContainerLimit:
    """Decoder hooks that check the containers of one body: no object with a duplicate key, and no more containers than
    a batch can need. An empty container is one byte in msgpack and 64 in memory."""

    def __init__(self, max_calls: int) -> None:
        # A call has its own object, limits, files, return_files, env and argv; 16 are for the batch.
        self._left = 6 * max_calls + 16

    def mapping(self, pairs: list[tuple[Json, Json]]) -> dict[Json, Json]:
        self._count()
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            duplicate = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise HttpError(400, f"the key {duplicate!r:.80} occurs twice in one object; send it once")
        return mapping

    def list(self, items: list[Json]) -> list[Json]:
        self._count()
        return items

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise HttpError(413, "more objects than a batch of the largest size can have; send smaller batches")


def _parse_int(digits: str) -> int:
    """Parse a JSON integer. A longer one has no value here: as a float it would be infinite, and equal to others."""
    if len(digits) > MAX_DIGITS:
        raise HttpError(
            400, f"a whole number of {len(digits)} characters, expected at most {MAX_DIGITS}; send it as text"
        )
    return int(digits)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _encode_json(value: object) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "replace")


def _encode_msgpack(value: object) -> bytes:
    try:
        packed: bytes = msgpack.packb(value)
    except UnicodeEncodeError:
        packed = msgpack.packb(value, unicode_errors="replace")
    return packed


def _with_base64_files(result: Encoded, content_type: str) -> Encoded:
    """Return the result, with its files as base64 text if the content type has no bytes."""
    files = result.get("files")
    if not files or content_type in (MSGPACK, MSGPACK_STREAM):
        return result
    assert isinstance(files, dict)
    return {**result, "files": {path: base64.b64encode(data).decode("ascii") for path, data in files.items()}}
