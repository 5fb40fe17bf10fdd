"""What a zygote keeps is bounded by what it runs, since every fork pays for it; and what becomes of forks that fail."""

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


def test_of_calls_that_came_together_those_that_cannot_be_forked_fail_and_the_others_run() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import errno, frames, os, socket, types, zygote
class Jobs:
    rooms, results = [0] * 32, [[1001, -errno.EPERM, -errno.EAGAIN, 1004, -errno.EPERM], [1002]]
    def put(self, *job): pass
    def run(self, count): self.last = self.results.pop(0); assert len(self.last) == count
    def result(self, number): return self.last[number]
    def time(self, number): return 1.0 + number
ours, theirs = socket.socketpair()
layers = types.SimpleNamespace(has_steps=False, ground=None, tmpfs="/tmp", floors={{1: 99}})
layers.steps = lambda *call: ([], [])
one, said, before = zygote.Zygote(frames.Frames(theirs), layers), [], len(os.listdir("/proc/self/fd"))
one.burst, one.send = Jobs(), lambda header, files=(): said.append((header["op"], header["id"], header["why"]))
for number in range(5):
    call = dict(op="call", id=number, slot=number, output=1, return_bytes=0, returns=0, timeout_s=1.0, blobs=[1, 0, 0])
    one._do_call(call, memoryview(bytearray(b"x")))
one._launch()
print(sorted((pid, running.id, running.started) for pid, running in one.running.items()))
print(said, layers.floors)
print(len(os.listdir("/proc/self/fd")) - before == 3 * len(one.running))
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    running, said, closed = done.stdout.splitlines()
    assert (
        running == "[(1001, 0, 1.0), (1002, 1, 1.0), (1004, 3, 4.0)]"
    )  # 1: clone3 was refused, and it was tried again
    why = "fork: Resource temporarily unavailable", "fork: Operation not permitted"
    assert said == f"[('failed', 2, {why[0]!r}), ('failed', 4, {why[1]!r})] {{}}"
    assert closed == "True"
