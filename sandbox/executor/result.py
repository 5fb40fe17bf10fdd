"""From how a call's process ended to its `Result`, as the mapping that goes over the wire.

The verdict rests on what the kernel says (exit status, signal, length of the output) and on what we did (time-out). The
report, written by the call's own process, adds words: the value and the error. It is hostile and parsed as such.
"""

from __future__ import annotations

import signal
import struct
from dataclasses import dataclass
from typing import Any

from sandbox.executor.zygote_frames import number
from sandbox.jail import CgroupUsage
from sandbox.types import EncodedError, EncodedResult, Status

_REPORT = struct.Struct("<6i")
_FILE = struct.Struct("<IQ")
_VALUE_CUT, _TRACEBACK_CUT, _FILES_CUT, _OUT_OF_MEMORY = 1, 2, 4, 8

WireResult = EncodedResult


@dataclass(frozen=True, slots=True)
class Report:
    """What the runner says of the run; all empty when it did not get to say anything."""

    value: str | None = None
    error: tuple[str, str, str, int | None] | None = None
    bits: int = 0

    @classmethod
    def parse(cls, data: bytes) -> Report:
        """Never raises: bytes that are no report are no report."""
        if len(data) < _REPORT.size:
            return cls()
        *sizes, line, bits = _REPORT.unpack_from(data)
        texts, start = [], _REPORT.size
        for size in sizes:
            end = start + max(size, 0)
            texts.append(data[start:end].decode("utf-8", "replace"))
            start = end
        if start != len(data):
            return cls()
        value, kind, message, trace = texts
        error = (kind, message, trace, line if line > 0 else None) if sizes[1] >= 0 else None
        return cls(value if sizes[0] >= 0 else None, error, bits)


def judge(
    done: dict[str, Any],
    blobs: list[bytes],
    *,
    call_id: str,
    attempts: int,
    asked_files: list[str],
    timeout_s: float,
    late: bool,
    spent: CgroupUsage | None = None,
) -> WireResult:
    """The result of a call whose process has ended; `late` if it used up its time, `spent` what the kernel counted of
    all its processes, if it did. Raises `ProtocolError`."""
    stdout, stderr, report_bytes, files = (*blobs, b"", b"", b"", b"")[:4]
    report = Report.parse(report_bytes)
    code = None if done.get("exit_code") is None else int(number(done, "exit_code"))
    ended_by = None if done.get("signal") is None else int(number(done, "signal"))
    if late:  # also one that ended just before we came to end it
        code, ended_by = None, int(signal.SIGKILL)
    out_cut, err_cut = done.get("stdout_truncated") is True, done.get("stderr_truncated") is True
    was_oom = ended_by == signal.SIGKILL and spent is not None and spent.hit_own_limit
    status = _status(code, late, out_cut or err_cut, was_oom, report)
    cuts = {
        "stdout": out_cut,
        "stderr": err_cut,
        "value": report.bits & _VALUE_CUT,
        "traceback": report.bits & _TRACEBACK_CUT,
        "files": report.bits & _FILES_CUT,
    }
    returned = _files(files, asked_files) if files else {}
    return {
        "id": call_id,
        "status": status.value,
        "stdout": stdout.decode("utf-8", "replace"),
        "stderr": stderr.decode("utf-8", "replace"),
        "value": report.value if status is Status.OK else None,
        "error": _error(status, code, ended_by, report, timeout_s),
        "exit_code": code,
        "signal": ended_by,
        "truncated": [name for name, cut in cuts.items() if cut],
        "files": returned,
        "usage": {
            "queue_ms": 0.0,
            "run_ms": number(done, "wall_ms"),
            "cpu_ms": cpu_ms(done, spent),
            "peak_memory_mb": round(_peak_bytes(done, spent) / (1 << 20), 1),
        },
        "attempts": attempts,
        "clamped": {},
        "missing_files": [path for path in dict.fromkeys(asked_files) if path not in returned],
    }


def cpu_ms(done: dict[str, Any], spent: CgroupUsage | None) -> float:
    """Of all its processes, or where nobody counted those, of the first and what it waited for. Raises
    `ProtocolError`."""
    first = number(done, "cpu_ms")
    return first if spent is None or spent.cpu_ms is None else round(spent.cpu_ms, 3)


def _peak_bytes(done: dict[str, Any], spent: CgroupUsage | None) -> float:
    """What it added to the memory that it inherits from the zygote: all its processes and files together; without a
    control group the largest of its processes, where neither files nor copies of inherited pages count."""
    largest = number(done, "peak_kb") * 1024
    return largest if spent is None or spent.peak_bytes is None else max(0, spent.peak_bytes)


def _status(code: int | None, late: bool, flooded: bool, was_oom: bool, report: Report) -> Status:
    if flooded:  # before the time-out: how far a flood got in its time depends on the load, that it flooded does not
        return Status.OUTPUT_LIMIT
    if late:
        return Status.TIMEOUT
    if code is None:
        return Status.MEMORY_LIMIT if was_oom else Status.KILLED
    if code == 0:
        return Status.OK
    return Status.MEMORY_LIMIT if report.bits & _OUT_OF_MEMORY else Status.ERROR


def _error(
    status: Status, code: int | None, ended_by: int | None, report: Report, timeout_s: float
) -> EncodedError | None:
    if status is Status.OK:
        return None
    if status is Status.TIMEOUT:
        return _words("Timeout", f"used up its {timeout_s:g} s")
    if status is Status.OUTPUT_LIMIT:
        return _words("OutputLimit", "wrote more than it may; what fitted is here")
    if status is Status.KILLED:
        name = _signal_name(ended_by)
        return _words(name, f"killed by signal {ended_by} ({name})")
    if status is Status.MEMORY_LIMIT and code is None:
        return _words("MemoryLimit", "its processes together used up memory_mb")
    if report.error is None:
        return _words("SystemExit", str(code))
    kind, message, trace, line = report.error
    return {"type": kind, "message": message, "traceback": trace, "line": line}


def _words(kind: str, message: str) -> EncodedError:
    return {"type": kind, "message": message, "traceback": "", "line": None}


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"SIG{number}"


def _files(data: bytes, asked: list[str]) -> dict[str, bytes]:
    """The returned files that were asked for; a stream that makes no sense ends where it stops making any."""
    files, start = {}, 0
    while len(data) - start >= _FILE.size:
        index, size = _FILE.unpack_from(data, start)
        start += _FILE.size
        if index >= len(asked) or size > len(data) - start:
            break
        files[asked[index]] = data[start : start + size]
        start += size
    return files
