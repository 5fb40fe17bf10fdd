"""Tests of the warm-up, in which a zygote runs scripts before its first call. It leaves the zygote as it was, and fails
if the scripts do not run as they do in a call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"
PLAN = {
    "namespaces": 0,
    "pid_namespace": False,
    "scratch_mount": "/tmp",
    "max_files": 1,
    "uid_base": None,
    "drop_capabilities": True,
    "no_new_privs": True,
    "slot_networks": False,
    "call_filter": "",
    "loopback_filter": None,
    "session_filter": None,
    "landlock": None,
    "clear_bounding_set": False,
    "own_pid_offsets": [],
    "user_namespace": False,
    "limits_processes": True,
}
"""A plan without a seccomp filter (`sandbox.jail.plan.ConfinementPlan`)."""
CODE = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import os, gc, signal, socket
import confine, fork_warmup, runner, system_calls, zygote
ours, theirs = socket.socketpair()
# Occupy the descriptors 0 to 15, of which the scripts of the warm-up use some.
for fd in range(ours.fileno(), 16): os.dup2(0, fd) if fd not in (ours.fileno(), theirs.fileno()) else None
confinement = confine.Confinement({{**{PLAN!r}, "pid_namespace": sys.argv[1] == "namespaces"}})
subject = zygote.Zygote(ours, confinement)
stdout = sys.stdout
runner.prepare("/tmp")
def state():
    fds = [(fd, os.readlink(f"/proc/self/fd/{{fd}}")) for fd in range(40) if os.path.exists(f"/proc/self/fd/{{fd}}")]
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    status = [line for line in open("/proc/self/status") if line.startswith(("Cap", "NoNewPrivs", "Seccomp:", "Uid"))]
    functions = [os._exit, gc.freeze, gc.enable, system_calls.syscall, subject.batch.invoke]
    return [fds, masked, status, functions, os.getcwd(), dict(os.environ), os.getpid(), os.getpgid(0), sys.path,
            gc.isenabled(), sorted(runner.main_module.__dict__), sorted(confinement.cgroup_procs_fds),
            vars(confinement).copy(), subject.running]
"""


def _run(code: str, level: str = "none") -> str:
    command = [sys.executable, "-I", "-c", CODE + code, level]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_warm_up_leaves_no_trace_in_the_zygote() -> None:
    code = """
before = state()
fork_warmup.run_scripts(subject, 2)
after = state()
theirs.setblocking(False)
try: received = theirs.recv(1)
except BlockingIOError: received = b""
print([(a, b) for a, b in zip(before, after) if a != b], received, file=stdout)
"""
    for level in ("none", "namespaces"):
        assert _run(code, level) == "[] b''\n"


def test_a_script_that_does_not_run_as_a_call_fails_the_warm_up() -> None:
    code = """
runner._compile = None
try: fork_warmup.run_scripts(subject, 1)
except RuntimeError as error: print(error, file=stdout)
"""
    assert "expected a header that ends in" in _run(code)
