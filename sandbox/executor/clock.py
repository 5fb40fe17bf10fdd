"""A call's own clock: the time it has run, or slept by its own choice, but not the time it waited for a core.

Own time is wall time minus `run_delay`, which the kernel's scheduler keeps for every task: the nanoseconds it was ready
to run and did not (second field of /proc/PID/schedstat, Documentation/scheduler/sched-stats.rst). The same code has
used the same own time on an idle and on a swamped machine. Only the main thread's waiting is known: what a call's
threads and children wait for counts as its own time.
"""

from __future__ import annotations

import os

HARD_CAP, HARD_CAP_S = 10, 60.0
"""Wall time may be so many times the limit, and always so many seconds, whatever the own clock says; then the node is
hopeless, not the call. The seconds are for short limits: with eight calls to a core, each gets an eighth of it, and
little else needs to run on the machine to make that a tenth for a while."""


def hard_cap_s(timeout_s: float) -> float:
    """The wall time after which a call ends."""
    return max(HARD_CAP * timeout_s, HARD_CAP_S)


def host_pid(pidfd: int) -> int | None:
    """The process a pidfd stands for, as this /proc numbers it; None if it is gone."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        for line in info:
            if line.startswith("Pid:"):
                pid = int(line.split()[1])
                return pid if pid > 0 else None
    return None


def waited_s(pid: int) -> float:
    """Seconds that the process's main thread has waited for a core; 0 where the kernel does not say or it is gone."""
    try:
        fd = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        return int(os.read(fd, 100).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
    finally:
        os.close(fd)


def is_alone(pid: int) -> bool:
    """Whether a call is one process with one thread: the more it starts, the longer each waits, through nobody else."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            return not children.read(1) and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return True
