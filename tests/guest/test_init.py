"""The first process of a jail that another program made, on its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INIT = Path(__file__).parents[2] / "sandbox/guest/init.py"
DEADLINE_S = 60


def init(code: str, *, alive: bool = True, program: str = sys.executable) -> subprocess.CompletedProcess[str]:
    ours, theirs = os.pipe()
    if not alive:
        os.close(theirs)
    try:
        argv = [sys.executable, "-I", "-S", str(INIT), str(ours), program, "-c", code]
        return subprocess.run(argv, pass_fds=[ours], stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False)
    finally:
        os.close(ours)
        if alive:
            os.close(theirs)


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 11)", 139), ("", 0)],
)
def test_status_is_the_guests(code: str, status: int) -> None:
    assert init(code).returncode == status


def test_guest_does_not_start_when_what_made_the_jail_is_gone(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    assert init(code, alive=False).returncode == 1
    assert not (tmp_path / "ran").exists()
    init(code)
    assert (tmp_path / "ran").exists()


def test_program_that_is_not_there_is_named() -> None:
    ended = init("", program="/missing/python")
    assert (ended.returncode, ended.stderr) == (127, "jail: cannot start /missing/python: No such file or directory\n")


def test_guest_has_none_of_our_descriptors_and_inherits_no_capability() -> None:
    code = """
import ctypes, os, sys
def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
sets = (ctypes.c_uint32 * 6)()
ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets)
sys.stderr.write(repr([[fd for fd in range(256) if is_open(fd)], sets[2], sets[5]]))
"""
    assert init(code).stderr == "[[0, 1, 2], 0, 0]"
