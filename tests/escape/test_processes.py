"""Attacks on other processes, and attempts to outlive the call or its time limit."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sandbox.types import Status
from tests.escape.targets import DEADLINE_S, Host, Target, succeeds_without_jail
from tests.executor.calling import OWN_PYTHON, call, wait_gone

REACHING = {
    "a signal to a process of the host": """
for pid in (HOST["pid"], HOST["server"], os.getppid()):
    if pid and works(os.kill, pid, 0): breach(pid)
""",
    "a signal to a thread of the host": """
for pid in (HOST["pid"], HOST["server"]):
    if raw(234, pid, pid, 0) == 0 or raw(200, pid, 0) == 0: breach(pid)
""",
    "a queued signal": """
info = struct.pack("iiiii108x", 0, 0, -1, os.getpid(), os.getuid())
for pid in (HOST["pid"], HOST["server"]):
    if raw(129, pid, 0, info) == 0 or raw(297, pid, pid, 0, info) == 0: breach(pid)
""",
    "a pidfd of a process": """
for pid in (HOST["pid"], HOST["server"]):
    fd = attempt(os.pidfd_open, pid)
    if not isinstance(fd, OSError): breach(pid)
""",
    "the limits of a process": """
for pid in (HOST["pid"], HOST["server"]):
    if works(resource.prlimit, pid, resource.RLIMIT_NOFILE): breach(pid)
""",
    "the priority of a process": """
for pid in (HOST["pid"], HOST["server"]):
    if works(os.getpriority, os.PRIO_PROCESS, pid): breach(pid)
    if works(os.sched_getaffinity, pid): breach(pid)
    if works(os.getsid, pid): breach(pid)
""",
    "the session of a process": """
for pid in (HOST["pid"], HOST["server"]):
    if works(os.getpgid, pid): breach(pid)
""",
    "any process by trying all pids": """
mine = {os.getpid(), os.getppid()}
found = [pid for pid in range(2, 70_000) if pid not in mine and not isinstance(attempt(os.kill, pid, 0), ProcessLookupError)]
if found: breach(found[:9])
""",
    "a higher priority": """
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
def test_reaching(attack: str, target: Target) -> None:
    target.resists(REACHING[attack], timeout_s=30.0)


@pytest.mark.parametrize("attack", REACHING)
def test_reaching_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, REACHING[attack], tmp_path)


KILLING = {
    "all processes": "attempt(os.kill, -1, {signal})",
    "its process group": "attempt(os.kill, 0, {signal})",
    "its process group by name": "attempt(os.killpg, os.getpgrp(), {signal})\nattempt(os.killpg, 0, {signal})",
    "its parents": "attempt(os.kill, os.getppid(), {signal})\nattempt(os.kill, 1, {signal})",
    "every process by number": "for pid in range(2, 5000):\n    if pid != os.getpid(): attempt(os.kill, pid, {signal})",
    "its parent, from the process group of the parent": "attempt(os.setpgid, 0, os.getppid())\nattempt(os.kill, 0, {signal})",
}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("attack", KILLING)
def test_killing(attack: str, number: int, target: Target) -> None:
    """A child makes the attack, so that the call itself can survive it. Concurrent calls are not disturbed."""
    neighbours = [target.caller.submit(call(f"import time\ntime.sleep(0.5)\nprint({n})")) for n in range(2)]
    code = f"if os.fork() == 0:\n    {KILLING[attack].format(signal=int(number)).replace(chr(10), chr(10) + '    ')}\n    os._exit(0)\n"
    result = target.run(code + "time.sleep(0.2)", timeout_s=2.0)
    assert result.status is not Status.UNAVAILABLE, result
    assert result.attempts == 1
    for n, neighbour in enumerate(map(target.caller.result_of, neighbours)):
        assert (neighbour.stdout, neighbour.attempts) == (f"{n}\n", 1), neighbour
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
    libc.syscall(60, 0)
""",
    "a child in its own process group with all signals blocked": "if os.fork() == 0: os.setpgid(0, 0); signal.pthread_sigmask(0, range(1, 65)); time.sleep(1000)",
    "a child that shares memory, by vfork": """
stack = ctypes.create_string_buffer(1 << 16)
sleep = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)
if os.fork() == 0: raw(58) or time.sleep(1000)
""",
}


@pytest.mark.parametrize("attack", LEFTOVERS)
def test_outliving_the_call(attack: str, target: Target) -> None:
    mark = "esc" + secrets.token_hex(5)
    result = target.run(f"libc.prctl(15, b'{mark}')\n{LEFTOVERS[attack]}\nos._exit(0)", timeout_s=5.0, processes=32)
    assert result.status in ("ok", "timeout", "error"), result
    wait_gone(_marked(mark, target.processes()))
    assert not _marked(mark), "a process outlived its call"
    target.check_healthy()


def _marked(mark: str, pids: list[int] | None = None) -> list[int]:
    """Return the pids of processes with this name, by default on the whole machine."""
    marked = []
    for pid in pids or [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == mark:
                marked.append(pid)
        except OSError:
            continue
    return marked


def test_a_daemon_outlives_its_parent_without_a_jail(host: Host, tmp_path: Path) -> None:
    mark = "esc" + secrets.token_hex(5)
    code = host.with_facts(f"libc.prctl(15, b'{mark}')\n{LEFTOVERS['a daemon']}\nos._exit(0)")
    subprocess.run([OWN_PYTHON, "-c", code], cwd=tmp_path, timeout=DEADLINE_S, check=True)
    (daemon,) = _marked(mark)
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
code = b'\\x48\\xc7\\xc0\\x3a\\x00\\x00\\x00\\x0f\\x05\\x85\\xc0\\x75\\x0b\\x48\\xc7\\xc0\\x22\\x00\\x00\\x00\\x0f\\x05\\xeb\\xf5\\xc3'
import mmap
page = mmap.mmap(-1, 4096, prot=7); page.write(code)
ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
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
until = time.monotonic() + 0.4
while True:
    children = []
    for _ in range(6):
        pid = attempt(os.fork)
        if pid == 0:
            while time.monotonic() < until: pass
            os._exit(0)
        if isinstance(pid, int): children.append(pid)
    for pid in children: os.waitpid(pid, 0)
    until = time.monotonic() + 0.4
""",
}


@pytest.mark.parametrize("attack", ENDLESS)
def test_code_that(attack: str, target: Target) -> None:
    result = target.run(ENDLESS[attack], timeout_s=0.5, memory_mb=1024)
    assert (result.status, result.attempts) == (Status.TIMEOUT, 1), result
    target.check_healthy()


def test_no_process_is_left_after_all_attacks(target: Target) -> None:
    """After all attacks only the executor, its jail and its zygotes exist."""
    target.check_healthy()
    deadline = time.monotonic() + DEADLINE_S
    while len(target.processes()) != target.at_rest and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(target.processes()) == target.at_rest
