"""The memory of the machine: whether enough is available, and whether the kernel killed a call because memory ran out.

All times are seconds of the monotonic clock.
"""

from __future__ import annotations

import math

from sandbox import machine
from sandbox.executor.call_state import Attempt
from sandbox.executor.time.monitor import KillReason

MIN_AVAILABLE_MEMORY_SHARE = 1 / 8
"""While less than this share of the machine's memory is available, no call moves from a short slot to a long slot. The
move would free a short slot, in which another call would start."""
MEMORY_SAMPLE_INTERVAL_S = 0.25
"""Seconds for which a sample of the available memory is used."""


class MachineMemory:
    def __init__(self) -> None:
        self._min_available_bytes = int(MIN_AVAILABLE_MEMORY_SHARE * machine.memory_limit())
        self._sampled_at, self._is_available = -math.inf, True
        self._oom_kills, self._oom_kill_seen_at = machine.oom_kills(), -math.inf
        """The kernel's count of processes killed for lack of memory when it was last read, and the time of the last
        reading that found a higher count than the reading before."""

    def is_available(self, now: float) -> bool:
        """Return whether enough memory is available. The answer may be `MEMORY_SAMPLE_INTERVAL_S` old."""
        if not 0 <= now - self._sampled_at < MEMORY_SAMPLE_INTERVAL_S:
            self._sampled_at = now
            self._is_available = machine.memory_available() >= self._min_available_bytes
        return self._is_available

    def has_killed(self, attempt: Attempt, kill_reason: KillReason | None, now: float) -> bool:
        """Return whether the kernel may have killed a call because memory outside of the call's own limit ran out.

        If the call has a cgroup, the cgroup shows this. Otherwise the answer is True if the kernel has killed any
        process of the machine for lack of memory since about the start of the call. After a wrong True the call is run
        a second time.
        """
        if attempt.usage is not None:
            return attempt.usage.hit_outer_limit and kill_reason is not KillReason.TIMED_OUT
        if kill_reason is not None:
            return False
        if (count := machine.oom_kills()) > self._oom_kills:
            self._oom_kills, self._oom_kill_seen_at = count, now
        return attempt.sent_at <= self._oom_kill_seen_at
