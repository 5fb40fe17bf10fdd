"""The memory of the machine: whether enough is available, and whether the kernel killed a call because it ran out.

All times are seconds of the monotonic clock.
"""

from __future__ import annotations

import math

from sandbox import machine
from sandbox.executor.call_state import Attempt
from sandbox.executor.time.monitor import KillReason

MIN_AVAILABLE_MEMORY_SHARE = 1 / 8
"""While less than this share of the machine's memory is available, no call moves to a long slot, since that would let
a further call start in the short slot."""
MEMORY_SAMPLE_INTERVAL_S = 0.25
"""Seconds for which a sample of the available memory is used."""


class MachineMemory:
    def __init__(self) -> None:
        self._min_available_bytes = int(MIN_AVAILABLE_MEMORY_SHARE * machine.memory_limit())
        self._sampled_at, self._is_available = -math.inf, True
        self._oom_kills, self._oom_kill_seen_at = machine.oom_kills(), -math.inf
        """The kernel's count when it was last read, and the time at which it was seen to have grown."""

    def is_available(self, now: float) -> bool:
        """Return whether enough memory is available, by a sample that is at most `MEMORY_SAMPLE_INTERVAL_S` old."""
        if not 0 <= now - self._sampled_at < MEMORY_SAMPLE_INTERVAL_S:
            self._sampled_at = now
            self._is_available = machine.memory_available() >= self._min_available_bytes
        return self._is_available

    def has_killed(self, attempt: Attempt, kill_reason: KillReason | None, now: float) -> bool:
        """Return whether the SIGKILL that ended a call may come from the kernel, because memory outside of the call's
        own limit ran out.

        Without a cgroup that could say so, the kernel's count for the whole machine decides. An earlier kill counts too
        if the count was not read since, and so does that of another process: both cost the call a second run.
        """
        if attempt.usage is not None:
            return attempt.usage.hit_outer_limit and kill_reason is not KillReason.TIMED_OUT
        if kill_reason is not None:
            return False
        if (count := machine.oom_kills()) > self._oom_kills:
            self._oom_kills, self._oom_kill_seen_at = count, now
        return attempt.sent_at <= self._oom_kill_seen_at
