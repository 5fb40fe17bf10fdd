"""Decodes HTTP bodies and encodes results: JSON or msgpack, by the request's headers.

Invariants:
- Whatever a body contains, it takes at most about 20 times its size in memory once it is decoded. Lists of short texts
  take 20 times their size; most bodies take a small multiple of their size.
- A body that cannot be decoded raises an `HttpError` that says where; no body causes a 500.
- Encoding a result never fails: lone surrogates, which code can print, become "?".
- Encoding results yields to the event loop after about `CHUNK_BYTES`, also within one result.

Decoding a body is one step of the event loop, in which no other request is served. So `body_parser` decodes a large
body in another process.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain
from types import MappingProxyType
from typing import Any, cast

import msgpack
from aiohttp import web

from sandbox.gateway.calls.batch import result_bytes
from sandbox.gateway.http.errors import HttpError
from sandbox.types import EncodedResult

JSON = "application/json"
MSGPACK = "application/msgpack"
NDJSON = "application/x-ndjson"
MSGPACK_STREAM = "application/x-msgpack-stream"
"""Content type of a sequence of msgpack mappings. NDJSON is the same for JSON objects."""

HEARTBEAT_S = 15.0
"""Seconds without a result after which a stream sends a heartbeat (an empty line, or nil in msgpack), so that clients
and proxies can tell a busy server from a dead server."""
HEARTBEAT = {NDJSON: b"\n", MSGPACK_STREAM: b"\xc0", JSON: b"\n"}
"""Heartbeats by content type. JSON parsers skip white space before a value; a msgpack body cannot have heartbeats,
because each byte would be a value."""
RESULTS_PER_YIELD = 64
"""Results encoded before the task yields to the event loop."""
CHUNK_BYTES = 256 << 10
"""A client has `stall_s` seconds to send or to read this many bytes. It is also the number of bytes that are encoded
before the task yields to the event loop."""
JUDGED_TEST_BYTES = 4096
"""Estimated bytes of one encoded judged test. The estimate decides when encoding yields to the event loop."""
MAX_MAP_LEN = 4096
"""Maximum number of keys of one mapping. No valid object of a call has more than 256."""
MAX_JSON_BRACKETS = 4 << 20
"""Maximum of opening brackets in a JSON body. They are counted because the JSON decoder has no hook for lists."""

NO_FIELDS: Mapping[str, object] = MappingProxyType({})

Json = Any
"""A decoded body, of which nothing is known yet."""
Encoded = Mapping[str, object]
"""An `EncodedResult`, or an encoded `Verdict`."""


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


def response_type(request: web.Request, default: str, offered: tuple[str, ...]) -> str:
    """Return the first of the `offered` types that `Accept` names, else `default`, the type of the request's body."""
    accept = request.headers.get("Accept", "")
    accepted = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    return next((content_type for content_type in offered if content_type in accepted), default)


def encode(value: object, content_type: str) -> bytes:
    """Encode as JSON or msgpack. Bytes are base64 text in JSON."""
    return _encode_msgpack(value) if content_type in (MSGPACK, MSGPACK_STREAM) else _encode_json(value)


def encoded_bytes(result: Encoded) -> int:
    """Return the approximate size of an encoded result, verdict or judged program."""
    if "files" in result:
        return result_bytes(cast(EncodedResult, result))
    tests = result.get("tests", ())
    assert isinstance(tests, Sized)
    return JUDGED_TEST_BYTES * (1 + len(tests))


async def encode_in_steps(value: object, content_type: str) -> list[bytes]:
    """Encode a large value as JSON or msgpack. Returns its parts."""
    pieces = _msgpack_pieces(value) if content_type in (MSGPACK, MSGPACK_STREAM) else _json_pieces(value)
    parts: list[bytes] = []
    step: list[bytes] = []
    step_bytes = 0
    for piece in pieces:
        if step_bytes + len(piece) > CHUNK_BYTES:
            parts.append(b"".join(step))
            step, step_bytes = [], 0
            await asyncio.sleep(0)
        step.append(piece)
        step_bytes += len(piece)
    return [*parts, b"".join(step)]


