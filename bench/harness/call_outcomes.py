"""The comparable part of a call's result, and the fields in which two outcomes differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sandbox.types import Result, Status


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Status, output, value, and the type of the error."""

    status: str
    stdout: str
    value: str | None
    error: str

    @classmethod
    def of_result(cls, result: Result) -> CallOutcome:
        """The outcome of a call that the service ran."""
        error = result.error.type if result.error else ""
        if result.status is Status.KILLED:
            error = f"signal {result.signal}"
        return cls(result.status.value, result.stdout, result.value, error)


def differing_fields(one: CallOutcome, other: CallOutcome) -> tuple[str, ...]:
    """Names of the fields in which two outcomes differ. Two time-outs do not differ, however far the calls got."""
    if one.status == other.status == "timeout":
        return ()
    a, b = asdict(one), asdict(other)
    return tuple(name for name in a if a[name] != b[name])


def shortened(text: str | None, max_chars: int = 300) -> str | None:
    """The text with its middle left out if it is longer than `max_chars`."""
    if text is None or len(text) <= max_chars:
        return text
    return text[: max_chars // 2] + " ... " + text[-max_chars // 2 :]
