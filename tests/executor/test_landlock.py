"""Tests of the isolation level `landlock` with a real executor.

Each call reaches its own scratch directory and no other one, and leaves nothing behind.

The executor is started by root, who gives each slot a uid of its own, and by an ordinary user. A slot is the set of
resources (uid, cgroup, scratch directory) that one call at a time uses.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import choose_level, kernel
from sandbox.types import Status
from tests.executor.calling import DEADLINE_S, OWN_PYTHON, Caller, call, executor, is_gone, wait_gone
from tests.jail import jails

DOCKER_CAPABILITIES = (
    "+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,+net_raw,+sys_chroot,+mknod,"
    "+audit_write,+setfcap"
)
"""Capabilities that Docker grants to root by default."""
SECRET = "of-the-server-3f1c"


@dataclass(frozen=True)
class Served:
    """A running executor whose scratch directories are in `temporary_dir`."""

    caller: Caller
    temporary_dir: Path
    has_uids: bool

    def output_of(self, code: str, **more: Any) -> str:
        """Run a call, assert that its status is OK, and return its standard output."""
        result = self.caller.run(code, **more)
        assert result.status is Status.OK, result
        return result.stdout

    @property
    def slot_dirs(self) -> Path:
        """The parent of the slots' directories."""
        (jail_dir,) = self.temporary_dir.iterdir()
        return jail_dir / "calls"


@contextmanager
def serving(user: str, **settings: Any) -> Iterator[Served]:
    """Start an executor as one of the users of the fixture `user`. Assert at the end that no scratch directory is
    left."""
    try:
        choose_level("landlock")
    except IsolationError as error:
        pytest.skip(str(error))
    server: tuple[str, ...] = (sys.executable,)
    guest_python, options = OWN_PYTHON, {}
    with jails.dir_for_all_users() as directory:
        temporary_dir = directory / "temporary"
        temporary_dir.mkdir()
        if user == "root":
            if os.geteuid() != 0:
                pytest.skip("root: this is an ordinary user")
            guest_python = jails.reachable_python(guest_python)
            if setpriv := shutil.which("setpriv"):
                server = (setpriv, "--bounding-set", f"-all,{DOCKER_CAPABILITIES}", sys.executable)
        elif user == "root, private Python":  # in a directory that only root may enter
            if kernel.CAP_SYS_ADMIN not in kernel.effective_capabilities():
                pytest.skip("root, private Python: needs CAP_SYS_ADMIN")
            home = directory / "home"
            home.mkdir(mode=0o700)
            subprocess.run([OWN_PYTHON, "-m", "venv", "--without-pip", home / "environment"], check=True)
            (home / "secret").write_text("for root alone")
            guest_python = f"{home}/environment/bin/python"
        elif os.geteuid() == 0:  # root becomes an ordinary user; any other user already is one
            server = (jails.python_for_all_users(directory),)
            guest_python = os.path.realpath(server[0])
            options = {"user": jails.NOBODY, "group": jails.NOBODY, "extra_groups": []}
            os.chown(temporary_dir, jails.NOBODY, jails.NOBODY)
        options |= {"env": {**os.environ, "TMPDIR": str(temporary_dir), "SECRET": SECRET}, "cwd": str(directory)}
        with executor(guest_python, server=server, process_options=options, isolation="landlock", **settings) as caller:
            yield Served(caller, temporary_dir, user != "ordinary user")
            processes = caller.processes()
        wait_gone(processes)  # init exits last and has removed the directory
        assert [*temporary_dir.iterdir()] == []


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_root_can_have_a_private_temporary_directory(mode: int) -> None:
    """pam_tmpdir creates a temporary directory with mode 0700. The uids of calls cannot enter this directory, so the
    scratch directories of calls are in another one."""
    if os.geteuid() != 0:
        pytest.skip("root: this is an ordinary user")
    with jails.dir_for_all_users() as directory:
        temporary_dir = directory / "temporary"
        temporary_dir.mkdir()
        temporary_dir.chmod(mode)
        options = {"env": {**os.environ, "TMPDIR": str(temporary_dir)}}
        guest_python = jails.reachable_python(OWN_PYTHON)
        with executor(guest_python, process_options=options, isolation="landlock") as caller:
            result = caller.run("import os, tempfile; open('own', 'w'); print(os.getcwd() == tempfile.gettempdir())")
            assert (result.status, result.stdout) == (Status.OK, "True\n"), result
            assert len([*temporary_dir.iterdir()]) == (mode == 0o755)
            processes = caller.processes()
        wait_gone(processes)


