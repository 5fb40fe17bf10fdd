"""What a zygote keeps is bounded by what it runs, since every fork pays for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"


def test_deadlines_of_ended_calls_do_not_pile_up() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import frames, socket, types, zygote
ours, theirs = socket.socketpair()
one = zygote.Zygote(frames.Frames(theirs), types.SimpleNamespace(has_steps=False))
def call(pid, deadline):
    running = zygote.Running(dict(id=pid, slot=0, output=1, return_bytes=1))
    running.pid = pid
    one.running[pid] = running
    one._await_deadline(running, deadline)
call(1, 500.0)
most = 0
for pid in range(10, 5010):
    call(pid, 1000.0 + pid)
    del one.running[pid]
    most = max(most, len(one.deadlines))
print(most < 100, one.deadlines[0] == (500.0, 1, 1))
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True True\n"
