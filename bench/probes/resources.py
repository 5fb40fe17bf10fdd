"""The resources of a server at one moment: memory, descriptors, processes, mounts, control groups, files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.probes import processes
from bench.probes.leftovers import cgroups

SETTLE_TIMEOUT_S = 30.0
"""Maximum seconds of the wait until a server is at rest. It is at rest if for one second its processes have not changed
and have been almost idle."""
SETTLED_CPU_S = 0.1
"""CPU seconds that the processes of a server at rest may use in this second."""


@dataclass(frozen=True, slots=True)
class ResourceSnapshot:
    """The resources of a server after `calls` calls."""

    calls: int
    memory_mb: float
    """PSS of all processes."""
    processes: int = 0
    zombies: int = 0
    descriptors: int = 0
    mounts: int = 0
    """Mounts in the namespaces of all processes, and in our own."""
    cgroups: int = 0
    temporary_files: int = 0

    @classmethod
    def take(cls, gateway: int, calls: int = 0, files: Sequence[str] = ()) -> ResourceSnapshot:
        """Read everything from /proc; `files` are the server's temporary files."""
        pids = processes.tree(gateway)
        return cls(
            calls=calls,
            memory_mb=round(processes.pss_mb(pids), 2),
            processes=len(pids),
            zombies=sum(map(processes.is_zombie, pids)),
            descriptors=sum(map(processes.descriptors, pids)),
            mounts=processes.mounts(os.getpid()) + sum(map(processes.mounts, pids)),
            cgroups=len(cgroups()),
            temporary_files=len(files),
        )


def wait_until_settled(list_pids: Callable[[], list[int]]) -> None:
    """Wait until for one second the processes have not changed and have been almost idle. Wait for at most
    `SETTLE_TIMEOUT_S`.

    The processes must be idle too: a new zygote is among them at once, but it uses its memory only after its imports.
    """
    give_up_at = time.monotonic() + SETTLE_TIMEOUT_S
    pids, since = list_pids(), time.monotonic()
    cpu_s = processes.cpu_s(pids)
    while time.monotonic() < min(give_up_at, since + 1.0):
        time.sleep(0.1)
        current = list_pids()
        if current != pids or processes.cpu_s(pids) > cpu_s + SETTLED_CPU_S:
            pids, since = current, time.monotonic()
            cpu_s = processes.cpu_s(pids)
