"""Starts real jails around a few lines of Python, which send messages to the test over the guest's socket."""

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
from sandbox.jail.syscalls import NUMBERS

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 30
NOBODY = 65_534
ENV = {"LANG": "C.UTF-8", "WHO": "guest"}
"""Environment in the spec of each jail."""

_PRELUDE = """
import json, os, socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
def send(message): sock.sendall(json.dumps(message).encode() + b"\\n")
def wait(): return sock.recv(1)
def attempt(call, *arguments):
    try: return str(call(*arguments))
    except OSError as error: return type(error).__name__ if error.errno is None else os.strerror(error.errno)
"""
"""Functions for the code in a jail. `attempt` returns the text of a call's result or error."""


def _write_execute_filter() -> bytes:
    """Return a filter like that of systemd's MemoryDenyWriteExecute.

    It refuses mprotect(2) with PROT_EXEC, and mmap(2) of memory that is both writable and executable.
    """
    number, rights = 0, 32  # offsets in seccomp_data: the number, and the low half of the third argument
    numbers = NUMBERS[os.uname().machine]
    executable, writable_and_executable = 0b100, 0b110
    return bpf.assemble(
        [
            bpf.Instruction(bpf.LOAD, number),
            bpf.Instruction(bpf.IF_EQUAL, numbers["mprotect"], yes="mprotect"),
            bpf.Instruction(bpf.IF_EQUAL, numbers["mmap"], no="allow"),
            bpf.Instruction(bpf.LOAD, rights),
            bpf.Instruction(bpf.AND, writable_and_executable),
            bpf.Instruction(bpf.IF_EQUAL, writable_and_executable, yes="refuse", no="allow"),
            bpf.Instruction(bpf.LOAD, rights, label="mprotect"),
            bpf.Instruction(bpf.AND, executable),
            bpf.Instruction(bpf.IF_EQUAL, 0, yes="allow"),
            bpf.Instruction(bpf.RETURN, seccomp.EPERM, label="refuse"),
            bpf.Instruction(bpf.RETURN, seccomp.ALLOW, label="allow"),
        ]
    )


NO_EXECUTABLE_MEMORY = {
    "PR_SET_MDWE": "import ctypes; assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0\n",
    "a filter": f"""
import ctypes, struct
libc, program = ctypes.CDLL(None), ctypes.create_string_buffer({_write_execute_filter()!r})
header = struct.pack("HxxxxxxP", {len(_write_execute_filter()) // 8}, ctypes.addressof(program))  # struct sock_fprog
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, header, 0, 0) == 0  # PR_SET_SECCOMP
""",
}
"""By name: code after which a process cannot execute memory that it has written. systemd has both options. SELinux can
have the same effect."""


def without_executable_memory(denial: str) -> str:
    """Return the code in `NO_EXECUTABLE_MEMORY` for this denial. Skips the test if the kernel does not support it."""
    code = NO_EXECUTABLE_MEMORY[denial]
    if subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode:
        pytest.skip(f"needs {denial} (Linux 6.3)")
    return code


class RunningJail:
    """A running jail, and the test's end of the guest's socket."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process = process
        self.sock = sock
        self._lines = sock.makefile("rb")

    def receive(self) -> Any:
        """Return the guest's next message. If the guest has ended, fail the test with the guest's stderr."""
        line = self._lines.readline()
        if not line:
            self.sock.close()
            assert self.process.stderr is not None
            pytest.fail(f"the guest ended ({self.process.wait(DEADLINE_S)}): {self.process.stderr.read().decode()}")
        return json.loads(line)

    def is_closed(self) -> bool:
        """Wait for the end of the stream. Then no process has the guest's end of the socket open any more."""
        return self._lines.readline() == b""

    def launch_error(self) -> str:
        """Wait for a launcher that fails, and return its stderr."""
        _, stderr = self.process.communicate(timeout=DEADLINE_S)
        return stderr.decode()


