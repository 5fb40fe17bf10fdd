"""What goes in and what comes out: `Call`, `Limits`, `Result` and the closed list of statuses.

Invariants:
- Everything here is frozen; a `Call` that exists is valid: `Call.decode` and its constructor check by the same rules.
- `code` and `stdin` are never refused for what they say. NUL bytes and lone surrogates are the code's own doing, so
  they reach the guest and come back as a Python error, as data.
- `FIELDS` describes each input field once; validation here and the schema in `gateway.openapi` both come from it.

Bytes (files) are base64 text in JSON and raw `bin` in msgpack; `decode` takes either.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal, TypedDict, overload

from sandbox.errors import InvalidCall

MAX_CODE_BYTES = 4 << 20
MAX_STDIN_BYTES = 16 << 20
MAX_FILES = 256
MAX_PATH_BYTES = 1024


class Status(StrEnum):
    """How a call ended. All but `UNAVAILABLE` and `INVALID` are the code's doing; neither is ever scored as 0."""

    OK = "ok"
    """Ran to its end with exit code 0."""
    ERROR = "error"
    """Raised, or ended with another exit code; also code that does not compile."""
    TIMEOUT = "timeout"
    """Used up `timeout_s` on its own clock: wall time less the time spent waiting for a core."""
    MEMORY_LIMIT = "memory_limit"
    """Ran out of `memory_mb`."""
    OUTPUT_LIMIT = "output_limit"
    """Wrote more than `output_kb` to stdout or stderr; what fitted is returned."""
    KILLED = "killed"
    """Died of a signal that was not ours: a crash in C code, for instance."""
    UNAVAILABLE = "unavailable"
    """No verdict, and the service's doing: it could not run the call (retries used up)."""
    INVALID = "invalid"
    """No verdict, and the caller's doing: the call is malformed and never ran. `error.message` names the field."""


class Profile(StrEnum):
    """Which warm interpreter a call is forked from. Wrong choices are slower, never wrong."""

    AUTO = "auto"
    """Chosen from the imports in the code."""
    BARE = "bare"
    """The standard library that math code uses."""
    NUMERIC = "numeric"
    """`bare` and numpy."""
    SYMBOLIC = "symbolic"
    """`numeric` and sympy, mpmath."""
    SCIENTIFIC = "scientific"
    """`symbolic` and scipy, networkx, pandas."""
    VERIFY = "verify"
    """`symbolic` and math-verify, for checks of answers. It is started when it is first asked for."""


class Outcome(StrEnum):
    """What came of comparing an answer with the right one. `UNAVAILABLE` and `INVALID` are never a score of 0."""

    EQUIVALENT = "equivalent"
    """They mean the same, as far as math-verify can tell."""
    NOT_EQUIVALENT = "not_equivalent"
    """Both can be read, and they do not mean the same."""
    UNPARSABLE = "unparsable"
    """One of the two cannot be read, or comparing them used up its limits. `Verdict.status` says which."""
    UNAVAILABLE = "unavailable"
    """No verdict, and the service's doing: it could not check the pair."""
    INVALID = "invalid"
    """No verdict, and the caller's doing: the pair is malformed. `Verdict.message` names the field."""


@dataclass(frozen=True, slots=True)
class NumberRule:
    """The rule for a numeric field: its range, both ends allowed, and whether it must be whole."""

    low: float
    high: float
    whole: bool
    default: float
    doc: str


