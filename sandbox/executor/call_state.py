"""The state of a call from the queue to its result. The state has four parts, each with one owner.

    part            contents                                          owner        lifetime
    CallSpec        the decoded call; immutable                       -            until the result
    SubmittedCall   the spec, number of failed starts                 Executor     until the result or loss
    Attempt         run id, slot, kill function, deadline, usage      ZygotePool   one try on one zygote
    CallMonitor     virtual clock, demotion, reason of a kill         Monitor      from the `still_running` frame
                                                                                   to the end of the attempt

This module defines the first three parts; `monitor` defines `CallMonitor`.

A zygote is a preloaded interpreter that forks once per call, in a slot: a numbered set of resources. Virtual time is
wall time minus run delay, which is the time that runnable threads wait for a core. To demote a call is to lower its CPU
priority because it has run for long; to promote it is to restore the priority.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
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
"""Upper bound of these bytes together: the report's fixed part and error texts (`guest/runner.py`), and
`RETURNED_HEADER_BYTES`."""
RETURNED_HEADER_BYTES = 4096
"""Upper bound of the headers of all returned files and figures; each header has 12 bytes. The paths of files that match
a pattern are not headers: they count against `MAX_RETURNED_BYTES`, as the contents do."""
MAX_TIMEOUT_S = 1e6
"""Maximum time limit in seconds. The zygote waits in poll(2), which takes milliseconds as a C int."""
MAX_OPEN_FILES = min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
"""RLIMIT_NOFILE of a call: 256, or the hard limit of this process if the hard limit is lower. A tool call needs fewer
than 256 descriptors, and a call that uses all 256 costs little."""
MAX_TASKS = resource.getrlimit(resource.RLIMIT_NPROC)[1]
"""Hard limit of this process on processes and threads; -1 if there is no limit. The limit of a call cannot be
higher."""
HANG_GRACE_S = 10.0
"""Seconds beyond the wall cap after which a zygote that has not reported the call's end counts as hung."""
WALL_CAP_FACTOR = 10
"""The wall cap of a call is its time limit multiplied by this factor, but at least `MIN_WALL_CAP_S`. The wall cap is
the wall time after which the call is killed."""
MIN_WALL_CAP_S = 60.0
"""Smallest wall cap in seconds."""
UNCROWDED_CALLS_PER_CORE = 2
"""With at most this many calls per core, each second of wall time uses up one second of the wall cap. With more calls,
it uses up less, since the calls wait for each other."""
_OPTIONS = ("env", "argv", "return_files", "figures")
"""Fields of a call that its process reads from the frame's JSON, if the call has them."""


def wall_cap_s(timeout_s: float) -> float:
    """Return the wall time after which a call is killed even if its virtual time is below its time limit. In this case
    the call ran on an overloaded machine."""
    return max(WALL_CAP_FACTOR * timeout_s, MIN_WALL_CAP_S)


def wall_cap_rate(calls_per_core: float) -> float:
    """Return the seconds of the wall cap that one second of wall time uses up."""
    return min(1.0, UNCROWDED_CALLS_PER_CORE / max(calls_per_core, 1e-9))


