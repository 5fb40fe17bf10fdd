"""Tests of the codec: any bytes decode to a value or an error, and encoded results decode to the same results."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import InvalidCall, RequestRefused
from sandbox.gateway.http import codec, validation
from sandbox.gateway.http.codec import JSON, MSGPACK, MSGPACK_STREAM, NDJSON
from sandbox.gateway.http.errors import HttpError
from sandbox.settings.server import ServeConfig
from sandbox.types import CALL_FIELDS, Result, Status

TEXT = st.text(st.characters(), max_size=20)
"""Text that may contain lone surrogates."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | TEXT | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*CALL_FIELDS, "x"]), inner, max_size=6)
    ),
    max_leaves=12,
)
BATCHES = st.fixed_dictionaries(
    {}, optional={"calls": st.lists(VALUES, max_size=4) | VALUES, "defaults": VALUES, "x": VALUES}
)


def decode(body: bytes, content_type: str) -> Any:
    return codec.decode(body, content_type, max_calls=8)


@given(st.binary(max_size=200), st.sampled_from([JSON, MSGPACK]))
def test_any_bytes_decode_to_a_value_or_raise_an_http_error(body: bytes, content_type: str) -> None:
    try:
        decode(body, content_type)
    except HttpError as error:
        assert error.status in (400, 413)
        assert str(error)


@given(VALUES)
def test_msgpack_decodes_to_the_sent_value(value: Any) -> None:
    body = msgpack.packb(value, unicode_errors="surrogatepass")
    assert repr(decode(body, MSGPACK)) == repr(value)


@given(BATCHES)
def test_any_decoded_body_is_parsed_as_a_batch_or_refused(decoded: Any) -> None:
    try:
        batch, malformed = asyncio.run(validation.parse(validation.BatchForm(ServeConfig()), decoded))
    except (InvalidCall, RequestRefused) as error:
        assert str(error)
        return
    assert len(batch.calls) + malformed == len(decoded["calls"])
    assert malformed == len([result for result in batch.results if result is not None])


@given(VALUES)
def test_any_decoded_body_is_parsed_as_a_call_or_refused(decoded: Any) -> None:
    try:
        batch, _ = asyncio.run(validation.parse(validation.CallForm(ServeConfig()), decoded))
        assert len(batch.calls) == 1
    except InvalidCall as error:
        assert str(error)


# With 70 repetitions, results are encoded in several parts (`RESULTS_PER_YIELD`).
@given(st.lists(st.tuples(TEXT, TEXT, st.binary(max_size=20)), min_size=1, max_size=3), st.sampled_from([1, 70]))
def test_encoded_results_decode_to_the_same_results_except_for_surrogates(
    fields: list[tuple[str, str, bytes]], repetitions: int
) -> None:
    results = [
        Result("i", Status.OK, stdout=out, value=value, files={"f": data}) for out, value, data in fields
    ] * repetitions
    for content_type in (JSON, MSGPACK):
        encoded = (result.encode(binary=True) for result in results)
        body = b"".join(asyncio.run(codec.encode_results(encoded, len(results), content_type)))
        decoded = json.loads(body) if content_type == JSON else msgpack.unpackb(body)
        assert [_without_surrogates(Result.decode(item)) for item in decoded["results"]] == [
            _without_surrogates(result) for result in results
        ]


@pytest.mark.parametrize("content_type", [NDJSON, MSGPACK_STREAM])
def test_a_line_of_a_stream_contains_a_result_and_its_index(content_type: str) -> None:
    result = Result("i", Status.OK, stdout="a\nb").encode(binary=True)
    line = b"".join(asyncio.run(codec.encode_line(7, result, codec.encoded_bytes(result), content_type)))
    decoded = json.loads(line) if content_type == NDJSON else msgpack.unpackb(line)
    assert decoded["index"] == 7
    assert Result.decode(decoded).stdout == "a\nb"
    assert line.count(b"\n") == 1


def _without_surrogates(result: Result) -> tuple[str, str, Any]:
    texts = [text.encode("utf-8", "replace").decode() for text in (result.stdout, result.value or "")]
    return texts[0], texts[1], result.files
