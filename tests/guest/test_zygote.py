"""What a zygote keeps is bounded by what it runs, since every fork pays for it; and what becomes of forks that fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"


def test_deadlines_of_ended_calls_do_not_pile_up() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import frames, socket, types, zygote
ours, theirs = socket.socketpair()
one = zygote.Zygote(frames.Frames(theirs), types.SimpleNamespace(has_steps=False))
def call(pid, deadline):
    running = zygote.Running(dict(run_id=pid, slot=0, output_bytes=1, return_bytes=1))
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
one.burst, one.send = Jobs(), lambda header, files=(): said.append((header["op"], header["run_id"], header["reason"]))
for number in range(5):
    limits = dict(output_bytes=1, return_bytes=0, return_count=0, timeout_s=1.0)
    call = dict(op="call", run_id=number, slot=number, blobs=[1, 0, 0], **limits)
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
    assert said == f"[('start_failed', 2, {why[0]!r}), ('start_failed', 4, {why[1]!r})] {{}}"
    assert closed == "True"


def test_a_zygote_that_cannot_fork_another_or_open_a_call_goes_on() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import frames, os, socket, time, types, zygote
ours, theirs = socket.socketpair()
one = zygote.Zygote(frames.Frames(theirs), types.SimpleNamespace(has_steps=False))
def lacking(*_): raise OSError(11, "Resource temporarily unavailable")
wanted, given = socket.socketpair()
one.frames.fds.append(given.detach())
fork, os.fork = os.fork, lacking
one._do_spawn(dict(profile="numeric"), b"")
os.fork = fork
print(wanted.recv(1) == b"")
running = zygote.Running(dict(run_id=7, slot=0, output_bytes=1, return_bytes=1))
running.pid, running.started = os.getpid(), time.monotonic()
one.marks[0] = zygote._CONFINED
one.running[running.pid] = running
one._await_deadline(running, running.started)
pidfd_open, os.pidfd_open = os.pidfd_open, lacking
one._tell_lasting()
one.outbox.flush()
os.pidfd_open = pidfd_open
time.sleep(one._patience_ms() / 1e3)
one._tell_lasting()
one.outbox.flush()
data, fds, _, _ = socket.recv_fds(ours, 4096, 4)
print(data.count(b"still_running"), len(fds), one.deadlines)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n1 1 []\n"


def test_a_call_that_is_not_confined_yet_is_not_told_of_and_its_time_has_not_begun() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import frames, json, os, socket, time, types, zygote
ours, theirs = socket.socketpair()
one = zygote.Zygote(frames.Frames(theirs), types.SimpleNamespace(has_steps=False))
running = zygote.Running(dict(run_id=7, slot=3, output_bytes=1, return_bytes=1))
running.pid, running.started = os.getpid(), time.monotonic() - 100.0
one.running[running.pid] = running
one._await_deadline(running, running.started)
one._tell_lasting()
one.outbox.flush()
ours.setblocking(False)
try: print(ours.recv(100))
except BlockingIOError: print("nothing")
one.marks[3] = zygote._CONFINED
time.sleep(one._patience_ms() / 1e3)
one._tell_lasting()
one.outbox.flush()
data, fds, _, _ = socket.recv_fds(ours, 4096, 4)
said = json.loads(data[8:])
print(said["op"], len(fds), said["wall_ms"] < 50_000)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "nothing\nstill_running 1 True\n"


@pytest.mark.parametrize(("error", "ends"), [("EOFError", 0), ("BrokenPipeError", 0), ("ValueError", 1)])
def test_an_executor_that_is_gone_ends_it_without_a_traceback(error: str, ends: int) -> None:
    code = f"import sys; sys.path.insert(0, {str(GUEST)!r}); import zygote\nwith zygote._to_the_end(): raise {error}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=False)
    assert (done.returncode, bool(done.stderr)) == (ends, bool(ends))