@pytest.fixture(scope="module", params=["root", "root, private Python", "ordinary user"])
def user(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(user: str) -> Iterator[Served]:
    with serving(user) as served:
        yield served


def test_a_call_sees_only_python_in_a_private_directory() -> None:
    with serving("root, private Python") as served:
        code = """
import json, os, subprocess, sys
home = os.path.dirname(os.path.dirname(os.path.dirname(sys.executable)))
print(sys.prefix == f"{home}/environment", os.path.exists(f"{home}/secret"), os.stat(home).st_mode & 0o777 == 0o755)
print(subprocess.run([sys.executable, "-c", "import decimal; print(1)"], capture_output=True, text=True).stdout)
"""
        assert served.output_of(code) == "True False True\n1\n\n"
        home = served.temporary_dir.parent / "home"
        assert (home / "secret").exists() and home.stat().st_mode & 0o777 == 0o700
        assert str(home) not in Path("/proc/self/mounts").read_text()


def test_a_call_can_use_its_scratch_directory(served: Served) -> None:
    code = """
import os, sys, tempfile
open("a", "w").write("x" * 100_000)
os.makedirs("b/c"); os.rename("a", "b/c/a"); os.symlink("b", "d"); os.mkfifo("e")
here = os.getcwd()
assert sys.path[0] == os.environ["HOME"] == tempfile.gettempdir() == here
print(os.path.getsize("d/c/a"), sorted(os.listdir()), tempfile.TemporaryFile().write(b"xy"))
"""
    assert served.output_of(code) == "100000 ['b', 'd', 'e'] 2\n"


LIBRARY_CODES = {
    "imports": "import csv, ctypes, decimal, hashlib, http.client, multiprocessing, unittest, zipfile",
    "time zones": "import zoneinfo\ntry: zoneinfo.ZoneInfo('Europe/Rome')\nexcept zoneinfo.ZoneInfoNotFoundError: pass",
    "MIME types": "import mimetypes; assert mimetypes.guess_type('a.html')[0] == 'text/html'",
    "users": "import getpass, pwd\ngetpass.getuser()\ntry: pwd.getpwuid(os.getuid())\nexcept KeyError: pass",
    "machine": "import platform; platform.platform(), platform.libc_ver(), os.cpu_count(), uuid.getnode()",
    "database": "import sqlite3; b = sqlite3.connect('x'); b.execute('create table t (n)'); b.commit(); b.close()",
    "threads": "from concurrent.futures import *\nwith ThreadPoolExecutor() as pool: assert [*pool.map(abs, [-1])]",
    "terminal": "import sys; assert not os.isatty(0) and not sys.stdin.read()",
    "null": "assert open('/dev/null', 'r+b').write(b'x') == 1 and os.urandom(3) and open('/dev/urandom', 'rb').read(2)",
}


@pytest.mark.parametrize("code", LIBRARY_CODES.values(), ids=LIBRARY_CODES)
def test_the_standard_library_works(served: Served, code: str) -> None:
    assert served.output_of(f"import os, uuid\n{code}\nprint('done')") == "done\n"


def test_input_and_returned_files_work(served: Served) -> None:
    code = "open('out', 'w').write(open('a/in').read() * 2)"
    result = served.caller.run(code, files={"a/in": b"xy"}, return_files=["out"])
    assert (result.status, result.files) == (Status.OK, {"out": b"xyxy"})


def test_a_call_finds_no_files_of_earlier_calls(served: Served) -> None:
    code = "import os; print(os.listdir()); open('mark', 'w'); os.mkdir('f'); open('f/g', 'w')"
    for _ in range(8):
        assert served.output_of(code) == "[]\n"


FORBIDDEN = {
    "host file": "open('/etc/passwd')",
    "host directory": "os.listdir('/etc')",
    "root": "os.listdir('/')",
    "processes": "os.listdir('/proc')",
    "own environment": "open('/proc/self/environ')",
    "environment of the server": f"open('/proc/{os.getpid()}/environ')",
    "temporary directory": "os.listdir(TEMPORARY)",
    "directories of other calls": "os.listdir(SLOT_DIRS)",
    "sources of the server": f"open({__file__!r})",
    "writing to sources of the server": f"open({__file__!r}, 'a')",
    "writing to the temporary directory": "open(TEMPORARY + '/x', 'w')",
    "a file beside directories of calls": "open(SLOT_DIRS + '/x', 'w')",
    "a directory beside directories of calls": "os.mkdir(SLOT_DIRS + '/x')",
    "writing to Python's library": "open(os.__file__, 'a')",
    "emptying Python's library": "os.truncate(os.__file__, 0)",
    "emptying Python's library by opening": "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "removing from Python's library": "os.unlink(os.__file__)",
    "linking a host file": "os.link(os.__file__, 'x')",
    "moving the scratch directory": "os.rename(os.getcwd(), SLOT_DIRS + '/x')",
    "making a device": "os.mknod('x', 0o20666, os.makedev(1, 8))",
    "running a host program": "os.execv('/bin/sh', ['sh'])",
    "extended attributes": "os.setxattr('.', 'user.x', b'1')",
    "priorities": "os.setpriority(os.PRIO_PROCESS, 0, 5)",
    "other users": "os.setuid(0)",
    "network": "__import__('socket').socket()",
}


@pytest.mark.parametrize("attempt", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_call_cannot_reach_anything_else(served: Served, attempt: str) -> None:
    constants = f"import os\nTEMPORARY, SLOT_DIRS = {str(served.temporary_dir)!r}, {str(served.slot_dirs)!r}\n"
    code = f"""{constants}
try: {attempt}
except PermissionError: print("refused")
except OSError as error: print("refused" if error.errno == {errno.EXDEV} else error)  # EXDEV: another mount
"""
    assert served.output_of(code) == "refused\n"
    assert os.access(os.__file__, os.R_OK), "no attempt has removed it"


def test_a_call_does_not_see_the_environment_of_the_server(served: Served) -> None:
    assert SECRET not in served.output_of("import os; print(dict(os.environ))")


def start_sleeper(served: Served, code: str) -> tuple[int, Path]:
    """Start a call that runs `code`, creates the file `ready`, and sleeps; return its seq and its scratch directory."""
    files_before = {*served.slot_dirs.glob("*/tmp/ready")}
    seq = served.caller.submit(call(f"{code}\nopen('ready', 'w').close()\nimport time\ntime.sleep(1000)"))
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:  # only the file shows that the call has started
        if new_files := {*served.slot_dirs.glob("*/tmp/ready")} - files_before:
            return seq, new_files.pop().parent
        time.sleep(0.01)
    pytest.fail("the call did not start")


def cancel(served: Served, seq: int, directory: Path) -> None:
    """Cancel a call and wait until its scratch directory is removed."""
    served.caller.send("cancel", [seq])
    deadline = time.monotonic() + DEADLINE_S
    while directory.exists():
        assert time.monotonic() < deadline, "the directory is still there"
        time.sleep(0.01)


def test_the_scratch_directory_of_another_call_is_out_of_reach(served: Served) -> None:
    seq, directory = start_sleeper(served, "open('secret', 'w').write('mine')")
    for attempt in (
        "open(OTHER + '/secret')",
        "open(OTHER + '/x', 'w')",
        "os.listdir(OTHER)",
        "os.unlink(OTHER + '/ready')",
    ):
        code = f"import os\nOTHER = {str(directory)!r}\ntry: {attempt}\nexcept PermissionError: print('refused')"
        assert served.output_of(code) == "refused\n", attempt
    assert (directory / "secret").read_text() == "mine"
    cancel(served, seq, directory)


def test_a_call_has_no_capabilities(served: Served) -> None:
    seq, directory = start_sleeper(served, "import os\nopen('pid', 'w').write(str(os.getpid()))")
    status = Path(f"/proc/{(directory / 'pid').read_text()}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {""}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert len(set(fields["Uid"].split())) == len(set(fields["Gid"].split())) == 1
    if served.has_uids:
        assert int(fields["Uid"].split()[0]) >= 10_000, "no uid of the host"
        assert fields["Groups"].strip() == ""
    cancel(served, seq, directory)


def test_each_slot_has_its_own_uid(served: Served) -> None:
    if not served.has_uids:
        pytest.skip("all calls share one uid here")
    sleepers = [start_sleeper(served, "import os\nopen('uid', 'w').write(str(os.getuid()))") for _ in range(3)]
    uids = {(directory / "uid").read_text() for _, directory in sleepers}
    assert len(uids) == 3
    for sleeper in sleepers:
        cancel(served, *sleeper)


def test_the_number_of_processes_is_limited_or_forking_is_refused(served: Served) -> None:
    code = """
import os, time
started = 0
try:
    while True:
        if os.fork() == 0: time.sleep(1000)
        started += 1
except OSError as error: print(started, type(error).__name__)
"""
    expected = "5 BlockingIOError\n" if served.has_uids else "0 PermissionError\n"
    assert served.output_of(code, processes=6) == expected


def test_exit_codes_and_signals_are_those_of_the_call(served: Served) -> None:
    ends = ["os.abort()", "os.kill(os.getpid(), 9)", "signal.raise_signal(15)", "os._exit(3)"]
    results = [served.caller.run(f"import os, signal; {end}") for end in ends]
    assert [(result.exit_code, result.signal) for result in results] == [(None, 6), (None, 9), (None, 15), (3, None)]


def host_pids_of(uid: int) -> list[int]:
    """Pids of all processes of a uid, without zombies."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit() and not is_gone(int(name)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pids += [int(name)] if jails.host_uid(int(name)) == uid else []
    return pids


CODES_THAT_LEAVE_PROCESSES = {
    "daemon": "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(1000)\n os._exit(0)\nos.wait()",
    "many children": "for _ in range(20):\n if os.fork() == 0: time.sleep(1000)",
    "ignored signals": "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 13, 15, 17)]\n"
    "if os.fork() == 0: time.sleep(1000)",
    "stopped child": "if os.fork() == 0: os.kill(os.getpid(), 19)\ntime.sleep(0.05)",
    "other program": "import subprocess, sys\n"
    "subprocess.Popen([sys.executable, '-c', 'while True: 0'], start_new_session=True)",
    "fork bomb": "signal.alarm(1)\nwhile True:\n try: os.fork()\n except OSError: pass",
}


@pytest.mark.parametrize("name", CODES_THAT_LEAVE_PROCESSES)
def test_no_process_outlives_its_call(served: Served, name: str) -> None:
    code = f"import os, signal, time\nprint(os.getuid(), flush=True)\n{CODES_THAT_LEAVE_PROCESSES[name]}"
    result = served.caller.run(code, timeout_s=20)
    uid = int(result.stdout.split()[0])
    if served.has_uids:
        assert result.status in (Status.OK, Status.KILLED), result
        assert uid != os.getuid()
        assert host_pids_of(uid) == []
    else:  # without uids a call may not fork
        assert result.error is not None
        assert result.error.type == "PermissionError" or name == "fork bomb", "the fork bomb catches the error"
    assert served.output_of("import os; print(os.listdir())") == "[]\n"


HOSTILE_TREES = {
    "deep": "for _ in range(1500): os.mkdir('d'); os.chdir('d')",
    "many": "for n in range(3000): open(str(n), 'w').close()",
    "wide and deep": "for n in range(40): os.makedirs('/'.join([f'{n}{c}' for c in 'abcdefghij']))",
    "links": "[os.symlink(p, str(n)) for n, p in enumerate((TARGET, TARGET + '/kept', '/', '..', '.', '/dev/null'))]",
    "hard names": r"[open(name, 'w').close() for name in ('-rf', '*', '\n', '\udcff', 'x' * 255, ' ')]",
    "pipes": "os.mkfifo('a'); os.mkdir('b'); os.mkfifo('b/c')",
    "closed": "os.makedirs('a/b'); open('a/b/d', 'w').close(); "
    "[ignore_refusal(os.chmod, path, 0) for path in ('a/b', 'a', '.')]",
}


@pytest.mark.parametrize("creation", HOSTILE_TREES.values(), ids=HOSTILE_TREES)
def test_a_hostile_directory_tree_is_removed_and_no_other_file(served: Served, creation: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    code = f"""
import os
TARGET = {str(tmp_path)!r}
def ignore_refusal(function, *arguments):
    try: function(*arguments)
    except PermissionError: pass
{creation}
"""
    assert served.output_of(code, timeout_s=60) == ""
    assert served.output_of("import os; print(os.listdir())") == "[]\n"
    deadline = time.monotonic() + DEADLINE_S
    # A directory with "." in its name has been moved aside and is being emptied.
    while [path for path in served.slot_dirs.iterdir() if "." in path.name]:
        assert time.monotonic() < deadline, "a directory is left"
        time.sleep(0.01)
    assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.parametrize("user", ["root", "ordinary user"], indirect=True)  # the place of Python makes no difference
@pytest.mark.parametrize("victim", ["launcher", "init", "both", "zygote", "child zygote"])
def test_a_killed_jail_leaves_nothing_and_is_restarted(victim: str, user: str) -> None:
    with serving(user, profiles=("bare", "numeric")) as served:
        executor_pid = served.caller.process.pid
        (launcher,) = jails.children(executor_pid)
        (init,) = jails.children(launcher)
        (zygote,) = jails.children(init)
        template, child_zygote = jails.children(zygote)
        not_calls = executor_pid, launcher, init, zygote, template, child_zygote, *jails.children(child_zygote)
        daemon = CODES_THAT_LEAVE_PROCESSES["daemon"] if served.has_uids else ""
        seq, directory = start_sleeper(
            served, f"import os, time\nprint(os.getuid())\n{daemon}\nopen('left', 'w').close()"
        )
        running = [pid for pid in served.caller.processes() if pid not in not_calls]
        assert running
        pid_of = {"launcher": launcher, "init": init, "zygote": zygote, "child zygote": child_zygote}
        for pid in (launcher, init) if victim == "both" else (pid_of[victim],):
            os.kill(pid, 9)
        if victim == "child zygote":
            cancel(served, seq, directory)
        wait_gone(running)
        for _ in range(8):
            assert served.output_of("import os; print(os.listdir())") == "[]\n"