# The highs are sanity bounds on the wire; what a node grants is the operator's ceiling (`Limits.clamped`).
LIMIT_FIELDS: dict[str, NumberRule] = {
    "timeout_s": NumberRule(0.01, 1e9, False, 10.0, "seconds of virtual time: wall time without waiting for a core"),
    "memory_mb": NumberRule(
        16, 1e9, True, 512, "MiB beyond the warm interpreter's own, of each process and of all together"
    ),
    "output_kb": NumberRule(1, 1e9, True, 64, "KiB kept of stdout, of stderr and of value, each"),
    "processes": NumberRule(1, 1e9, True, 64, "processes and threads at once"),
    "disk_mb": NumberRule(1, 1e9, True, 64, "MiB of private scratch files"),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may use. Units are in the names; defaults are those of `LIMIT_FIELDS`."""

    timeout_s: float = 10.0
    memory_mb: int = 512
    output_kb: int = 64
    processes: int = 64
    disk_mb: int = 64

    @classmethod
    def decode(cls, raw: Any, base: Limits | None = None, where: str = "limits") -> Limits:
        """Limits from a decoded mapping, or from `Limits`, whose values are checked; fields left out come from `base`.
        Raises `InvalidCall`."""
        base = base or DEFAULT_LIMITS
        if raw is None:
            return base
        if isinstance(raw, Limits):
            raw = {name: getattr(raw, name) for name in LIMIT_FIELDS}
        mapping = _mapping(raw, where)
        check_fields(mapping, LIMIT_FIELDS, where)
        values: dict[str, Any] = {n: _number(mapping[n], LIMIT_FIELDS[n], f"{where}.{n}") for n in mapping}
        return replace(base, **values) if values else base

    def clamped(self, ceiling: Limits) -> tuple[Limits, dict[str, float]]:
        """These limits under an operator's ceiling, and the fields that were lowered with their new values."""
        lowered: dict[str, float] = {
            name: getattr(ceiling, name) for name in LIMIT_FIELDS if getattr(self, name) > getattr(ceiling, name)
        }
        if not lowered:
            return self, lowered
        changed: dict[str, Any] = dict(lowered)
        return replace(self, **changed), lowered


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Call:
    """One piece of Python to run. `files` maps relative paths to contents, laid in the working folder beforehand.

    The constructor raises `InvalidCall`, as `decode` does, and takes fields in either form: as they are here, or as
    they are on the wire.
    """

    code: str
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    return_files: tuple[str, ...] = ()
    limits: Limits = DEFAULT_LIMITS
    echo: bool = True
    profile: Profile = Profile.AUTO
    id: str = ""
    priority: int = 0
    tenant: str = ""

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            if (value := getattr(self, name)) is not default:
                _set(self, name, _decode_field(name, value, DEFAULT_LIMITS, f"call.{name}"))

    @classmethod
    def decode(cls, raw: Any, defaults: Call | None = None, where: str = "call") -> Call:
        """A call from a decoded JSON or msgpack mapping. Raises `InvalidCall` naming the field and what it expects."""
        mapping = _mapping(raw, where)
        check_fields(mapping, CALL_FIELDS, where)
        if "code" not in mapping:
            raise InvalidCall(f"{where}.code: expected Python source as text, but the field is missing")
        base = defaults or _NO_DEFAULTS
        call = object.__new__(cls)  # not by the constructor, which would check all fields a second time
        for name in CALL_FIELDS:
            value = getattr(base, name)
            if name in mapping:
                value = _decode_field(name, mapping[name], base.limits, f"{where}.{name}")
            _set(call, name, value)
        return call

    @classmethod
    def decode_defaults(cls, raw: Any, where: str = "defaults") -> Call:
        """The batch's `defaults`: any field of a call but `code` and `id`. Raises `InvalidCall`."""
        if raw is None:
            return _NO_DEFAULTS
        mapping = _mapping(raw, where)
        for name in ("code", "id"):
            if name in mapping:
                raise InvalidCall(f"{where}.{name}: belongs to a single call; move it into calls[]")
        return cls.decode({**mapping, "code": ""}, where=where)

    @property
    def size(self) -> int:
        """About how many bytes this call holds, for admission by memory."""
        return 256 + len(self.code) + len(self.stdin) + sum(map(len, self.files.values()))

    def encode(self, *, binary: bool = False) -> dict[str, Any]:
        """The mapping that `decode` takes, defaults left out; file contents are base64 unless `binary`."""
        raw: dict[str, Any] = {"code": self.code}
        for name in ("stdin", "echo", "profile", "id", "priority", "tenant"):
            value = getattr(self, name)
            if value != getattr(_NO_DEFAULTS, name):
                raw[name] = str(value) if isinstance(value, Profile) else value
        if self.files:
            raw["files"] = {path: data if binary else _b64(data) for path, data in self.files.items()}
        if self.return_files:
            raw["return_files"] = list(self.return_files)
        limits = {name: getattr(self.limits, name) for name in LIMIT_FIELDS}
        changed = {name: value for name, value in limits.items() if value != LIMIT_FIELDS[name].default}
        if changed:
            raw["limits"] = changed
        return raw


@dataclass(frozen=True, slots=True)
class CallError:
    """Why the code failed. `line` is the line of the user's code, 1-based, where it is known."""

    type: str
    message: str
    traceback: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What the call cost. `USAGE_FIELDS` has the units and how exact each number is."""

    queue_ms: float = 0.0
    run_ms: float = 0.0
    cpu_ms: float = 0.0
    peak_memory_mb: float = 0.0


class EncodedError(TypedDict):
    """`CallError` in msgpack form."""

    type: str
    message: str
    traceback: str
    line: int | None


class EncodedUsage(TypedDict):
    """`Usage` in msgpack form."""

    queue_ms: float
    run_ms: float
    cpu_ms: float
    peak_memory_mb: float


class EncodedResult(TypedDict):
    """`Result` in msgpack form: `Result.encode(binary=True)` in frames and between modules of the server. A server that
    handles many results builds and edits these mappings without a `Result` in between."""

    id: str
    status: str
    stdout: str
    stderr: str
    value: str | None
    error: EncodedError | None
    exit_code: int | None
    signal: int | None
    truncated: list[str]
    files: dict[str, bytes]
    usage: EncodedUsage
    attempts: int
    clamped: Mapping[str, float]
    missing_files: list[str]


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one call. `RESULT_FIELDS` describes each field."""

    id: str
    status: Status
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    error: CallError | None = None
    exit_code: int | None = None
    signal: int | None = None
    truncated: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    usage: Usage = Usage()
    attempts: int = 1
    clamped: Mapping[str, float] = field(default_factory=dict)
    missing_files: tuple[str, ...] = ()

    @overload
    def encode(self, *, binary: Literal[True]) -> EncodedResult: ...

    @overload
    def encode(self, *, binary: Literal[False] = False) -> dict[str, Any]: ...

    def encode(self, *, binary: bool = False) -> EncodedResult | dict[str, Any]:
        """A mapping fit for JSON, or for msgpack with raw file contents if `binary`."""
        error, usage = self.error, self.usage
        encoded: EncodedResult = {
            "id": self.id,
            "status": self.status.value,
            "stdout": self.stdout,
            "stderr": self.stderr,
            "value": self.value,
            "error": None
            if error is None
            else {"type": error.type, "message": error.message, "traceback": error.traceback, "line": error.line},
            "exit_code": self.exit_code,
            "signal": self.signal,
            "truncated": list(self.truncated),
            "files": dict(self.files),
            "usage": {
                "queue_ms": usage.queue_ms,
                "run_ms": usage.run_ms,
                "cpu_ms": usage.cpu_ms,
                "peak_memory_mb": usage.peak_memory_mb,
            },
            "attempts": self.attempts,
            "clamped": dict(self.clamped),
            "missing_files": list(self.missing_files),
        }
        return encoded if binary else {**encoded, "files": {path: _b64(data) for path, data in self.files.items()}}

    @classmethod
    def decode(cls, raw: Mapping[str, Any]) -> Result:
        """The inverse of `encode`, for clients. Unknown keys are ignored, so that older clients read newer servers."""
        error, usage = raw.get("error"), raw.get("usage") or {}
        return cls(
            id=raw["id"],
            status=Status(raw["status"]),
            stdout=raw.get("stdout", ""),
            stderr=raw.get("stderr", ""),
            value=raw.get("value"),
            error=None
            if error is None
            else CallError(error["type"], error["message"], error.get("traceback", ""), error.get("line")),
            exit_code=raw.get("exit_code"),
            signal=raw.get("signal"),
            truncated=tuple(raw.get("truncated", ())),
            files={path: _bytes(data, f"files[{path!r}]") for path, data in raw.get("files", {}).items()},
            usage=Usage(**{n: usage[n] for n in ("queue_ms", "run_ms", "cpu_ms", "peak_memory_mb") if n in usage}),
            attempts=raw.get("attempts", 1),
            clamped=raw.get("clamped", {}),
            missing_files=tuple(raw.get("missing_files", ())),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one pair of answers. `status` is how the check itself ended, on its own clock and within its own
    limits: `ok` for one that came to its end, `timeout` for a comparison that did not, and so on."""

    outcome: Outcome
    status: Status = Status.OK
    message: str = ""
    usage: Usage = Usage()

    def encode(self) -> dict[str, Any]:
        """A mapping fit for JSON and msgpack."""
        return {
            "outcome": self.outcome.value,
            "status": self.status.value,
            "message": self.message,
            "usage": asdict(self.usage),
        }


def unavailable_result(call_id: str, kind: str, message: str, attempts: int = 0) -> Result:
    """The result of a call that got no verdict through the service's fault; `kind` names which."""
    return Result(id=call_id, status=Status.UNAVAILABLE, error=CallError(kind, message), attempts=attempts)


def invalid_result(call_id: str, message: str) -> Result:
    """The result of a malformed call in a batch."""
    return Result(id=call_id, status=Status.INVALID, error=CallError("InvalidCall", message), attempts=0)


CALL_FIELDS: dict[str, str] = {
    "code": "Python source, run as a script",
    "stdin": "text on standard input",
    "files": "relative path to content: base64 text, or raw bytes in msgpack",
    "return_files": "relative paths to send back after the run",
    "limits": "what the call may use",
    "echo": "whether the last expression's value is returned, as a notebook shows it",
    "profile": "which warm interpreter to fork",
    "id": "your name for this call, returned with its result",
    "priority": "lower runs first among waiting calls",
    "tenant": "whose call this is; tenants share the node fairly",
}
CALL_ERROR_FIELDS: dict[str, str] = {
    "type": "name of the exception's type, of the signal, or of what ended the call",
    "message": "the exception's text, or what was expected and what came",
    "traceback": "the traceback as Python prints it, with frames of the code alone; empty where there is none",
    "line": "line of the code, from 1; null where it is not known",
}
USAGE_FIELDS: dict[str, str] = {
    "queue_ms": "milliseconds that the call waited for a slot, all attempts together",
    "run_ms": "milliseconds from the start of the call's process to its end, by the wall clock",
    "cpu_ms": "milliseconds of CPU time of all processes of the call; without control groups, of the first one and of "
    "those that it has waited for",
    "peak_memory_mb": "MiB that the call added to the memory which it inherits from its warm interpreter, at the peak. "
    "With control groups: all its processes and its files, and the inherited pages that it wrote to, about 0.5 MiB for "
    "the smallest call. Without: the largest of its processes alone, without files and without inherited pages",
}
RESULT_FIELDS: dict[str, str] = {
    "id": "the call's id; without one, its place in the batch, from 0",
    "status": "how the call ended",
    "stdout": "what was written to standard output, at most output_kb of it",
    "stderr": "what was written to standard error, at most output_kb of it",
    "value": "repr() of the last expression, if echo was asked for and the call ended as ok; else null",
    "error": "why the call did not end as ok; null if it did",
    "exit_code": "exit code of the call's process; null if a signal ended it, or nothing ran",
    "signal": "number of the signal that ended the call's process; else null",
    "truncated": "what was cut for size: stdout, stderr, value, traceback or files",
    "files": "returned files, by path: base64 text in JSON, raw bytes in msgpack",
    "usage": "what the call cost",
    "attempts": "how often the call was started; 0 for one that never was",
    "clamped": "limits above the operator's ceiling, with the value that held instead",
    "missing_files": "paths of return_files that are not in files: the code left no readable regular file there, the "
    "file did not fit (truncated then has files), or the call was ended before its files were read",
}
VERDICT_FIELDS: dict[str, str] = {
    "outcome": "what came of the comparison",
    "status": "how the check itself ended, on its own clock and within its own limits: ok for one that came to its end",
    "message": "why there is no comparison; else empty",
    "usage": "what the check cost",
}
PRIORITY = NumberRule(-100, 100, True, 0, CALL_FIELDS["priority"])
_DEFAULTS = {one.name: one.default for one in fields(Call)}
_set = object.__setattr__


def _decode_field(name: str, value: Any, limits: Limits, where: str) -> Any:
    """The value of a field in either form; `limits` are for those that it leaves out. Raises `InvalidCall`."""
    if name in ("code", "stdin"):
        return _text(value, where, MAX_CODE_BYTES if name == "code" else MAX_STDIN_BYTES)
    if name in ("id", "tenant"):
        return _label(value, where)
    if name == "limits":
        return Limits.decode(value, limits, where)
    if name == "files":
        return _files(value, where)
    if name == "return_files":
        return _paths(value, where)
    if name == "echo":
        if not isinstance(value, bool):
            raise InvalidCall(f"{where}: expected true or false, got {_shown(value)}")
        return value
    if name == "priority":
        return _number(value, PRIORITY, where)
    try:
        return Profile(value)
    except ValueError:
        names = ", ".join(Profile)
        raise InvalidCall(f"{where}: expected one of {names}, got {_shown(value)}") from None


def _mapping(raw: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise InvalidCall(f"{where}: expected an object, got {_shown(raw)}")
    return raw


def check_fields(mapping: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    if mapping.keys() <= known.keys():
        return
    unknown = next(name for name in mapping if name not in known)
    raise InvalidCall(f"{where}: unknown field {_shown(unknown)}; the fields are {', '.join(known)}")


def _number(value: Any, rule: NumberRule, where: str) -> float:
    kind = "a whole number" if rule.whole else "a number"
    expected = f"{where}: expected {kind} from {rule.low:g} to {rule.high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidCall(f"{expected}, got {_shown(value)}")
    if not rule.low <= value <= rule.high or (rule.whole and value != int(value)):
        raise InvalidCall(f"{expected}, got {_shown(value)}")
    return int(value) if rule.whole else float(value)


def _text(value: Any, where: str, most: int) -> str:
    if not isinstance(value, str):
        raise InvalidCall(f"{where}: expected text, got {_shown(value)}")
    if len(value) > most:
        raise InvalidCall(f"{where}: expected at most {most} characters, got {len(value)}; send less, or use files")
    return value


def _label(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > 256 or not value.isprintable():
        raise InvalidCall(f"{where}: expected printable text of at most 256 characters, got {_shown(value)}")
    return value


def _files(value: Any, where: str) -> Mapping[str, bytes]:
    mapping = _mapping(value, where)
    if len(mapping) > MAX_FILES:
        raise InvalidCall(f"{where}: expected at most {MAX_FILES} files, got {len(mapping)}")
    files = {_path(path, where): _bytes(data, f"{where}[{_shown(path)}]") for path, data in mapping.items()}
    for path in files:
        end = path.find("/")
        while end >= 0:
            if path[:end] in files:
                raise InvalidCall(
                    f"{where}: expected each path to be a file or a directory, but {_shown(path[:end])} is a file "
                    f"and a directory in {_shown(path)}; rename one"
                )
            end = path.find("/", end + 1)
    return files


def _paths(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_FILES:
        raise InvalidCall(f"{where}: expected a list of at most {MAX_FILES} relative paths, got {_shown(value)}")
    return tuple(_path(path, where) for path in value)


def _path(path: Any, where: str) -> str:
    parts = path.split("/") if isinstance(path, str) else []
    clean = parts and path.isprintable() and len(path.encode("utf-8", "surrogatepass")) <= MAX_PATH_BYTES
    if not clean or any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts):
        expected = "a relative path without empty, '.' or '..' parts, such as 'data/in.csv'"
        raise InvalidCall(f"{where}: expected {expected}, got {_shown(path)}")
    return str(path)


def _bytes(value: Any, where: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as why:
            raise InvalidCall(f"{where}: expected base64 text, got {_shown(value)} ({why})") from None
    raise InvalidCall(f"{where}: expected base64 text (or bytes in msgpack), got {_shown(value)}")


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _shown(value: Any) -> str:
    """A short, safe rendering of a hostile value for an error message."""
    if isinstance(value, (Mapping, list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"  # repr refuses the longest
    shown = repr(value[:60] if isinstance(value, (str, bytes)) else value)
    return ascii(shown)[1:-1] if not shown.isascii() else shown[:80]


_NO_DEFAULTS = Call(code="")
