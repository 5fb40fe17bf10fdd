"""Real jails for tests: starts one around a few lines of Python, which send messages over the guest's socket."""

from __future__ import annotations

import atexit
import glob
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sandbox.jail import Interpreter, JailSpec, Level, bpf, launch_argv, scratch_parent_dir, seccomp

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 30
NOBODY = 65_534
ENV = {"LANG": "C.UTF-8", "WHO": "guest"}

_PRELUDE = """
import json, os, socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
def send(message): sock.sendall(json.dumps(message).encode() + b"\\n")
def wait(): return sock.recv(1)
def attempt(call, *arguments):
    try: return str(call(*arguments))
    except OSError as error: return type(error).__name__ if error.errno is None else os.strerror(error.errno)
"""


def _filter() -> bytes:
    """Return a filter that, like systemd's MemoryDenyWriteExecute, refuses mprotect(2) with PROT_EXEC and mmap(2) of
    memory that is both writable and executable."""
    number, rights = 0, 32  # offsets in seccomp_data: the number, and the low half of the third argument
    mmap_, mprotect, writable_and_executable = 9, 10, 0b110
    return bpf.assemble(
        [
            bpf.Instruction(bpf.LOAD, number),
            bpf.Instruction(bpf.IF_EQUAL, mprotect, yes="mprotect"),
            bpf.Instruction(bpf.IF_EQUAL, mmap_, no="allow"),
            bpf.Instruction(bpf.LOAD, rights),
            bpf.Instruction(bpf.AND, writable_and_executable),
            bpf.Instruction(bpf.IF_EQUAL, writable_and_executable, yes="refuse", no="allow"),
            bpf.Instruction(bpf.LOAD, rights, label="mprotect"),
            bpf.Instruction(bpf.AND, 0b100),
            bpf.Instruction(bpf.IF_EQUAL, 0, yes="allow"),
            bpf.Instruction(bpf.RETURN, seccomp.EPERM, label="refuse"),
            bpf.Instruction(bpf.RETURN, seccomp.ALLOW, label="allow"),
        ]
    )


NO_EXECUTABLE_MEMORY = {
    "PR_SET_MDWE": "import ctypes; assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0\n",
    "a filter": f"""
import ctypes, struct
libc, program = ctypes.CDLL(None), ctypes.create_string_buffer({_filter()!r})
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, and PR_SET_SECCOMP
assert libc.prctl(22, 2, struct.pack("HxxxxxxP", {len(_filter()) // 8}, ctypes.addressof(program)), 0, 0) == 0
""",
}
"""Code after which a process cannot execute memory that it has written, as under systemd (both ways) and SELinux."""


def without_executable_memory(denial: str) -> str:
    """Return this code. Skips the test if the kernel lacks PR_SET_MDWE."""
    code = NO_EXECUTABLE_MEMORY[denial]
    if subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode:
        pytest.skip(f"needs {denial} (Linux 6.3)")
    return code


class RunningJail:
    """A running jail and the test's end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process = process
        self.sock = sock
        self._lines = sock.makefile("rb")

    def receive(self) -> Any:
        """Return the guest's next message. Fails the test with the guest's stderr if it has ended."""
        line = self._lines.readline()
        if not line:
            self.sock.close()
            assert self.process.stderr is not None
            pytest.fail(f"the guest ended ({self.process.wait(DEADLINE_S)}): {self.process.stderr.read().decode()}")
        return json.loads(line)

    def is_closed(self) -> bool:
        """Wait for the end of the stream, when no process has the guest's end open any more."""
        return self._lines.readline() == b""

    def launch_error(self) -> str:
        """Wait for a launcher that fails, and return its stderr."""
        _, stderr = self.process.communicate(timeout=DEADLINE_S)
        return stderr.decode()


