"""Tests with any `ended` frames, in which a zygote reports the end of a call. Such a frame becomes a result that can be
sent and decoded, or a `ProtocolError`."""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from sandbox import wire
from sandbox.errors import ProtocolError
from sandbox.executor import returned_files
from sandbox.executor.result import Report, build_result
from sandbox.fields import check_paths
from sandbox.path_patterns import is_pattern, matches
from sandbox.types import Result, Status

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 130)
    | st.floats()
    | st.sampled_from([10**400, 1e15, -1e15, 2.0**63])
)
ANYTHING = SCALARS | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
ENDED_FIELDS = ("exit_code", "signal", "wall_ms", "cpu_ms", "peak_kb", "stdout_truncated", "stderr_truncated")
VALID_HEADERS = st.fixed_dictionaries(
    {
        "exit_code": st.none() | st.integers(0, 255),
        "signal": st.none() | st.integers(0, 64),
        "wall_ms": st.floats(0, 1e6),
        "cpu_ms": st.floats(0, 1e6),
        "peak_kb": st.integers(0, 1 << 30),
        "stdout_truncated": st.booleans(),
        "stderr_truncated": st.booleans(),
    }
)
HOSTILE_HEADERS = st.dictionaries(st.sampled_from(ENDED_FIELDS), ANYTHING)
MIXED_HEADERS = st.builds(lambda valid, hostile: {**valid, **hostile}, VALID_HEADERS, HOSTILE_HEADERS)
HEADERS = VALID_HEADERS | HOSTILE_HEADERS | MIXED_HEADERS
LENGTHS = st.integers(-3, 30) | st.integers(-(2**31), 2**31 - 1)


@st.composite
def reports(draw: st.DrawFn) -> bytes:
    """Draw reports of four texts. Their lengths are right or any numbers. Line number and flags are any numbers."""
    texts = draw(st.lists(st.binary(max_size=20), min_size=4, max_size=4))
    right_lengths = [len(text) for text in texts]
    lengths = draw(st.just(right_lengths) | st.lists(LENGTHS, min_size=4, max_size=4))
    numbers = [*lengths, *draw(st.lists(LENGTHS, min_size=2, max_size=2))]
    return struct.pack("<6i", *numbers) + b"".join(texts) + draw(st.just(b"") | st.binary(max_size=5))


@st.composite
def file_streams(draw: st.DrawFn) -> bytes:
    """Draw streams of returned files. Some files have a wrong index or length, and some have a name. A stream may be
    cut anywhere."""
    stream = b""
    names = st.sampled_from([b"", b"a\0", b"b/c.x\0", b"../a\0", b"/a\0", b"b//c\0", b"\xff\0", b"\0", b".x\0"])
    for data in draw(st.lists(st.builds(bytes.__add__, names, st.binary(max_size=20)), max_size=4)):
        size = draw(st.just(len(data)) | st.sampled_from([0, 1, 2**64 - 1]))
        stream += struct.pack("<IQ", draw(st.integers(0, 4) | st.just(2**32 - 1)), size) + data
    return stream[: draw(st.integers(0, len(stream)) | st.just(len(stream)))]


@given(st.binary(max_size=100) | reports())
@example(b"")
@example(struct.pack("<6i", *[2**31 - 1] * 6))
@example(struct.pack("<6i", *[-(2**31)] * 6))
def test_any_bytes_give_a_report_without_invented_text(data: bytes) -> None:
    report = Report.parse(data)
    texts = [report.value or ""]
    if report.error is not None:
        texts += [report.error["type"], report.error["message"], report.error["traceback"]]
        assert report.error["line"] is None or report.error["line"] > 0
    assert sum(map(len, texts)) <= len(data)


@given(HEADERS, reports(), file_streams(), st.booleans())
@example({"exit_code": float("nan")}, b"", b"", False)
@example({"exit_code": 0, "signal": None, "wall_ms": 1, "cpu_ms": 1, "peak_kb": float("inf")}, b"", b"", False)
def test_any_ended_frame_gives_a_result_or_an_error(
    ended: dict[str, Any], report: bytes, files: bytes, timed_out: bool
) -> None:
    return_files = ["a", "b/c", "d"]
    try:
        encoded = build_result(
            ended,
            [b"out\xff", b"err", report, files],
            call_id="c",
            return_files=return_files,
            timeout_s=1.5,
            timed_out=timed_out,
        )
    except ProtocolError as error:
        assert len(str(error)) < 500
        return
    unpacker = wire.Unpacker()
    unpacker.feed(wire.pack(["results", [[1, encoded]]]))
    [[_, [[_, received]]]] = list(unpacker)
    result = Result.decode(received)
    assert result.status is not Status.UNAVAILABLE
    is_output_truncated = not {"stdout", "stderr"}.isdisjoint(result.truncated)
    assert (result.status is Status.OK) == (result.exit_code == 0 and not timed_out and not is_output_truncated)
    assert (result.error is None) == (result.status is Status.OK)
    assert (result.id, result.attempts, result.stdout, result.stderr) == ("c", 1, "out\ufffd", "err")
    assert set(result.files) <= set(return_files)


@given(st.lists(st.binary(max_size=30), max_size=6))
def test_missing_and_surplus_blobs_are_ignored(blobs: list[bytes]) -> None:
    ended = {"exit_code": 0, "signal": None, "wall_ms": 1, "cpu_ms": 1, "peak_kb": 1}
    encoded = build_result(ended, blobs, call_id="", return_files=[], timeout_s=1.0, timed_out=False)
    assert Result.decode(encoded).stdout == (blobs[0].decode("utf-8", "replace") if blobs else "")


@given(
    file_streams() | st.binary(max_size=60),
    st.lists(st.text(max_size=3) | st.sampled_from(["*", "**/*.x", "[!a]/?"]), unique=True, max_size=4),
    st.booleans(),
)
def test_only_requested_files_are_returned(stream: bytes, requested: list[str], figures: bool) -> None:
    returned = returned_files.parse(stream, requested, figures=figures)
    for path, data in returned.files.items():
        by_pattern = any(is_pattern(pattern) and matches(path, pattern) for pattern in requested)
        assert path in requested or (by_pattern and check_paths([path], "")) or (figures and path.startswith("figure-"))
        assert data in stream
    assert set(returned.missing) <= set(requested)
