"""Kills processes of a server with SIGKILL at random, but never a call: a killed call would rightly end as `killed`.

gateway ── executor ── launcher ── init ── zygote ── zygote ... ── call
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, defaultdict

from bench.probes import processes

KILLABLE = ("zygote", "init", "launcher", "executor")
"""Kinds of processes below the gateway, which replaces them."""
SIGSTOP_TIMEOUT_S = 5.0


class FaultInjector:
    """Kills by `kill_one`, and counts by kind in `kills`."""

    def __init__(self, rng: random.Random) -> None:
        self.kills: Counter[str] = Counter()
        self._rng = rng

    def kill_one(self, gateway: int) -> None:
        """Kill one process below this gateway, each with the same probability."""
        candidates = [(kind, pid) for kind, pids in processes_by_kind(gateway).items() for pid in pids]
        self._rng.shuffle(candidates)
        for kind, pid in candidates:
            if _kill(pid, kind):
                self.kills[kind] += 1
                return


def processes_by_kind(gateway: int) -> dict[str, list[int]]:
    """Process ids below a gateway by kind. Among the zygotes there may be calls."""
    children = processes.children()
    by_kind: dict[str, list[int]] = defaultdict(list)
    by_kind["executor"] = children[gateway]
    by_kind["launcher"] = [pid for executor in by_kind["executor"] for pid in children[executor]]
    for pid in [pid for launcher in by_kind["launcher"] for pid in processes.tree(launcher)[1:]]:
        by_kind["zygote" if "zygote.py" in processes.command(pid) else "init"].append(pid)
    return by_kind


def _kill(pid: int, kind: str) -> bool:
    """Kill the process, unless it is a call.

    A call just forked from a zygote has the zygote's command line. So a candidate is stopped first, and is not killed
    if it is a child of a zygote and leads a process group. A call becomes such a leader before its code runs, and a
    zygote stays in the group of its parent.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if kind == "zygote":
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            if not _is_stopped(pid) or _is_call(pid):
                signal.pidfd_send_signal(process, signal.SIGCONT)
                return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(process)
    return True


def _is_stopped(pid: int) -> bool:
    """Wait until SIGSTOP has taken effect."""
    give_up_at = time.monotonic() + SIGSTOP_TIMEOUT_S
    while time.monotonic() < give_up_at and processes.state(pid) not in ("", "T", "Z"):
        time.sleep(0.001)
    return processes.state(pid) == "T"


def _is_call(pid: int) -> bool:
    """Return whether a process that runs `zygote.py` is a call. Every user may read this of every process."""
    return os.getpgid(pid) == pid and "zygote.py" in processes.command(processes.parent(pid))
