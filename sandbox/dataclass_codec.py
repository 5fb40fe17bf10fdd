"""Encodes the dataclasses of results as mappings for JSON and msgpack, and decodes them, by the annotations of their
fields. An annotation is also the description of its field: `name: Annotated[str, "what it is"]`.

- A mapping has the names of the fields, in their order. An enum is its value, a dataclass a mapping, a tuple a list.
  None stays None.
- Decoding ignores unknown keys and gives missing fields their defaults. So a client can read the results of a newer
  server and of an older server.
- Bytes stay bytes in an encoded mapping; decoding also takes base64 text.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from sandbox.fields import decode_bytes

T = TypeVar("T")
Convert = Callable[[Any], Any]


class Codec:
    """The fields of a dataclass, and how they are encoded and decoded."""

    def __init__(self, cls: type) -> None:
        annotations = get_type_hints(cls, include_extras=True)
        self.names = [field.name for field in fields(cls)]
        self.descriptions: dict[str, str] = {}
        self.encoders: list[tuple[str, Convert]] = []
        """Functions for the fields whose form in a mapping differs from their value."""
        self.decoders: list[tuple[str, Convert]] = []
        for name in self.names:
            assert get_origin(annotations[name]) is Annotated, f"{cls.__name__}.{name} has no description"
            hint, self.descriptions[name] = get_args(annotations[name])
            encode_field, decode_field = _converters(hint)
            self.encoders += [(name, encode_field)] if encode_field else []
            self.decoders += [(name, decode_field)] if decode_field else []
        self.values: Callable[[Any], tuple[Any, ...]] = attrgetter(*self.names)


@cache
def codec_of(cls: Any) -> Codec:
    """Return the codec of a dataclass of at least two fields, which are all described."""
    return Codec(cls)


def encode(value: Any) -> dict[str, Any]:
    """Return the mapping of a dataclass."""
    codec = codec_of(value.__class__)
    encoded = dict(zip(codec.names, codec.values(value)))  # noqa: B905  the lengths are equal, and the check would take half of the time
    for name, convert in codec.encoders:
        if (item := encoded[name]) is not None:
            encoded[name] = convert(item)
    return encoded


def decode(cls: Callable[..., T], raw: Mapping[str, Any]) -> T:
    """Invert `encode`."""
    codec = codec_of(cls)
    values = {name: raw[name] for name in codec.names if name in raw}
    for name, convert in codec.decoders:
        if (item := values.get(name)) is not None:
            values[name] = convert(item)
    return cls(**values)


def _converters(hint: Any) -> tuple[Convert | None, Convert | None]:
    """Return the functions that encode and decode a value with this annotation. None stands for no change. A dataclass
    with the methods `encode` and `decode` is converted by these methods."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _converters(hint)
    if origin is tuple:
        encode_item, decode_item = _converters(arguments[0])
        return (
            (lambda items: list(map(encode_item, items))) if encode_item else list,
            (lambda items: tuple(map(decode_item, items))) if decode_item else tuple,
        )
    if origin is not None:
        return dict, _decode_files if arguments[1] is bytes else None
    if issubclass(hint, StrEnum):
        return str, hint
    if hasattr(hint, "__dataclass_fields__"):
        return getattr(hint, "encode", encode), getattr(hint, "decode", partial(decode, hint))
    return None, None


def _decode_files(files: Mapping[str, Any]) -> dict[str, bytes]:
    return {path: decode_bytes(data, f"files[{path!r}]") for path, data in files.items()}
