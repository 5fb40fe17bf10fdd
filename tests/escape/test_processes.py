"""Attacks on other processes, and attempts to outlive the call or its time limit.

The functions of the attacks (`works`, `raw`, `attempt`, `breach`) and their imports are in `targets.PRELUDE`.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from sandbox.types import Status
from tests.escape.targets import DEADLINE_S, Host, Target, succeeds_without_jail
from tests.executor.calling import OWN_PYTHON, call, wait_gone

REACHING = {
    "a signal to a process of the host": """
for pid in (HOST["victim_pid"], HOST["executor_pid"], os.getppid()):
    if pid and works(os.kill, pid, 0): breach(pid)
""",
    "a signal to a thread of the host": """
for pid in (HOST["victim_pid"], HOST["executor_pid"]):
    if raw('tgkill', pid, pid, 0) == 0 or raw('tkill', pid, 0) == 0: breach(pid)
""",
    "a queued signal": """
siginfo = struct.pack("iiiii108x", 0, 0, -1, os.getpid(), os.getuid())
for pid in (HOST["victim_pid"], HOST["executor_pid"]):
    # rt_sigqueueinfo(2), rt_tgsigqueueinfo(2)
    if raw('rt_sigqueueinfo', pid, 0, siginfo) == 0 or raw('rt_tgsigqueueinfo', pid, pid, 0, siginfo) == 0: breach(pid)
""",
    "a pidfd of a process": """
for pid in (HOST["victim_pid"], HOST["executor_pid"]):
    fd = attempt(os.pidfd_open, pid)
    if not isinstance(fd, OSError): breach(pid)
""",
    "the limits of a process": """
for pid in (HOST["victim_pid"], HOST["executor_pid"]):
    if works(resource.prlimit, pid, resource.RLIMIT_NOFILE): breach(pid)
""",
    "the priority of a process": """
for pid in (HOST["victim_pid"], HOST["executor_pid"]):
    if works(os.getpriority, os.PRIO_PROCESS, pid): breach(pid)
    if works(os.sched_getaffinity, pid): breach(pid)
    if works(os.getsid, pid): breach(pid)
""",
    "the session of a process": """
for pid in (HOST["victim_pid"], HOST["executor_pid"]):
    if works(os.getpgid, pid): breach(pid)
""",
    "any process by trying all pids": """
def exists(pid): return not isinstance(attempt(os.kill, pid, 0), ProcessLookupError)
pids = [pid for pid in range(2, 70_000) if pid not in (os.getpid(), os.getppid()) and exists(pid)]
if pids: breach(pids[:9])
""",
    # A call cannot lower its priority either: the filter refuses setpriority(2).
    "another priority": """
if works(os.nice, -5) or works(os.nice, 1): breach("nice")
""",
    "more by raising a limit": """
for limit in range(16):
    limits = attempt(resource.getrlimit, limit)
    if isinstance(limits, OSError) or limits[1] == resource.RLIM_INFINITY: continue
    try: resource.setrlimit(limit, (limits[0], limits[1] + 1))
    except (ValueError, OSError): continue
    breach(limit)
if resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY: breach("memory without limit")
""",
}


@pytest.mark.parametrize("attack", REACHING)
def test_a_call_cannot_reach(attack: str, target: Target) -> None:
    target.resists(REACHING[attack], timeout_s=30.0)


@pytest.mark.parametrize("attack", REACHING)
def test_reaching_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, REACHING[attack], tmp_path)


KILLS = {
    "all processes": "attempt(os.kill, -1, {signal})",
    "its process group": "attempt(os.kill, 0, {signal})",
    "its process group by name": "attempt(os.killpg, os.getpgrp(), {signal})\nattempt(os.killpg, 0, {signal})",
    "its parents": "attempt(os.kill, os.getppid(), {signal})\nattempt(os.kill, 1, {signal})",
    "every process by number": "for pid in range(2, 5000):\n    if pid != os.getpid(): attempt(os.kill, pid, {signal})",
    "its parent, from the process group of the parent": "attempt(os.setpgid, 0, os.getppid())\nattempt(os.kill, 0, {signal})",
}


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("attack", KILLS)
def test_a_call_cannot_disturb_others_by_killing(attack: str, signum: int, target: Target) -> None:
    """A child process of the call makes the attack, so that the call itself can survive the attack."""
    concurrent = [target.caller.submit(call(f"import time\ntime.sleep(0.5)\nprint({n})")) for n in range(2)]
    kills = textwrap.indent(KILLS[attack].format(signal=int(signum)), "    ")
    result = target.run(f"if os.fork() == 0:\n{kills}\n    os._exit(0)\ntime.sleep(0.2)", timeout_s=2.0)
    assert result.status is not Status.UNAVAILABLE, result
    assert result.attempts == 1
    for n, other in enumerate(map(target.caller.result_of, concurrent)):
        assert (other.stdout, other.attempts) == (f"{n}\n", 1), other
    target.check_healthy()


def test_killing_the_process_group_succeeds_without_a_jail(tmp_path: Path) -> None:
    code = "import os, signal\npid = os.fork()\nif pid == 0: os.kill(0, 15); os._exit(0)\nos.wait()"
    assert subprocess.run([OWN_PYTHON, "-c", code], start_new_session=True, check=False).returncode == -signal.SIGTERM


LEFTOVERS = {
    "a daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 4096); os.chdir("/")
        for number in range(1, 64):
            try: signal.signal(number, signal.SIG_IGN)
            except (ValueError, OSError): pass
        time.sleep(1000)
    os._exit(0)
os.wait()
""",
    "a child that keeps the pipes": "if os.fork() == 0: time.sleep(1000)",
    "a program": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)",
    "a child that is stopped": "if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1000)",
    "a chain of orphans": """
for _ in range(8):
    if os.fork(): break
else: time.sleep(1000)
""",
    "children that replace each other": """
if os.fork() == 0:
    os.setsid(); start = time.monotonic()
    while time.monotonic() < start + 60:
        if os.fork(): os._exit(0)
""",
    "a thread of a child": """
if os.fork() == 0:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    raw('exit', 0)  # ends only the first thread
""",
    "a child in its own process group with all signals blocked": "if os.fork() == 0: os.setpgid(0, 0); signal.pthread_sigmask(0, range(1, 65)); time.sleep(1000)",
    "a child that shares memory, by vfork": """
if os.fork() == 0:  # vfork(3) returns 0 in its child, which sleeps
    raw('clone', 0x4100 | signal.SIGCHLD, 0, 0, 0, 0) or time.sleep(1000)  # CLONE_VM, CLONE_VFORK
""",
}


