"""Bodies: reading them within bounds, decoding them, and writing answers. JSON or msgpack, by the request's headers.

Invariants:
- No body, however made, costs more memory than about 20 times `body_mb` (lists of short texts; most cost a small
  multiple), and large ones are decoded one at a time, whoever hangs up meanwhile. All that are not admitted yet have no
  more than `Bodies.most` bytes together.
- What cannot be decoded is a `Refusal` that says where it broke; nothing a client sends ends in a 500.
- Answers always encode: lone surrogates, which code can print into a value, become "?".
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

from sandbox.gateway.http.errors import Refusal

JSON = "application/json"
MSGPACK = "application/msgpack"
NDJSON = "application/x-ndjson"
MSGPACK_STREAM = "application/x-msgpack-stream"
"""The msgpack twin of NDJSON: one mapping after another, each of which says where it ends."""

THREAD_BYTES = 1 << 20
"""Bodies from here on are decoded in a thread; their hooks run Python, so the loop gets its turns."""
QUIET_S = 15.0
"""A stream that has nothing to say for so long says so, by an empty line, or nil in msgpack: whoever waits at the other
end, or in between, can tell that from a service that is gone."""
QUIET = {NDJSON: b"\n", MSGPACK_STREAM: b"\xc0"}
CHUNK = 64
"""Answers encoded between two turns of the loop."""
PIECE = 256 << 10
"""What a client has `stall_s` to send, or to read."""
MAX_MAP_LEN = 4096
MAX_DIGITS = 40
MAX_LISTS = 4 << 20
"""Brackets in a JSON body. Its decoder has no hook for lists; text may hold brackets too, but hardly so many."""

Encoded = Mapping[str, Any]
"""An `EncodedResult`, or an encoded `Verdict`."""


class Bodies:
    """Bodies on their way in, those of all requests together."""

    def __init__(self, most: int, most_each: int, max_calls: int, stall_s: float = 30.0) -> None:
        self.most = most
        self.most_each = most_each
        self.max_calls = max_calls
        self.stall_s = stall_s
        self.held = 0
        """Bytes being read, and of bodies that were read and not given back."""
        self._large = asyncio.Semaphore(1)
        """Large ones are decoded one at a time: hostile ones take many times their size."""

    async def read(self, request: web.Request) -> bytes:
        """The body, to be given back once its calls are admitted, or are not. Raises `Refusal`: 413 for one that is too
        long, 429 when there are too many at once, 408 for one that does not come on: each `PIECE` of it, and the rest,
        has `stall_s`."""
        if (length := request.content_length or 0) > self.most_each:
            raise self._too_long(length)
        chunks: list[bytes] = []
        size, is_whole = 0, False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.stall_s) as limit:
                async for chunk in request.content.iter_any():
                    if (size + len(chunk)) // PIECE > size // PIECE:
                        limit.reschedule(loop.time() + self.stall_s)
                    chunks.append(chunk)
                    size += len(chunk)
                    self.held += len(chunk)
                    if size > self.most_each:
                        raise self._too_long(size)
                    if self.held > self.most:
                        message = (
                            f"bodies of {self.held} bytes are on their way in, at most {self.most}; try again in 1 s"
                        )
                        raise Refusal(429, message, {"Retry-After": "1"})
            is_whole = True
        except TimeoutError:
            raise Refusal(
                408,
                f"the body stopped after {size} bytes: expected all of it, or {PIECE} bytes more, within "
                f"{self.stall_s:g} s; send it faster, or start the service with a larger --stall-s",
            ) from None
        finally:
            if not is_whole:
                self.give_back(size)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def give_back(self, size: int) -> None:
        """Of a body that was read, so many bytes are here no longer, or the queue counts them."""
        self.held -= size

    async def decode(self, body: bytes, kind: str) -> Any:
        """What `body` holds. Raises `Refusal`: 400 for what is malformed, 413 for what only means to be large."""
        decoder = _decode_msgpack if kind == MSGPACK else _decode_json
        if len(body) < THREAD_BYTES:
            return decoder(body, self.max_calls)
        async with self._large:
            decoding = asyncio.get_running_loop().run_in_executor(None, decoder, body, self.max_calls)
            try:
                return await asyncio.shield(decoding)
            finally:  # no thread ends early: whoever hangs up waits for it, and the next one with him
                await asyncio.gather(decoding, return_exceptions=True)

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


def encode(value: Any, kind: str) -> bytes:
    """`value` as JSON or msgpack."""
    return _pack(value) if kind in (MSGPACK, MSGPACK_STREAM) else _dump(value)


def encode_answer(answer: Encoded, kind: str) -> bytes:
    """One result."""
    return encode(_fit(answer, kind), kind)


async def encode_answers(answers: Sequence[Encoded], kind: str) -> bytes:
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


def encode_line(index: int, answer: Encoded, kind: str) -> bytes:
    """One result of a stream."""
    line = encode({"index": index, **_fit(answer, kind)}, kind)
    return line + b"\n" if kind == NDJSON else line


def _decode_json(body: bytes, max_calls: int) -> Any:
    if len(body) > MAX_LISTS and body.count(b"[") > MAX_LISTS:
        raise Refusal(413, f"more than {MAX_LISTS} opening brackets; send smaller batches, or send them as msgpack")
    decoder = json.JSONDecoder(object_pairs_hook=_Containers(max_calls).mapping, parse_int=_whole)
    try:
        return decoder.decode(body.decode())
    except UnicodeDecodeError as why:
        raise Refusal(400, f"the body is not UTF-8: {why.reason} at byte {why.start}") from None
    except json.JSONDecodeError as why:
        raise Refusal(400, f"malformed JSON at line {why.lineno}, column {why.colno}: {why.msg}") from None
    except RecursionError:
        raise Refusal(400, "the JSON is nested too deeply; a batch needs five levels") from None


def _decode_msgpack(body: bytes, max_calls: int) -> Any:
    containers = _Containers(max_calls)
    try:
        return msgpack.unpackb(
            body,
            object_pairs_hook=containers.mapping,
            list_hook=containers.list,
            unicode_errors="surrogatepass",
            max_array_len=max_calls,
            max_map_len=MAX_MAP_LEN,
            max_ext_len=0,
        )
    except UnicodeDecodeError as why:
        raise Refusal(400, f"malformed msgpack: text that is not UTF-8 ({why.reason})") from None
    except (ValueError, msgpack.UnpackException, RecursionError) as why:
        raise Refusal(400, f"malformed msgpack: {str(why) or type(why).__name__:.200}") from None


class _Containers:
    """Hooks that look at each container of one body: no key twice, and no more of them than calls can need, since an
    empty one is one byte here and 64 in memory."""

    def __init__(self, max_calls: int) -> None:
        self._left = 4 * max_calls + 16

    def mapping(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._count()
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise Refusal(400, f"the key {twice!r:.80} is given twice in one object, so it is not clear which holds")
        return mapping

    def list(self, items: list[Any]) -> list[Any]:
        self._count()
        return items

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Refusal(413, "more objects than a batch of the largest size can have; send smaller batches")


def _whole(digits: str) -> float:
    """Python refuses to read integers of thousands of digits; no field takes them, and as floats they say so."""
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _dump(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "replace")


def _pack(value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(value)
    except UnicodeEncodeError:
        packed = msgpack.packb(value, unicode_errors="replace")
    return packed


def _fit(answer: Encoded, kind: str) -> Encoded:
    """`answer` with its files as base64 where the form has no bytes."""
    files = answer.get("files")
    if not files or kind in (MSGPACK, MSGPACK_STREAM):
        return answer
    return {**answer, "files": {path: base64.b64encode(data).decode("ascii") for path, data in files.items()}}
