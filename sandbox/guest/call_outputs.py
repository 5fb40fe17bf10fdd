"""The files to which a call writes its output, its report and its returned files, and what they contain at its end.

A zygote has one `CallOutputs` for each of its calls, and the keeper of a session for its cell.
"""

from __future__ import annotations

import os

import output_files
import returned_files
import runner


class CallOutputs:
    """Bounded files for stdout, stderr and the report and, if the call returns files, for these. Raises `OSError`."""

    def __init__(self, call: dict) -> None:
        self._output_limit_bytes: int = call["output_bytes"]
        self._files_limit_bytes: int = call["return_bytes"]
        sizes = [self._output_limit_bytes] * 2 + [runner.max_report_bytes(self._output_limit_bytes)]
        if call["returns_files"]:
            sizes.append(self._files_limit_bytes)
        self.fds: list[int] = []
        try:
            for size in sizes:
                self.fds.append(output_files.bounded_file(size))
        except OSError:
            self.close()
            raise

    def in_call(self) -> list[tuple[int, int]]:
        """Return pairs: a descriptor of this process, and the descriptor that it becomes in the call."""
        return list(zip(self.fds, (1, 2, runner.REPORT_FD, returned_files.FILES_FD)))

    def report(self) -> tuple[int, int]:
        """Return the descriptor of the report, and the length of the report."""
        size, _ = output_files.written_bytes(self.fds[2], runner.max_report_bytes(self._output_limit_bytes))
        return self.fds[2], size

    def contents(self) -> tuple[dict, list[tuple[int, int]]]:
        """Return what the frame `ended` says about the outputs: fields of its header, and (descriptor, length) of each
        of its blobs."""
        (stdout_size, stdout_truncated), (stderr_size, stderr_truncated) = (
            output_files.written_bytes(fd, self._output_limit_bytes) for fd in self.fds[:2]
        )
        blobs = [(self.fds[0], stdout_size), (self.fds[1], stderr_size), self.report()]
        blobs += [(fd, output_files.written_bytes(fd, self._files_limit_bytes)[0]) for fd in self.fds[3:]]
        return {"stdout_truncated": stdout_truncated, "stderr_truncated": stderr_truncated}, blobs

    def close(self) -> None:
        """Close the files. Idempotent."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def exit_fields(status: int) -> dict[str, int | None]:
    """Return the fields of the frame `ended` that say how a process has ended, from its wait status."""
    return {
        "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
    }