@contextmanager
def running(spec: JailSpec, code: str | None = None, *, as_nobody: bool = False) -> Iterator[RunningJail]:
    """Start a jail that runs `code`, or the spec's own program if `code` is None, and kill it at the end."""
    test_end, guest_end = socket.socketpair()
    test_end.settimeout(DEADLINE_S)
    if code is not None:
        spec = replace(spec, argv=(spec.guest_python, "-c", _PRELUDE + code, "{fd}"))
    with guest_end:
        argv = launch_argv(spec, guest_end.fileno())
        user: dict[str, Any] = {}
        if as_nobody:
            user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            # Start the launcher by a Python, and from a copy of this package, that user nobody can read.
            _, _, _, module, *arguments = argv  # python -I -m MODULE ...
            start = f"import sys; sys.path.insert(0, {str(copied_packages())!r}); from {module} import main; main()"
            argv = [spec.python.executable, "-I", "-c", start, *arguments]
        process = subprocess.Popen(argv, pass_fds=[guest_end.fileno()], stderr=subprocess.PIPE, **user)
    with test_end, process:
        try:
            yield RunningJail(process, test_end)
        finally:
            process.kill()


def run(spec: JailSpec, code: str, *, as_nobody: bool = False) -> Any:
    """Run `code` in a jail and return its first message."""
    with running(spec, code, as_nobody=as_nobody) as jail:
        return jail.receive()


def children(pid: int) -> list[int]:
    """Return the host pids of the children of a process. There are none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def tree_pids(pid: int) -> list[int]:
    """Return the process ids of a process and all its descendants, the process first."""
    return [pid, *(descendant for child in children(pid) for descendant in tree_pids(child))]


def host_uid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("Uid:")).split()[1])


def find_python_minor(minor: int) -> str | None:
    """Find a Python 3.`minor` of this machine, from pyenv or on PATH."""
    from_pyenv = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/3.{minor}.*/bin/python3")))
    return from_pyenv[-1] if from_pyenv else shutil.which(f"python3.{minor}")


def system_python() -> str | None:
    """Find a Python that ordinary users can start and that is new enough for the launcher."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        output = _stdout_of([path, "-I", "-c", "import sys; print(sys.version_info >= (3, 11))"])
        if output.strip() == "True":
            return path
    return None


def all_users_can_reach(path: str) -> bool:
    link_and_target = (Path(os.path.abspath(path)), Path(os.path.realpath(path)))
    return all(parent.stat().st_mode & 0o001 for file in link_and_target for parent in file.parents)


def reachable_python(python: str) -> str:
    """Return a Python that calls with their own uids can reach: `python` or another one. Skips if there is none."""
    if os.geteuid() != 0 or all_users_can_reach(python):
        return python
    return system_python() or pytest.skip("own uids: needs a Python 3.11 that other users can reach")


@contextmanager
def dir_for_all_users() -> Iterator[Path]:
    """Create a directory that all users can enter, unlike the temporary directories of pytest."""
    with tempfile.TemporaryDirectory(prefix="rstar-test-", dir=scratch_parent_dir(has_uids=True)) as name:
        os.chmod(name, 0o755)
        yield Path(name)


@cache
def copied_packages() -> Path:
    """Return a directory with a copy of all packages that a server imports, for servers of ordinary users.

    This checkout and its environment may lie in a home that only its owner can enter. The copy exists until this
    process ends.
    """
    files = _stdout_of([sys.executable, "-c", _PRINT_IMPORTED_FILES]).splitlines()
    stack = ExitStack()
    atexit.register(stack.close)
    directory = stack.enter_context(dir_for_all_users())
    for path in map(Path, [f"{REPOSITORY}/sandbox/__init__.py", *files]):
        if path.name == "__init__.py":
            shutil.copytree(path.parent, directory / path.parent.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, directory)
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory


_PRINT_IMPORTED_FILES = """
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
    """Run `argv` as root of a user namespace with one id, in which groups cannot be changed.

    Skips the test if unshare(1) cannot create such a namespace.
    """
    unshare = ("unshare", "--user", "--map-root-user")
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine grants no user namespace")
    return subprocess.run([*unshare, *argv], capture_output=True, text=True, check=False, timeout=2 * DEADLINE_S)


def make_spec(
    python: Interpreter, uids: tuple[int | None, int], guest_dir: Path, level: Level = Level.NAMESPACES
) -> JailSpec:
    return JailSpec(level, python, str(guest_dir), ENV, (), *uids)


def _stdout_of(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=DEADLINE_S).stdout
    except OSError:
        return ""
