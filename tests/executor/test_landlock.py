"""Level `landlock` from end to end, as root with uids for its calls and as an ordinary user: each call finds its own
folder and nothing else, and leaves nothing behind."""

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

DOCKERS = (
    "+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,+net_raw,+sys_chroot,+mknod,"
    "+audit_write,+setfcap"
)
"""What Docker leaves to root."""
SECRET = "of-the-server-3f1c"


@dataclass(frozen=True)
class Served:
    """A running executor, whose jail's folder is in `temporary`."""

    caller: Caller
    temporary: Path
    has_uids: bool

    def said(self, code: str, **more: Any) -> str:
        """What a call prints that ends well."""
        result = self.caller.run(code, **more)
        assert result.status is Status.OK, result
        return result.stdout

    @property
    def places(self) -> Path:
        (jail,) = self.temporary.iterdir()
        return jail / "calls"


@contextmanager
def serving(who: str, **settings: Any) -> Iterator[Served]:
    try:
        choose_level("landlock")
    except IsolationError as why:
        pytest.skip(str(why))
    server: tuple[str, ...] = (sys.executable,)
    guest, options = OWN_PYTHON, {}
    with jails.dir_for_all_users() as folder:
        temporary = folder / "temporary"
        temporary.mkdir()
        if who == "root":
            if os.geteuid() != 0:
                pytest.skip("root: this is an ordinary user")
            guest = jails.reachable_python(guest)
            if setpriv := shutil.which("setpriv"):
                server = (setpriv, "--bounding-set", f"-all,{DOCKERS}", sys.executable)
        elif who == "root at home":
            if kernel.CAP_SYS_ADMIN not in kernel.effective_capabilities():
                pytest.skip("root at home: needs CAP_SYS_ADMIN")
            home = folder / "home"
            home.mkdir(mode=0o700)
            subprocess.run([OWN_PYTHON, "-m", "venv", "--without-pip", home / "environment"], check=True)
            (home / "secret").write_text("for root alone")
            guest = f"{home}/environment/bin/python"
        elif os.geteuid() == 0:
            server = (jails.python_for_all_users(folder),)
            guest = os.path.realpath(server[0])
            options = {"user": jails.NOBODY, "group": jails.NOBODY, "extra_groups": []}
            os.chown(temporary, jails.NOBODY, jails.NOBODY)
        options |= {"env": {**os.environ, "TMPDIR": str(temporary), "SECRET": SECRET}, "cwd": str(folder)}
        with executor(guest, server=server, process_options=options, isolation="landlock", **settings) as caller:
            yield Served(caller, temporary, who != "ordinary user")
            processes = caller.processes()
        wait_gone(processes)  # init is the last, and has removed the folder
        assert [*temporary.iterdir()] == []


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_root_with_a_private_temporary_folder(mode: int) -> None:
    """As pam_tmpdir makes one: no uid of a call may enter it, so calls write elsewhere."""
    if os.geteuid() != 0:
        pytest.skip("root: this is an ordinary user")
    with jails.dir_for_all_users() as folder:
        temporary = folder / "temporary"
        temporary.mkdir()
        temporary.chmod(mode)
        options = {"env": {**os.environ, "TMPDIR": str(temporary)}}
        guest = jails.reachable_python(OWN_PYTHON)
        with executor(guest, process_options=options, isolation="landlock") as caller:
            result = caller.run("import os, tempfile; open('own', 'w'); print(os.getcwd() == tempfile.gettempdir())")
            assert (result.status, result.stdout) == (Status.OK, "True\n"), result
            assert len([*temporary.iterdir()]) == (mode == 0o755)
            processes = caller.processes()
        wait_gone(processes)


