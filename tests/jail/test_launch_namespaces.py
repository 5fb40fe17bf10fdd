"""Attacks on a jail by code that runs in place of the zygote, the first program in a jail.

This code has the privileges of a zygote, so it can do more than the code of a call, which has no privileges.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.jail import Interpreter, JailSpec, Level, kernel, launch_argv, launcher
from sandbox.jail.root_fs import LOCALE_DIRS
from tests.jail import jails
from tests.jail.conftest import GUEST_EXIT_STATUS, JailSetup, find_interpreter

LIBC = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
def libc_call(name, *arguments):
    return "done" if getattr(libc, name)(*arguments) == 0 else os.strerror(ctypes.get_errno())
"""
"""The C library for the code in a jail. `libc_call` returns "done" or the text of the error."""


def test_root_is_read_only(jail_setup: JailSetup) -> None:
    code = """
directories = ["/", "/dev", "/etc", "/guest", "/python", "/python/bin", "/tmp", os.path.dirname(os.__file__)]
writes = [attempt(open, f"{path}/new", "w") for path in directories]
changes = [attempt(open, "/guest/zygote.py", "r+"), attempt(os.unlink, "/etc/passwd"), attempt(os.chmod, "/tmp", 0o777)]
send([*writes, *changes])
"""
    assert set(jail_setup.run(code)) == {os.strerror(errno.EROFS)}


def test_root_cannot_be_remounted_writable(jail_setup: JailSetup) -> None:
    remount, bind = kernel.MS_REMOUNT, kernel.MS_BIND
    code = f"""{LIBC}
stdlib = os.path.dirname(os.__file__).encode()
results = [libc_call("umount2", stdlib, {kernel.MNT_DETACH})]
for path in (b"/", stdlib):
    for flags in ({remount}, {remount | bind}): results.append(libc_call("mount", None, path, None, flags, None))
send(results)
"""
    assert "done" not in jail_setup.run(code)


def test_host_files_are_absent(jail_setup: JailSetup) -> None:
    code = """
paths = []
for directory, subdirs, names in os.walk("/"):
    if directory == "/": subdirs.remove("python")
    paths += [os.path.join(directory, name) for name in (*names, *subdirs)]
send(paths)
"""
    libraries = {target for _, target in jail_setup.spec.python.libraries}
    library_dirs = {str(directory) for path in libraries for directory in Path(path).parents} - {"/"}
    directories = {"/dev", "/etc", "/guest", "/tmp"}
    guest = {"/guest/zygote.py", "/guest/init.py"}
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "shm")}
    etc = {f"/etc/{name}" for name in ("passwd", "group", "hosts")}
    locale_dirs = [Path(path) for path in LOCALE_DIRS if os.path.isdir(path)]
    locale = {str(file) for path in locale_dirs for file in (path, *path.parents, *path.rglob("*"))} - {"/"}
    assert set(jail_setup.run(code)) == libraries | library_dirs | directories | guest | devices | etc | locale


def test_packages_of_the_base_interpreter_are_hidden_in_a_virtual_environment(
    isolation: None, guest_dir: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, capture_output=True)
    spec = jails.make_spec(Interpreter.find(str(environment / "bin/python")), (None, 0), guest_dir)
    code = """
import site
send([name for directory in site.getsitepackages() if os.path.isdir(directory) for name in os.listdir(directory)])
"""
    assert jails.run(spec, code) == []


def test_no_descriptor_or_parent_directory_leads_to_the_host(jail_setup: JailSetup) -> None:
    code = """
def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
far_up = "/" + "../" * 40
send([os.path.samefile("/", far_up), [fd for fd in range(1024) if is_open(fd)], int(sys.argv[1]), os.getcwd()])
"""
    root_has_no_parent, open_fds, socket_fd, working_dir = jail_setup.run(code)
    assert root_has_no_parent
    assert open_fds == [0, 1, 2, socket_fd]
    assert working_dir == "/"


