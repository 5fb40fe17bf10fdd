"""A zygote that has rehearsed calls is as it was, and one in which a call would not run as a call does not serve."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"
PLAN = {
    **{"unshare": 0, "unshare_pid": False, "tmpfs": "/tmp", "inodes": 1, "uid_base": None, "drop_caps": True},
    **{"no_new_privs": True, "seccomp": "", "landlock": None, "drop_bounding": False, "own_pid_at": []},
    **{"unshare_user": False, "bounds_processes": True},
}
CODE = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import os, gc, signal, socket
import confine, descriptors, frames, fork_warmup, runner, zygote
ours, theirs = socket.socketpair()
for fd in range(ours.fileno(), 16): os.dup2(0, fd) if fd not in (ours.fileno(), theirs.fileno()) else None
one = zygote.Zygote(frames.Frames(ours), confine.Confinement({PLAN!r}))
stdout = sys.stdout
runner.prepare("/tmp")
def state():
    fds = [(fd, os.readlink(f"/proc/self/fd/{{fd}}")) for fd in range(40) if os.path.exists(f"/proc/self/fd/{{fd}}")]
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    status = [line for line in open("/proc/self/status") if line.startswith(("Cap", "NoNewPrivs", "Seccomp:", "Uid"))]
    functions = [os._exit, descriptors._syscall, os.setpgid, gc.freeze, confine._syscall, confine._fork]
    return [fds, masked, status, functions, os.getcwd(), os.getpid(), os.getpgid(0), sys.path, gc.isenabled(),
            sorted(runner._main.__dict__), sorted(one.layers.doors), vars(one.layers).keys(), one.running]
"""


def _run(code: str) -> str:
    command = [sys.executable, "-I", "-c", CODE + code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_rehearsal_leaves_no_trace_in_the_zygote() -> None:
    code = """
before = state()
fork_warmup.play(one, 2)
after = state()
theirs.setblocking(False)
try: said = theirs.recv(1)
except BlockingIOError: said = b""
print([(a, b) for a, b in zip(before, after) if a != b], said, file=stdout)
"""
    assert _run(code) == "[] b''\n"


def test_what_would_not_run_as_a_call_does_not_pass_a_rehearsal() -> None:
    code = """
runner._compile = None
try: fork_warmup.play(one, 1)
except RuntimeError as why: print(why, file=stdout)
"""
    assert "expected to hear" in _run(code)
