"""Tests of frames from a zygote, the interpreter that forks once per call. Any bytes give frames or a `ProtocolError`,
in bounded memory."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox.errors import ProtocolError
from sandbox.executor import zygote_frames
from sandbox.executor.call_state import CallSpec

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
HEADERS = st.dictionaries(st.text(), JSON).filter(lambda header: "op" not in header and "blobs" not in header)


def new_unpacker() -> zygote_frames.Unpacker:
    unpacker = zygote_frames.Unpacker()
    unpacker.max_body_bytes = 1 << 20
    return unpacker


def raw_frame(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<II", len(header), len(body)) + header + body


def same_json(value: Any, other: Any) -> bool:
    """Compare values by their JSON texts, in which NaN equals NaN."""
    return json.dumps(value) == json.dumps(other)


@given(HEADERS, st.text(), st.lists(st.binary()), st.data())
def test_frames_are_decoded_from_any_chunks(
    header: dict[str, Any], op: str, blobs: list[bytes], data: st.DataObject
) -> None:
    head = json.dumps({**header, "op": op, "blobs": [len(blob) for blob in blobs]}).encode()
    stream = raw_frame(head, b"".join(blobs)) * 2
    received, unpacker, start = [], new_unpacker(), 0
    while start < len(stream):
        end = data.draw(st.integers(start + 1, len(stream)))
        unpacker.feed(stream[start:end])
        received += list(unpacker)
        start = end
    assert len(received) == 2
    assert all(same_json(received_header, json.loads(head)) for received_header, _ in received)
    assert [received_blobs for _, received_blobs in received] == [blobs, blobs]


@given(st.lists(st.binary(), max_size=5))
def test_any_bytes_give_frames_or_an_error(chunks: list[bytes]) -> None:
    unpacker = new_unpacker()
    try:
        for chunk in chunks:
            unpacker.feed(chunk)
            for header, blobs in unpacker:
                assert isinstance(header["op"], str)
                assert all(isinstance(blob, bytes) for blob in blobs)
    except ProtocolError as error:
        assert len(str(error)) < 500


@given(JSON, st.binary())
@example({"op": "x", "blobs": [True]}, b"a")
@example({"op": "x", "blobs": [-1, 2]}, b"a")
@example({"op": "x", "blobs": {"": 1}}, b"")
@example({"op": "x", "blobs": [1.0]}, b"a")
@example({"op": "x", "blobs": ""}, b"")
@example({"op": 5, "blobs": []}, b"")
@example({"op": "x", "blobs": [10**400]}, b"")
@example({"op": "x", "blobs": [float("nan")]}, b"")
def test_any_header_gives_a_frame_or_an_error(header: Any, body: bytes) -> None:
    unpacker = new_unpacker()
    unpacker.feed(raw_frame(json.dumps(header).encode(), body))
    try:
        ((received_header, blobs),) = list(unpacker)
    except ProtocolError as error:
        assert len(str(error)) < 500
    else:
        assert same_json(received_header, header)
        assert b"".join(blobs) == body


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"null",
        b"\xff",
        b'{"op": "x", "blobs": [], "a": ' + b"[" * (1 << 19),
        b'{"op": "x", "blobs": [], "a": ' + b'{"a":' * (1 << 17),
        b'{"op": "x", "blobs": [], "a": ' + b"9" * 100_000 + b"}",
        b'{"op": "x", "blobs": [' + b"9" * 4000 + b"]}",
        b'{"op": "x"}',
        b'{"blobs": []}',
        b'{"op": "x", "blobs": []} {}',
    ],
    ids=[
        "empty",
        "no object",
        "not UTF-8",
        "deep lists",
        "deep objects",
        "long number",
        "long length",
        "no blobs",
        "no op",
        "two values",
    ],
)
def test_headers_built_to_break_a_decoder_are_errors(header: bytes) -> None:
    unpacker = new_unpacker()
    unpacker.feed(raw_frame(header))
    with pytest.raises(ProtocolError) as raised:
        list(unpacker)
    assert len(str(raised.value)) < 500


# Of header and body. Each may have at most 1 MiB.
@pytest.mark.parametrize("lengths", [((1 << 20) + 1, 0), (2**32 - 1, 0), (2, (1 << 20) + 1), (2, 2**32 - 1)])
def test_too_large_lengths_are_refused_before_the_frame_arrives(lengths: tuple[int, int]) -> None:
    unpacker = new_unpacker()
    unpacker.feed(struct.pack("<II", *lengths))
    with pytest.raises(ProtocolError, match="expected at most"):
        list(unpacker)


def test_frames_before_an_invalid_one_are_returned_once() -> None:
    unpacker = new_unpacker()
    unpacker.feed(raw_frame(b'{"op": "x", "blobs": []}') + raw_frame(b"no"))
    remaining = iter(unpacker)
    assert next(remaining)[0]["op"] == "x"
    with pytest.raises(ProtocolError):
        next(remaining)
    with pytest.raises(ProtocolError):
        list(unpacker)


@given(JSON)
@example(True)
@example(float("nan"))
@example(float("inf"))
@example(10**400)
@example(2**70)
def test_get_number_returns_a_finite_number_or_raises(value: Any) -> None:
    try:
        number = zygote_frames.get_number({"n": value}, "n")
    except ProtocolError as error:
        assert len(str(error)) < 500
    else:
        assert type(number) is float
        assert abs(number) < 1e15, "the documented bound"
        assert type(value) in (int, float)


@given(JSON)
@example("line\nline")
@example("x" * 10_000)
@example("\x1b[31m")
@example("\ud800")
def test_get_text_returns_short_printable_text_or_raises(value: Any) -> None:
    for get, field in ((zygote_frames.get_text, value), (zygote_frames.get_texts, [value])):
        try:
            texts = get({"t": field}, "t")
        except ProtocolError as error:
            assert len(str(error)) < 500
        else:
            assert isinstance(value, str)
            (text,) = texts if isinstance(texts, list) else [texts]
            assert text.isprintable()
            assert len(text) < 4000, "300 characters of up to ten each, if they are escaped"


# The header of an `ended` frame has 42 bytes, and 8 more for each of at most 4 blobs.
@pytest.mark.parametrize("length", [1, 30, 41, 43, 46, 42 + 8 * 5, 42 + 8 * 1000])
def test_a_binary_ended_header_of_a_wrong_length_is_an_error(length: int) -> None:
    unpacker = new_unpacker()
    unpacker.feed(raw_frame(b"\1" + bytes(length - 1)))  # 1 is the kind `ended`
    with pytest.raises(ProtocolError, match="invalid frame"):
        list(unpacker)


@pytest.mark.parametrize(
    ("value", "is_sent"), [({}, False), ({"compile_only": False}, False), ({"compile_only": True}, True)]
)
def test_a_call_only_compiles_if_its_field_is_true(value: dict[str, bool], is_sent: bool) -> None:
    frame = CallSpec.decode(1, {"code": "1", **value}).encode_start(run_id=1, slot=0)
    assert (b"compile_only" in frame) is is_sent
