"""Tests of the codec of dataclasses: each kind of annotation, unknown and missing fields, and descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from sandbox import dataclass_codec
from sandbox.errors import InvalidCall
from sandbox.types import Status


@dataclass(frozen=True)
class Inner:
    a: Annotated[int, "a number"]
    b: Annotated[str | None, "a text, or none"] = None


@dataclass(frozen=True)
class Own:
    a: Annotated[int, "a number"]
    b: Annotated[int, "a number"]

    def encode(self) -> list[int]:
        return [self.a, self.b]

    @classmethod
    def decode(cls, raw: list[int]) -> Own:
        return cls(*raw)


@dataclass(frozen=True)
class Outer:
    status: Annotated[Status, "an enum"]
    inner: Annotated[Inner | None, "a dataclass, or none"] = None
    inners: Annotated[tuple[Inner, ...], "dataclasses"] = ()
    own: Annotated[tuple[Own, ...], "dataclasses with methods"] = ()
    files: Annotated[Mapping[str, bytes], "files"] = field(default_factory=dict)
    counts: Annotated[Mapping[str, int], "numbers"] = field(default_factory=dict)


VALUE = Outer(Status.OK, Inner(1), (Inner(2, "b"),), (Own(3, 4),), {"a": b"b"}, {"c": 5})
ENCODED = {
    "status": "ok",
    "inner": {"a": 1, "b": None},
    "inners": [{"a": 2, "b": "b"}],
    "own": [[3, 4]],
    "files": {"a": b"b"},
    "counts": {"c": 5},
}


def test_a_dataclass_is_the_same_after_encoding_and_decoding() -> None:
    encoded = dataclass_codec.encode(VALUE)
    assert encoded == ENCODED
    assert list(encoded) == list(ENCODED)
    assert dataclass_codec.decode(Outer, encoded) == VALUE


def test_unknown_keys_are_ignored_and_missing_ones_have_their_defaults() -> None:
    assert dataclass_codec.decode(Outer, {"status": "error", "later": 1}) == Outer(Status.ERROR)


def test_bytes_may_be_base64_text() -> None:
    assert dataclass_codec.decode(Outer, {"status": "ok", "files": {"a": "Yg=="}}).files == {"a": b"b"}
    with pytest.raises(InvalidCall, match="files\\['a'\\]: expected base64 text"):
        dataclass_codec.decode(Outer, {"status": "ok", "files": {"a": "?"}})


@pytest.mark.parametrize("raw", [{}, {"status": "later"}, {"status": "ok", "inner": 5}, {"status": "ok", "files": 5}])
def test_a_mapping_of_another_shape_raises_an_error_that_clients_expect(raw: Any) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        dataclass_codec.decode(Outer, raw)


def test_a_field_without_a_description_is_a_bug() -> None:
    @dataclass
    class Undescribed:
        a: Annotated[int, "a number"]
        b: int

    with pytest.raises(AssertionError, match=r"Undescribed\.b has no description"):
        dataclass_codec.codec_of(Undescribed)
