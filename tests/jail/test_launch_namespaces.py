"""Attacks on a jail from where its zygote stands: with every privilege that the zygote has, which calls do not."""

from __future__ import annotations

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
from tests.jail import jails
from tests.jail.conftest import Way, find

MOUNT = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
def call(name, *arguments):
    return "done" if getattr(libc, name)(*arguments) == 0 else os.strerror(ctypes.get_errno())
"""


def test_root_is_read_only(way: Way) -> None:
    code = """
places = ["/", "/dev", "/etc", "/guest", "/python", "/python/bin", "/tmp", os.path.dirname(os.__file__)]
writes = [tried(open, f"{place}/new", "w") for place in places]
tell([*writes, tried(open, "/guest/zygote.py", "r+"), tried(os.unlink, "/etc/passwd"), tried(os.chmod, "/tmp", 0o777)])
"""
    assert set(way.ask(code)) == {os.strerror(30)}  # EROFS


def test_root_cannot_be_made_writable_again(way: Way) -> None:
    code = (
        MOUNT
        + """
library = os.path.dirname(os.__file__).encode()
tell([call("mount", None, place, None, flags, None) for place in (b"/", library) for flags in (0x20, 0x1020)]
     + [call("umount2", library, 2)])
"""
    )
    assert "done" not in way.ask(code)


def test_host_files_are_absent(way: Way) -> None:
    code = """
seen = []
for folder, below, names in os.walk("/"):
    if folder.startswith("/python/"):
        below[:] = [name for name in below if folder == "/python/bin"]
    seen += [os.path.join(folder, name) for name in (*names, *below)]
tell(seen)
"""
    seen = set(way.ask(code))
    libraries = {target for _, target in way.spec.python.libraries}
    folders = {str(folder) for path in libraries for folder in Path(path).parents} - {"/"}
    own = {"/dev", "/etc", "/guest", "/python", "/tmp", "/python/bin", "/guest/zygote.py", "/guest/init.py"}
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "shm")}
    etc = {f"/etc/{name}" for name in ("passwd", "group", "hosts")}
    rest = {path for path in seen if not path.startswith("/python/")}
    assert rest == (libraries | folders | own | devices | etc) - {"/python/bin"}


def test_base_packages_are_not_those_of_the_environment(machine: None, guest_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True, capture_output=True)
    spec = jails.spec_for(Interpreter.find(str(bare / "bin/python")), (None, 0), guest_dir)
    code = """
import site
tell([name for folder in site.getsitepackages() if os.path.isdir(folder) for name in os.listdir(folder)])
"""
    assert jails.ask(spec, code) == []


def test_old_root_is_gone(way: Way) -> None:
    code = """
def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
up = "/" + "../" * 40
tell([os.path.samefile("/", up), [fd for fd in range(1024) if is_open(fd)], int(sys.argv[1]), os.getcwd()])
"""
    same, descriptors, fd, folder = way.ask(code)
    assert same
    assert descriptors == [0, 1, 2, fd]
    assert folder == "/"


def test_network_is_empty(way: Way) -> None:
    with socket.socket(socket.AF_UNIX) as host, socket.create_server(("127.0.0.1", 0)) as server:
        host.bind("\0jail-test")
        host.listen()
        code = f"""
abstract = tried(socket.socket(socket.AF_UNIX).connect, "\\0jail-test")
inet = tried(socket.socket().connect, ("127.0.0.1", {server.getsockname()[1]}))
tell([[name for _, name in socket.if_nameindex()], abstract, inet])
"""
        assert way.ask(code) == [["lo"], os.strerror(111), os.strerror(101)]  # ECONNREFUSED, ENETUNREACH


def test_zygote_is_not_pid_one(way: Way) -> None:
    pid, parent = way.ask("tell([os.getpid(), os.getppid()])")
    assert pid > 1
    assert parent == 1


def test_zygote_cannot_signal_the_host(way: Way) -> None:
    assert way.ask(f"tell([tried(os.kill, pid, 0) for pid in ({os.getpid()}, {os.getppid()})])") == [os.strerror(3)] * 2


def test_environment_is_clean(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the server")
    assert way.ask("tell(dict(os.environ))") == dict(way.spec.guest_env())


def test_no_memory_is_dumped_anywhere(way: Way) -> None:
    """At 1, not 0, which lets dumps go where kernel.core_pattern is a pipe; and no call may lower it."""
    assert way.ask("import resource\ntell(resource.getrlimit(resource.RLIMIT_CORE))") == [1, 1]


def test_host_name_stays_outside(way: Way) -> None:
    assert way.ask("tell(os.uname().nodename)") == launcher.HOSTNAME


def test_zygote_keeps_only_what_calls_need(way: Way) -> None:
    code = (
        MOUNT
        + """