@contextmanager
def running(spec: JailSpec, code: str | None, *, as_nobody: bool = False) -> Iterator[RunningJail]:
    """Start a jail that runs `code`, or without it the spec's own program, and kill it at the end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_S)
    if code is not None:
        spec = replace(spec, argv=(spec.guest_python, "-c", _PRELUDE + code, "{fd}"))
    with theirs:
        argv = launch_argv(spec, theirs.fileno())
        user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if as_nobody else {}
        if as_nobody:
            # By a Python and a copy of this package that user nobody can read.
            start = f"import sys; sys.path.insert(0, {str(copied_packages())!r}); from {argv[3]} import main; main()"
            argv = [spec.python.executable, "-I", "-c", start, *argv[4:]]
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, **user)
    with ours, process:
        try:
            yield RunningJail(process, ours)
        finally:
            process.kill()


def run(spec: JailSpec, code: str, *, as_nobody: bool = False) -> Any:
    """Run `code` in a jail and return its first message."""
    with running(spec, code, as_nobody=as_nobody) as jail:
        return jail.receive()


def children(pid: int) -> list[int]:
    """Return the host pids of the children of `pid`; none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> list[int]:
    return [pid, *(below for child in children(pid) for below in descendants(child))]


def host_uid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("Uid:")).split()[1])


def find_python_minor(minor: int) -> str | None:
    """Find a Python 3.`minor` of this machine, on PATH or from pyenv."""
    built = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/3.{minor}.*/bin/python3")))
    return built[-1] if built else shutil.which(f"python3.{minor}")


def system_python() -> str | None:
    """Find a Python that ordinary users can start and that is new enough for the launcher."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        output = _stdout_of([path, "-I", "-c", "import sys; print(sys.version_info >= (3, 11))"])
        if output.strip() == "True":
            return path
    return None


def all_users_can_reach(path: str) -> bool:
    names = (Path(os.path.abspath(path)), Path(os.path.realpath(path)))
    return all(parent.stat().st_mode & 0o001 for name in names for parent in name.parents)


def reachable_python(python: str) -> str:
    """Return a Python that calls with their own uids can reach: `python` or another one. Skips if there is none."""
    if os.geteuid() != 0 or all_users_can_reach(python):
        return python
    return system_python() or pytest.skip("own uids: needs a Python 3.11 that other users can reach")


@contextmanager
def dir_for_all_users() -> Iterator[Path]:
    """Create a directory that all users can enter. It is not below pytest's own, which other users cannot enter."""
    with tempfile.TemporaryDirectory(prefix="rstar-test-", dir=scratch_parent_dir(has_uids=True)) as name:
        os.chmod(name, 0o755)
        yield Path(name)


@cache
def copied_packages() -> Path:
    """Return a directory with a copy of all packages that a server imports, for servers of ordinary users.

    This checkout and its environment may lie in a home that only its owner can enter. The copy exists until this
    process ends.
    """
    names = _stdout_of([sys.executable, "-c", _IMPORTED]).split("\n")[:-1]
    stack = ExitStack()
    atexit.register(stack.close)
    directory = stack.enter_context(dir_for_all_users())
    for path in map(Path, [f"{REPOSITORY}/sandbox/__init__.py", *names]):
        if path.name == "__init__.py":
            shutil.copytree(path.parent, directory / path.parent.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, directory)
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory


_IMPORTED = """
import sandbox.executor.connection, sys
for name in sorted({name.partition(".")[0] for name in sys.modules} - {"sandbox"}):
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if "-packages" in file and not name.startswith("_"): print(file)
"""


def python_for_all_users(directory: Path) -> str:
    """Create an environment in `directory` in which ordinary users can start a server. Skips if there is no Python."""
    system = system_python()
    if system is None:
        pytest.skip("an ordinary user needs a Python 3.11 in /usr/bin or /usr/local/bin")
    environment = directory / "environment"
    subprocess.run([system, "-m", "venv", "--without-pip", environment], check=True, capture_output=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(f"{copied_packages()}\n")
    return str(environment / "bin/python")


def run_in_user_namespace(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run `argv` as root of a user namespace made by unshare(1), with one id and groups that cannot be changed.

    Skips the test if there is none.
    """
    inside = ("unshare", "--user", "--map-root-user")
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine grants no user namespace")
    return subprocess.run([*inside, *argv], capture_output=True, text=True, check=False, timeout=2 * DEADLINE_S)


def make_spec(
    python: Interpreter, uids: tuple[int | None, int], guest_dir: Path, level: Level = Level.NAMESPACES
) -> JailSpec:
    return JailSpec(level, python, str(guest_dir), ENV, (), *uids)


def _stdout_of(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=DEADLINE_S).stdout
    except OSError:
        return ""
