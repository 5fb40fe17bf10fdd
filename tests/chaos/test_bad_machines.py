"""Tests of `serve` and `doctor` on machines that lack something, which is taken away from one process and its children.

`serve` ends with one line that says what to do, or it runs calls at the level that it announces. `doctor` says the same
level, and the row of what is missing is not ok. Clocks that jump are in test_clocks.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import bpf, choose_level, kernel
from sandbox.jail.seccomp import ALLOW, ENOSYS, EPERM
from sandbox.jail.syscalls import NUMBERS
from tests.executor.calling import OWN_PYTHON
from tests.jail.jails import reachable_python

EINVAL = 0x00050016
"""The result of a filter that gives EINVAL, as a kernel does that lacks an option."""
FIRST_ARGUMENT = 16
"""Offset of the low half of the first argument in struct seccomp_data."""
PR_SET_SECCOMP = 22
PRIVATE_MOUNTS = (
    "kernel.unshare(kernel.CLONE_NEWNS)\n"
    "kernel.mount('none', '/', flags=kernel.MS_REC | kernel.MS_PRIVATE)\n"
)  # fmt: skip


def filter_code(*refusals: tuple[str, int | None, int]) -> str:
    """Return code that loads a filter. A refusal is (system call, bits of its first argument or None, result)."""
    program = []
    for number, (name, bits, result) in enumerate(refusals):
        other = f"other {number}"
        syscall = NUMBERS[os.uname().machine][name]
        program += [bpf.Instruction(bpf.LOAD, 0), bpf.Instruction(bpf.IF_EQUAL, syscall, no=other)]
        if bits is not None:
            program += [bpf.Instruction(bpf.LOAD, FIRST_ARGUMENT), bpf.Instruction(bpf.AND, bits)]
            program += [bpf.Instruction(bpf.IF_EQUAL, bits, no=other)]
        program += [bpf.Instruction(bpf.RETURN, result), bpf.Instruction(bpf.LOAD, 0, label=other)]
    code = bpf.assemble([*program, bpf.Instruction(bpf.RETURN, ALLOW)])
    return f"kernel.set_no_new_privs()\nkernel.load_seccomp({code!r})\n"


@dataclass(frozen=True)
class Situation:
    code: str
    """Code that makes the situation, before the server starts."""
    level: str | None
    """The strongest level that can hold, or None if `serve` must end."""
    row: str | None
    """The row of `doctor` that names what is missing, or None if nothing is."""
    text: str = ""
    """Text in the only line of a `serve` that ends."""
    needs_root: bool = False


SITUATIONS = {
    "a kernel without user namespaces": Situation(
        filter_code(("unshare", kernel.CLONE_NEWUSER, EINVAL)), "landlock", "namespaces"
    ),
    "a container engine's filter": Situation(
        filter_code(("unshare", None, EPERM), ("clone3", None, ENOSYS)), "landlock", "seccomp_filter"
    ),
    "user.max_user_namespaces = 0": Situation(
        "from sandbox.jail import userns\nuserns.enter_as_root()\n"
        "with open('/proc/sys/user/max_user_namespaces', 'w') as file: file.write('0')\n",
        "landlock",
        "max_user_namespaces",
    ),
    "a kernel without seccomp": Situation(
        filter_code(("prctl", PR_SET_SECCOMP, EINVAL), ("seccomp", None, EINVAL)),
        None,
        "seccomp_filter",
        "this machine lacks seccomp",
    ),
    "a kernel without Landlock": Situation(filter_code(("landlock_create_ruleset", None, ENOSYS)), "namespaces", None),
    "a kernel without Landlock and user namespaces": Situation(
        filter_code(("landlock_create_ruleset", None, ENOSYS), ("unshare", None, EPERM)),
        None,
        "landlock",
        "this machine lacks Landlock",
    ),
    "a read-only cgroup tree": Situation(
        PRIVATE_MOUNTS
        + "from sandbox import machine\n"
        + "flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY\n"
        + "for path in {str(path) for _, path, _ in machine.own_cgroups()}: kernel.mount('none', path, flags=flags)\n",
        "namespaces",
        "cgroups",
        needs_root=True,
    ),
    "/proc with hidepid=2": Situation(
        PRIVATE_MOUNTS + "kernel.mount('proc', '/proc', 'proc', 0, 'hidepid=2')\n", "namespaces", None, needs_root=True
    ),
    "no /proc": Situation(
        PRIVATE_MOUNTS + "kernel.mount('none', '/proc', 'tmpfs', 0, 'size=4k')\n",
        None,
        "namespaces",
        "No such file or directory: '/proc/self",
        needs_root=True,
    ),
    "a chroot": Situation(
        PRIVATE_MOUNTS
        + "top = '/mnt'\n"
        + "kernel.mount('none', top, 'tmpfs', 0, 'size=1m')\n"
        + "top += '/root'\n"
        + "os.mkdir(top)\n"
        + "for entry in os.scandir('/'):\n"
        + "    if entry.is_symlink(): os.symlink(os.readlink(entry), top + entry.path)\n"
        + "    elif entry.is_dir() and entry.name != 'mnt':\n"
        + "        os.mkdir(top + entry.path)\n"
        + "        kernel.mount(entry.path, top + entry.path, flags=kernel.MS_BIND | kernel.MS_REC)\n"
        + "os.chroot(top)\n"
        + "os.chdir('/')\n",
        "landlock",
        "chroot",
        needs_root=True,
    ),
    "256 descriptors": Situation(
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n",
        None,
        "nofile",
        "the limit on open files (ulimit -Hn) is 256, but 256 connections need 612; raise it, best to 16740",
    ),
    "700 descriptors": Situation(
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (700, 700))\n", "namespaces", "nofile"
    ),
}


def start(situation: Situation, *command: str) -> subprocess.Popen[str]:
    """Start a command of `rstar-sandbox` in a situation."""
    python = reachable_python(OWN_PYTHON)
    argv = [sys.executable, "-m", "sandbox", *command, "--python", python]
    code = f"import os\nfrom sandbox.jail import kernel\n{situation.code}\nos.execv({argv[0]!r}, {argv!r})"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_call(url: str) -> str:
    request = urllib.request.Request(f"{url}/v1/execute", b'{"code": "6 * 7"}', {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["value"])


def served_level(situation: Situation) -> tuple[str | None, str]:
    """Return the level at which `serve` has run a call, or None; and what it printed until then."""
    with start(situation, "serve", "--port", "0") as server:
        assert server.stderr is not None
        printed = ""
        try:
            for line in server.stderr:
                printed += line
                if announced := re.search(r"on (http\S+)  isolation=(\w+)", line):
                    assert run_call(announced[1]) == "42"
                    return announced[2], printed
            return None, printed
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()
            assert server.returncode in (0, 1, 2)


@pytest.fixture(scope="module")
def strongest() -> str:
    """The level that `auto` chooses on this machine as it is."""
    try:
        return choose_level("auto", environ={}).level.value
    except IsolationError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("name", SITUATIONS)
def test_serve_and_doctor_agree_on_a_machine_with(name: str, strongest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RSTAR_NSJAIL", raising=False)
    situation = SITUATIONS[name]
    if situation.needs_root and os.geteuid() != 0:
        pytest.skip("needs root to mount")
    expected = "landlock" if strongest == "landlock" and situation.level else situation.level
    level, printed = served_level(situation)
    assert level == expected, printed
    if level is None:
        (line,) = printed.splitlines()
        assert line.startswith("rstar-sandbox: ")
        assert situation.text in line
    with start(situation, "doctor", "--json") as doctor:
        report = json.loads(doctor.communicate()[0])
    assert (report["level"], doctor.returncode) == (expected, 0 if expected else 1), report
    not_ok = {row["name"] for row in report["checks"] if not row["ok"]}
    assert situation.row is None or situation.row in not_ok, report


@pytest.mark.parametrize("name", ["a kernel without user namespaces", "a kernel without seccomp"])
def test_a_level_that_was_asked_for_by_name_is_never_replaced_by_a_weaker_one(
    name: str, strongest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RSTAR_SANDBOX_ISOLATION", "namespaces")
    level, printed = served_level(SITUATIONS[name])
    assert level is None
    (line,) = printed.splitlines()
    assert line.startswith("rstar-sandbox: isolation=namespaces: this machine lacks ")
    assert line.endswith("`rstar-sandbox doctor` shows the commands")
