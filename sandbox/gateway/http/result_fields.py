"""Descriptions of the fields of results, errors, usage and verdicts, for the OpenAPI schema."""

from __future__ import annotations

CALL_ERROR_FIELDS: dict[str, str] = {
    "type": "name of the exception's type, of the signal, or of the limit that ended the call",
    "message": "the exception's text, or what was expected and what came",
    "traceback": "the traceback as Python prints it, with frames of the code only; empty if there is none",
    "line": "line of the code, from 1; null if unknown",
}
USAGE_FIELDS: dict[str, str] = {
    "queue_ms": "milliseconds that the call waited for a slot, summed over all attempts",
    "run_ms": "milliseconds of wall time from the start of the call's process to its end",
    "cpu_ms": "milliseconds of CPU time of all processes of the call; without cgroups, of the first process and of the "
    "children that it waited for",
    "peak_memory_mb": "peak MiB that the call added to the memory inherited from its zygote. With cgroups: all its "
    "processes, its files, and the inherited pages that it wrote to, about 0.5 MiB for the smallest call. Without "
    "cgroups: its largest process only, without files and without inherited pages",
}
RESULT_FIELDS: dict[str, str] = {
    "id": "the call's id; without one, its index in the batch, from 0",
    "status": "how the call ended",
    "stdout": "text written to standard output, at most output_kb; bytes that are not UTF-8 become U+FFFD, from about "
    "10,000 on '?'",
    "stderr": "text written to standard error, like stdout",
    "value": "repr() of the last expression if echo is true and the status is ok; else null",
    "error": "the reason why the call did not end as ok; null if it did",
    "exit_code": "exit code of the call's process; null if a signal ended it or nothing ran",
    "signal": "number of the signal that ended the call's process; else null",
    "truncated": "names of the fields that were truncated: stdout, stderr, value, traceback or files",
    "files": "returned files and figures by path: base64 text in JSON, raw bytes in msgpack",
    "usage": "resources that the call used",
    "attempts": "number of times that the call was sent to an executor, at most attempts; 0 if never",
    "clamped": "limits above the server's maximum, with the lower value that was used",
    "missing_files": "paths and patterns of return_files without a file in files: the code left no readable regular "
    "file there, the file did not fit (truncated then contains files), or the call was killed before its files were "
    "read",
}
VERDICT_FIELDS: dict[str, str] = {
    "outcome": "how the answer compares with the right answer",
    "status": "how the check ended, in its own virtual time and limits: ok if the comparison finished",
    "message": "the reason why there is no comparison; else empty",
    "usage": "resources that the check used",
    "extracted": "the answers that were found in gold and answer, each cut at 200 characters",
}
