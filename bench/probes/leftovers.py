"""Processes, files, mounts and control groups that a stopped server has left on the machine.

Only things with the project's name that did not exist before the server started are counted. So another server may run
beside the measured one if it was started before it, but no other server may start in the meantime.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from bench.probes import processes

SHARED_DIRS = (Path("/tmp"), Path("/dev/shm"), Path("/run"))
NAME = "rstar"
"""Part of the names of all files, mounts and control groups of the project."""
EXIT_TIMEOUT_S = 20.0
"""Killed processes must be gone after this number of seconds. They die as soon as they are scheduled."""


class Leftovers:
    """Created before the server starts, read after its end. `temporary_dir` was the server's TMPDIR."""

    def __init__(self, temporary_dir: Path) -> None:
        self._temporary_dir = temporary_dir
        self._before = self._all()

    def files(self) -> list[str]:
        """Files that have appeared so far."""
        return sorted(temporary_files(self._temporary_dir) - self._before)

    def list_all(self, pids: Sequence[int]) -> list[str]:
        """Everything that is left; `pids` are the processes that the server had."""
        alive = [f"process: {processes.command(pid)}" for pid in surviving(pids)]
        return alive + sorted(self._all() - self._before)

    def _all(self) -> set[str]:
        return temporary_files(self._temporary_dir) | cgroups() | _mounts()


def surviving(pids: Sequence[int]) -> list[int]:
    """The processes of `pids` that have not ended after `EXIT_TIMEOUT_S`."""
    give_up_at = time.monotonic() + EXIT_TIMEOUT_S
    while (alive := [pid for pid in pids if processes.command(pid)]) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return alive


def temporary_files(directory: Path) -> set[str]:
    """All files in `directory`, and those of the project in the directories that all processes share."""
    files = {str(path) for path in directory.rglob("*")}
    shared = (path for parent in SHARED_DIRS if parent.is_dir() for path in parent.iterdir() if NAME in path.name)
    return files | {str(path) for path in shared}


def cgroups() -> set[str]:
    """Control groups of the project, except those whose name contains the id of a living process."""
    groups = (os.path.join(top, name) for top, names, _ in os.walk("/sys/fs/cgroup") for name in names if NAME in name)
    return {path for path in groups if not any(map(processes.command, _numbers_in(path)))}


def _numbers_in(path: str) -> list[int]:
    return [int(part) for part in os.path.basename(path).split("-") if part.isdecimal()]


def _mounts() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {f"mount: {line.split()[4]}" for line in lines if NAME in line}
