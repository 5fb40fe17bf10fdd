"""The results of `sandbox.integrations.e2b`, with the fields of `e2b_code_interpreter`."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

from sandbox.types import Result as CallResult
from sandbox.types import Status


@dataclass
class Result:
    """A value that the code shows: the value of its last expression as text, or a figure as a PNG in base64."""

    text: str | None = None
    png: str | None = None
    is_main_result: bool = False


@dataclass
class Logs:
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


@dataclass
class ExecutionError:
    """Why the code did not end as ok: its exception, or a limit such as `Timeout`."""

    name: str
    value: str
    traceback: str


@dataclass
class Execution:
    """The result of one `run_code`. `text` is the value of the last expression."""

    results: list[Result] = field(default_factory=list)
    logs: Logs = field(default_factory=Logs)
    error: ExecutionError | None = None
    execution_count: int | None = None

    @property
    def text(self) -> str | None:
        return next((result.text for result in self.results if result.is_main_result), None)

    @classmethod
    def of(cls, result: CallResult, execution_count: int) -> Execution:
        """Return the execution for the result of a call that ran."""
        results = [] if result.value is None else [Result(text=result.value, is_main_result=True)]
        results += [
            Result(png=base64.b64encode(data).decode("ascii"))
            for path, data in sorted(result.files.items())
            if path.startswith("figure-")
        ]
        error = _error(result)
        stderr = result.stderr.removesuffix(error.traceback) if error else result.stderr
        logs = Logs([result.stdout] if result.stdout else [], [stderr] if stderr else [])
        return cls(results, logs, error, execution_count)


def _error(result: CallResult) -> ExecutionError | None:
    if result.error is not None:
        return ExecutionError(result.error.type, result.error.message, result.error.traceback)
    if result.status is not Status.OK:  # such as `killed`, or an exit code
        return ExecutionError(result.status.value, result.status.description, "")
    return None
