"""Tests of system calls that have no effect on other calls. In a call they work as outside of a jail."""

from __future__ import annotations

import os

import pytest

from sandbox.jail import Level
from sandbox.jail.root_fs import LOCALE_DIRS
from tests.executor.calling import Caller
from tests.guest.test_script import stdout_of

WORKING = {
    "the size of a pipe can be changed": """
import fcntl
r, w = os.pipe()
print(fcntl.fcntl(w, 1031, 1 << 15) == fcntl.fcntl(r, 1032) == 1 << 15)  # F_SETPIPE_SZ, F_GETPIPE_SZ
""",
    "advice for a file is accepted": """
fd = os.open("file", os.O_RDWR | os.O_CREAT)
for advice in range(6): os.posix_fadvise(fd, 0, 0, advice)
print(True)
""",
    "vectors are written and read with flags": """
fd = os.open("file", os.O_RDWR | os.O_CREAT)
written = [os.pwritev(fd, [b"ab", b"c"], 0, flags) for flags in (0, os.RWF_SYNC, os.RWF_DSYNC)]
print(written == [3] * 3 and os.pread(fd, 9, 0) == b"abc")
""",
    "a file is sent to a socket": """
import socket
with open("file", "wb") as file: file.write(bytes(range(256)) * 1000)
ours, theirs = socket.socketpair()
with open("file", "rb") as file:
    first, second = os.sendfile(ours.fileno(), file.fileno(), 1, 2), os.sendfile(ours.fileno(), file.fileno(), None, 3)
    print((first, second, theirs.recv(9), file.tell()) == (2, 3, bytes([1, 2, 0, 1, 2]), 3))
""",
    "a memory file is a file without a name": """
fd, other = os.memfd_create("name"), os.memfd_create("name", 0)
with open(fd, "w+b") as file:
    file.write(b"content"); file.seek(0)
    print(file.read() == b"content" and not os.get_inheritable(fd) and os.get_inheritable(other) and not os.listdir())
""",
    "removing a file that is not there raises FileNotFoundError, in a directory of the library too": """
for remove in (os.remove, os.unlink):
    try: remove(os.path.dirname(os.__file__) + "/not there")
    except FileNotFoundError: pass
print(True)
""",
}


@pytest.mark.parametrize("situation", WORKING)
def test_a_system_call_has_the_same_effect_as_outside_of_a_jail(guest: Caller, situation: str) -> None:
    assert stdout_of(guest.run(f"import os\n{WORKING[situation]}")) == "True\n"


def test_a_file_of_the_library_still_cannot_be_removed(guest: Caller) -> None:
    assert guest.run("import os\nos.remove(os.__file__)").error is not None


def test_memory_files_are_bounded_by_disk_mb(guest: Caller) -> None:
    code = """
import os
written = 0
try:
    while written < 1 << 26: written += os.write(os.memfd_create("name"), bytes(1 << 20))
except OSError as error: print(error.strerror)
"""
    assert stdout_of(guest.run(code, disk_mb=8)) in ("No space left on device\n", "Too many open files\n")


@pytest.mark.skipif(not any(map(os.path.isdir, LOCALE_DIRS)), reason="this machine has no locale C.UTF-8")
def test_the_locale_of_the_environment_is_there(guest: Caller) -> None:
    code = "import locale\nprint(locale.setlocale(locale.LC_ALL, ''))"
    assert stdout_of(guest.run(code)) == "C.UTF-8\n"


def test_the_user_of_a_call_is_known(guest: Caller) -> None:
    code = """
import grp, os, pathlib, pwd
user = pwd.getpwuid(os.getuid())
assert pathlib.Path().owner() == user.pw_name and os.path.expanduser("~" + user.pw_name) == user.pw_dir
group = grp.getgrgid(os.getgid())
print(user.pw_name, user.pw_dir, group.gr_name, group.gr_gid in os.getgrouplist(user.pw_name, user.pw_gid))
"""
    if guest.ready["isolation"] not in (Level.NAMESPACES, Level.NSJAIL):
        pytest.skip("without a root of its own a call sees the users of the machine")
    assert stdout_of(guest.run(code)) in ("sandbox /tmp sandbox True\n", "nobody / nogroup True\n")


def test_the_error_of_a_missing_program_says_that_the_sandbox_has_no_programs_but_python(guest: Caller) -> None:
    if guest.ready["isolation"] not in (Level.NAMESPACES, Level.NSJAIL):
        pytest.skip("without a root of its own a call sees the programs of the machine")
    result = guest.run("import subprocess\nsubprocess.run(['ls'])")
    assert result.error is not None and result.error.type == "FileNotFoundError"
    if not guest.ready["python"].startswith("3.10"):  # exceptions of Python 3.10 have no notes
        assert "The sandbox has no shell, and no programs but Python." in result.error.traceback
    result = guest.run("import os\nprint(os.WEXITSTATUS(os.system('ls')))")
    assert (result.stdout, result.stderr) == ("127\n", "The sandbox has no shell, and no programs but Python.\n")