@pytest.mark.parametrize("attack", LEFTOVERS)
def test_no_process_outlives_its_call(attack: str, target: Target) -> None:
    name = _new_process_name()
    result = target.run(f"{SET_NAME.format(name)}\n{LEFTOVERS[attack]}\nos._exit(0)", timeout_s=5.0, processes=32)
    assert result.status in ("ok", "timeout", "error"), result
    wait_gone(_pids_named(name, target.processes()))
    assert not _pids_named(name), "a process outlived its call"
    target.check_healthy()


SET_NAME = "libc.prctl(15, b'{}')  # PR_SET_NAME; children inherit the name"


def _new_process_name() -> str:
    return "esc" + secrets.token_hex(5)


def _pids_named(process_name: str, pids: list[int] | None = None) -> list[int]:
    """Return the pids of processes with this name, among `pids` or else on the whole machine."""
    named = []
    for pid in pids or [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == process_name:
                named.append(pid)
        except OSError:
            continue
    return named


def test_a_daemon_outlives_its_parent_without_a_jail(host: Host, tmp_path: Path) -> None:
    name = _new_process_name()
    code = host.attack_program(f"{SET_NAME.format(name)}\n{LEFTOVERS['a daemon']}\nos._exit(0)")
    subprocess.run([OWN_PYTHON, "-c", code], cwd=tmp_path, timeout=DEADLINE_S, check=True)
    (daemon,) = _pids_named(name)
    os.kill(daemon, signal.SIGKILL)


ENDLESS = {
    "ignores every signal": """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (ValueError, OSError): pass
while True: time.sleep(1000)
""",
    "never releases the interpreter lock": "re.match('(a*)*b', 'a' * 40)",
    "computes in C": "9 ** 9 ** 9",
    "formats a huge number": "sys.set_int_max_str_digits(0)\nlen(str(7 ** 9_000_000))",
    "waits for a child that sleeps, by vfork": """
raw('clone', 0x4100 | signal.SIGCHLD, 0, 0, 0, 0)  # CLONE_VM, CLONE_VFORK
time.sleep(1000)
""",
    "sleeps in an atexit handler": "import atexit\natexit.register(time.sleep, 1000)",
    "waits for a thread": "threading.Thread(target=time.sleep, args=(1000,)).start()",
    "waits for input": "os.read(os.pipe()[0], 1)",
    "loops in a handler": "def loop(*_):\n    while True: pass\nsignal.signal(signal.SIGALRM, loop); signal.setitimer(0, 0.01); time.sleep(1000)",
    "catches everything": """
while True:
    try:
        while True: time.sleep(1000)
    except BaseException: pass
""",
    "loops in a destructor": "class C:\n    def __del__(self):\n        while True: pass\nC()",
    "computes only in short-lived children": """
until = time.monotonic() + 0.15  # seconds; the call's limit is 0.2
while True:
    children = []
    for _ in range(6):
        pid = attempt(os.fork)
        if pid == 0:
            while time.monotonic() < until: pass
            os._exit(0)
        if isinstance(pid, int): children.append(pid)
    for pid in children: os.waitpid(pid, 0)
    until = time.monotonic() + 0.15
""",
}


@pytest.mark.parametrize("behaviour", ENDLESS)
def test_endless_code_times_out_even_if_it(behaviour: str, target: Target) -> None:
    result = target.run(ENDLESS[behaviour], timeout_s=0.2, memory_mb=1024)
    assert (result.status, result.attempts) == (Status.TIMEOUT, 1), result
    target.check_healthy()


def test_no_process_is_left_after_all_attacks(target: Target) -> None:
    """This test is the last of the file, because the fixture's executor has then run all attacks above."""
    target.check_healthy()
    deadline = time.monotonic() + DEADLINE_S
    while len(target.processes()) != target.idle_process_count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(target.processes()) == target.idle_process_count
