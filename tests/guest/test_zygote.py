"""Tests of the zygote, the interpreter that forks once per call.

Its lists do not grow with ended calls. It reports failed forks, and retries failed reports.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.guest.protocol import MAX_SLOTS_PER_POOL

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"
CODE = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import errno, frames, json, os, protocol, socket, time, types, zygote
ours, theirs = socket.socketpair()
confinement = types.SimpleNamespace(may_have_template=False, landlock=None, scratch_mount="/tmp", cgroup_dir_fds={{}})
confinement.prepare_slot = confinement.release_slot = lambda slot: None
subject = zygote.Zygote(theirs, confinement)
def running_call(pid, run_id, slot=0, started=0.0):
    running = zygote.RunningCall(dict(run_id=run_id, slot=slot, output_bytes=1, return_bytes=1))
    running.pid, running.started = pid, started
    subject.running[pid] = running
    return running
def fail(*_): raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
def report():
    subject._report_still_running()
    subject.writer.flush()
"""


def _run(code: str) -> str:
    command = [sys.executable, "-I", "-c", CODE + code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_deadlines_of_ended_calls_do_not_accumulate() -> None:
    code = """
subject._set_deadline(running_call(1, 1), 500.0)
max_deadlines = 0
for pid in range(10, 5010):
    subject._set_deadline(running_call(pid, pid), 1000.0 + pid)
    del subject.running[pid]
    max_deadlines = max(max_deadlines, len(subject.deadlines))
print(max_deadlines < 100, subject.deadlines[0] == (500.0, 1, 1))
"""
    assert _run(code) == "True True\n"


def test_calls_of_a_batch_that_cannot_be_forked_fail_and_the_others_run() -> None:
    """In the first run of the batch, clone3 is refused for call 1. So call 1 is forked again in the second run."""
    code = """
class Batch:
    time_addresses, data_address = [0] * 32, 0
    results = [[1001, -errno.EPERM, -errno.EAGAIN, 1004, -errno.EPERM], [1002]]
    def add(self, *job): pass
    def run(self, count): self.pids = self.results.pop(0); assert len(self.pids) == count; return False
    def child_pid(self, number): return self.pids[number]
    def forked_at(self, number): return 1.0 + number
confinement.cgroup_dir_fds[1] = 99
confinement.syscall_steps = lambda *call: ([], [])
sent, fds_before = [], len(os.listdir("/proc/self/fd"))
subject.batch = Batch()
subject.writer.add = lambda header, files=(): sent.append((header["op"], header["run_id"], header["reason"]))
for number in range(5):
    sizes = dict(output_bytes=1, return_bytes=0, returns_files=False)
    call = dict(op="call", run_id=number, slot=number, timeout_s=1.0, **sizes)
    record = memoryview(bytearray(b"header and x"))
    subject.on_call({**call, "blobs": [1, 0, 0]}, record[-1:], record)
subject.fork_pending()
print(sorted((pid, running.run_id, running.started) for pid, running in subject.running.items()))
print(sent, confinement.cgroup_dir_fds)
print(len(os.listdir("/proc/self/fd")) - fds_before == 3 * len(subject.running))
"""
    running, sent, closes_files = _run(code).splitlines()
    assert running == "[(1001, 0, 1.0), (1002, 1, 1.0), (1004, 3, 4.0)]"
    reasons = "fork: Resource temporarily unavailable", "fork: Operation not permitted"
    assert sent == f"[('start_failed', 2, {reasons[0]!r}), ('start_failed', 4, {reasons[1]!r})] {{}}"
    assert closes_files == "True"


def test_a_failed_spawn_closes_its_socket_and_a_failed_report_is_retried() -> None:
    code = """
executor_end, zygote_end = socket.socketpair()
subject.reader.fds.append(zygote_end.detach())
fork, os.fork = os.fork, fail
subject._on_spawn(dict(profile="numeric"), b"")
os.fork = fork
print(executor_end.recv(1) == b"")
running = running_call(os.getpid(), 7, started=time.monotonic())
subject.confined_flags[0] = zygote._CONFINED
subject._set_deadline(running, running.started)
pidfd_open, os.pidfd_open = os.pidfd_open, fail
report()
os.pidfd_open = pidfd_open
time.sleep(subject._poll_timeout_ms() / 1e3)
report()
data, fds, _, _ = socket.recv_fds(ours, 4096, 4)
print(data.count(b"still_running"), len(fds), subject.deadlines)
"""
    assert _run(code) == "True\n1 1 []\n"


def test_a_call_is_reported_and_its_time_starts_only_once_it_is_confined() -> None:
    code = """
running = running_call(os.getpid(), 7, slot=3, started=time.monotonic() - 100.0)
subject._set_deadline(running, running.started)
report()
ours.setblocking(False)
try: print(ours.recv(100))
except BlockingIOError: print("nothing")
subject.confined_flags[3] = zygote._CONFINED
time.sleep(subject._poll_timeout_ms() / 1e3)
report()
data, fds, _, _ = socket.recv_fds(ours, 4096, 4)
header = json.loads(data[protocol.LENGTHS.size:])
print(header["op"], len(fds), header["wall_ms"] < 50_000)
"""
    assert _run(code) == "nothing\nstill_running 1 True\n"


@pytest.mark.parametrize(("error", "exit_code"), [("EOFError", 0), ("BrokenPipeError", 0), ("ValueError", 1)])
def test_only_an_unexpected_error_ends_the_process_with_a_traceback(error: str, exit_code: int) -> None:
    command = [sys.executable, "-I", "-c", f"{CODE}\nwith zygote._exits_process(): raise {error}"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, bool(done.stderr)) == (exit_code, bool(exit_code))


def test_a_zygote_has_a_flag_for_each_slot_that_the_executor_may_use() -> None:
    assert int(_run("print(len(subject.confined_flags))")) == MAX_SLOTS_PER_POOL


def test_a_directory_that_no_child_can_be_forked_for_is_emptied_after_a_later_call() -> None:
    """A fork fails if other calls have started as many processes as the container may have."""
    code = """
import landlock_slots, tempfile
slots = object.__new__(landlock_slots.LandlockSlots)
slots._uid_base, slots._scratch, slots._moved_aside, slots._to_clean = None, tempfile.mkdtemp(), 0, []
landlock_slots._MAX_INLINE_S = 0
def clean_up(slot):
    os.makedirs(slots.home(slot))
    open(slots.home(slot) + "/a", "w").close()
    return slots.clean_up(slot)
fork, os.fork = os.fork, fail
print(clean_up(0), len(slots._to_clean), len(os.listdir(slots._scratch)))
os.fork = fork
print(clean_up(1), len(slots._to_clean))
for _ in range(2): os.wait()
print(os.listdir(slots._scratch))
os.rename = fail
print(clean_up(2), len(slots._to_clean), os.listdir(slots._scratch))
import shutil; shutil.rmtree(slots._scratch)
"""
    assert _run(code) == "True 1 1\nTrue 0\n[]\nTrue 0 ['2']\n"