@dataclass(frozen=True, eq=False, slots=True)
class CallSpec:
    """A call as the gateway sent it, decoded. The gateway has validated it."""

    seq: int
    encoded: EncodedCall
    limits: dict[str, float]
    modules: frozenset[str]
    """Modules that the code appears to import."""
    profile: str
    has_reserved_place: bool
    """Whether the gateway sent the call beyond the window (the number of calls that an executor accepts at once). Such
    a call starts before other calls. If no short slot is free, it may start in a reserved slot."""

    @classmethod
    def decode(cls, seq: int, encoded: EncodedCall, profiles: ProfileTree = BUILT_IN_PROFILES) -> CallSpec:
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
    def session(self) -> Mapping[str, Any]:
        """What the call is to do with a session; empty if it does not belong to one. `sessions.py` has the fields."""
        return self.encoded.get("session", {})

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
        """Upper bound of the bytes that a zygote may send as the end of the call. stdout, stderr, and the report's
        value and traceback have at most `output_bytes` each. The rest of the report and the returned files are
        added."""
        return 4 * self.output_bytes + REPORT_OVERHEAD_BYTES + MAX_RETURNED_BYTES

    def cgroup_memory_bytes(self, zygote_bytes: int) -> int:
        """Return the memory limit of the call's cgroup, in a zygote with `zygote_bytes` of private memory.

        In this cgroup the kernel also counts files, output, and pages that the call copies from the zygote. So the
        maximum of each of these is added to `memory_mb`. A call that exceeds none of its limits is then never killed
        because of their sum.
        """
        return zygote_bytes + (int(self.limits["memory_mb"]) << 20) + self.disk_bytes + self.max_result_bytes

    @property
    def max_file_bytes(self) -> int:
        """RLIMIT_FSIZE of the call, in bytes: `disk_mb`, or the size of the largest memory file if that is more.
        Output, report and returned files are written to memory files, to which the limit applies too. The sizes of
        memory files are also bounded by seals."""
        returned_bytes = self.disk_bytes + RETURNED_HEADER_BYTES if self.returns_files else 0
        return max(self.disk_bytes, returned_bytes, 2 * self.output_bytes + REPORT_OVERHEAD_BYTES)

    @property
    def max_tasks(self) -> int:
        requested = int(self.limits["processes"])
        return requested if MAX_TASKS < 0 else min(requested, MAX_TASKS)

    def encode_start(self, run_id: int, slot: int, more: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        """Encode the frame that makes a zygote run the call. `more` has further fields of its header."""
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
            **more,
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
    """One attempt to run a call on one zygote. It is the `SubmittedCall.attempt` of the call until the zygote has
    reported that the call has ended."""

    call: SubmittedCall
    run_id: int
    slot: int
    """The slot in which the call is counted."""
    resource_slot: int
    """The slot whose resources the call uses: for a cell the slot of its session, else `slot`."""
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
    is_keeper: bool = False
    """Whether it is the keeper of a session."""
    is_monitored: bool = False
    usage: CgroupUsage | None = None
    """What the call's cgroup has counted; set when the call has ended."""


@dataclass(eq=False, slots=True)
class SubmittedCall:
    """A call without a result. It is queued, or it has an `attempt`, or it waits until the `verify` zygote is ready, or
    it waits for the delay after a loss or a failed start."""

    spec: CallSpec
    start_failures: int = 0
    attempt: Attempt | None = None
    is_cancelled: bool = False
    keeps_priority: bool = False
    """Whether the call was demoted, then got too little of a core, and could not be promoted. Such a call runs a second
    time, at normal priority."""

    def mark_cancelled(self) -> None:
        """Mark that no result is to be sent, and free the code and the input. Keep the limits, since the executor uses
        them until the attempt has ended."""
        self.is_cancelled = True
        self.spec = replace(self.spec, encoded={}, modules=frozenset())

    def unavailable_result(self, reason: UnavailableReason, message: str) -> EncodedResult:
        """Build the result for the case that the service could not run the call."""
        return unavailable_result(self.spec.id, reason, message, attempts=1).encode(binary=True)


@dataclass(frozen=True, slots=True)
class StillRunning:
    """A zygote's report that a call has run for `report_after_s`."""

    wall_s: float
    pidfd: int
    """Pidfd of the call's first process. The receiver has to close it."""


def _encode_stdin(text: str | bytes) -> bytes:
    """Return standard input as bytes.

    In text, each of the surrogates U+DC80 to U+DCFF stands for one byte that is not UTF-8 (PEP 383). If the text also
    has other lone surrogates, each surrogate is encoded as three bytes instead.
    """
    if isinstance(text, bytes):
        return text
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
