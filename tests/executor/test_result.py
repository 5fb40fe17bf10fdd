"""Verdicts rest on the kernel's word and ours; the call's own report adds words and cannot break anything."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox.errors import ProtocolError
from sandbox.executor.result import Report, judge
from sandbox.types import Result, Status
from tests.executor.test_zygote_frames import JSON

ENDED: dict[str, Any] = {"exit_code": 0, "signal": None, "wall_ms": 1.5, "cpu_ms": 1.0, "peak_kb": 2048}


def report(*texts: bytes | None, line: int = -1, bits: int = 0) -> bytes:
    sizes = [-1 if text is None else len(text) for text in texts]
    return struct.pack("<6i", *sizes, line, bits) + b"".join(text or b"" for text in texts)


RAISED = report(None, b"ValueError", b"no", b"Traceback", line=3)


def verdict(ended: dict[str, Any], *blobs: bytes, late: bool = False, asked: tuple[str, ...] = ()) -> Result:
    about = {"call_id": "c", "attempts": 2, "asked_files": list(asked), "timeout_s": 1.5}
    return Result.decode(judge({**ENDED, **ended}, list(blobs), late=late, **about))


@pytest.mark.parametrize(
    ("ended", "late", "words", "status", "kind"),
    [
        ({"exit_code": 0}, False, b"", Status.OK, None),
        ({"exit_code": 0}, False, RAISED, Status.OK, None),
        ({"exit_code": 1}, False, RAISED, Status.ERROR, "ValueError"),
        ({"exit_code": 3}, False, b"", Status.ERROR, "SystemExit"),
        ({"exit_code": 1}, False, report(None, b"MemoryError", b"", b"", bits=8), Status.MEMORY_LIMIT, "MemoryError"),
        ({"exit_code": 0}, False, report(None, b"MemoryError", b"", b"", bits=8), Status.OK, None),
        ({"exit_code": None, "signal": 9}, False, b"", Status.KILLED, "SIGKILL"),
        ({"exit_code": None, "signal": 11}, False, RAISED, Status.KILLED, "SIGSEGV"),
        ({"exit_code": None, "signal": 1000}, False, b"", Status.KILLED, "SIG1000"),
        ({"exit_code": None, "signal": 9}, True, b"", Status.TIMEOUT, "Timeout"),
        ({"exit_code": None, "signal": 9, "stdout_truncated": True}, True, b"", Status.OUTPUT_LIMIT, "OutputLimit"),
        ({"exit_code": 1, "stderr_truncated": True}, False, RAISED, Status.OUTPUT_LIMIT, "OutputLimit"),
    ],
)
def test_each_end_has_its_status(
    ended: dict[str, Any], late: bool, words: bytes, status: Status, kind: str | None
) -> None:
    result = verdict(ended, b"out", b"err", words, late=late)
    assert (result.status, result.stdout, result.stderr) == (status, "out", "err")
    assert (result.error.type if result.error else None) == kind
    assert (result.id, result.attempts, result.usage.peak_memory_mb) == ("c", 2, 2.0)


def test_a_value_comes_only_from_a_call_that_is_ok() -> None:
    assert verdict({}, b"", b"", report(b"5", None, b"", b"")).value == "5"
    assert verdict({"exit_code": 1}, b"", b"", report(b"5", None, b"", b"")).value is None


def test_cuts_are_named() -> None:
    result = verdict(
        {"stdout_truncated": True, "stderr_truncated": True}, b"", b"", report(b"", None, b"", b"", bits=7)
    )
    assert result.truncated == ("stdout", "stderr", "value", "traceback", "files")


@given(st.binary(max_size=200), st.binary(max_size=200), st.booleans())
def test_no_report_and_no_files_break_a_verdict(words: bytes, files: bytes, late: bool) -> None:
    result = verdict({"exit_code": 1}, b"\xff", b"", words, files, late=late, asked=("a", "b"))
    assert result.status in (Status.ERROR, Status.TIMEOUT, Status.MEMORY_LIMIT)
    assert set(result.files) <= {"a", "b"}
    assert sum(map(len, result.files.values())) <= len(files)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=6, max_size=6), st.binary(max_size=100))
@example([2**31 - 1] * 6, b"")
@example([-(2**31)] * 6, b"")
def test_any_numbers_are_a_report_or_none(numbers: list[int], rest: bytes) -> None:
    parsed = Report.parse(struct.pack("<6i", *numbers) + rest)
    said = len(parsed.value or "") + sum(len(part) for part in (parsed.error or ())[:3] if isinstance(part, str))
    assert said <= 3 * len(rest)


@given(
    st.dictionaries(st.sampled_from([*ENDED, "stdout_truncated", "stderr_truncated", "run_id", "op"]), JSON),
    st.lists(st.binary()),
)
@example({"exit_code": True}, [])
@example({"wall_ms": float("nan")}, [])
@example({"cpu_ms": 10**400}, [])
@example({"signal": 1e14}, [b""] * 10)
def test_any_header_is_a_result_or_a_protocol_error(header: dict[str, Any], blobs: list[bytes]) -> None:
    try:
        result = verdict(header, *blobs)
    except ProtocolError:
        return
    assert result.status is not Status.UNAVAILABLE
    assert isinstance(result.usage.run_ms, float)