def test_network_is_empty(jail_setup: JailSetup) -> None:
    with socket.socket(socket.AF_UNIX) as host, socket.create_server(("127.0.0.1", 0)) as server:
        host.bind("\0jail-test")
        host.listen()
        code = f"""
abstract = attempt(socket.socket(socket.AF_UNIX).connect, "\\0jail-test")
inet = attempt(socket.socket().connect, ("127.0.0.1", {server.getsockname()[1]}))
send([[name for _, name in socket.if_nameindex()], abstract, inet])
"""
        assert jail_setup.run(code) == [["lo"], os.strerror(errno.ECONNREFUSED), os.strerror(errno.ENETUNREACH)]


def test_zygote_is_not_pid_one(jail_setup: JailSetup) -> None:
    pid, parent = jail_setup.run("send([os.getpid(), os.getppid()])")
    assert pid > 1
    assert parent == 1


def test_zygote_cannot_signal_the_host(jail_setup: JailSetup) -> None:
    assert jail_setup.run(f"send(attempt(os.kill, {os.getpid()}, 0))") == os.strerror(errno.ESRCH)


def test_environment_is_clean(jail_setup: JailSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the server")
    assert jail_setup.run("send(dict(os.environ))") == dict(jail_setup.spec.guest_env())


def test_core_dumps_are_disabled(jail_setup: JailSetup) -> None:
    """The limit is 1 byte, not 0. With 0 the kernel would still send dumps to a program if kernel.core_pattern is a
    pipe."""
    assert jail_setup.run("import resource\nsend(resource.getrlimit(resource.RLIMIT_CORE))") == [1, 1]


def test_host_name_is_hidden(jail_setup: JailSetup) -> None:
    assert jail_setup.run("send(os.uname().nodename)") == launcher.HOSTNAME


def test_zygote_keeps_only_the_capabilities_to_confine_calls(jail_setup: JailSetup) -> None:
    code = f"""{LIBC}
sets = (ctypes.c_uint32 * 6)()
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets)  # version 3 of the structures in capget(2)
effective = [bit for bit in range(64) if (sets[0] | sets[3] << 32) >> bit & 1]
bounding = [bit for bit in range(64) if libc.prctl(23, bit, 0, 0, 0) == 1]  # PR_CAPBSET_READ
send([effective, bounding, libc.prctl(39, 0, 0, 0, 0)])  # PR_GET_NO_NEW_PRIVS
"""
    effective, bounding, no_new_privs = jail_setup.run(code)
    assert set(effective) == set(bounding) == {*launcher.ZYGOTE_CAPABILITIES.values()}
    assert no_new_privs == 1


def test_zygote_can_confine_a_call(jail_setup: JailSetup) -> None:
    uid_base, call_uid = jail_setup.spec.uid_base, 1003
    code = f"""{LIBC}
assert libc_call("unshare", {kernel.CLONE_NEWPID}) == "done"
child = os.fork()
if child == 0:
    unshared = libc_call("unshare", {kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS})
    mounted = libc_call("mount", b"call", b"/tmp", b"tmpfs", {kernel.MS_NOSUID | kernel.MS_NODEV}, b"size=1m,mode=0777")
    if {uid_base is not None}:
        os.setgroups([]), os.setresgid(*[{call_uid}] * 3), os.setresuid(*[{call_uid}] * 3)
    else:
        libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # no capabilities
    open("/tmp/a", "w").write("x"), open("/dev/shm/b", "w"), open("/dev/urandom", "rb").read(1)
    written_bytes = attempt(open("/tmp/large", "wb", 0).write, bytes(2 << 20))
    mounted_again = libc_call("mount", b"x", b"/tmp", b"tmpfs", 0, None)
    send([os.getpid(), unshared, mounted, written_bytes, sorted(os.listdir("/tmp")), mounted_again])
    wait()
    os._exit(0)
os.waitpid(child, 0)
"""
    with jail_setup.running(code) as jail:
        pid, unshared, mounted, written_bytes, files, mounted_again = jail.receive()
        assert (pid, unshared, mounted) == (1, "done", "done")
        assert int(written_bytes) <= 1 << 20  # the size of the tmpfs
        assert files == ["a", "b", "large"]
        assert mounted_again == os.strerror(errno.EPERM)
        # At level nsjail, the launcher and nsjail stay root on the host.
        host_processes = 2 if jail_setup.spec.level is Level.NSJAIL else 0
        uids = {jails.host_uid(pid) for pid in jails.tree_pids(jail.process.pid)[host_processes:]}
        if uid_base is not None:
            assert uids == {uid_base, uid_base + call_uid}
        assert 0 not in uids


def test_orphans_are_reaped(jail_setup: JailSetup) -> None:
    code = """
import time
readable, writable = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.write(writable, str(os.getpid()).encode())
        os.close(writable)
        os._exit(0)
    os._exit(0)
os.wait()
os.close(writable)
orphan = int(os.read(readable, 9))
deadline = time.monotonic() + 10
while attempt(os.kill, orphan, 0) == "None" and time.monotonic() < deadline: time.sleep(0.001)
send(attempt(os.kill, orphan, 0))
"""
    assert jail_setup.run(code) == os.strerror(errno.ESRCH)


@pytest.mark.parametrize(
    ("code", "status"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), 11)", 128 + signal.SIGSEGV), ("", 0)],
)
def test_exit_status_is_forwarded(jail_setup: JailSetup, code: str, status: int) -> None:
    with jail_setup.running(code) as jail:
        assert jail.process.wait(jails.DEADLINE_S) == status