@pytest.fixture(scope="module", params=["root", "root at home", "ordinary user"])
def who(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(who: str) -> Iterator[Served]:
    with serving(who) as served:
        yield served


def test_python_in_a_private_folder_is_shared_and_nothing_beside_it() -> None:
    with serving("root at home") as served:
        code = """
import json, os, subprocess, sys
home = os.path.dirname(os.path.dirname(os.path.dirname(sys.executable)))
print(sys.prefix == f"{home}/environment", os.path.exists(f"{home}/secret"), os.stat(home).st_mode & 0o777 == 0o755)
print(subprocess.run([sys.executable, "-c", "import decimal; print(1)"], capture_output=True, text=True).stdout)
"""
        assert served.said(code) == "True False True\n1\n\n"
        home = served.temporary.parent / "home"
        assert (home / "secret").exists() and home.stat().st_mode & 0o777 == 0o700
        assert str(home) not in Path("/proc/self/mounts").read_text()


def test_call_works_in_a_folder_of_its_own(served: Served) -> None:
    code = """
import os, sys, tempfile
open("a", "w").write("x" * 100_000)
os.makedirs("b/c"); os.rename("a", "b/c/a"); os.symlink("b", "d"); os.mkfifo("e")
here = os.getcwd()
assert sys.path[0] == os.environ["HOME"] == tempfile.gettempdir() == here
print(os.path.getsize("d/c/a"), sorted(os.listdir()), tempfile.TemporaryFile().write(b"xy"))
"""
    assert served.said(code) == "100000 ['b', 'd', 'e'] 2\n"


LIBRARY = {
    "imports": "import csv, ctypes, decimal, hashlib, http.client, multiprocessing, unittest, zipfile",
    "time zones": "import zoneinfo\ntry: zoneinfo.ZoneInfo('Europe/Rome')\nexcept zoneinfo.ZoneInfoNotFoundError: pass",
    "kinds of files": "import mimetypes; assert mimetypes.guess_type('a.html')[0] == 'text/html'",
    "users": "import getpass, pwd\ngetpass.getuser()\ntry: pwd.getpwuid(os.getuid())\nexcept KeyError: pass",
    "machine": "import platform; platform.platform(), platform.libc_ver(), os.cpu_count(), uuid.getnode()",
    "database": "import sqlite3; b = sqlite3.connect('x'); b.execute('create table t (n)'); b.commit(); b.close()",
    "threads": "from concurrent.futures import *\nwith ThreadPoolExecutor() as pool: assert [*pool.map(abs, [-1])]",
    "terminal": "import sys; assert not os.isatty(0) and not sys.stdin.read()",
    "null": "assert open('/dev/null', 'r+b').write(b'x') == 1 and os.urandom(3) and open('/dev/urandom', 'rb').read(2)",
}


@pytest.mark.parametrize("what", LIBRARY)
def test_library_works(served: Served, what: str) -> None:
    assert served.said(f"import os, uuid\n{LIBRARY[what]}\nprint('done')") == "done\n"


def test_files_come_and_go(served: Served) -> None:
    code = "open('out', 'w').write(open('a/in').read() * 2)"
    result = served.caller.run(code, files={"a/in": b"xy"}, return_files=["out"])
    assert (result.status, result.files) == (Status.OK, {"out": b"xyxy"})


def test_nothing_of_a_call_is_left_to_the_next(served: Served) -> None:
    code = "import os; print(os.listdir()); open('mark', 'w'); os.mkdir('f'); open('f/g', 'w')"
    for _ in range(8):
        assert served.said(code) == "[]\n"


HIDDEN = {
    "host file": "open('/etc/passwd')",
    "host folder": "os.listdir('/etc')",
    "root": "os.listdir('/')",
    "processes": "os.listdir('/proc')",
    "own environment": "open('/proc/self/environ')",
    "environment of the server": f"open('/proc/{os.getpid()}/environ')",
    "temporary folder": "os.listdir(TEMPORARY)",
    "folders of others": "os.listdir(PLACES)",
    "sources of the server": f"open({__file__!r})",
    "writing into it": f"open({__file__!r}, 'a')",
    "writing to the temporary folder": "open(TEMPORARY + '/x', 'w')",
    "writing among the folders": "open(PLACES + '/x', 'w')",
    "a folder among the folders": "os.mkdir(PLACES + '/x')",
    "writing to Python's library": "open(os.__file__, 'a')",
    "emptying Python's library": "os.truncate(os.__file__, 0)",
    "emptying it by opening": "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "removing from Python's library": "os.unlink(os.__file__)",
    "linking a host file": "os.link(os.__file__, 'x')",
    "moving the folder away": "os.rename(os.getcwd(), PLACES + '/x')",
    "making a device": "os.mknod('x', 0o20666, os.makedev(1, 8))",
    "running a host program": "os.execv('/bin/sh', ['sh'])",
    "notes on files": "os.setxattr('.', 'user.x', b'1')",
    "priorities": "os.setpriority(os.PRIO_PROCESS, 0, 5)",
    "other users": "os.setuid(0)",
    "network": "__import__('socket').socket()",
}


@pytest.mark.parametrize("what", HIDDEN)
def test_refused(served: Served, what: str) -> None:
    names = f"import os\nTEMPORARY, PLACES = {str(served.temporary)!r}, {str(served.places)!r}\n"
    code = f"""{names}
try: {HIDDEN[what]}
except PermissionError: print("refused")
except OSError as why: print("refused" if why.errno == {errno.EXDEV} else why)  # a file of a mount that is not its own
"""
    assert served.said(code) == "refused\n"
    assert os.access(os.__file__, os.R_OK)


def test_environment_is_the_guests(served: Served) -> None:
    assert SECRET not in served.said("import os; print(dict(os.environ))")


def started(served: Served, code: str) -> tuple[int, Path]:
    """A call that runs `code`, makes the file `ready`, and sleeps: its number, and its folder."""
    known = {*served.places.glob("*/tmp/ready")}
    seq = served.caller.submit(call(f"{code}\nopen('ready', 'w').close()\nimport time\ntime.sleep(1000)"))
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:  # it has no other way to tell us
        if found := {*served.places.glob("*/tmp/ready")} - known:
            return seq, found.pop().parent
        time.sleep(0.01)
    pytest.fail("the call did not start")


def cancel(served: Served, seq: int, folder: Path) -> None:
    served.caller.send("cancel", [seq])
    deadline = time.monotonic() + DEADLINE_S
    while folder.exists():
        assert time.monotonic() < deadline, "the folder is still there"
        time.sleep(0.01)


def test_folder_of_a_running_call_is_out_of_reach(served: Served) -> None:
    seq, folder = started(served, "open('secret', 'w').write('mine')")
    for attempt in (
        "open(OTHER + '/secret')",
        "open(OTHER + '/x', 'w')",
        "os.listdir(OTHER)",
        "os.unlink(OTHER + '/ready')",
    ):
        code = f"import os\nOTHER = {str(folder)!r}\ntry: {attempt}\nexcept PermissionError: print('refused')"
        assert served.said(code) == "refused\n", attempt
    assert (folder / "secret").read_text() == "mine"
    cancel(served, seq, folder)


def test_call_holds_no_privilege(served: Served) -> None:
    seq, folder = started(served, "import os\nopen('pid', 'w').write(str(os.getpid()))")
    status = Path(f"/proc/{(folder / 'pid').read_text()}/status").read_text()
    said = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {said[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {""}
    assert (said["NoNewPrivs"], said["Seccomp"]) == ("1", "2")
    assert len(set(said["Uid"].split())) == len(set(said["Gid"].split())) == 1
    if served.has_uids:
        assert int(said["Uid"].split()[0]) >= 10_000
        assert said["Groups"].strip() == ""
    cancel(served, seq, folder)


def test_slots_have_uids_of_their_own(served: Served) -> None:
    if not served.has_uids:
        pytest.skip("one uid for all calls: nothing to tell apart")
    sleepers = [started(served, "import os\nopen('uid', 'w').write(str(os.getuid()))") for _ in range(3)]
    uids = {(folder / "uid").read_text() for _, folder in sleepers}
    assert len(uids) == 3
    for sleeper in sleepers:
        cancel(served, *sleeper)


def test_processes_are_bounded_or_none(served: Served) -> None:
    code = """
import os, time
started = 0
try:
    while True:
        if os.fork() == 0: time.sleep(1000)
        started += 1
except OSError as why: print(started, type(why).__name__)
"""
    expected = "5 BlockingIOError\n" if served.has_uids else "0 PermissionError\n"
    assert served.said(code, processes=6) == expected


def test_ends_as_it_says(served: Served) -> None:
    ends = ["os.abort()", "os.kill(os.getpid(), 9)", "signal.raise_signal(15)", "os._exit(3)"]
    results = [served.caller.run(f"import os, signal; {end}") for end in ends]
    assert [(result.exit_code, result.signal) for result in results] == [(None, 6), (None, 9), (None, 15), (3, None)]


def host_pids_of(uid: int) -> list[int]:
    """Every process of a uid, zombies apart."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and not is_gone(int(name)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [int(name)] if jails.host_uid(int(name)) == uid else []
    return found


OUTLIVING = {
    "daemon": "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(1000)\n os._exit(0)\nos.wait()",
    "many": "for _ in range(20):\n if os.fork() == 0: time.sleep(1000)",
    "deaf": "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 13, 15, 17)]\nif os.fork() == 0: time.sleep(1000)",
    "stopped": "if os.fork() == 0: os.kill(os.getpid(), 19)\ntime.sleep(0.05)",
    "executed": "import subprocess as s, sys\ns.Popen([sys.executable, '-c', 'while True: 0'], start_new_session=True)",
    "bomb": "signal.alarm(1)\nwhile True:\n try: os.fork()\n except OSError: pass",
}


@pytest.mark.parametrize("what", OUTLIVING)
def test_nothing_outlives_its_call(served: Served, what: str) -> None:
    code = f"import os, signal, time\nprint(os.getuid(), flush=True)\n{OUTLIVING[what]}"
    result = served.caller.run(code, timeout_s=20)
    uid = int(result.stdout.split()[0])
    if served.has_uids:
        assert result.status in (Status.OK, Status.KILLED), result
        assert uid != os.getuid()
        assert host_pids_of(uid) == []
    else:  # it may start nothing in the first place
        assert result.error is not None
        assert (result.error.type, what) == ("PermissionError", what) or what == "bomb"
    assert served.said("import os; print(os.listdir())") == "[]\n"


HOSTILE = {
    "deep": "for _ in range(1500): os.mkdir('d'); os.chdir('d')",
    "many": "for n in range(3000): open(str(n), 'w').close()",
    "wide and deep": "for n in range(40): os.makedirs('/'.join([f'{n}{c}' for c in 'abcdefghij']))",
    "links": "[os.symlink(p, str(n)) for n, p in enumerate((TARGET, TARGET + '/kept', '/', '..', '.', '/dev/null'))]",
    "hard names": r"[open(name, 'w').close() for name in ('-rf', '*', '\n', '\udcff', 'x' * 255, ' ')]",
    "pipes": "os.mkfifo('a'); os.mkdir('b'); os.mkfifo('b/c')",
    "closed": "os.makedirs('a/b'); open('a/b/d', 'w').close(); [tried(os.chmod, p, 0) for p in ('a/b', 'a', '.')]",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_folder_is_removed_and_nothing_else(served: Served, what: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    code = f"""
import os
TARGET = {str(tmp_path)!r}
def tried(what, *arguments):
    try: what(*arguments)
    except PermissionError: pass
{HOSTILE[what]}
"""
    assert served.said(code, timeout_s=60) == ""
    assert served.said("import os; print(os.listdir())") == "[]\n"
    deadline = time.monotonic() + DEADLINE_S
    while [place for place in served.places.iterdir() if "." in place.name]:  # what a child of the zygote is emptying
        assert time.monotonic() < deadline, "a folder is left"
        time.sleep(0.01)
    assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.parametrize("victim", ["launcher", "init", "both", "zygote", "child zygote"])
def test_a_jail_that_is_killed_is_swept_and_started_anew(victim: str, who: str) -> None:
    with serving(who, profiles=("bare", "numeric")) as served:
        executor_pid = served.caller.process.pid
        (launcher,) = jails.children(executor_pid)
        (init,) = jails.children(launcher)
        (zygote,) = jails.children(init)
        (child_zygote,) = jails.children(zygote)
        daemon = OUTLIVING["daemon"] if served.has_uids else ""
        seq, folder = started(served, f"import os, time\nprint(os.getuid())\n{daemon}\nopen('left', 'w').close()")
        running = [
            pid for pid in served.caller.processes() if pid not in (executor_pid, launcher, init, zygote, child_zygote)
        ]
        assert running
        alone = {"launcher": launcher, "init": init, "zygote": zygote, "child zygote": child_zygote}
        for pid in (launcher, init) if victim == "both" else (alone[victim],):
            os.kill(pid, 9)
        if victim == "child zygote":
            cancel(served, seq, folder)
        wait_gone(running)
        for _ in range(8):
            assert served.said("import os; print(os.listdir())") == "[]\n"