async def encode_result(result: Encoded, size: int, content_type: str) -> list[bytes]:
    """Encode one result, a large one in steps. `size` is its `encoded_bytes`. Returns the parts of the body."""
    if size <= CHUNK_BYTES:
        return [encode(result, content_type)]
    return await encode_in_steps(result, content_type)


async def encode_results(
    results: Iterable[Encoded], count: int, content_type: str, head: Mapping[str, object] = NO_FIELDS
) -> list[bytes]:
    """Encode an object with the fields of `head` and the list `results`, which has `count` items. Returns the parts of
    the body in order."""
    is_msgpack = content_type == MSGPACK
    if is_msgpack:
        packer = msgpack.Packer()
        fields = b"".join(map(_encode_msgpack, chain.from_iterable(head.items())))
        opening = packer.pack_map_header(len(head) + 1) + fields + packer.pack("results")
        parts = [opening + packer.pack_array_header(count)]
    else:
        parts = [_encode_json({**head, "results": []})[:-2]]
    separator = b"" if is_msgpack else b","
    group: list[Encoded] = []
    group_bytes = 0
    for number, result in enumerate(results):
        size = encoded_bytes(result)
        if group and (group_bytes + size > CHUNK_BYTES or len(group) == RESULTS_PER_YIELD):
            parts += _encode_group(group, content_type), separator
            group, group_bytes = [], 0
            await asyncio.sleep(0)
        if size <= CHUNK_BYTES:
            group.append(result)
            group_bytes += size
        else:
            parts += await encode_in_steps(result, content_type)
            parts.append(separator if number < count - 1 else b"")
    if group:
        parts.append(_encode_group(group, content_type))
    if not is_msgpack:
        parts.append(b"]}")
    return parts


async def encode_line(index: int, result: Encoded, size: int, content_type: str) -> list[bytes]:
    """Encode one result of a stream. `size` is its `encoded_bytes`. Returns the parts of the line."""
    line = {"index": index, **result}
    parts = await encode_result(line, size, content_type)
    if content_type == NDJSON:
        parts.append(b"\n")
    return parts


def _encode_group(results: list[Encoded], content_type: str) -> bytes:
    """Encode results without the brackets of their list."""
    if content_type == MSGPACK:
        return b"".join(map(_encode_msgpack, results))
    return _encode_json(results)[1:-1]


