"""Calls and results: `Call`, `Limits`, `Result`, `Verdict` and the closed lists of statuses and outcomes.

- All types are frozen. A `Call` that exists is valid: the constructor and `Call.decode` check by the same rules.
- `code` and `stdin` may hold any characters. NUL bytes and lone surrogates reach the guest and come back as a Python
  error in the result.
- `CALL_FIELDS` and `LIMIT_FIELDS` describe each field of a call once, for validation and the OpenAPI schema. The
  annotations of `Result` and its parts describe the fields of results (`sandbox.dataclass_codec`).

Bytes are base64 text in JSON and raw `bin` in msgpack; `decode` takes both. Standard input that is bytes is the field
`stdin` in msgpack and `stdin_base64` in JSON.
"""

from __future__ import annotations

import base64
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from operator import attrgetter, gt
from typing import Annotated, Any, Literal, Self, TypedDict, cast, overload

from sandbox import dataclass_codec
from sandbox.errors import InvalidCall
from sandbox.fields import (
    NumberRule,
    check_arguments,
    check_env,
    check_files,
    check_flag,
    check_label,
    check_mapping,
    check_names,
    check_number,
    check_paths,
    check_stdin,
    check_text,
    shown,
    to_base64,
    with_decoded_stdin,
    with_encoded_texts,
)

MAX_CODE_CHARS = 4 << 20
DEADLINE_RULE = NumberRule(0.01, 1e9, whole=False, doc="seconds from admission until an unfinished call is cancelled")
MAX_STDIN_CHARS = 16 << 20
"""Maximum length of standard input, in characters for text and in bytes for bytes."""