TWO_DESCENDANTS = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import signal
        for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)  # SIGHUP, SIGINT, SIGTERM
        send("ready")
    os.read(os.pipe()[0], 1)
os.read(os.pipe()[0], 1)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_launcher_ends_the_jail(jail_setup: JailSetup, signum: signal.Signals) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    with jail_setup.running(TWO_DESCENDANTS) as jail:
        assert jail.receive() == "ready"
        pidfds = [os.pidfd_open(pid) for pid in jails.tree_pids(jail.process.pid)[1:]]
        # init, the guest, its two descendants, and at level nsjail the process nsjail
        assert len(pidfds) == (5 if jail_setup.spec.level is Level.NSJAIL else 4)
        jail.process.send_signal(signum)
        assert jail.process.wait(jails.DEADLINE_S) == -signum
        assert jail.is_closed()
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], jails.DEADLINE_S)[0], "a process of the jail outlived its launcher"
            os.close(pidfd)
    assert Path("/proc/self/mounts").read_text() == mounts


def test_processes_of_the_guest_end_with_the_guest(jail_setup: JailSetup) -> None:
    with jail_setup.running("if os.fork() == 0: os.read(os.pipe()[0], 1)") as jail:
        assert jail.process.wait(jails.DEADLINE_S) == 0
        assert jail.is_closed()


