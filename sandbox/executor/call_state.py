"""The state of a call between queue and result. It has four parts, each with one owner.

    part           contents                                              owner        lifetime
    CallRequest    the decoded call; immutable                           -            until the result
    CallState      the request, failed starts                            Executor     until the result or loss
    Attempt        run id, slot, kill function, deadline, usage          ZygotePool   one try on one zygote
    CallMonitor    virtual clock, demotion, reason of a kill             Monitor      from the `still_running` frame
                                                                                      to the end of the attempt

`CallMonitor` is defined in `monitor`, the other three here.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sandbox.executor import zygote_frames
from sandbox.executor.profile_choice import BUILT_IN_PROFILES, ProfileTree, imported_modules
from sandbox.jail import CgroupUsage
from sandbox.types import (
    LIMIT_FIELDS,
    EncodedCall,
    EncodedResult,
    Network,
    Profile,
    UnavailableReason,
    unavailable_result,
)

MAX_RETURNED_BYTES = 16 << 20
"""Bytes that the returned files of one call may have together, since a result is sent in one frame."""
REPORT_OVERHEAD_BYTES = 16 << 10
"""Upper bound of the report's fixed part and error texts (`guest/runner.py`) plus `RETURNED_HEADER_BYTES`."""
RETURNED_HEADER_BYTES = 4096
"""Upper bound of the headers of all returned files and figures: 12 bytes each. The names of a pattern's matches take
space from the contents."""
MAX_TIMEOUT_S = 1e6
"""Largest time limit in seconds. The zygote waits in poll(2), which takes milliseconds as a C int."""
MAX_OPEN_FILES = min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
"""RLIMIT_NOFILE of a call: 256, or this process's hard limit if that is lower. A tool call needs fewer; a call that
uses them all still costs little."""
MAX_TASKS = resource.getrlimit(resource.RLIMIT_NPROC)[1]
"""Hard limit of this process on processes and threads; -1 if there is no limit. A call cannot have a higher one."""
HANG_GRACE_S = 10.0
"""Seconds beyond the wall cap after which a zygote that has not reported the call's end counts as hung."""
WALL_CAP_FACTOR, MIN_WALL_CAP_S = 10, 60.0
"""The wall cap of a call is its time limit times this factor, and at least this many seconds."""
UNCROWDED_CALLS_PER_CORE = 2
"""With at most this many calls per core, each second of wall time uses up one second of the wall cap."""
_OPTIONS = ("env", "argv", "return_files", "figures")
"""Fields of a call that its process reads from the frame's JSON, if the call has them."""


def wall_cap_s(timeout_s: float) -> float:
    """Return the wall time after which a call is killed whatever its virtual clock shows. A call that has not reached
    its time limit by then ran on an overloaded machine."""
    return max(WALL_CAP_FACTOR * timeout_s, MIN_WALL_CAP_S)


def wall_cap_used_per_s(calls_per_core: float) -> float:
    """Return the seconds of the wall cap that one second of wall time uses up: 1, or less if so many calls share a core
    that they wait for each other."""
    return min(1.0, UNCROWDED_CALLS_PER_CORE / max(calls_per_core, 1e-9))