def _json_pieces(value: object) -> Iterator[bytes]:
    """Yield a value as JSON, in pieces of about `CHUNK_BYTES` or less."""
    if isinstance(value, (str, bytes)):
        step = 3 * (CHUNK_BYTES // 3)  # base64 encodes three bytes as four characters
        yield b'"'
        for start in range(0, len(value), step):
            yield _encode_json(value[start : start + step])[1:-1]
        yield b'"'
    elif isinstance(value, Mapping):
        yield b"{"
        for number, (name, item) in enumerate(value.items()):
            yield (b"," if number else b"") + _encode_json(name) + b":"
            yield from _json_pieces(item)
        yield b"}"
    elif isinstance(value, list):
        yield b"["
        for number, group in enumerate(_groups(value)):
            yield (b"," if number else b"") + _encode_json(group)[1:-1]
        yield b"]"
    else:
        yield _encode_json(value)


def _msgpack_pieces(value: object) -> Iterator[bytes]:
    """Yield a value as msgpack, in pieces of about `CHUNK_BYTES` or less. The content of a file is one piece."""
    if isinstance(value, str):
        texts = (value[start : start + CHUNK_BYTES] for start in range(0, len(value), CHUNK_BYTES))
        pieces = [text.encode("utf-8", "replace") for text in texts]
        yield b"\xdb" + sum(map(len, pieces)).to_bytes(4, "big")  # the header of a text; `Packer` has no method for it
        yield from pieces
    elif isinstance(value, bytes):
        yield b"\xc6" + len(value).to_bytes(4, "big")  # the header of bytes
        yield value
    elif isinstance(value, Mapping):
        yield msgpack.Packer().pack_map_header(len(value))
        for name, item in value.items():
            yield _encode_msgpack(name)
            yield from _msgpack_pieces(item)
    elif isinstance(value, list):
        yield msgpack.Packer().pack_array_header(len(value))
        for group in _groups(value):
            yield b"".join(map(_encode_msgpack, group))
    else:
        yield _encode_msgpack(value)


def _groups(items: list[object]) -> Iterator[list[object]]:
    """Yield the items of a list in groups of about `CHUNK_BYTES`. No list of a result has larger items."""
    step = max(1, CHUNK_BYTES // JUDGED_TEST_BYTES)
    return (items[start : start + step] for start in range(0, len(items), step))


def decode(body: bytes | bytearray, content_type: str, max_calls: int, max_keys: int = MAX_MAP_LEN) -> Json:
    """Decode a body. Raises `HttpError`: 400 if it is malformed, 413 if it has more objects than `max_calls` calls
    have, or an object with more than `max_keys` keys."""
    decoder = _decode_msgpack if content_type == MSGPACK else _decode_json
    return decoder(body, max_calls, max_keys)


def _decode_json(body: bytes | bytearray, max_calls: int, max_keys: int) -> Json:
    if len(body) > MAX_JSON_BRACKETS and body.count(b"[") > MAX_JSON_BRACKETS:
        raise HttpError(
            413, f"more than {MAX_JSON_BRACKETS} opening brackets; send smaller batches, or send them as msgpack"
        )
    # Without a hook for whole numbers the decoder is five times as fast; `int` refuses more than `MAX_DIGITS`.
    decoder = json.JSONDecoder(object_pairs_hook=_ContainerLimit(max_calls, max_keys).mapping)
    try:
        return decoder.decode(body.decode())
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise HttpError(400, f"malformed JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError:  # not decoded as a float: it would be infinite, and so equal to every other such number
        raise HttpError(
            400, f"a whole number has more than {sys.get_int_max_str_digits()} digits; send it as text"
        ) from None
    except RecursionError:
        raise HttpError(400, "the JSON is nested too deeply; a batch needs five levels") from None


def _decode_msgpack(body: bytes | bytearray, max_calls: int, max_keys: int) -> Json:
    limit = _ContainerLimit(max_calls, max_keys)
    try:
        return msgpack.unpackb(
            body,
            object_pairs_hook=limit.mapping,
            list_hook=limit.list,
            unicode_errors="surrogatepass",
            max_array_len=max_calls,
            max_map_len=max_keys,
            max_ext_len=0,
        )
    except UnicodeDecodeError as error:
        raise HttpError(400, f"malformed msgpack: text that is not UTF-8 ({error.reason})") from None
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise HttpError(400, f"malformed msgpack: {str(error) or type(error).__name__:.200}") from None


class _ContainerLimit:
    """Decoder hooks that check the containers of one body: no object with a duplicate key or too many keys, and no more
    containers than a batch can need. An empty container is one byte in msgpack and 64 in memory."""

    def __init__(self, max_calls: int, max_keys: int) -> None:
        # A call has its own object, limits, files, return_files, env and argv; 16 are for the batch.
        self._left = 6 * max_calls + 16
        self._max_keys = max_keys

    def mapping(self, pairs: list[tuple[Json, Json]]) -> dict[Json, Json]:
        self._count()
        if len(pairs) > self._max_keys:
            raise HttpError(413, f"an object of {len(pairs)} keys, expected at most {self._max_keys}; send fewer")
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


def _base64(value: object) -> str:
    """Encode what JSON has no form for: the bytes of a file."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    raise TypeError(f"{type(value).__name__} has no form in JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"), default=_base64)


def _encode_json(value: object) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "replace")


def _encode_msgpack(value: object) -> bytes:
    try:
        packed: bytes = msgpack.packb(value)
    except UnicodeEncodeError:
        packed = msgpack.packb(value, unicode_errors="replace")
    return packed