data = (ctypes.c_uint32 * 6)()
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
bounding = [bit for bit in range(64) if libc.prctl(23, bit, 0, 0, 0) == 1]
tell([[bit for bit in range(64) if (data[0] | data[3] << 32) >> bit & 1], bounding, libc.prctl(39, 0, 0, 0, 0)])
"""
    )
    effective, bounding, no_new_privs = way.ask(code)
    assert set(effective) == set(bounding) == {*launcher.ZYGOTE_CAPABILITIES.values()}
    assert no_new_privs == 1


def test_zygote_can_set_up_a_call(way: Way) -> None:
    base = way.spec.uid_base
    code = (
        MOUNT
        + f"""
assert call("unshare", {kernel.CLONE_NEWPID}) == "done"
child = os.fork()
if child == 0:
    steps = [call("unshare", {kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS})]
    steps.append(call("mount", b"call", b"/tmp", b"tmpfs", 6, b"size=1m,mode=0777"))
    if {base is not None}:
        os.setgroups([]), os.setresgid(1003, 1003, 1003), os.setresuid(1003, 1003, 1003)
    else:
        libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    open("/tmp/mine", "w").write("x"), open("/dev/shm/mine2", "w"), open("/dev/urandom", "rb").read(1)
    steps.append(tried(open("/tmp/large", "wb", 0).write, bytes(2 << 20)))
    tell([os.getpid(), steps, sorted(os.listdir("/tmp")), call("mount", b"x", b"/tmp", b"tmpfs", 0, None)])
    wait()
    os._exit(0)
os.waitpid(child, 0)
"""
    )
    with way.started(code) as jail:
        pid, steps, files, mount = jail.answer()
        assert (pid, steps[:2]) == (1, ["done", "done"])
        assert int(steps[2]) <= 1 << 20
        assert files == ["large", "mine", "mine2"]
        assert mount == os.strerror(1)
        outside = 2 if way.spec.level is Level.NSJAIL else 0  # the launcher and nsjail, which only wait
        uids = {jails.host_uid(pid) for pid in jails.descendants(jail.process.pid)[outside:]}
        if base is not None:
            assert uids == {base, base + 1003}
        assert 0 not in uids


def test_orphans_are_reaped(way: Way) -> None:
    code = """
import time
end, other = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.write(other, str(os.getpid()).encode())
        os.close(other)
        os._exit(0)
    os._exit(0)
os.wait()
os.close(other)
orphan = int(os.read(end, 9))
deadline = time.monotonic() + 10
while tried(os.kill, orphan, 0) == "None" and time.monotonic() < deadline: time.sleep(0.001)
tell(tried(os.kill, orphan, 0))
"""
    assert way.ask(code) == os.strerror(3)  # ESRCH


@pytest.mark.parametrize(("code", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 11)", 139), ("", 0)])
def test_exit_status_is_forwarded(way: Way, code: str, status: int) -> None:
    with way.started(code) as jail:
        assert jail.process.wait(jails.DEADLINE_S) == status


FAMILY = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import signal
        for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
        tell("ready")
    signal_never_comes = os.read(os.pipe()[0], 1)
os.read(os.pipe()[0], 1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_outer_process_takes_the_jail_down(way: Way, number: signal.Signals) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    with way.started(FAMILY) as jail:
        assert jail.answer() == "ready"
        inside = [os.pidfd_open(pid) for pid in jails.descendants(jail.process.pid)[1:]]
        # Init, the guest, and its two; and nsjail.
        assert len(inside) == (5 if way.spec.level is Level.NSJAIL else 4)
        jail.process.send_signal(number)
        assert jail.process.wait(jails.DEADLINE_S) == -number
        assert jail.is_silent()
        for pidfd in inside:
            assert select.select([pidfd], [], [], jails.DEADLINE_S)[0], "a process of the jail outlived its launcher"
            os.close(pidfd)
    assert Path("/proc/self/mounts").read_text() == mounts


def test_the_end_of_the_guest_ends_what_it_started(way: Way) -> None:
    with way.started("if os.fork() == 0: os.read(os.pipe()[0], 1)") as jail:
        assert jail.process.wait(jails.DEADLINE_S) == 0
        assert jail.is_silent()


@pytest.mark.parametrize("level", [Level.NSJAIL, Level.NAMESPACES, Level.NONE])
def test_jail_lives_as_long_as_the_server_and_not_its_threads(
    request: pytest.FixtureRequest, machine: None, python: Interpreter, guest_dir: Path, level: Level
) -> None:
    if level is Level.NSJAIL:
        request.getfixturevalue("nsjail")
    ours, theirs = socket.socketpair()
    ours.settimeout(jails.DEADLINE_S)
    fd = theirs.fileno()
    code = f"import os, socket; s = socket.socket(fileno={fd}); s.send(b'up'); s.recv(1); s.send(b'on'); s.recv(1)"
    spec = JailSpec(level, python, str(guest_dir))
    spec = JailSpec(level, python, str(guest_dir), argv=(spec.guest_python, "-c", code))
    server = f"""
