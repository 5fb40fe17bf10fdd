"""Tests of the frames between gateway and executor. They arrive however the stream is split. Bytes that are no frame
raise `ProtocolError`."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import wire
from sandbox.errors import ProtocolError
from sandbox.types import Call
from sandbox.wire import Unpacker, pack

any_text = st.text(st.characters(codec=None, categories=None), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | any_text | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)
messages = st.tuples(any_text, st.lists(values, max_size=3)).map(lambda parts: [parts[0], *parts[1]])


@given(st.lists(messages, max_size=5), st.lists(st.integers(0, 200), max_size=8))
def test_frames_survive_any_split_of_the_stream(sent: list[list[Any]], cuts: list[int]) -> None:
    stream = b"".join(map(pack, sent))
    ends = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    unpacker = Unpacker()
    received: list[list[Any]] = []
    for start, end in itertools.pairwise(ends):
        unpacker.feed(stream[start:end])
        received += unpacker
    assert received == sent


@given(st.binary(max_size=200))
def test_hostile_bytes_raise_nothing_but_protocol_error(data: bytes) -> None:
    for stream in (data, struct.pack("<I", len(data)) + data):
        unpacker = Unpacker(max_frame_bytes=100)
        unpacker.feed(stream)
        try:
            messages = list(unpacker)
        except ProtocolError:
            continue
        assert all(isinstance(message[0], str) for message in messages)


def test_a_frame_with_an_excessive_length_is_refused_before_it_is_read() -> None:
    unpacker = Unpacker(max_frame_bytes=10)
    unpacker.feed(struct.pack("<I", 11))
    with pytest.raises(ProtocolError, match="frame of 11 bytes, expected at most 10"):
        list(unpacker)


def test_a_frame_above_the_maximum_size_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ProtocolError, match="send fewer calls"):
        pack(["calls", "x" * 20])


@pytest.mark.parametrize(
    "body",
    [b"", b"\x90", b"\x91\x01", b"\x80", b"\x91\xa1k\x00", b"\xc1"],
    ids=["empty", "empty array", "number as kind", "map", "byte after the array", "no msgpack"],
)
def test_a_message_that_is_no_array_with_a_kind_is_refused(body: bytes) -> None:
    unpacker = Unpacker()
    unpacker.feed(struct.pack("<I", len(body)) + body)
    with pytest.raises(ProtocolError):
        list(unpacker)


def test_a_loop_that_ends_early_loses_and_repeats_no_frame() -> None:
    unpacker = Unpacker()
    unpacker.feed(pack(["ready"]) + pack(["stats", 1]) + pack(["stats", 2]))
    for message in unpacker:
        assert message == ["ready"]
        break
    assert list(unpacker) == [["stats", 1], ["stats", 2]]
    assert list(unpacker) == []


def test_a_call_survives_a_frame() -> None:
    call = Call.decode({"code": "print('\ud800')", "files": {"a": "AAE="}, "limits": {"timeout_s": 2}})
    unpacker = Unpacker()
    unpacker.feed(pack(["calls", [[1, call.encode(binary=True)]]]))
    [[kind, [[seq, raw]]]] = unpacker
    assert (kind, seq, Call.decode(raw)) == ("calls", 1, call)


def test_large_files_are_parts_of_a_frame_that_are_not_copied() -> None:
    small, large = b"a" * (wire.LARGE_BYTES - 1), b"b" * wire.LARGE_BYTES
    calls: list[list[Any]] = [
        [1, Call("\ud800", files={"a": large, "b": small, "c": large}, env={"A": "x"}).encode(binary=True)],
        [2, Call("2").encode(binary=True)],
    ]
    parts = wire.pack_calls(calls)
    assert [part for part in parts if part is large] == [large] * 2
    assert sum(len(part) for part in parts if part is not large) < len(small) + 1000
    for sent in (calls, calls[1:]):
        assert b"".join(wire.pack_calls(sent)) == wire.pack(["calls", sent])


def test_a_frame_of_large_files_above_the_maximum_size_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("", files={"a": b"b" * wire.LARGE_BYTES}).encode(binary=True)
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", wire.LARGE_BYTES)
    with pytest.raises(ProtocolError, match=r"frame of \d+ bytes, expected at most"):
        wire.pack_calls([[1, call]])
