"""Tests of how the end of a call becomes a result: its status, error, value, and what was truncated.

A report is what the process of a call writes about its end. It is untrusted.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox.errors import ProtocolError
from sandbox.executor import result
from sandbox.executor.result import MAX_INVALID, Report, build_result, decode_output
from sandbox.types import EncodedResult, Result, Status
from tests.executor.test_zygote_frames import JSON

ENDED: dict[str, Any] = {"exit_code": 0, "signal": None, "wall_ms": 1.5, "cpu_ms": 1.0, "peak_kb": 2048}


def report(*texts: bytes | None, line: int = -1, flags: int = 0) -> bytes:
    """A report with these texts: value, error type, message and traceback; None is an absent text."""
    sizes = [-1 if text is None else len(text) for text in texts]
    return struct.pack("<6i", *sizes, line, flags) + b"".join(text or b"" for text in texts)


RAISED = report(None, b"ValueError", b"no", b"Traceback", line=3)
MEMORY_ERROR = report(None, b"MemoryError", b"", b"", flags=8)  # _OUT_OF_MEMORY


def encoded(
    ended: dict[str, Any], *blobs: bytes, timed_out: bool = False, files: tuple[str, ...] = ()
) -> EncodedResult:
    return build_result(
        {**ENDED, **ended},
        list(blobs),
        call_id="c",
        return_files=list(files),
        timeout_s=1.5,
        timed_out=timed_out,
    )


def decoded(ended: dict[str, Any], *blobs: bytes, timed_out: bool = False, files: tuple[str, ...] = ()) -> Result:
    return Result.decode(encoded(ended, *blobs, timed_out=timed_out, files=files))


@pytest.mark.parametrize(
    ("ended", "timed_out", "report_bytes", "status", "error_type"),
    [
        ({"exit_code": 0}, False, b"", Status.OK, None),
        ({"exit_code": 0}, False, RAISED, Status.OK, None),
        ({"exit_code": 1}, False, RAISED, Status.ERROR, "ValueError"),
        ({"exit_code": 3}, False, b"", Status.ERROR, "SystemExit"),
        ({"exit_code": 1}, False, MEMORY_ERROR, Status.MEMORY_LIMIT, "MemoryError"),
        ({"exit_code": 0}, False, MEMORY_ERROR, Status.OK, None),
        ({"exit_code": None, "signal": 9}, False, b"", Status.KILLED, "SIGKILL"),
        ({"exit_code": None, "signal": 11}, False, RAISED, Status.KILLED, "SIGSEGV"),
        ({"exit_code": None, "signal": 1000}, False, b"", Status.KILLED, "SIG1000"),
        ({"exit_code": None, "signal": 9}, True, b"", Status.TIMEOUT, "Timeout"),
        ({"exit_code": None, "signal": 9, "stdout_truncated": True}, True, b"", Status.OUTPUT_LIMIT, "OutputLimit"),
        ({"exit_code": 1, "stderr_truncated": True}, False, RAISED, Status.OUTPUT_LIMIT, "OutputLimit"),
    ],
)
def test_each_end_of_a_call_has_its_status(
    ended: dict[str, Any], timed_out: bool, report_bytes: bytes, status: Status, error_type: str | None
) -> None:
    result = decoded(ended, b"out", b"err", report_bytes, timed_out=timed_out)
    assert (result.status, result.stdout, result.stderr) == (status, "out", "err")
    assert (result.error.type if result.error else None) == error_type
    assert (result.id, result.attempts, result.usage.peak_memory_mb) == ("c", 1, 2.0), "as `ENDED` and `encoded` say"


def test_a_built_result_has_the_keys_of_an_encoded_one() -> None:
    built = encoded({"exit_code": 1}, b"", b"", RAISED)
    reencoded = Result.decode(built).encode(binary=True)
    assert built == reencoded
    assert list(built) == list(reencoded)


def test_only_a_call_that_is_ok_has_a_value() -> None:
    assert decoded({}, b"", b"", report(b"5", None, b"", b"")).value == "5"
    assert decoded({"exit_code": 1}, b"", b"", report(b"5", None, b"", b"")).value is None


def test_every_truncated_part_is_named() -> None:
    all_flags = report(b"", None, b"", b"", flags=1 | 2 | 4)  # value, traceback and files are truncated
    result = decoded({"stdout_truncated": True, "stderr_truncated": True}, b"", b"", all_flags)
    assert result.truncated == ("stdout", "stderr", "value", "traceback", "files")


@given(st.binary(max_size=200), st.binary(max_size=200), st.booleans())
def test_any_report_and_any_files_give_a_result(report_bytes: bytes, file_bytes: bytes, timed_out: bool) -> None:
    result = decoded({"exit_code": 1}, b"\xff", b"", report_bytes, file_bytes, timed_out=timed_out, files=("a", "b"))
    assert result.status in (Status.ERROR, Status.TIMEOUT, Status.MEMORY_LIMIT)
    assert set(result.files) <= {"a", "b"}
    assert sum(map(len, result.files.values())) <= len(file_bytes)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=6, max_size=6), st.binary(max_size=100))
@example([2**31 - 1] * 6, b"")
@example([-(2**31)] * 6, b"")
def test_a_report_with_any_lengths_has_no_more_text_than_its_bytes(numbers: list[int], texts: bytes) -> None:
    parsed = Report.parse(struct.pack("<6i", *numbers) + texts)
    parts = [parsed.value or ""]
    if parsed.error is not None:
        parts += [parsed.error["type"], parsed.error["message"], parsed.error["traceback"]]
    assert sum(map(len, parts)) <= 3 * len(texts)


@given(
    st.dictionaries(st.sampled_from([*ENDED, "stdout_truncated", "stderr_truncated", "run_id", "op"]), JSON),
    st.lists(st.binary()),
)
@example({"exit_code": True}, [])
@example({"wall_ms": float("nan")}, [])
@example({"cpu_ms": 10**400}, [])
@example({"signal": 1e14}, [b""] * 10)
def test_any_header_gives_a_result_or_a_protocol_error(header: dict[str, Any], blobs: list[bytes]) -> None:
    try:
        result = decoded(header, *blobs)
    except ProtocolError:
        return
    assert result.status is not Status.UNAVAILABLE
    assert isinstance(result.usage.run_ms, float)


@given(
    st.lists(st.sampled_from([b"x" * 99, "\N{GRINNING FACE}é".encode() * 9, b"\xf0\x9f", b"\xff"])), st.integers(1, 9)
)
def test_invalid_bytes_become_replacement_characters(parts: list[bytes], chunk_bytes: int) -> None:
    data = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result, "_CHUNK_BYTES", chunk_bytes)
        assert decode_output(data) == data.decode("utf-8", "replace")


def test_output_with_many_invalid_bytes_is_hardly_larger_than_its_bytes() -> None:
    data = b"a\xff" * (1 << 20) + "é".encode()
    text = decode_output(data)
    assert text.startswith("a\N{REPLACEMENT CHARACTER}" * MAX_INVALID)
    assert text.endswith("a?a?a???")
    assert len(text) <= len(data)
    assert len(text.encode()) < 1.05 * len(data)
