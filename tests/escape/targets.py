"""What is attacked: an executor at one level of isolation, as one identity, with secrets all around it.

An attack is code that says BREACH as soon as it has got hold of something. `Target.repels` runs it as a call and wants
it to come to its end without; `plainly` runs the same code where nothing stops it, and wants the BREACH. Attackers
know everything about the host but its secrets: pids, paths and ports are in `HOST`.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from sandbox.types import Call, Result, Status
from tests.executor import calling
from tests.executor.calling import OWN_PYTHON, Caller, call
from tests.jail.jails import REPOSITORY, dir_for_all_users, python_for_all_users, reachable_python

NAMES = ("nsjail", "namespaces", "namespaces as nobody", "landlock", "landlock as nobody")
NOBODY = 65_534
SLOTS = 4
DEADLINE_S = calling.DEADLINE_S

PRELUDE = r"""
import ctypes, errno, fcntl, os, re, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def raw(number, *arguments):
    ctypes.set_errno(0)
    got = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return got if got != -1 else -ctypes.get_errno()
def breach(what): os.write(1, f"BREACH {what}\n".encode())
def scan(data):
    for token in set(re.findall(rb"CANARY-\w{32}", data)): breach(token.decode())
def read(path, limit=1 << 20):
    try:
        with open(path, "rb", buffering=0) as file: return file.read(limit) or b""
    except OSError: return b""
def names(path):
    try: return os.listdir(path)
    except OSError: return []
def attempt(what, *arguments):
    try: return what(*arguments)
    except OSError as error: return error
# Where to write and what to change: everywhere in a jail. A control, which succeeds, has only a directory of its own,
# since it must not change the machine that the tests run on.
PLACES, SHARED, DEVICE = [".", HOST["directory"]], [HOST["file"]], HOST["file"]
if HOST["is_jailed"]:
    library = os.path.dirname(os.__file__)
    PLACES += [*"/tmp /var/tmp /dev/shm /run /run/lock /dev / /guest /python /home /root /mnt /srv /etc".split(),
               *"/proc/self /proc/1/cwd /proc/1/root /sys/fs/cgroup".split(), os.path.expanduser("~"), *filter(None, sys.path),
               os.path.dirname(sys.executable), library + "/site-packages", library + "/__pycache__"]
    SHARED += [os.__file__, sys.executable, "/etc/passwd", "/dev/null", "/dev/zero", "/guest/zygote.py", *PLACES[2:]]
    DEVICE = "/dev/null"
"""


def canary() -> str:
    return "CANARY-" + secrets.token_hex(16)


@dataclass(frozen=True)
class Host:
    """The machine around the jail, with its secrets; `facts` is what attackers know of it."""

    facts: dict[str, Any]
    environ: dict[str, str]
    secret: str
    """In the server's environment and command line, in files, in shared memory, and sent to whoever connects."""

    def with_facts(self, code: str) -> str:
        return f"HOST = {self.facts!r}\n{PRELUDE}\n{code}\nos.write(1, b'END\\n')\n"


class Target:
    """One executor under attack."""

    def __init__(self, name: str, caller: Caller, host: Host) -> None:
        self.name = name
        self.level, _, identity = name.partition(" as ")
        self.is_ordinary = bool(identity) or os.geteuid() != 0
        self.caller = caller
        self.host = host
        self.at_rest = len(self.processes())

    def run(self, code: str, **more: Any) -> Result:
        """One call that attacks, whatever comes of it."""
        return self.caller.run(self.host.with_facts(code), **more)

    def call(self, code: str, **more: Any) -> Call:
        return call(self.host.with_facts(code), **more)

    def resists(self, code: str, **more: Any) -> Result:
        """Run an attack to its end; it must not have got anything."""
        return resisted(self.run(code, **more))

    def processes(self) -> list[int]:
        """The executor and all below it; those that end while we scan do not count."""
        while self.caller.process.poll() is None:
            try:
                return self.caller.processes()
            except (FileNotFoundError, ProcessLookupError):
                continue
        pytest.fail("the executor has ended")

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The zygote and its calls stand still."""
        pids = [pid for pid in self.processes() if _is_zygote(pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def sleeping(self, code: str) -> Iterator[None]:
        """A call that has run `code` and then sleeps until this ends."""
        before = set(self.processes())
        seq = self.caller.submit(call(f"{code}\nimport time\ntime.sleep(1000)", timeout_s=300.0))
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not any(_sleeps(pid) for pid in set(self.processes()) - before):
                assert time.monotonic() < deadline, "it does not get to its sleep"
                time.sleep(0.01)
            yield
        finally:
            self.caller.send("cancel", [seq])

    def check_healthy(self) -> None:
        """Every slot still answers, at the first attempt, and as ever."""
        calls = [call(f"print({n} * 7)") for n in range(2 * self.caller.ready["slots"])]
        for n, result in enumerate(self.caller.run_all(calls)):
            assert (result.status, result.stdout, result.attempts) == (Status.OK, f"{n * 7}\n", 1), result


def _is_zygote(pid: int) -> bool:
    try:
        return b"zygote.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _sleeps(pid: int) -> bool:
    """Whether a process is in clock_nanosleep(2), or as much of it as we may know: that it sleeps."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().startswith("230 ")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:  # another user's, and in a container even root may not scan into it
        return bool(re.search(r"^State:\tS", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))


