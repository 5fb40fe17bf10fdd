"""Tests of the confinement, the steps between the fork of a call and the first line of its code.

Each isolation level has its own order of system calls. Machine code and Python execute the same list of steps.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.jail.syscalls import NUMBERS
from tests.guest.test_fork_warmup import PLAN

pytestmark = pytest.mark.skipif(platform.machine() not in NUMBERS, reason="the guest has no numbers of system calls")

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"
ALLOW_ALL_FILTER = "BgAAAAAA/38="
"""A seccomp filter of one instruction that allows every system call, in base64."""
NAMESPACES_PLAN = {
    "pid_namespace": True,
    "namespaces": 0x04000000,  # CLONE_NEWUTS
    "scratch_mount": "/tmp",
    "drop_capabilities": True,
    "no_new_privs": True,
    "call_filter": ALLOW_ALL_FILTER,
    "own_pid_offsets": [],
}
NETWORK_PLAN = {**NAMESPACES_PLAN, "uid_base": 1000, "slot_networks": True, "loopback_filter": ALLOW_ALL_FILTER}
LANDLOCK_PLAN = {
    "pid_namespace": False,
    "namespaces": 0,
    "scratch_mount": None,
    "drop_capabilities": True,
    "no_new_privs": True,
    "call_filter": ALLOW_ALL_FILTER,
    "own_pid_offsets": [4],  # the operand of the filter's only instruction
    "landlock": {"faked": True},
}
NONE_PLAN = {
    "pid_namespace": False,
    "namespaces": 0,
    "scratch_mount": None,
    "drop_capabilities": False,
    "no_new_privs": False,
    "call_filter": None,
    "limits_processes": False,
}
CODE = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import json, os, types
import confine, fork_batch, landlock_slots, system_calls
# Descriptors of the zygote: 30 is the output, 40 is cgroup.procs, and 50 is the ruleset of Landlock.
class FakeLandlock:
    def __init__(self, plan): pass
    def become_subreaper(self): pass
    def ruleset(self, slot): return 50, 0
landlock_slots.LandlockSlots = FakeLandlock
plan, stdin_bytes = json.loads(sys.argv[1])
confinement = confine.Confinement(plan)
confinement.cgroup_procs_fds[0] = [40]
if plan["slot_networks"]: confinement.network_fds[0] = 60
call = {{**dict.fromkeys(confine.RLIMITS, 1 << 40), "disk_bytes": 1 << 20, "blobs": [1, stdin_bytes, 0]}}
if plan.get("has_loopback"): call["network"] = "loopback"
batch = fork_batch.ForkBatch()
steps, data = confinement.syscall_steps(0, call, [(30, 1)], -1, batch.time_addresses[0], batch.data_address)
"""
SYSTEM_CALLS = """
    CLOCK_GETTIME CLONE DUP3 WRITE LANDLOCK_RESTRICT_SELF CLOSE OPENAT SIGPROCMASK SETPGID UNSHARE MOUNT SETGROUPS
    SETRESGID SETRESUID CAPSET CHDIR SETRLIMIT PRCTL SETSID SETNS SOCKET IOCTL SECCOMP
"""
PRINT_ORDER = f"""
names = {{getattr(system_calls, name): name for name in {SYSTEM_CALLS.split()}}}
print(json.dumps([names[number] for number in steps[:: fork_batch.STEP_WORDS]]))
"""
FORK, OUTPUT, EMPTY_INPUT = ["CLOCK_GETTIME", "CLONE"], ["DUP3", "WRITE"], ["CLOSE", "OPENAT"]
UIDS, RLIMITS = ["SETGROUPS", "SETRESGID", "SETRESUID"], ["SETRLIMIT"] * 3
DEATH_SIGNAL = NO_NEW_PRIVS = "PRCTL"
LAST, LAST_OF_LANDLOCK = [DEATH_SIGNAL, NO_NEW_PRIVS, "SECCOMP"], [DEATH_SIGNAL, "SETSID", NO_NEW_PRIVS]
SCRATCH = ["UNSHARE", "MOUNT"]


