"""What a server that has ended may have left on the machine: processes, files, mounts, control groups.

What bears our name and was there before is not counted, so a server beside this one is no leftover of it; one that
starts in between is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from bench.probes import processes

SHARED_FOLDERS = (Path("/tmp"), Path("/dev/shm"), Path("/run"))
OURS = "rstar"
END_S = 20.0
"""What the last processes get to be gone: they were killed, and die as soon as they are given a core."""


class Leftovers:
    """Made before the server starts, asked after its end. `folder` was the server's TMPDIR."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._all()

    def files(self) -> list[str]:
        """Files by now."""
        return sorted(temporary_files(self._folder) - self._before)

    def found(self, pids: Sequence[int]) -> list[str]:
        """All there is; `pids` are the processes that the server had."""
        return [f"process: {processes.command(pid)}" for pid in still_there(pids)] + sorted(self._all() - self._before)

    def _all(self) -> set[str]:
        return temporary_files(self._folder) | cgroups() | _mounts()


def still_there(pids: Sequence[int]) -> list[int]:
    """Those of `pids` that have not ended after `END_S`."""
    give_up = time.monotonic() + END_S
    while (alive := [pid for pid in pids if processes.command(pid)]) and time.monotonic() < give_up:
        time.sleep(0.05)
    return alive


def temporary_files(folder: Path) -> set[str]:
    """All in `folder`, and what bears our name in the folders that all processes share."""
    found = {str(path) for path in folder.rglob("*")}
    return found | {str(path) for shared in SHARED_FOLDERS if shared.is_dir() for path in _ours_in(shared)}


def cgroups() -> set[str]:
    """Control groups that bear our name, but for those that say whose they are if that process lives."""
    return {path for path in _groups() if not any(map(processes.command, _numbers_in(path)))}


def _groups() -> set[str]:
    return {os.path.join(at, name) for at, names, _ in os.walk("/sys/fs/cgroup") for name in names if OURS in name}


def _numbers_in(path: str) -> list[int]:
    return [int(part) for part in os.path.basename(path).split("-") if part.isdecimal()]


def _ours_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if OURS in path.name]


def _mounts() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {f"mount: {line.split()[4]}" for line in lines if OURS in line}
