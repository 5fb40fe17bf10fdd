"""Bodies: reading them within bounds, decoding them, and writing answers. JSON or msgpack, by the request's headers.

Invariants:
- No body, however made, costs more memory than a small multiple of `body_mb`, and all bodies being read together no
  more than `Intake.most`.
- What cannot be decoded is a `Refusal` that says where it broke; nothing a client sends ends in a 500.
- Answers always encode: lone surrogates, which code can print into a value, become "?".
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack
from aiohttp import web

from sandbox.gateway.refusal import Refusal

JSON = "application/json"
MSGPACK = "application/msgpack"
NDJSON = "application/x-ndjson"
MSGPACK_STREAM = "application/x-msgpack-stream"
"""The msgpack twin of NDJSON: one mapping after another, each of which says where it ends."""

THREAD_BYTES = 1 << 20
"""Bodies from here on are decoded in a thread; their hooks run Python, so the loop gets its turns."""
CHUNK = 64
"""Answers encoded between two turns of the loop."""
MAX_MAP_LEN = 4096
MAX_DIGITS = 40

Answer = dict[str, Any]


class Intake:
    """Bytes of bodies being read, all requests together."""

    def __init__(self, most: int, most_each: int) -> None:
        self.most = most
        self.most_each = most_each
        self.held = 0

    async def read(self, request: web.Request) -> bytes:
        """The body. Raises `Refusal`: 413 for one that is too long, 429 when there are too many at once."""
        if (length := request.content_length or 0) > self.most_each:
            raise self._too_long(length)
        chunks: list[bytes] = []
        size = 0
        try:
            async for chunk in request.content.iter_any():
                chunks.append(chunk)
                size += len(chunk)
                self.held += len(chunk)
                if size > self.most_each:
                    raise self._too_long(size)
                if self.held > self.most:
                    message = f"bodies of {self.held} bytes are being read, at most {self.most}; try again in 1 s"
                    raise Refusal(429, message, {"Retry-After": "1"})
        finally:
            self.held -= size
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _too_long(self, size: int) -> Refusal:
        return Refusal(
            413,
            f"a body of {size} bytes or more, expected at most {self.most_each}; "
            "send smaller batches, or start the service with a larger --body-mb",
        )


def body_type(request: web.Request) -> str:
    """JSON or MSGPACK. Raises `Refusal` 415 for others, and for compressed bodies, whose real size nobody knows."""
    headers = request.headers
    encoding = headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise Refusal(415, f"Content-Encoding is {encoding!r:.80}; send the body uncompressed")
    sent = headers.get("Content-Type", JSON)
    kind = sent.partition(";")[0].strip().lower()
    if kind in (JSON, MSGPACK):
        return kind
    raise Refusal(415, f"Content-Type is {sent!r:.80}, expected {JSON} or {MSGPACK}")


def answer_type(request: web.Request, sent: str, offered: tuple[str, ...]) -> str:
    """The first of `offered` that `Accept` names, else the type that was `sent`."""
    accept = request.headers.get("Accept", "")
    wanted = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    return next((kind for kind in offered if kind in wanted), sent)


async def decode(body: bytes, kind: str, max_array_len: int) -> Any:
    """The value that `body` holds. Raises `Refusal` 400."""
    if kind == MSGPACK:
        work: Callable[[], Any] = lambda: _decode_msgpack(body, max_array_len)  # noqa: E731
    else:
        work = lambda: _decode_json(body)  # noqa: E731
    return work() if len(body) < THREAD_BYTES else await asyncio.to_thread(work)


def encode(value: Any, kind: str) -> bytes:
    """`value` as JSON or msgpack."""
    return _pack(value) if kind in (MSGPACK, MSGPACK_STREAM) else _dump(value)


def encode_answer(answer: Answer, kind: str) -> bytes:
    """One result."""
    return encode(_fit(answer, kind), kind)


async def encode_answers(answers: list[Answer], kind: str) -> bytes:
    """`{"results": answers}`, with a turn for others after every `CHUNK` of them."""
    binary = kind == MSGPACK
    if len(answers) <= CHUNK:
        return encode({"results": [_fit(answer, kind) for answer in answers]}, kind)
    packer = msgpack.Packer()
    head = packer.pack_map_header(1) + packer.pack("results") + packer.pack_array_header(len(answers))
    parts: list[bytes] = []
    for start in range(0, len(answers), CHUNK):
        some = [_fit(answer, kind) for answer in answers[start : start + CHUNK]]
        parts.append(b"".join(map(_pack, some)) if binary else _dump(some)[1:-1])
        await asyncio.sleep(0)
    return head + b"".join(parts) if binary else b'{"results":[' + b",".join(parts) + b"]}"


def encode_line(index: int, answer: Answer, kind: str) -> bytes:
    """One result of a stream."""
    line = encode({"index": index, **_fit(answer, kind)}, kind)
    return line + b"\n" if kind == NDJSON else line


def _decode_json(body: bytes) -> Any:
    try:
        return _DECODER.decode(body.decode())
    except UnicodeDecodeError as why:
        raise Refusal(400, f"the body is not UTF-8: {why.reason} at byte {why.start}") from None
    except json.JSONDecodeError as why:
        raise Refusal(400, f"malformed JSON at line {why.lineno}, column {why.colno}: {why.msg}") from None
    except RecursionError:
        raise Refusal(400, "the JSON is nested too deeply; a batch needs five levels") from None


def _decode_msgpack(body: bytes, max_array_len: int) -> Any:
    try:
        return msgpack.unpackb(
            body,
            object_pairs_hook=_unique,
            unicode_errors="surrogatepass",
            max_array_len=max_array_len,
            max_map_len=MAX_MAP_LEN,
        )
    except UnicodeDecodeError as why:
        raise Refusal(400, f"malformed msgpack: text that is not UTF-8 ({why.reason})") from None
    except (ValueError, msgpack.UnpackException, RecursionError) as why:
        raise Refusal(400, f"malformed msgpack: {str(why) or type(why).__name__:.200}") from None


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise Refusal(400, f"the key {twice!r:.80} is given twice in one object; which one holds is anybody's guess")
    return mapping


def _whole(digits: str) -> float:
    """Python refuses to read integers of thousands of digits; no field takes them, and as floats they say so."""
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_whole)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _dump(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "replace")


def _pack(value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(value)
    except UnicodeEncodeError:
        packed = msgpack.packb(value, unicode_errors="replace")
    return packed


def _fit(answer: Answer, kind: str) -> Answer:
    """`answer` with its files as base64 where the form has no bytes."""
    files = answer["files"]
    if not files or kind in (MSGPACK, MSGPACK_STREAM):
        return answer
    return {**answer, "files": {path: base64.b64encode(data).decode("ascii") for path, data in files.items()}}