def resisted(result: Result) -> Result:
    assert "BREACH" not in result.stdout, result.stdout
    assert result.stdout.endswith("END\n"), f"the attack did not come to its end: {result}"
    return result


def skip_under_seccomp() -> None:
    """Skips a control where this process is itself under a seccomp filter, a container's for one, which may stop the
    attack too."""
    if "Seccomp:\t0" not in Path("/proc/self/status").read_text():
        pytest.skip("the control needs a process that no seccomp filter holds, so none in a container")


def succeeds_without_jail(host: Host, code: str, directory: Path) -> None:
    """The control: without a jail the attack succeeds, so that its failure in one means something."""
    skip_under_seccomp()
    environ = {**os.environ, "PYTHONPATH": f"{REPOSITORY}"}
    ours, theirs = socket.socketpair()  # something to inherit
    with ours, theirs:
        done = subprocess.run(
            [OWN_PYTHON, "-c", host.with_facts(code)],
            capture_output=True,
            text=True,
            check=False,
            cwd=directory,
            env=environ,
            timeout=DEADLINE_S,
            start_new_session=True,
            pass_fds=[ours.fileno()],
        )
    assert "BREACH" in done.stdout, f"stopped by something other than a jail: {done.stdout}{done.stderr}"


@contextmanager
def make_host() -> Iterator[Host]:
    """Secrets in files, environment, command line and memory of a process, shared memory, and behind sockets."""
    secret = canary()
    with ExitStack() as stack:
        directory = stack.enter_context(dir_for_all_users())
        file = directory / "secret"
        file.write_text(secret)
        shared = Path(f"/dev/shm/escape-{secrets.token_hex(8)}")
        shared.write_text(secret)
        stack.callback(shared.unlink)
        environ = {"API_KEY": secret}
        argv = [sys.executable, "-c", "import sys; kept = bytearray(sys.argv[1], 'ascii'); sys.stdin.read()", secret]
        victim = stack.enter_context(
            subprocess.Popen(argv, stdin=subprocess.PIPE, env={**os.environ, **environ}, start_new_session=True)
        )
        stack.callback(victim.kill)
        path = f"{directory}/socket"
        servers = [_server(socket.AF_INET, ("127.0.0.1", 0)), _server(socket.AF_UNIX, path)]
        abstract = f"\0escape-{secrets.token_hex(8)}"
        servers.append(_server(socket.AF_UNIX, abstract))
        for server in servers:
            stack.enter_context(server)
        file.chmod(0o644)
        os.chmod(path, 0o777)
        shared.chmod(0o666)
        facts = {
            "file": str(file),
            "directory": str(directory),
            "shm": str(shared),
            "pid": victim.pid,
            "server": victim.pid,
            "port": servers[0].getsockname()[1],
            "path": path,
            "abstract": abstract,
            "name": socket.gethostname(),
            "is_jailed": False,
        }
        yield Host(facts, environ, secret)
        assert victim.poll() is None, "an attack ended a process of the host"


def _server(family: int, address: Any) -> socket.socket:
    server = socket.socket(family)
    server.bind(address)
    server.listen(64)
    return server


@contextmanager
def target(name: str, host: Host) -> Iterator[Target]:
    """The executor of that name; skips, with the reason, where this machine does not grant it."""
    level, _, identity = name.partition(" as ")
    try:
        choose_level(level)
    except IsolationError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        server, guest = sys.executable, OWN_PYTHON
        options: dict[str, Any] = {"env": {**os.environ, **host.environ}, "cwd": host.facts["directory"]}
        if identity:
            if os.geteuid() != 0:
                pytest.skip(f"{name}: this is an ordinary user already")
            server = python_for_all_users(stack.enter_context(dir_for_all_users()))
            guest = str(Path(server).resolve())
            options |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        elif level == "landlock":
            guest = reachable_python(guest)
        argv = [server, "-X", f"secret={host.secret}"]
        with calling.executor(guest, server=argv, process_options=options, isolation=level, slots=SLOTS) as caller:
            facts = {**host.facts, "is_jailed": True, "server": caller.process.pid}
            yield Target(name, caller, Host(facts, host.environ, host.secret))
