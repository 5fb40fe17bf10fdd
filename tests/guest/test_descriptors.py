"""All descriptors are closed in few system calls, by any Python and on any kernel: no number is guessed."""

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
from sandbox.jail.syscalls import X86_64
from tests.executor.calling import OWN_PYTHON, executor
from tests.jail.jails import all_users_can_reach, find_python_minor, system_python

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter is written for x86_64")

GUEST = Path(__file__).parents[2] / "sandbox" / "guest"
GUESSED = 4096
"""No process of the test has so many descriptors: who closes this number, or a higher one, guesses."""
ENOSYS, ALLOW, KILL = 0x00050026, 0x7FFF0000, 0x80000000


def hold(*, has_close_range: bool) -> None:
    """Before exec: whoever guesses is killed, and close_range(2) is there or not. Enough descriptors are allowed for
    guesses to go over `GUESSED`."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kernel.set_no_new_privs()
    kernel.load_seccomp(
        bpf.assemble(
            [
                bpf.Instruction(bpf.LOAD, 0),
                bpf.Instruction(bpf.IF_EQUAL, X86_64["close_range"], yes="range"),
                bpf.Instruction(bpf.IF_EQUAL, X86_64["close"], no="allow"),
                bpf.Instruction(bpf.LOAD, 16),
                bpf.Instruction(bpf.IF_AT_LEAST, GUESSED, yes="kill", no="allow"),
                bpf.Instruction(bpf.RETURN, ALLOW if has_close_range else ENOSYS, label="range"),
                bpf.Instruction(bpf.RETURN, KILL, label="kill"),
                bpf.Instruction(bpf.RETURN, ALLOW, label="allow"),
            ]
        )
    )


def guest_of(level: str, *, has_close_range: bool) -> str:
    """With close_range(2), a Python that does not make it: os.closerange of 3.9 is a loop over close(2) with every C
    library, as that of any Python is with an old one."""
    python: str | None = OWN_PYTHON if not has_close_range else find_python_minor(9)
    if level == "landlock" and os.geteuid() == 0 and python is not None and not all_users_can_reach(python):
        python = None if has_close_range else system_python()
    return python or pytest.skip("needs a Python that calls can reach, 3.9 where close_range(2) is to be there")


@pytest.mark.parametrize("level", ["namespaces", "landlock", "none"])
@pytest.mark.parametrize("has_close_range", [True, False])
def test_no_descriptor_is_closed_by_guessing(level: str, has_close_range: bool) -> None:
    try:
        choose_level(level)
    except IsolationError as why:
        pytest.skip(str(why))
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= GUESSED:
        pytest.skip(f"needs a hard limit of more than {GUESSED} descriptors (ulimit -Hn)")
    python = guest_of(level, has_close_range=has_close_range)
    options = {"preexec_fn": partial(hold, has_close_range=has_close_range)}
    with executor(python, isolation=level, process_options=options) as caller:
        result = caller.run(
            "import os\nn = 0\nfor fd in range(200):\n  try: n += os.fstat(fd) and 1\n  except OSError: 0\nn"
        )
        assert (result.value, result.attempts) == ("4", 1), result


@pytest.mark.parametrize("highest", [5, 63, 64, 255, 256, 1000, 2048])
def test_descriptors_beyond_any_power_of_two_are_closed(highest: int) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(GUEST)!r})
import descriptors
os.dup2(0, {highest})
kept = [os.fstat(fd) for fd in range(3)]
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
            preexec_fn=partial(hold, has_close_range=has_close_range),
        )
        assert done.stdout == "[0, 1, 2]\n", done


@pytest.mark.parametrize("has_close_range", [True, False])
def test_a_launcher_closes_all_but_what_is_kept(has_close_range: bool) -> None:
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
        preexec_fn=partial(hold, has_close_range=has_close_range),
    )
    assert done.stdout == "[0, 1, 2, 8, 300]\n", done
