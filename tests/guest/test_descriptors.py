"""Tests that all descriptors are closed with few system calls, and not by trying each number. This holds for any Python
and any kernel."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import bpf, choose_level, kernel
from sandbox.jail.syscalls import NUMBERS
from tests.executor.calling import OWN_PYTHON, executor
from tests.jail.jails import all_users_can_reach, find_python_minor, system_python

pytestmark = pytest.mark.skipif(os.uname().machine not in NUMBERS, reason="needs the numbers of system calls")

GUEST = Path(__file__).parents[2] / "sandbox" / "guest"
UNUSED_FD = 4096
"""This number is higher than every descriptor of the tests' processes. Only code that tries each number would close
it."""
RETURN_ENOSYS = 0x00050026  # SECCOMP_RET_ERRNO | ENOSYS
ALLOW = 0x7FFF0000  # SECCOMP_RET_ALLOW
KILL = 0x80000000  # SECCOMP_RET_KILL_PROCESS


def restrict(*, has_close_range: bool) -> None:
    """Restrict this process before it executes a program. The program is killed if it closes `UNUSED_FD` or a higher
    number. close_range(2) is allowed or refused.

    The descriptor limit is raised above `UNUSED_FD`, so that code which tries each number would reach this number.
    """
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    kernel.set_no_new_privs()
    kernel.load_seccomp(
        bpf.assemble(
            [
                bpf.Instruction(bpf.LOAD, 0),  # the number of the system call
                bpf.Instruction(bpf.IF_EQUAL, NUMBERS[os.uname().machine]["close_range"], yes="range"),
                bpf.Instruction(bpf.IF_EQUAL, NUMBERS[os.uname().machine]["close"], no="allow"),
                bpf.Instruction(bpf.LOAD, 16),  # the first argument
                bpf.Instruction(bpf.IF_AT_LEAST, UNUSED_FD, yes="kill", no="allow"),
                bpf.Instruction(bpf.RETURN, ALLOW if has_close_range else RETURN_ENOSYS, label="range"),
                bpf.Instruction(bpf.RETURN, KILL, label="kill"),
                bpf.Instruction(bpf.RETURN, ALLOW, label="allow"),
            ]
        )
    )


def reachable_guest_python(level: str, *, has_close_range: bool) -> str:
    """Return a guest Python that calls at this level can reach.

    If close_range(2) is allowed, this is Python 3.9, whose os.closerange never uses that system call.
    """
    python: str | None = OWN_PYTHON if not has_close_range else find_python_minor(9)
    if level == "landlock" and os.geteuid() == 0 and python is not None and not all_users_can_reach(python):
        python = None if has_close_range else system_python()
    return python or pytest.skip("needs a Python that calls can reach (3.9 for the case with close_range)")


@pytest.mark.parametrize("level", ["namespaces", "landlock", "none"])
@pytest.mark.parametrize("has_close_range", [True, False])
def test_no_unused_descriptor_is_closed(level: str, has_close_range: bool) -> None:
    try:
        choose_level(level)
    except IsolationError as error:
        pytest.skip(str(error))
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= UNUSED_FD:
        pytest.skip(f"needs a hard limit of more than {UNUSED_FD} descriptors (ulimit -Hn)")
    python = reachable_guest_python(level, has_close_range=has_close_range)
    options = {"preexec_fn": partial(restrict, has_close_range=has_close_range)}
    with executor(python, isolation=level, process_options=options) as caller:
        result = caller.run(
            "import os\nfds = []\nfor fd in range(200):\n  try: fds += [os.fstat(fd) and fd]\n  except OSError: 0\nfds"
        )
        assert (result.value, result.attempts) == ("[0, 1, 2, 3]", 1), result  # 3 is the report


@pytest.mark.parametrize("highest", [5, 63, 64, 255, 256, 1000, 2048])
def test_the_highest_descriptor_is_closed_whatever_its_number(highest: int) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(GUEST)!r})
import descriptors
os.dup2(0, {highest})
def is_open(fd):
    try: return bool(os.fstat(fd))
    except OSError: return False
descriptors.close_from(3)
print([fd for fd in range(10_000) if is_open(fd)])
"""
    for has_close_range in (True, False):
        done = subprocess.run(
            [sys.executable, "-I", "-c", code],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=partial(restrict, has_close_range=has_close_range),
        )
        assert done.stdout == "[0, 1, 2]\n", done


@pytest.mark.parametrize("has_close_range", [True, False])
def test_a_launcher_closes_all_descriptors_but_those_it_keeps(has_close_range: bool) -> None:
    code = """
import os
from sandbox.jail import launcher
for fd in (7, 8, 9, 300, 2048): os.dup2(0, fd)
launcher.close_fds_except(300, 8)
def is_open(fd):
    try: return bool(os.fstat(fd))
    except OSError: return False
print([fd for fd in range(10_000) if is_open(fd)])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=partial(restrict, has_close_range=has_close_range),
    )
    assert done.stdout == "[0, 1, 2, 8, 300]\n", done
