"""Targets of attacks: an executor at one isolation level, started by one user, with secrets around it.

- An attack is code that prints BREACH when it has reached something. `Target.resists` runs the attack as a call, which
  must come to its end without printing BREACH.
- Each attack has a control: `succeeds_without_jail` runs the same code without a jail, where it must print BREACH.
- Attackers know everything about the host except its secrets: pids, paths and ports are in `HOST` (`make_host`).
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from sandbox.jail.syscalls import NUMBERS
from sandbox.types import Call, Result, Status
from tests.executor import calling
from tests.executor.calling import OWN_PYTHON, Caller, call
from tests.jail.jails import REPOSITORY, dir_for_all_users, python_for_all_users, reachable_python

NAMES = ("nsjail", "namespaces", "namespaces as nobody", "landlock", "landlock as nobody")
"""Names of the targets: a level, and the user who starts the executor if it is not the user who runs the tests."""
NOBODY = 65_534
SLOTS = 4
DEADLINE_S = calling.DEADLINE_S

SYSTEM_CALLS = NUMBERS.get(os.uname().machine, {})
"""The numbers of the system calls of this machine."""
PRELUDE = (
    f"NUMBERS = {dict(SYSTEM_CALLS)!r}"
    r"""
import ctypes, errno, fcntl, os, re, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def raw(call, *arguments):
    number = NUMBERS[call] if isinstance(call, str) else call
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return result if result != -1 else -ctypes.get_errno()
def breach(evidence): os.write(1, f"BREACH {evidence}\n".encode())
def scan(data):
    for token in set(re.findall(rb"CANARY-\w{32}", data)): breach(token.decode())
def read(path, limit=1 << 20):
    try:
        with open(path, "rb", buffering=0) as file: return file.read(limit) or b""
    except OSError: return b""
def names(path):
    try: return os.listdir(path)
    except OSError: return []
def attempt(action, *arguments):
    try: return action(*arguments)
    except OSError as error: return error
def works(action, *arguments): return not isinstance(attempt(action, *arguments), OSError)
# Directories to write to, paths of files and directories to change, and a device. In a jail an attack tries many paths. A
# control (an attack without a jail) succeeds and must not change the machine, so it tries only paths of its own.
DIRS, PROTECTED_PATHS, DEVICE = [".", HOST["directory"]], [HOST["file"]], HOST["file"]
if HOST["is_jailed"]:
    library = os.path.dirname(os.__file__)
    DIRS += [*"/tmp /var/tmp /dev/shm /run /run/lock /dev / /guest /python /home /root /mnt /srv /etc".split(),
               *"/proc/self /proc/1/cwd /proc/1/root /sys/fs/cgroup".split(), os.path.expanduser("~"), *filter(None, sys.path),
               os.path.dirname(sys.executable), library + "/site-packages", library + "/__pycache__"]
    # Not the first two directories, in which a call may make changes.
    PROTECTED_PATHS += [os.__file__, sys.executable, "/etc/passwd", "/dev/null", "/dev/zero", "/guest/zygote.py", *DIRS[2:]]
    DEVICE = "/dev/null"
"""
)
"""Beginning of each attack. It defines these functions:

- `raw` makes a system call by its number, and returns the result or the negative errno;
- `breach` reports that the attack has succeeded;
- `scan` reports all canaries (secrets) that it finds in some bytes;
- `attempt` calls a function, and returns its `OSError` instead of raising the error.
"""


def canary() -> str:
    """Return a random secret that `scan` recognizes."""
    return "CANARY-" + secrets.token_hex(16)


@dataclass(frozen=True)
class Host:
    """The machine around the jail, with its secrets."""

    facts: dict[str, Any]
    """Everything that attackers know. This dictionary is `HOST` in their code."""
    environ: dict[str, str]
    """Variables to add to the executor's environment."""
    secret: str
    """A canary in the executor's environment and command line, in a file and in shared memory."""

    def attack_program(self, code: str) -> str:
        """Return an attack as a whole program: `HOST`, `PRELUDE`, the code, and a line END."""
        return f"HOST = {self.facts!r}\n{PRELUDE}\n{code}\nos.write(1, b'END\\n')\n"


