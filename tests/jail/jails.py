"""Real jails for tests: start one around a few lines of Python, and talk to these over the guest's own socket."""

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
link = socket.socket(fileno=int(sys.argv[1]))
def tell(what): link.sendall(json.dumps(what).encode() + b"\\n")
def wait(): return link.recv(1)
def tried(call, *arguments):
    try: return str(call(*arguments))
    except OSError as why: return type(why).__name__ if why.errno is None else os.strerror(why.errno)
"""


def _filter() -> bytes:
    """What systemd's MemoryDenyWriteExecute refuses, of what matters here: mprotect(2) with PROT_EXEC, and mmap(2) with
    both rights."""
    number, rights = 0, 32  # in seccomp_data: the lower half of the third argument
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
"""Code after which memory that was written to cannot be executed, as systemd (either way) and SELinux have it."""


def without_executable_memory(denial: str) -> str:
    """That code; skips where the kernel does not know the first way."""
    code = NO_EXECUTABLE_MEMORY[denial]
    if subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode:
        pytest.skip(f"needs {denial} (Linux 6.3)")
    return code


class Jailed:
    """A running jail and our end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.process = process
        self.link = link
        self._answers = link.makefile("rb")

    def answer(self) -> Any:
        """The next thing that the guest tells, or an end to the test with what its stderr says."""
        line = self._answers.readline()
        if not line:
            self.link.close()
            assert self.process.stderr is not None
            pytest.fail(f"the guest ended ({self.process.wait(DEADLINE_S)}): {self.process.stderr.read().decode()}")
        return json.loads(line)

    def is_silent(self) -> bool:
        """Wait for the end of the stream: every process that held the guest's end is gone."""
        return self._answers.readline() == b""

    def refused(self) -> str:
        """Wait for a launcher that gives up; what it said."""
        _, said = self.process.communicate(timeout=DEADLINE_S)
        return said.decode()


@contextmanager
def started(spec: JailSpec, code: str | None, *, ordinary: bool = False) -> Iterator[Jailed]:
    """A jail that runs `code` in place of the zygote, or what the spec says; if `ordinary`, started by user nobody."""
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_S)
    if code is not None:
        spec = replace(spec, argv=(spec.guest_python, "-c", _PRELUDE + code, "{fd}"))
    with theirs:
        argv = launch_argv(spec, theirs.fileno())
        user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if ordinary else {}
        if ordinary:
            # Not this interpreter, which may lie in a home that others cannot enter; nor installed in that one.
            start = f"import sys; sys.path.insert(0, {str(staged())!r}); from {argv[3]} import main; main()"
            argv = [spec.python.executable, "-I", "-c", start, *argv[4:]]
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, **user)
    with ours, process:
        try:
            yield Jailed(process, ours)
        finally:
            process.kill()


def ask(spec: JailSpec, code: str, *, ordinary: bool = False) -> Any:
    """What `code` tells first."""
    with started(spec, code, ordinary=ordinary) as jail:
        return jail.answer()


def children(pid: int) -> list[int]:
    """The processes that `pid` forked, as the host counts them; none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> list[int]:
    return [pid, *(below for child in children(pid) for below in descendants(child))]


def host_uid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("Uid:")).split()[1])


def interpreter_of_minor(minor: int) -> str | None:
    """Some Python 3.`minor` of this machine, on PATH or from pyenv."""
    built = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/3.{minor}.*/bin/python3")))
    return built[-1] if built else shutil.which(f"python3.{minor}")


def system_python() -> str | None:
    """A Python that ordinary users can start, new enough for the launcher."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        said = _output([path, "-I", "-c", "import sys; print(sys.version_info >= (3, 11))"])
        if said.strip() == "True":
            return path
    return None


def is_passable(path: str) -> bool:
    """Whether any user can reach what is there."""
    ways = (Path(os.path.abspath(path)), Path(os.path.realpath(path)))
    return all(folder.stat().st_mode & 0o001 for way in ways for folder in way.parents)


def reachable_python(python: str) -> str:
    """`python`, or where we are root and only we can reach it, one that calls with uids of their own can; or a skip."""
    if os.geteuid() != 0 or is_passable(python):
        return python
    return system_python() or pytest.skip("uids of their own: needs a Python 3.11 that other users can reach")


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, wherever TMPDIR is. Not below pytest's own, which each pytest that starts
    closes to other users."""
    with tempfile.TemporaryDirectory(prefix="rstar-test-", dir=scratch_parent_dir(has_uids=True)) as name:
        os.chmod(name, 0o755)
        yield Path(name)


@cache
def staged() -> Path:
    """A copy of what a server imports, for servers of ordinary users: this checkout and its environment may lie in a
    home that only its owner can enter. It stays until this process ends."""
    names = _output([sys.executable, "-c", _IMPORTED]).split("\n")[:-1]
    stack = ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(open_folder())
    for path in map(Path, [f"{REPOSITORY}/sandbox/__init__.py", *names]):
        if path.name == "__init__.py":
            shutil.copytree(path.parent, folder / path.parent.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


_IMPORTED = """
import sandbox.executor.connection, sys
for name in sorted({name.partition(".")[0] for name in sys.modules} - {"sandbox"}):
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if "-packages" in file and not name.startswith("_"): print(file)
"""


def python_for_all(folder: Path) -> str:
    """An environment, made in `folder`, with what a server needs that an ordinary user can start, too; or a skip."""
    system = system_python()
    if system is None:
        pytest.skip("an ordinary user needs a Python 3.11 in /usr/bin or /usr/local/bin")
    home = folder / "environment"
    subprocess.run([system, "-m", "venv", "--without-pip", home], check=True, capture_output=True)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(f"{staged()}\n")
    return str(home / "bin/python")


def inside_a_user_namespace(*argv: str) -> subprocess.CompletedProcess[str]:
    """`argv` as root of a user namespace of util-linux's making, with one id and groups that cannot be changed; skips
    where there is none to be had."""
    inside = ("unshare", "--user", "--map-root-user")
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine grants no user namespace")
    return subprocess.run([*inside, *argv], capture_output=True, text=True, check=False, timeout=2 * DEADLINE_S)


def spec_for(
    python: Interpreter, uids: tuple[int | None, int], guest_dir: Path, level: Level = Level.NAMESPACES
) -> JailSpec:
    return JailSpec(level, python, str(guest_dir), ENV, (), *uids)


def _output(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=DEADLINE_S).stdout
    except OSError:
        return ""