import subprocess, sys, threading
threading.Thread(target=lambda: subprocess.Popen({launch_argv(spec, fd)!r}, pass_fds=[{fd}])).start()
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", server], stdin=subprocess.PIPE, pass_fds=[fd]) as process:
        theirs.close()
        assert ours.recv(2) == b"up"
        ours.send(b".")
        assert ours.recv(2) == b"on"  # the thread that started it has ended
        process.kill()
        assert ours.recv(1) == b""
    ours.close()


def test_packages_of_the_runtime_work_inside(machine: None, guest_python: Path, guest_dir: Path) -> None:
    code = "import numpy, scipy.linalg, sympy, networkx, pandas, sqlite3, ssl, lzma; tell(int(numpy.ones(3).sum()))"
    assert jails.ask(jails.spec_for(find(str(guest_python)), (None, 0), guest_dir), code) == 3


@pytest.mark.parametrize("minor", [9, 10, 11, 12, 13])
def test_guest_may_be_any_python_from_3_9_to_3_13(machine: None, guest_dir: Path, minor: int) -> None:
    path = jails.interpreter_of_minor(minor)
    if path is None:
        pytest.skip(f"needs a Python 3.{minor} on PATH or from pyenv")
    code = "import math, ctypes, hashlib, sqlite3; tell([sys.version_info[1], sys.prefix, sys.executable])"
    found = jails.ask(jails.spec_for(find(path), (None, 0), guest_dir), code)
    assert found == [minor, "/python", "/python/bin/python3"]


def test_subprocess_with_an_empty_environment_finds_packages(way: Way) -> None:
    code = """
import site, subprocess
said = subprocess.run([sys.executable, "-c", "import sys; print(sys.path[1:])"], env={}, capture_output=True, text=True)
tell(said.stdout.strip() == str(sys.path[1:]) or [said.stdout, said.stderr, sys.path])
"""
    assert way.ask(code) is True


def test_missing_guest_folder_ends_the_start(way: Way) -> None:
    missing = replace(way.spec, guest_dir="/missing/guest")
    with jails.started(missing, "", ordinary=way.ordinary) as jail:
        assert "/missing/guest" in jail.refused()
        assert jail.process.returncode == launcher.EXIT_LAYER_REFUSED


def test_range_of_uids_that_is_not_ours_ends_the_start(way: Way) -> None:
    if not way.ordinary:
        pytest.skip(f"{way.name}: may map ranges")
    greedy = replace(way.spec, uid_base=20_000, uid_count=2000)
    with jails.started(greedy, "", ordinary=True) as jail:
        assert "id map" in jail.refused()
        assert jail.process.returncode == launcher.EXIT_LAYER_REFUSED


def test_program_that_is_not_there_is_named(way: Way) -> None:
    spec = replace(way.spec, argv=("/python/bin/other",))
    with jails.started(spec, None, ordinary=way.ordinary) as jail:
        assert "/python/bin/other" in jail.refused()
        assert jail.process.returncode == launcher.EXIT_CANNOT_START


def test_jail_without_argv_runs_the_zygote(way: Way) -> None:
    with jails.started(way.spec, None, ordinary=way.ordinary) as jail:
        assert jail.process.wait(jails.DEADLINE_S) == 3  # as the fixture's zygote.py says


def test_private_python_is_refused_by_name(machine: None, python: Interpreter, guest_dir: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: an ordinary user's calls run as that user")
    (tmp_path / "packages").mkdir(mode=0o700)
    private = replace(python, mounts=(*python.mounts, (str(tmp_path / "packages"), "/python/packages0")))
    with jails.started(jails.spec_for(private, (None, 0), guest_dir), "") as jail:
        assert str(tmp_path / "packages") in jail.refused()