class Target:
    """One executor under attack."""

    def __init__(self, name: str, caller: Caller, host: Host) -> None:
        self.name = name
        self.level, _, _ = name.partition(" as ")
        self.caller = caller
        self.host = host
        caller.run("1")  # so the template of the zygote exists
        self.idle_process_count = len(self.processes())
        """Processes of the executor, its jail and its zygotes while no call runs."""

    def run(self, code: str, **options: Any) -> Result:
        """Run an attack as a call, and return its result without a check."""
        return self.caller.run(self.host.attack_program(code), **options)

    def build_call(self, code: str, **options: Any) -> Call:
        """Return an attack as a call, without running it."""
        return call(self.host.attack_program(code), **options)

    def resists(self, code: str, **options: Any) -> Result:
        """Run an attack as a call that must come to its end without a BREACH."""
        return check_resisted(self.run(code, **options))

    def processes(self) -> list[int]:
        """Return the pids of the executor and its descendants."""
        while self.caller.process.poll() is None:
            try:
                return self.caller.processes()
            except (FileNotFoundError, ProcessLookupError):
                continue
        pytest.fail("the executor has ended")

    @contextmanager
    def zygotes_stopped(self) -> Iterator[None]:
        """Stop the zygotes by SIGSTOP within the block. The calls that the block submits start together at its end."""
        pids = [pid for pid in self.processes() if _is_zygote(pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def sleeping_call(self, code: str, **options: Any) -> Iterator[None]:
        """Within the block, keep a call running that has executed `code` and now sleeps."""
        pids_before = set(self.processes())
        seq = self.caller.submit(call(f"{code}\nimport time\ntime.sleep(1000)", timeout_s=300.0, **options))
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not any(_sleeps(pid) for pid in set(self.processes()) - pids_before):
                assert time.monotonic() < deadline, "the call does not reach its sleep"
                time.sleep(0.01)
            yield
        finally:
            self.caller.send("cancel", [seq])

    def check_healthy(self) -> None:
        """Check that all slots still run calls, correctly and at the first attempt."""
        calls = [call(f"print({n} * 7)") for n in range(2 * self.caller.ready["slots"])]
        for n, result in enumerate(self.caller.run_all(calls)):
            assert (result.status, result.stdout, result.attempts) == (Status.OK, f"{n * 7}\n", 1), result


def _is_zygote(pid: int) -> bool:
    try:
        return b"zygote.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _sleeps(pid: int) -> bool:
    """Return whether a process is in clock_nanosleep(2). If its system call is not visible, any sleep counts."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().startswith("230 ")  # the number of clock_nanosleep
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:  # in a container even root may not read this file of another user's process
        return bool(re.search(r"^State:\tS", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))


def check_resisted(result: Result) -> Result:
    """Check that an attack came to its end without a BREACH, and return its result."""
    assert "BREACH" not in result.stdout, result.stdout
    assert result.stdout.endswith("END\n"), f"the attack did not come to its end: {result}"
    return result


def skip_under_seccomp() -> None:
    """Skip a control if this process has a seccomp filter (of a container, for example). The filter may stop the
    attack."""
    if "Seccomp:\t0" not in Path("/proc/self/status").read_text():
        pytest.skip("the control needs a process without a seccomp filter, so it does not run in a container")


def with_controls_of_root(attacks: Iterable[str], *of_root: str) -> list[Any]:
    """Return the parameters of a test of controls. The attacks in `of_root` work only for root, because the kernel stops
    them for all other users."""
    needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the kernel stops the attack of other users")
    assert {*of_root} <= {*attacks}
    return [pytest.param(attack, marks=needs_root if attack in of_root else ()) for attack in attacks]


def succeeds_without_jail(host: Host, code: str, directory: Path) -> None:
    """Run an attack without a jail, where it must succeed: this shows that the attack works."""
    skip_under_seccomp()
    environ = {**os.environ, "PYTHONPATH": f"{REPOSITORY}"}
    inherited, other_end = socket.socketpair()  # one attack looks for an inherited descriptor
    with inherited, other_end:
        run = subprocess.run(
            [OWN_PYTHON, "-c", host.attack_program(code)],
            capture_output=True,
            text=True,
            check=False,
            cwd=directory,
            env=environ,
            timeout=DEADLINE_S,
            start_new_session=True,
            pass_fds=[inherited.fileno()],
        )
    assert "BREACH" in run.stdout, f"the attack failed without a jail: {run.stdout}{run.stderr}"


@contextmanager
def make_host() -> Iterator[Host]:
    """Create secrets in a file, in shared memory and in a process, and servers on sockets."""
    secret = canary()
    with ExitStack() as stack:
        directory = stack.enter_context(dir_for_all_users())
        file = directory / "secret"
        file.write_text(secret)
        shared_memory = Path(f"/dev/shm/escape-{secrets.token_hex(8)}")
        shared_memory.write_text(secret)
        stack.callback(shared_memory.unlink)
        environ = {"API_KEY": secret}
        argv = [sys.executable, "-c", "import sys; kept = bytearray(sys.argv[1], 'ascii'); sys.stdin.read()", secret]
        victim = stack.enter_context(
            subprocess.Popen(argv, stdin=subprocess.PIPE, env={**os.environ, **environ}, start_new_session=True)
        )
        stack.callback(victim.kill)
        socket_path = f"{directory}/socket"
        abstract_name = f"\0escape-{secrets.token_hex(8)}"
        tcp_server = stack.enter_context(_listening_socket(socket.AF_INET, ("127.0.0.1", 0)))
        stack.enter_context(_listening_socket(socket.AF_UNIX, socket_path))
        stack.enter_context(_listening_socket(socket.AF_UNIX, abstract_name))
        file.chmod(0o644)
        os.chmod(socket_path, 0o777)
        shared_memory.chmod(0o666)
        facts = {
            "file": str(file),
            "directory": str(directory),
            "shm": str(shared_memory),
            "victim_pid": victim.pid,  # the pid of a process with the secret
            "executor_pid": victim.pid,  # a target replaces this pid; a control has no executor
            "port": tcp_server.getsockname()[1],
            "path": socket_path,  # the path of a listening Unix socket
            "abstract": abstract_name,  # the name of a listening socket in the abstract namespace
            "name": socket.gethostname(),
            "is_jailed": False,
        }
        yield Host(facts, environ, secret)
        assert victim.poll() is None, "an attack killed a process of the host"


def _listening_socket(family: int, address: Any) -> socket.socket:
    server = socket.socket(family)
    server.bind(address)
    server.listen(64)
    return server


@contextmanager
def target(name: str, host: Host) -> Iterator[Target]:
    """Start the executor of a target. Skips the test if this machine does not support it."""
    level, _, user = name.partition(" as ")
    try:
        choose_level(level)
    except IsolationError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        executor_python, guest_python = sys.executable, OWN_PYTHON
        options: dict[str, Any] = {"env": {**os.environ, **host.environ}, "cwd": host.facts["directory"]}
        if user:
            if os.geteuid() != 0:
                pytest.skip(f"{name}: the tests run as an ordinary user already")
            executor_python = python_for_all_users(stack.enter_context(dir_for_all_users()))
            guest_python = str(Path(executor_python).resolve())
            options |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        elif level == "landlock":
            guest_python = reachable_python(guest_python)
        argv = [executor_python, "-X", f"secret={host.secret}"]
        with calling.executor(
            guest_python, server=argv, process_options=options, isolation=level, slots=SLOTS
        ) as caller:
            facts = {**host.facts, "is_jailed": True, "executor_pid": caller.process.pid}
            yield Target(name, caller, Host(facts, host.environ, host.secret))