def _run(code: str, plan: dict[str, object], *, stdin_bytes: int = 0) -> str:
    argument = json.dumps([{**PLAN, "limits_processes": False, **plan}, stdin_bytes])
    command = [sys.executable, "-I", "-c", CODE + code, argument]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(
    ("plan", "order"),
    [
        (
            {**NAMESPACES_PLAN, "uid_base": 1000},
            [*OUTPUT, *EMPTY_INPUT, "SIGPROCMASK", "SETPGID", *SCRATCH, *UIDS, "CHDIR", *RLIMITS, *LAST],
        ),
        (
            {**NAMESPACES_PLAN, "user_namespace": True, "limits_processes": True},
            [
                *OUTPUT,
                *EMPTY_INPUT,
                "SIGPROCMASK",
                "SETPGID",
                *SCRATCH,
                "UNSHARE",
                "CAPSET",
                "CHDIR",
                *RLIMITS,
                "SETRLIMIT",
                *LAST,
            ],
        ),
        (
            NETWORK_PLAN,
            [*OUTPUT, *EMPTY_INPUT, "SIGPROCMASK", "SETPGID", "SETNS", *SCRATCH, *UIDS, "CHDIR", *RLIMITS, *LAST],
        ),
        (
            {**NETWORK_PLAN, "has_loopback": True},
            [
                *OUTPUT,
                *EMPTY_INPUT,
                "SIGPROCMASK",
                "SETPGID",
                "UNSHARE",
                "CLOSE",
                "SOCKET",
                "IOCTL",
                *SCRATCH,
                *UIDS,
                "CHDIR",
                *RLIMITS,
                *LAST,
            ],
        ),
        (
            {**LANDLOCK_PLAN, "uid_base": 1000},
            [*OUTPUT, "LANDLOCK_RESTRICT_SELF", *EMPTY_INPUT, "SIGPROCMASK", *UIDS, *RLIMITS, *LAST_OF_LANDLOCK],
        ),
        (
            LANDLOCK_PLAN,
            [*OUTPUT, "LANDLOCK_RESTRICT_SELF", *EMPTY_INPUT, "SIGPROCMASK", "CAPSET", *RLIMITS, *LAST_OF_LANDLOCK],
        ),
        (NONE_PLAN, [*OUTPUT, *EMPTY_INPUT, "SIGPROCMASK", "SETPGID", *RLIMITS, DEATH_SIGNAL]),
    ],
    ids=[
        "namespaces with uids",
        "namespaces without uids",
        "network of the slot",
        "loopback",
        "landlock with uids",
        "landlock without uids",
        "none",
    ],
)
def test_a_call_is_confined_in_this_order(plan: dict[str, object], order: list[str]) -> None:
    assert json.loads(_run(PRINT_ORDER, plan)) == [*FORK, *order]
    first = order.index("CLOSE")
    order_with_input = [*order[:first], *order[first + len(EMPTY_INPUT) :]]
    assert json.loads(_run(PRINT_ORDER, plan, stdin_bytes=1)) == [*FORK, *order_with_input]


def test_the_template_and_the_zygote_leave_the_same_process() -> None:
    """The test runs the steps of level `none`, because only these need no privilege. /dev/null replaces the outputs and
    the file of the cgroup."""
    code = """
call.update(file_bytes=1 << 20, open_files=64)
for fd in (30, 40): os.dup2(os.open(os.devnull, os.O_RDWR), fd)
read_fd, write_fd = os.pipe()
def finish():
    batch.raise_if_step_failed()
    import resource, signal
    limits = [resource.getrlimit(number) for number in confine.RLIMITS.values()]
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1)]
    state = limits, links, os.getpgid(0) == os.getpid(), list(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    os.write(write_fd, repr(state).encode())
    os._exit(0)
def status_of_child():
    steps, data = confinement.syscall_steps(0, call, [(30, 1)], -1, batch.time_addresses[0], batch.data_address)
    batch.add(0, batch.frame_buffer[:1], 1, steps, data)
    if batch.run(1): finish()
    os.waitpid(batch.child_pid(0), 0)
    return os.read(read_fd, 4096)
of_zygote = status_of_child()
confinement.fork_from_template()
if batch.start_template(): finish()
of_template = status_of_child()
limit_is_set = b"1048576" in of_zygote  # file_bytes
print(of_template == of_zygote, limit_is_set or of_zygote.decode())
"""
    assert _run(code, NONE_PLAN) == "True True\n"
