"""One call on its way through the executor, and the orders to a zygote that it turns into."""

from __future__ import annotations

import json
import math
import resource
from dataclasses import dataclass
from typing import Any

from sandbox.executor import profile_choice, virtual_clock, zygote_frames
from sandbox.executor.result import WireResult
from sandbox.jail import CgroupUsage
from sandbox.types import LIMIT_FIELDS, Profile, unavailable_result

RETURN_BYTES = 16 << 20
"""The most that one call's returned files may hold together: a result travels in one piece."""
REPORT_BYTES = 16 << 10
"""More than the report's fixed part and its error texts (`guest/runner.py`) and `RETURN_HEADERS` take."""
RETURN_HEADERS = 4096
"""Room for the lengths before returned files, beside their content: 12 bytes each."""
MOST_S = 1e6
"""Eleven days; a zygote's poll(2) cannot wait for much more."""
OPEN_FILES = 256
"""Descriptors a call may hold: more than any tool call needs, little enough that exhausting them is cheap."""
MOST_PROCESSES = resource.getrlimit(resource.RLIMIT_NPROC)[1]
"""What this process may not raise, no call can be given."""
GRACE_S = 10.0
"""What a zygote gets beyond the hard cap to say that a call has ended, before it counts as wedged."""


@dataclass(eq=False, slots=True)
class Work:
    """A call, where it runs, and how often it was tried. The executor owns it until it is answered."""

    seq: int
    call: dict[str, Any]
    limits: dict[str, float]
    modules: set[str]
    profile: Profile
    attempts: int = 1
    refusals: int = 0
    slot: int = -1
    ordered_at: float = 0.0
    give_up_at: float = 0.0
    whereabouts: tuple[Any, int] | None = None
    """The zygote that has it, and its number there."""
    memory_bytes: int = 0
    inherited_bytes: int = 0
    """What its processes may hold together, and how much of that is its zygote's."""
    zygote_pid: int = 0
    inner_pid: int = 0
    """The zygote's process, and the number that the zygote gives for the call's first process, which only it knows."""
    watch: Any = None
    """Of its own clock, if it lasts (`lasting.Watch`)."""
    is_long: bool = False
    """Takes only cores that nobody else wants."""
    has_long_place: bool = False
    has_share: bool = False
    """Takes its share of the cores all the same."""
    most_cpu_s: float = math.inf
    """With more, it was out of time however it ended: its own time is no less than what it computes."""
    out_of_time: bool = False
    starved: bool = False
    out_of_memory: bool = False
    spent: CgroupUsage | None = None
    cancelled: bool = False

    @classmethod
    def decode(cls, seq: int, call: dict[str, Any]) -> Work:
        """From the wire; the gateway has validated it."""
        given = call.get("limits", {})
        limits = {name: given.get(name, rule.default) for name, rule in LIMIT_FIELDS.items()}
        modules = profile_choice.imported(call["code"])
        asked = Profile(call.get("profile", Profile.AUTO))
        return cls(seq, call, limits, modules, profile_choice.choose(modules) if asked is Profile.AUTO else asked)

    @property
    def timeout_s(self) -> float:
        return min(self.limits["timeout_s"], MOST_S)

    @property
    def most_bytes(self) -> int:
        """No outcome is longer: stdout, stderr, a report of value and traceback, and returned files."""
        return 4 * (int(self.limits["output_kb"]) << 10) + REPORT_BYTES + RETURN_BYTES

    def most_memory(self, inherited: int) -> int:
        """Bytes that its processes may hold together before the kernel ends them, in a zygote with so many of its own.

        What is in its files and its output is memory, too, and so is a copied page of the zygote's. All have room of
        their own, so that a call within each of its limits is never ended for their sum.
        """
        disk = int(self.limits["disk_mb"]) << 20
        return inherited + (int(self.limits["memory_mb"]) << 20) + disk + self.most_bytes

    @property
    def most_file_bytes(self) -> int:
        """RLIMIT_FSIZE: `disk_mb`, unless a memory file for output, report or returned files is larger. Those have
        limits of their own, below which this one must not refuse a write."""
        limits = self.limits
        disk = int(limits["disk_mb"]) << 20
        returned = disk + RETURN_HEADERS if self.call.get("return_files") else 0
        return max(disk, returned, 2 * (int(limits["output_kb"]) << 10) + REPORT_BYTES)

    @property
    def most_processes(self) -> int:
        asked = int(self.limits["processes"])
        return asked if MOST_PROCESSES < 0 else min(asked, MOST_PROCESSES)

    def drop(self) -> None:
        """Nobody waits for it any more: it stays where it is, but small."""
        self.cancelled = True
        self.call = {}
        self.modules = set()

    def order(self, ticket: int, slot: int, now: float) -> bytes:
        """The frame that has a zygote run this."""
        call, limits = self.call, self.limits
        self.slot = slot
        self.ordered_at = now
        self.give_up_at = now + virtual_clock.hard_cap_s(self.timeout_s) + GRACE_S
        files, returned = call.get("files", {}), call.get("return_files", [])
        names = json.dumps([list(files), returned]).encode() if files or returned else b""
        header = {
            "op": "call",
            "run_id": ticket,
            "slot": slot,
            "timeout_s": self.timeout_s,
            "memory_bytes": int(limits["memory_mb"]) << 20,
            "output_bytes": int(limits["output_kb"]) << 10,
            "processes": self.most_processes,
            "disk_bytes": int(limits["disk_mb"]) << 20,
            "file_bytes": self.most_file_bytes,
            "open_files": OPEN_FILES,
            "return_bytes": min(int(limits["disk_mb"]) << 20, RETURN_BYTES) + RETURN_HEADERS,
            "echo": call.get("echo", True),
            "return_count": len(returned),
        }
        return zygote_frames.pack(header, [_code(call["code"]), _input(call.get("stdin", "")), names, *files.values()])

    def no_verdict(self, kind: str, message: str) -> WireResult:
        """The result that says it is us."""
        return unavailable_result(self.call.get("id", ""), kind, message, self.attempts).encode(binary=True)


def _code(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _input(text: str) -> bytes:
    """Lone surrogates stand for the bytes that were no UTF-8 (PEP 383), as far as they can."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
