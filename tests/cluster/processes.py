"""Processes that the tests of the cluster start, and their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from bench.probes import processes

EXIT_TIMEOUT_S = 15.0


def children(pid: int) -> set[int]:
    """Return the children of a process that have not ended."""
    return {child for child in processes.children()[pid] if not processes.is_zombie(child)}


def running(pids: Iterable[int]) -> list[int]:
    """Return the pids of the processes that have not ended."""
    return [pid for pid in pids if processes.state(pid) not in ("", "Z")]


async def until_gone(pids: Iterable[int]) -> None:
    """Wait until the processes have ended."""
    give_up_at = time.monotonic() + EXIT_TIMEOUT_S
    while alive := running(pids):
        assert time.monotonic() < give_up_at, [processes.command(pid) for pid in alive]
        await asyncio.sleep(0.02)
