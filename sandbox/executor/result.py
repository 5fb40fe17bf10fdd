"""Builds the result of a call from the end of its process.

    source                                         trusted   decides
    exit status, signal, length of the output      yes       status
    usage that the call's cgroup has counted       yes       status `memory_limit`, usage
    time-out noticed by the executor               yes       status
    report, written by the call's own process      no        value, error; changes status `error` to `memory_limit`
    returned files, written by the same process    no        files

The report may contain any bytes, so it is parsed like any untrusted input. The only change of the status that it can
cause is from `error` to `memory_limit`.
"""

from __future__ import annotations

import codecs
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.executor import returned_files
from sandbox.executor.zygote_frames import Header, get_number
from sandbox.guest.protocol import FILES_TRUNCATED, OUT_OF_MEMORY, REPORT, TRACEBACK_TRUNCATED, VALUE_TRUNCATED
from sandbox.jail import CgroupUsage
from sandbox.types import EncodedError, EncodedResult, Status, signal_name

MAX_INVALID = 10_000
"""About how many invalid bytes of a text are replaced by U+FFFD (`decode_output`)."""
_CHUNK_BYTES = 1 << 14
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_ASCII_TABLE = bytes(range(128)) + b"?" * 128
"""Table for `bytes.translate` that replaces each byte that is not ASCII by a question mark."""


@dataclass(frozen=True, slots=True)
class Report:
    """The report of the runner (`guest/protocol.py`). It is empty if the process ended before it wrote a report."""

    value: str | None = None
    error: EncodedError | None = None
    flags: int = 0

    @classmethod
    def parse(cls, data: bytes) -> Report:
        """Return the report, or an empty one if `data` is not a valid report. Never raises."""
        if len(data) < REPORT.size:
            return cls()
        *sizes, line, flags = REPORT.unpack_from(data)
        texts, start = [], REPORT.size
        for size in sizes:
            end = start + max(size, 0)
            texts.append(decode_output(data[start:end]))
            start = end
        if start != len(data):
            return cls()
        value, error_type, message, traceback = texts
        value_size, error_size, *_ = sizes
        error = _error_fields(error_type, message, traceback, line if line > 0 else None) if error_size >= 0 else None
        return cls(value if value_size >= 0 else None, error, flags)


