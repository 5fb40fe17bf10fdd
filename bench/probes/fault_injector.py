"""Kills processes of a server with SIGKILL at random, but never a call: a killed call would rightly end as `killed`.

gateway ── executor ── launcher ── init ── zygote ── zygote ... ── call
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, defaultdict
from contextlib import suppress

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

    A call that was just forked from a zygote has the zygote's command line. But a zygote blocks SIGCHLD, and a fork
    unblocks it before it runs a call. So a candidate is stopped first, and killed only if it blocks SIGCHLD.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if kind == "zygote":
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            if not (_is_stopped(pid) and _blocks_sigchld(pid)):
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


def _blocks_sigchld(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/status") as status:
        mask = next(line.split()[1] for line in status if line.startswith("SigBlk:"))
        return int(mask, 16) & 1 << signal.SIGCHLD - 1 != 0
    return False