class DocumentedEnum(StrEnum):
    """Text values, each with a description for readers and for the OpenAPI document."""

    description: str

    def __new__(cls, value: str, description: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.description = description
        return member


class Status(DocumentedEnum):
    """How a call ended. `unavailable` and `invalid` say nothing about the code and must not be scored as 0."""

    OK = "ok", "The code ended with exit code 0."
    ERROR = "error", "The code raised an exception, did not compile, or ended with another exit code."
    TIMEOUT = "timeout", "The call used `timeout_s` of virtual time: wall time minus the time spent waiting for a core."
    MEMORY_LIMIT = "memory_limit", "The call needed more than `memory_mb`."
    OUTPUT_LIMIT = (
        "output_limit",
        "The call wrote more than `output_kb` to stdout or stderr. The result has the first `output_kb`.",
    )
    KILLED = "killed", "A signal that the service did not send ended the process, for example after a crash in C code."
    UNAVAILABLE = "unavailable", "The service failed to run the call; its retries are used up."
    INVALID = "invalid", "The call is malformed and did not run. `error.message` names the field."


PROFILE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
"""Form of the name of a profile."""


class Profile(DocumentedEnum):
    """The modules that the zygote of a call has imported. An unsuitable profile makes a call slower, never wrong.

    An operator can define further profiles (`sandbox.settings.profiles`), whose names are plain text.
    """

    AUTO = "auto", "The server chooses by the imports in the code."
    BARE = "bare", "The modules of the standard library that math code uses."
    NUMERIC = "numeric", "`bare` and numpy."
    SYMBOLIC = "symbolic", "`numeric`, sympy and mpmath."
    SCIENTIFIC = "scientific", "`symbolic`, scipy, networkx, pandas and matplotlib."
    VERIFY = "verify", "`symbolic` and math-verify, for answer checks. Its zygote is spawned on first use."


class Network(DocumentedEnum):
    """The network of a call."""

    NONE = "none", "No network: only Unix sockets between the call's own processes."
    LOOPBACK = (
        "loopback",
        "TCP and UDP on 127.0.0.1, between the call's own processes, in a network namespace of its own.",
    )


_PROFILES: dict[str, Profile] = {profile.value: profile for profile in Profile}


class Outcome(DocumentedEnum):
    """How an answer compares with the right answer. `unavailable` and `invalid` must not be scored as 0."""

    EQUIVALENT = "equivalent", "Both have an answer, and the answers are equal by the rules of `strictness`."
    NOT_EQUIVALENT = "not_equivalent", "Both have an answer, and the answers are not shown to be equal."
    UNPARSABLE = (
        "unparsable",
        "One of the two has no answer, or the comparison exceeded its limits (see `Verdict.status`).",
    )
    UNAVAILABLE = "unavailable", "The service failed to check the pair."
    INVALID = "invalid", "The pair is malformed. `Verdict.message` names the field."


class Strictness(DocumentedEnum):
    """The rules by which two answers are equal."""

    STRICT = "strict", "The rules of docs/verify.md: exact, and in doubt not equivalent."
    MATH_VERIFY = "math-verify", "The library math-verify as it is, for comparison with published figures."


LIMIT_FIELDS: dict[str, NumberRule] = {
    "timeout_s": NumberRule(
        0.01, 1e9, whole=False, default=10.0, doc="seconds of virtual time: wall time without waiting for a core"
    ),
    "memory_mb": NumberRule(
        16,
        1e9,
        default=512,
        doc="MiB in addition to the memory of the zygote, for each process and for all processes together",
    ),
    "output_kb": NumberRule(1, 1e9, default=64, doc="KiB of stdout, of stderr and of value to return, each"),
    "processes": NumberRule(1, 1e9, default=64, doc="processes and threads that exist at once"),
    "disk_mb": NumberRule(1, 1e9, default=64, doc="MiB of files in the scratch directory"),
}
"""Rule and description of each limit. The upper bounds only reject nonsense: the server lowers each limit to its own
maximum (`clamp`)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one call; the server lowers values above its own maximum, and the result's `clamped` lists
    them. The defaults equal those of `LIMIT_FIELDS`."""

    timeout_s: float = 10.0
    memory_mb: int = 512
    output_kb: int = 64
    processes: int = 64
    disk_mb: int = 64

    @classmethod
    def decode(cls, raw: Any, base: Limits | None = None, where: str = "limits") -> Limits:
        """Check a decoded mapping or `Limits`. Missing fields come from `base`. Raises `InvalidCall`."""
        values: dict[str, Any] = check_limits(raw, where)
        return replace(base or DEFAULT_LIMITS, **values)


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Call:
    """One piece of Python code with its input and limits. `files` maps relative paths to the contents of files that are
    created in the scratch directory before the code runs. `env` maps the names of environment variables to their texts.

    The constructor accepts each field in its final type or in its JSON form, except that a text in `files` is the text
    of the file, not base64. Raises `InvalidCall`.
    """

    code: str
    stdin: str | bytes = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    return_files: tuple[str, ...] = ()
    limits: Limits = DEFAULT_LIMITS
    echo: bool = True
    profile: Profile | str = Profile.AUTO
    id: str = ""
    priority: int = 0
    tenant: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    figures: bool = False
    deadline_s: float | None = None
    network: Network = Network.NONE

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            if (value := getattr(self, name)) is not default:
                value = with_encoded_texts(value) if name == "files" else value
                check = Limits.decode if name == "limits" else _FIELD_CHECKS[name]
                _set(self, name, check(value, where=f"call.{name}"))

    @classmethod
    def decode(cls, raw: Any, defaults: Call | None = None, where: str = "call") -> Call:
        """Build a call from a decoded JSON or msgpack mapping. Missing fields come from `defaults`. Raises
        `InvalidCall`."""
        fields, base = check_call(raw, where), defaults or _DEFAULT_CALL
        call = object.__new__(cls)  # the constructor would check all fields a second time
        for name in _DEFAULTS:
            _set(call, name, fields.get(name, getattr(base, name)))
        if "limits" in fields:
            values: dict[str, Any] = dict(fields["limits"])
            _set(call, "limits", replace(base.limits, **values))
        return call

    @classmethod
    def decode_defaults(cls, raw: Any, where: str = "defaults") -> Call:
        """Build the `defaults` of a batch: all fields of a call except `code` and `id`. Raises `InvalidCall`."""
        return cls.decode({**check_defaults(raw, where), "code": ""}, where=where)

    @property
    def size(self) -> int:
        """Approximate memory of this call in bytes."""
        return call_size(cast(EncodedCall, {name: getattr(self, name) for name in _SIZED_FIELDS}))

    @overload
    def encode(self, *, binary: Literal[True]) -> EncodedCall: ...

    @overload
    def encode(self, *, binary: bool = False) -> Mapping[str, Any]: ...

    def encode(self, *, binary: bool = False) -> Mapping[str, Any]:
        """Return the mapping that `decode` takes, without fields at their defaults. With `binary`, bytes stay bytes;
        else they become base64 text."""
        raw: dict[str, Any] = {"code": self.code}
        for name in ("stdin", "echo", "profile", "id", "priority", "tenant", "figures", "deadline_s", "network"):
            value = getattr(self, name)
            if value != getattr(_DEFAULT_CALL, name):
                raw[name] = str(value) if isinstance(value, DocumentedEnum) else value
        if not binary and isinstance(self.stdin, bytes):
            raw["stdin_base64"] = base64.b64encode(raw.pop("stdin")).decode("ascii")
        if self.files:
            raw["files"] = dict(self.files) if binary else to_base64(self.files)
        if self.env:
            raw["env"] = dict(self.env)
        if self.argv:
            raw["argv"] = list(self.argv)
        if self.return_files:
            raw["return_files"] = list(self.return_files)
        limits = {name: getattr(self.limits, name) for name in LIMIT_FIELDS}
        changed = {name: value for name, value in limits.items() if value != LIMIT_FIELDS[name].default}
        if changed:
            raw["limits"] = changed
        return raw


@dataclass(frozen=True, slots=True)
class CallError:
    """The reason why a call did not end as ok. `line` is the 1-based line of the user's code, if known."""

    type: Annotated[str, "name of the exception's type, of the signal, or of the limit that ended the call"]
    message: Annotated[str, "the exception's text, or what was expected and what came"]
    traceback: Annotated[
        str,
        "the traceback as Python prints it, with frames of the code only; empty if there is none",
    ] = ""
    line: Annotated[int | None, "line of the code, from 1; null if unknown"] = None

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that a call used."""

    queue_ms: Annotated[float, "milliseconds that the call waited for a slot, summed over all attempts"] = 0.0
    run_ms: Annotated[float, "milliseconds of wall time from the start of the call's process to its end"] = 0.0
    cpu_ms: Annotated[
        float,
        "milliseconds of CPU time of all processes of the call; without cgroups, of the first process and of the "
        "children that it waited for",
    ] = 0.0
    peak_memory_mb: Annotated[
        float,
        "peak MiB that the call added to the memory inherited from its zygote. With cgroups: all its processes, its "
        "files, and the inherited pages that it wrote to, about 0.5 MiB for the smallest call. Without cgroups: its "
        "largest process only, without files and without inherited pages",
    ] = 0.0


class EncodedCall(TypedDict, total=False):
    """`Call` in msgpack form: `Call.encode(binary=True)` in frames and between modules of the server. A missing field
    has its default. Modules share these mappings and do not change them: `{**call, "stdin": "1"}` is another call."""

    code: str
    stdin: str | bytes
    files: Mapping[str, bytes]
    return_files: Sequence[str]
    limits: Mapping[str, float]
    echo: bool
    profile: str
    id: str
    priority: int
    tenant: str
    env: Mapping[str, str]
    argv: Sequence[str]
    figures: bool
    deadline_s: float
    network: str
    compiled: bytes
    """The compiled form of `code`. It only saves time: the result is the same without it."""
    compile_only: bool
    """Whether the call compiles its code and does not run it. It returns the compiled code as a file."""
    reserved: bool
    """Whether the call gets a reserved place: the executor accepts it in addition to its window (`sandbox.wire`)."""
    session: Mapping[str, Any]
    """What the call is to do with a session (`executor/session.py` has the fields)."""


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


class EncodedCellResult(EncodedResult):
    """`CellResult` in msgpack form."""

    session: EncodedSession


class EncodedSession(TypedDict):
    """`SessionState` in msgpack form."""

    head: int
    states: list[int]
    committed: bool
    lost: list[str]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one call."""

    id: Annotated[str, "the call's id; without one, its index in the batch, from 0"]
    status: Annotated[Status, "how the call ended"]
    stdout: Annotated[
        str,
        "text written to standard output, at most output_kb; bytes that are not UTF-8 become U+FFFD, from about "
        "10,000 on '?'",
    ] = ""
    stderr: Annotated[str, "text written to standard error, like stdout"] = ""
    value: Annotated[str | None, "repr() of the last expression if echo is true and the status is ok; else null"] = None
    error: Annotated[CallError | None, "the reason why the call did not end as ok; null if it did"] = None
    exit_code: Annotated[int | None, "exit code of the call's process; null if a signal ended it or nothing ran"] = None
    signal: Annotated[int | None, "number of the signal that ended the call's process; else null"] = None
    truncated: Annotated[
        tuple[str, ...],
        "names of the fields that were truncated: stdout, stderr, value, traceback or files",
    ] = ()
    files: Annotated[
        Mapping[str, bytes],
        "returned files and figures by path: base64 text in JSON, raw bytes in msgpack",
    ] = field(default_factory=dict)
    usage: Annotated[Usage, "resources that the call used"] = Usage()
    attempts: Annotated[int, "number of times that the call was sent to an executor, at most attempts; 0 if never"] = 1
    clamped: Annotated[
        Mapping[str, float],
        "limits above the server's maximum, with the lower value that was used",
    ] = field(default_factory=dict)
    missing_files: Annotated[
        tuple[str, ...],
        "paths and patterns of return_files without a file in files: the code left no readable regular file there, "
        "the file did not fit (truncated then contains files), or the call was killed before its files were read",
    ] = ()

    @overload
    def encode(self, *, binary: Literal[True]) -> EncodedResult: ...

    @overload
    def encode(self, *, binary: Literal[False] = False) -> dict[str, Any]: ...

    def encode(self, *, binary: bool = False) -> EncodedResult | dict[str, Any]:
        """Return a mapping for JSON, or with `binary` for msgpack."""
        encoded = cast(EncodedResult, dataclass_codec.encode(self))
        return encoded if binary else {**encoded, "files": to_base64(self.files)}

    @classmethod
    def decode(cls, raw: Mapping[str, Any]) -> Self:
        """Invert `encode`. Unknown keys are ignored, so that an older client can read the results of a newer server."""
        return dataclass_codec.decode(cls, raw)


@dataclass(frozen=True, slots=True)
class SessionState:
    """The states of a session after a cell. The head is the state from which the next cell runs."""

    head: Annotated[int, "number of the state from which the next cell runs"] = 0
    states: Annotated[tuple[int, ...], "numbers of the states that are kept"] = (0,)
    committed: Annotated[
        bool,
        "whether the cell made a new state, the head. If not, its process ended before its code; variables and files "
        "are those from before the cell",
    ] = True
    lost: Annotated[tuple[str, ...], "what the cell left behind that is not kept: threads and processes"] = ()


@dataclass(frozen=True, slots=True)
class CellResult(Result):
    """The result of one cell of a session."""

    session: Annotated[SessionState, "the session after the cell; only if the cell ran"] = SessionState()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one answer check. `status` is the status of the call that ran the check: `ok` if the comparison
    finished, `timeout` if it took too long, and so on."""

    outcome: Annotated[Outcome, "how the answer compares with the right answer"]
    status: Annotated[
        Status,
        "how the check ended, in its own virtual time and limits: ok if the comparison finished",
    ] = Status.OK
    message: Annotated[str, "the reason why there is no comparison; else empty"] = ""
    usage: Annotated[Usage, "resources that the check used"] = Usage()
    extracted: Annotated[
        dict[str, str],
        "the answers that were found in gold and answer, each cut at 200 characters",
    ] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """Return a mapping for JSON and msgpack."""
        return dataclass_codec.encode(self)


def memory_bytes(text: str | bytes) -> int:
    """Return the bytes of a text in memory: up to four for each character. Costs the same for any length."""
    return len(text) if isinstance(text, bytes) or text.isascii() else sys.getsizeof(text)


def signal_name(number: int | None) -> str:
    """Return the name of a signal, such as SIGSEGV."""
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"SIG{number}"


class UnavailableReason(DocumentedEnum):
    """Why a call is `unavailable`: `CallError.type` of its result."""

    STOPPED = "Stopped", "The server stopped before the call finished."
    NODE_ERROR = "NodeError", "In none of its attempts could the process of the call be started."
    POISON = (
        "Poison",
        "The call was started as often as `attempts` allows and never got a result. A client must not send it again: "
        "each start may end another zygote, with the calls that run in it.",
    )
    DEADLINE = "Deadline", "The call was not finished `deadline_s` after its admission."
    CANCELLED = "Cancelled", "Its caller cancelled it by its id."
    QUEUE_TIMEOUT = "QueueTimeout", "The call waited `queue_timeout_s` for a slot."
    RESULTS_UNREAD = "ResultsUnread", "Results waited too long for the client to read them."
    RESULT_TOO_LARGE = "ResultTooLarge", "The result is too large for a frame between the server's processes."
    STARVED = "Starved", "The call got too little of a core on an overloaded machine."
    SESSION_GONE = (
        "SessionGone",
        "The session of the cell has ended, with all its states. Open another session; nothing is run again by itself.",
    )

    @property
    def is_retryable(self) -> bool:
        """Whether a client sends the call again."""
        return self in (UnavailableReason.STOPPED, UnavailableReason.NODE_ERROR)


def unavailable_result(call_id: str, reason: UnavailableReason, message: str, attempts: int = 0) -> Result:
    """Return the result of a call that the service failed to run."""
    return Result(id=call_id, status=Status.UNAVAILABLE, error=CallError(reason.value, message), attempts=attempts)


def unavailable_reason(error_type: str) -> UnavailableReason | None:
    """Return the reason that a result has as its `CallError.type`, or None if this version does not know it."""
    return UnavailableReason(error_type) if error_type in tuple(UnavailableReason) else None


def used_up_result(call_id: str, attempts: int, reason: str, *, has_started: bool) -> Result:
    """Return the result of a call whose attempts are all used up. The last attempt was lost for `reason`.

    If the code may have started in one of the attempts (`has_started`), the code itself may end the zygotes. The
    `UnavailableReason` is then `POISON`, and the call must not be sent again. Otherwise it is `NODE_ERROR`.
    """
    message = f"each of its {attempts} attempts ended without a result, the last for this reason: {reason}"
    reason_type = UnavailableReason.POISON if has_started else UnavailableReason.NODE_ERROR
    return unavailable_result(call_id, reason_type, message, attempts)


def invalid_result(call_id: str, message: str) -> Result:
    """Return the result of a malformed call."""
    return Result(id=call_id, status=Status.INVALID, error=CallError("InvalidCall", message), attempts=0)


CALL_FIELDS: dict[str, str] = {
    "code": "Python source, run as a script",
    "stdin": "text on standard input; in msgpack also raw bytes",
    "stdin_base64": "bytes on standard input as base64 text, instead of stdin",
    "files": "files to create in the scratch directory: relative path to content, which is base64 text, or an object "
    'such as {"text": "a,b"}, or raw bytes in msgpack',
    "return_files": "relative paths of files to return after the run, or patterns such as `*.png` and `out/**/*.csv`",
    "limits": "resource limits of the call",
    "echo": "whether to return the value of the last expression, as a notebook does",
    "profile": "profile of the zygote that the call is forked from",
    "id": "your name for the call, returned with its result",
    "priority": "waiting calls with a lower number run first",
    "tenant": "owner of the call; the server divides its slots fairly between tenants",
    "env": "environment variables of the code: name to text",
    "argv": "arguments of the code: `sys.argv` is `main.py` and these",
    "figures": "whether to return the open figures of matplotlib as figure-1.png, figure-2.png, ...",
    "deadline_s": DEADLINE_RULE.doc,
    "network": "loopback: the code may use TCP and UDP on 127.0.0.1, between its own processes",
}
PRIORITY_RULE = NumberRule(-100, 100, doc=CALL_FIELDS["priority"])
_DEFAULTS = {f.name: f.default for f in fields(Call)}
"""Default of each field, or `dataclasses.MISSING`."""
_set = object.__setattr__
"""Sets a field of a frozen dataclass."""


def check_call(raw: Any, where: str = "call") -> EncodedCall:
    """Check a decoded JSON or msgpack mapping, and return it in msgpack form. Raises `InvalidCall`."""
    mapping = check_mapping(raw, where)
    check_names(mapping, CALL_FIELDS, where, {"limits": LIMIT_FIELDS})
    if "code" not in mapping:
        raise InvalidCall(f"{where}.code: expected Python source as text, but the field is missing")
    if "stdin_base64" in mapping:
        mapping = with_decoded_stdin(mapping, where)
    checked = {name: _FIELD_CHECKS[name](value, where=f"{where}.{name}") for name, value in mapping.items()}
    return cast(EncodedCall, checked)


def check_defaults(raw: Any, where: str = "defaults") -> EncodedCall:
    """Check the `defaults` of a batch: all fields of a call except `code` and `id`. Raises `InvalidCall`."""
    if raw is None:
        return {}
    mapping = check_mapping(raw, where)
    for name in ("code", "id"):
        if name in mapping:
            raise InvalidCall(f"{where}.{name}: belongs to a single call; move it into calls[]")
    defaults = check_call({**mapping, "code": ""}, where)
    del defaults["code"]
    return defaults


def check_limits(raw: Any, where: str = "limits") -> dict[str, float]:
    """Check a decoded mapping or `Limits`, and return the limits that it has. Raises `InvalidCall`."""
    if isinstance(raw, Limits):
        raw = {name: getattr(raw, name) for name in LIMIT_FIELDS}
    mapping = check_mapping(raw, where)
    check_names(mapping, LIMIT_FIELDS, where)
    return {name: check_number(mapping[name], f"{where}.{name}", LIMIT_FIELDS[name]) for name in mapping}


def with_defaults(call: EncodedCall, defaults: EncodedCall) -> EncodedCall:
    """Return a checked call whose missing fields and limits come from checked defaults."""
    if not defaults:
        return call
    merged: EncodedCall = {**defaults, **call}
    if "limits" in call and "limits" in defaults:
        merged["limits"] = {**defaults["limits"], **call["limits"]}
    return merged


def clamp(call: EncodedCall, max_limits: Limits) -> tuple[EncodedCall, dict[str, float]]:
    """Lower each limit of a call to its maximum. Returns the call, and the lowered limits with their new values."""
    limits, maxima = {**_DEFAULT_VALUES, **call.get("limits", {})}, _limit_values(max_limits)
    if not any(map(gt, limits.values(), maxima)):
        return call, {}
    lowered = {name: maximum for name, maximum in zip(limits, maxima, strict=True) if limits[name] > maximum}
    return {**call, "limits": {**call.get("limits", {}), **lowered}}, lowered


def call_size(call: EncodedCall) -> int:
    """Return the approximate memory of a call in bytes, for admission."""
    size = 256 + memory_bytes(call["code"]) + memory_bytes(call.get("stdin", "")) + len(call.get("compiled", b""))
    if not call.keys().isdisjoint(_LIST_FIELDS):
        env, files = call.get("env", {}), call.get("files", {})
        texts = (*call.get("argv", ()), *env, *env.values(), *files, *call.get("return_files", ()))
        size += 64 * len(texts) + sum(map(memory_bytes, texts)) + sum(map(len, files.values()))
    return size


_DEFAULT_VALUES = {name: rule.default for name, rule in LIMIT_FIELDS.items()}
_limit_values: Callable[[Limits], tuple[float, ...]] = attrgetter(*LIMIT_FIELDS)
_LIST_FIELDS = frozenset({"argv", "env", "files", "return_files"})
_SIZED_FIELDS = ("code", "stdin", *_LIST_FIELDS)


def _check_profile(value: Any, where: str) -> Profile | str:
    """Check the form of a name. The server checks that it has a profile of this name."""
    if isinstance(value, str) and (value in _PROFILES or PROFILE_NAME.fullmatch(value)):
        return _PROFILES.get(value, value)
    raise InvalidCall(f"{where}: expected one of {', '.join(Profile)}, got {shown(value)}")


def _check_network(value: Any, where: str) -> Network:
    if isinstance(value, str) and value in tuple(Network):
        return Network(value)
    raise InvalidCall(f"{where}: expected one of {', '.join(Network)}, got {shown(value)}")


_FIELD_CHECKS: dict[str, Callable[..., Any]] = {
    "code": partial(check_text, max_chars=MAX_CODE_CHARS),
    "stdin": partial(check_stdin, max_chars=MAX_STDIN_CHARS),
    "files": check_files,
    "return_files": check_paths,
    "limits": check_limits,
    "echo": check_flag,
    "profile": _check_profile,
    "id": check_label,
    "priority": partial(check_number, rule=PRIORITY_RULE),
    "tenant": check_label,
    "env": check_env,
    "argv": check_arguments,
    "deadline_s": partial(check_number, rule=DEADLINE_RULE),
    "figures": check_flag,
    "network": _check_network,
}
"""The check of each field of a call."""


_DEFAULT_CALL = Call(code="")
"""A call whose fields have their defaults, for calls without a batch and for batches that set no `defaults`."""
