"""Frames between the gateway and its body worker, on a socket: a 1-byte kind and a 4-byte little-endian length, then
the payload of this length.

    gateway -> worker                              worker -> gateway
    CONFIG  [batch_calls, queue_timeout_s, ...]    ITEMS  [item, ...]       about `FRAME_BYTES` in one frame
    BODY    [form, content type, tenant, size]     LARGE  item              with placeholders for large texts and bytes
            then the body, without a frame         BLOB   text or bytes     one for each placeholder, in order
                                                   ERROR  [class, arguments]
                                                   DONE   nothing           after the last item

An item is a part of a decoded and checked body (`validation.Form`), at most one call or the fields of one program. Its
large texts and bytes come in frames of their own. So no frame takes long to decode, and the gateway can serve other
requests after each frame.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack

from sandbox.gateway.http.validation import Form
from sandbox.settings.profiles import OwnProfile
from sandbox.settings.server import ServeConfig
from sandbox.types import Limits

HEADER = struct.Struct("<BI")
CONFIG, BODY, ITEMS, LARGE, BLOB, ERROR, DONE = range(7)
"""The kinds of frames."""
FRAME_BYTES = 64 << 10
"""Size of the items in a frame (ITEMS) from which the worker adds no further item to the frame."""
BLOB_BYTES = 1 << 20
"""Length of a text (in characters) or of bytes from which an item has a placeholder for it. The text or the bytes then
come in a frame of their own (BLOB)."""
_TEXT = 1
"""Code of the msgpack extension that is the placeholder of a text."""
_BYTES = 2
"""Code of the msgpack extension that is the placeholder of bytes."""


def encode_config(config: ServeConfig) -> list[Any]:
    """Return the settings that the checks of a body read, as plain data."""
    limits = {name: getattr(config.max_limits, name) for name in Limits.__slots__}
    return [config.batch_calls, config.queue_timeout_s, limits, [own.encode() for own in config.own_profiles]]


def decode_config(encoded: list[Any]) -> ServeConfig:
    """Invert `encode_config`."""
    batch_calls, queue_timeout_s, limits, own_profiles = encoded
    return ServeConfig(
        batch_calls=batch_calls,
        queue_timeout_s=queue_timeout_s,
        max_limits=Limits(**limits),
        own_profiles=tuple(map(OwnProfile.decode, own_profiles)),
    )


def form_name(form: Form) -> str:
    """Return the name by which the worker finds the class of a form."""
    return f"{type(form).__module__}:{type(form).__name__}"


def find_by_name(name: str) -> Any:
    """Return the class with the name `MODULE:CLASS`.

    The import is safe: the names are those of forms and errors of the two processes. No name comes from a body.
    """
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def pack(value: Any) -> bytes:
    """Encode plain data. Text may contain lone surrogates: the code and the stdin of a call may have any characters."""
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def unpack(data: bytes) -> Any:
    """Invert `pack`."""
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)


def array_header(length: int) -> bytes:
    """Return the first bytes of an encoded list of this length. The encoded items come after them."""
    header: bytes = msgpack.Packer().pack_array_header(length)
    return header


def detach(value: Any, blobs: list[bytes]) -> Any:
    """Return a value with placeholders for its large texts and bytes, which are appended to `blobs`."""
    if isinstance(value, (str, bytes)) and len(value) >= BLOB_BYTES:
        is_text = isinstance(value, str)
        blobs.append(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
        return msgpack.ExtType(_TEXT if is_text else _BYTES, b"")
    if isinstance(value, dict):
        return {name: detach(item, blobs) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [detach(item, blobs) for item in value]
    return value


async def attach(value: Any, next_blob: Callable[[], Awaitable[bytes]]) -> Any:
    """Invert `detach`."""
    if isinstance(value, msgpack.ExtType):
        blob = await next_blob()
        return blob.decode("utf-8", "surrogatepass") if value.code == _TEXT else blob
    if isinstance(value, dict):
        return {name: await attach(item, next_blob) for name, item in value.items()}
    if isinstance(value, list):
        return [await attach(item, next_blob) for item in value]
    return value