@pytest.mark.parametrize("level", [Level.NSJAIL, Level.NAMESPACES, Level.NONE])
def test_jail_outlives_the_thread_that_started_it_and_ends_with_the_server(
    request: pytest.FixtureRequest, isolation: None, python: Interpreter, guest_dir: Path, level: Level
) -> None:
    if level is Level.NSJAIL:
        request.getfixturevalue("nsjail_available")
    test_end, guest_end = socket.socketpair()
    test_end.settimeout(jails.DEADLINE_S)
    fd = guest_end.fileno()
    code = f"import os, socket; s = socket.socket(fileno={fd}); s.send(b'up'); s.recv(1); s.send(b'on'); s.recv(1)"
    spec = JailSpec(level, python, str(guest_dir))
    spec = replace(spec, argv=(spec.guest_python, "-c", code))
    server = f"""
import subprocess, sys, threading
threading.Thread(target=lambda: subprocess.Popen({launch_argv(spec, fd)!r}, pass_fds=[{fd}])).start()
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", server], stdin=subprocess.PIPE, pass_fds=[fd]) as process:
        guest_end.close()
        assert test_end.recv(2) == b"up"
        test_end.send(b".")
        assert test_end.recv(2) == b"on"  # the thread that started the jail has ended
        process.kill()
        assert test_end.recv(1) == b""
    test_end.close()


def test_packages_of_the_runtime_work_inside(isolation: None, guest_python: Path, guest_dir: Path) -> None:
    code = "import numpy, scipy.linalg, sympy, networkx, pandas, sqlite3, ssl, lzma; send(int(numpy.ones(3).sum()))"
    assert jails.run(jails.make_spec(find_interpreter(str(guest_python)), (None, 0), guest_dir), code) == 3


@pytest.mark.parametrize("minor", [9, 10, 11, 12, 13])
def test_guest_may_be_any_python_from_3_9_to_3_13(isolation: None, guest_dir: Path, minor: int) -> None:
    path = jails.find_python_minor(minor)
    if path is None:
        pytest.skip(f"needs a Python 3.{minor} on PATH or from pyenv")
    code = "import math, ctypes, hashlib, sqlite3; send([sys.version_info[1], sys.prefix, sys.executable])"
    spec = jails.make_spec(find_interpreter(path), (None, 0), guest_dir)
    assert jails.run(spec, code) == [minor, "/python", "/python/bin/python3"]


def test_subprocess_with_an_empty_environment_finds_packages(jail_setup: JailSetup) -> None:
    code = """
import site, subprocess
run = subprocess.run([sys.executable, "-c", "import sys; print(sys.path[1:])"], env={}, capture_output=True, text=True)
send(run.stdout.strip() == str(sys.path[1:]) or [run.stdout, run.stderr, sys.path])
"""
    assert jail_setup.run(code) is True


def test_a_missing_guest_directory_is_a_launch_error(jail_setup: JailSetup) -> None:
    missing = replace(jail_setup.spec, guest_dir="/missing/guest")
    with jails.running(missing, "", as_nobody=jail_setup.as_nobody) as jail:
        assert "/missing/guest" in jail.launch_error()
        assert jail.process.returncode == launcher.EXIT_LAYER_REFUSED


def test_a_uid_range_that_the_user_may_not_map_is_a_launch_error(jail_setup: JailSetup) -> None:
    if not jail_setup.as_nobody:
        pytest.skip(f"{jail_setup.name}: may map all ranges")
    foreign = replace(jail_setup.spec, uid_base=20_000, uid_count=2000)
    with jails.running(foreign, "", as_nobody=True) as jail:
        assert "id map" in jail.launch_error()
        assert jail.process.returncode == launcher.EXIT_LAYER_REFUSED


def test_a_missing_guest_program_is_named(jail_setup: JailSetup) -> None:
    spec = replace(jail_setup.spec, argv=("/python/bin/other",))
    with jails.running(spec, as_nobody=jail_setup.as_nobody) as jail:
        assert "/python/bin/other" in jail.launch_error()
        assert jail.process.returncode == launcher.EXIT_CANNOT_START


def test_jail_without_argv_runs_the_zygote(jail_setup: JailSetup) -> None:
    with jails.running(jail_setup.spec, as_nobody=jail_setup.as_nobody) as jail:
        assert jail.process.wait(jails.DEADLINE_S) == GUEST_EXIT_STATUS


def test_packages_that_calls_cannot_read_are_named(
    isolation: None, python: Interpreter, guest_dir: Path, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: an ordinary user's calls run as that user")
    (tmp_path / "packages").mkdir(mode=0o700)
    private = replace(python, mounts=(*python.mounts, (str(tmp_path / "packages"), "/python/packages0")))
    with jails.running(jails.make_spec(private, (None, 0), guest_dir), "") as jail:
        assert str(tmp_path / "packages") in jail.launch_error()