def decode_output(data: bytes) -> str:
    """Decode UTF-8, and replace each invalid byte by U+FFFD. After about `MAX_INVALID` invalid bytes, each byte that is
    not ASCII becomes "?" instead. The reason is that a U+FFFD takes 50 ns of the event loop and three bytes of memory,
    so megabytes of invalid bytes would block the loop and become three times as large."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        decoder, parts, num_invalid = _Utf8Decoder("replace"), [], 0
    for start in range(0, len(data), _CHUNK_BYTES):
        end = start + _CHUNK_BYTES
        parts.append(decoder.decode(data[start:end], final=end >= len(data)))
        num_invalid += parts[-1].count("\N{REPLACEMENT CHARACTER}")
        if num_invalid > MAX_INVALID:
            parts.append(data[end:].translate(_ASCII_TABLE).decode("ascii"))
            break
    return "".join(parts)


def build_result(
    ended: Header,
    blobs: list[bytes],
    *,
    call_id: str,
    return_files: Sequence[str],
    figures: bool = False,
    timeout_s: float,
    timed_out: bool,
    usage: CgroupUsage | None = None,
) -> EncodedResult:
    """Build the result of a call from the `ended` frame of its zygote and the frame's blobs (stdout, stderr, report,
    returned files).

    `timed_out`: whether the call has used up its time. It may have ended just before the executor could kill it.
    `usage`: the counters of the call's cgroup; None without a cgroup. Raises `ProtocolError`.
    """
    stdout, stderr, report_bytes, file_bytes = (*blobs, b"", b"", b"", b"")[:4]  # missing blobs count as empty
    report = Report.parse(report_bytes)
    exit_code = None if ended.get("exit_code") is None else int(get_number(ended, "exit_code"))
    term_signal = None if ended.get("signal") is None else int(get_number(ended, "signal"))
    if timed_out:
        exit_code, term_signal = None, int(signal.SIGKILL)
    stdout_truncated, stderr_truncated = ended.get("stdout_truncated") is True, ended.get("stderr_truncated") is True
    output_exceeded = stdout_truncated or stderr_truncated
    was_oom_killed = term_signal == signal.SIGKILL and usage is not None and usage.hit_own_limit
    status = _status(exit_code, report, timed_out=timed_out, output_exceeded=output_exceeded, oom_killed=was_oom_killed)
    truncated = {
        "stdout": stdout_truncated,
        "stderr": stderr_truncated,
        "value": report.flags & VALUE_TRUNCATED,
        "traceback": report.flags & TRACEBACK_TRUNCATED,
        "files": report.flags & FILES_TRUNCATED,
    }
    returned = returned_files.parse(file_bytes, return_files, figures=figures)
    return {
        "id": call_id,
        "status": status.value,
        "stdout": decode_output(stdout),
        "stderr": decode_output(stderr),
        "value": report.value if status is Status.OK else None,
        "error": _error(status, exit_code, term_signal, report, timeout_s),
        "exit_code": exit_code,
        "signal": term_signal,
        "truncated": [name for name, is_truncated in truncated.items() if is_truncated],
        "files": returned.files,
        "usage": {
            "queue_ms": 0.0,  # the gateway fills in this value, `attempts` and `clamped`
            "run_ms": get_number(ended, "wall_ms"),
            "cpu_ms": total_cpu_ms(ended, usage),
            "peak_memory_mb": round(_peak_bytes(ended, usage) / (1 << 20), 1),
        },
        "attempts": 1,
        "clamped": {},
        "missing_files": returned.missing,
    }


def total_cpu_ms(ended: Header, usage: CgroupUsage | None) -> float:
    """Return the CPU milliseconds of all processes of a call. Without a cgroup, only two kinds of processes count: the
    first process, and the children that the first process has waited for. Raises `ProtocolError`."""
    reported_ms = get_number(ended, "cpu_ms")
    return reported_ms if usage is None or usage.cpu_ms is None else round(usage.cpu_ms, 3)


def _peak_bytes(ended: Header, usage: CgroupUsage | None) -> float:
    """Return the peak memory of a call in bytes: that of its processes and files together, without the memory that is
    inherited from the zygote. Without a cgroup, it is the peak of the largest process, without files and without copies
    of inherited pages.

    The cgroup's peak is the growth since the start of the call. It is negative if the kernel has freed cached files
    since then.
    """
    reported_bytes = get_number(ended, "peak_kb") * 1024
    return reported_bytes if usage is None or usage.peak_bytes is None else max(0, usage.peak_bytes)


def _status(
    exit_code: int | None, report: Report, *, timed_out: bool, output_exceeded: bool, oom_killed: bool
) -> Status:
    if output_exceeded:
        # This is checked first, so that the same code always gets the same status. Code that prints for ever always
        # exceeds this limit, but whether it also times out depends on the load.
        return Status.OUTPUT_LIMIT
    if timed_out:
        return Status.TIMEOUT
    if exit_code is None:
        return Status.MEMORY_LIMIT if oom_killed else Status.KILLED
    if exit_code == 0:
        return Status.OK
    return Status.MEMORY_LIMIT if report.flags & OUT_OF_MEMORY else Status.ERROR


def _error(
    status: Status, exit_code: int | None, term_signal: int | None, report: Report, timeout_s: float
) -> EncodedError | None:
    match status:
        case Status.OK:
            return None
        case Status.TIMEOUT:
            return _error_fields("Timeout", f"used up its {timeout_s:g} s")
        case Status.OUTPUT_LIMIT:
            return _error_fields("OutputLimit", "wrote more than output_kb; the result contains the beginning")
        case Status.KILLED:
            name = signal_name(term_signal)
            return _error_fields(name, f"killed by signal {term_signal} ({name})")
    if status is Status.MEMORY_LIMIT and exit_code is None:
        return _error_fields("MemoryLimit", "its processes together used up memory_mb")
    return report.error or _error_fields("SystemExit", str(exit_code))


def _error_fields(error_type: str, message: str, traceback: str = "", line: int | None = None) -> EncodedError:
    return {"type": error_type, "message": message, "traceback": traceback, "line": line}
