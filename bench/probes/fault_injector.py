"""What kills parts of a server with SIGKILL, at random, and never a call: a call that is killed has that for a verdict.

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

BELOW = ("zygote", "init", "launcher", "executor")
"""What has a gateway above it, which sees to it that nobody notices."""
STOP_S = 5.0
"""What a process gets to stand still."""


class Monkey:
    """Kills by `strike`, and counts by kind in `kills`."""

    def __init__(self, rng: random.Random) -> None:
        self.kills: Counter[str] = Counter()
        self._rng = rng

    def strike(self, gateway: int) -> None:
        """Kill one process below this gateway, each as likely as any other."""
        there = [(kind, pid) for kind, pids in victims(gateway).items() for pid in pids]
        self._rng.shuffle(there)
        for kind, pid in there:
            if _kill(pid, kind):
                self.kills[kind] += 1
                return


def victims(gateway: int) -> dict[str, list[int]]:
    """Process ids by kind. Among the zygotes there may be calls."""
    below = processes.children()
    found: dict[str, list[int]] = defaultdict(list)
    found["executor"] = below[gateway]
    found["launcher"] = [pid for executor in found["executor"] for pid in below[executor]]
    deeper = [pid for launcher in found["launcher"] for pid in processes.tree(launcher)[1:]]
    for pid in deeper:
        found["zygote" if "zygote.py" in processes.command(pid) else "init"].append(pid)
    return found


def _kill(pid: int, kind: str) -> bool:
    """A zygote's fork looks like it and becomes a call, so a zygote is told once it stands still: it has a descriptor
    that is closed in a fork before that is a call, and a fork that dies before is one that never began."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if kind == "zygote":
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            if not (_stands_still(pid) and _waits_for_children(pid)):
                signal.pidfd_send_signal(process, signal.SIGCONT)
                return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(process)
    return True


def _stands_still(pid: int) -> bool:
    give_up = time.monotonic() + STOP_S
    while time.monotonic() < give_up and processes.state(pid) not in ("", "T", "Z"):
        time.sleep(0.001)
    return processes.state(pid) == "T"


def _waits_for_children(pid: int) -> bool:
    """Whether it holds the descriptor by which a zygote hears of deaths."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if "signalfd" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                    return True
    return False