@dataclass(frozen=True, eq=False, slots=True)
class CallRequest:
    """A call as the gateway sent it. The gateway has validated it."""

    seq: int
    encoded: EncodedCall
    limits: dict[str, float]
    modules: frozenset[str]
    """Modules that the code appears to import."""
    profile: str
    has_reserved_place: bool
    """Whether the gateway sent it in addition to the window. It starts before other calls, in a reserved slot if no
    short one is free."""

    @classmethod
    def decode(cls, seq: int, encoded: EncodedCall, profiles: ProfileTree = BUILT_IN_PROFILES) -> CallRequest:
        requested = encoded.get("limits", {})
        limits = {name: requested.get(name, rule.default) for name, rule in LIMIT_FIELDS.items()}
        modules = imported_modules(encoded["code"])
        profile = profiles.choose(encoded.get("profile", Profile.AUTO), modules)
        return cls(seq, encoded, limits, modules, profile, encoded.get("reserved", False))

    @property
    def id(self) -> str:
        return self.encoded.get("id", "")

    @property
    def return_files(self) -> Sequence[str]:
        return self.encoded.get("return_files", ())

    @property
    def figures(self) -> bool:
        return bool(self.encoded.get("figures"))

    @property
    def has_loopback(self) -> bool:
        return bool(self.encoded.get("network") == Network.LOOPBACK)

    @property
    def returns_files(self) -> bool:
        return bool(self.return_files) or self.figures

    @property
    def timeout_s(self) -> float:
        return min(self.limits["timeout_s"], MAX_TIMEOUT_S)

    @property
    def output_bytes(self) -> int:
        return int(self.limits["output_kb"]) << 10

    @property
    def disk_bytes(self) -> int:
        return int(self.limits["disk_mb"]) << 20

    @property
    def max_result_bytes(self) -> int:
        """Upper bound of what a zygote may send as the end of the call: stdout, stderr, and in the report value and
        traceback, each limited by `output_bytes`; then the rest of the report and the returned files."""
        return 4 * self.output_bytes + REPORT_OVERHEAD_BYTES + MAX_RETURNED_BYTES

    def cgroup_memory_bytes(self, zygote_bytes: int) -> int:
        """Return the memory limit of the call's cgroup, in a zygote with `zygote_bytes` of private memory.

        In this cgroup the kernel also counts files, output, and pages that the call copies from the zygote. The maximum
        of each is added, so that a call which exceeds none of its limits is never killed for their sum.
        """
        return zygote_bytes + (int(self.limits["memory_mb"]) << 20) + self.disk_bytes + self.max_result_bytes

    @property
    def max_file_bytes(self) -> int:
        """RLIMIT_FSIZE of the call: `disk_mb`, or more if a memory file is larger. The limit also applies to the memory
        files for output, report (value and traceback) and returned files, whose sizes seals bound as well."""
        returned_bytes = self.disk_bytes + RETURNED_HEADER_BYTES if self.returns_files else 0
        return max(self.disk_bytes, returned_bytes, 2 * self.output_bytes + REPORT_OVERHEAD_BYTES)

    @property
    def max_tasks(self) -> int:
        requested = int(self.limits["processes"])
        return requested if MAX_TASKS < 0 else min(requested, MAX_TASKS)

    def encode_start(self, run_id: int, slot: int) -> bytes:
        """Encode the frame that makes a zygote run the call."""
        encoded = self.encoded
        files: Mapping[str, bytes] = encoded.get("files", {})
        options: dict[str, Any] = {name: value for name, value in encoded.items() if name in _OPTIONS}
        if files:
            options["files"] = list(files)
        options_json = json.dumps(options).encode() if options else b""
        header = {
            "op": "call",
            "run_id": run_id,
            "slot": slot,
            "timeout_s": self.timeout_s,
            "memory_bytes": int(self.limits["memory_mb"]) << 20,
            "output_bytes": self.output_bytes,
            "processes": self.max_tasks,
            "disk_bytes": self.disk_bytes,
            "file_bytes": self.max_file_bytes,
            "open_files": MAX_OPEN_FILES,
            "return_bytes": min(self.disk_bytes, MAX_RETURNED_BYTES) + RETURNED_HEADER_BYTES,
            "echo": encoded.get("echo", True),
            "returns_files": self.returns_files,
        }
        if self.has_loopback:
            header["network"] = "loopback"
        code = encoded["code"].encode("utf-8", "surrogatepass")
        blobs = [code, _encode_stdin(encoded.get("stdin", "")), options_json, *files.values()]
        if "compiled" in encoded:
            header["has_compiled"] = True
            blobs.append(encoded["compiled"])
        if encoded.get("compile_only"):
            header["compile_only"] = True
        return zygote_frames.pack(header, blobs)


@dataclass(eq=False, slots=True)
class Attempt:
    """One try to run a call on one zygote. `CallState.attempt` refers to it until the zygote has reported its end."""

    call: CallState
    run_id: int
    slot: int
    sent_at: float
    """Monotonic time at which the call was sent to the zygote."""
    kill: Callable[[], None]
    """Makes the zygote kill the call's first process, and so the call."""
    hang_deadline: float
    """Monotonic time after which the zygote counts as hung, unless it has reported the end of the call."""
    memory_bytes: int
    """Memory that all processes of the call may have together."""
    zygote_bytes: int
    """The part of `memory_bytes` that stands for the zygote's private memory."""
    is_monitored: bool = False
    usage: CgroupUsage | None = None
    """What the call's cgroup has counted; set when the call has ended."""


@dataclass(eq=False, slots=True)
class CallState:
    """An unanswered call. It is queued, or waits for the `verify` zygote or after a loss or a failed start, or has an
    `attempt`."""

    request: CallRequest
    start_failures: int = 0
    attempt: Attempt | None = None
    is_cancelled: bool = False
    keeps_priority: bool = False
    """Whether the call got too little of a core when it was demoted and could not be promoted. It runs a second time,
    at normal priority."""

    def mark_cancelled(self) -> None:
        """Mark that no result is to be sent, and free the code and the input. The limits are kept, since they are used
        until the attempt has ended."""
        self.is_cancelled = True
        self.request = replace(self.request, encoded={}, modules=frozenset())

    def unavailable_result(self, reason: UnavailableReason, message: str) -> EncodedResult:
        """Build the result for the case that the service could not run the call."""
        return unavailable_result(self.request.id, reason, message, attempts=1).encode(binary=True)


@dataclass(frozen=True, slots=True)
class StillRunning:
    """A zygote's report that a call has run for `report_after_s`."""

    wall_s: float
    pidfd: int
    """Pidfd of the call's first process. The receiver has to close it."""


def _encode_stdin(text: str | bytes) -> bytes:
    """Encode standard input, which may be bytes already.

    In text the surrogates U+DC80 to U+DCFF stand for bytes that are not UTF-8 (PEP 383). If the text contains any other
    lone surrogate, all its surrogates are encoded as three bytes each.
    """
    if isinstance(text, bytes):
        return text
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
