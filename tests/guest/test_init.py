"""Tests of `init.py`, which is the first process of a jail that another program has built. Here it runs without a
jail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INIT = Path(__file__).parents[2] / "sandbox/guest/init.py"
TIMEOUT_S = 60


def run_init(
    code: str, *, is_launcher_alive: bool = True, program: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    read_fd, write_fd = os.pipe()
    if not is_launcher_alive:
        os.close(write_fd)
    try:
        argv = [sys.executable, "-I", "-S", str(INIT), str(read_fd), program, "-c", code]
        return subprocess.run(
            argv, pass_fds=[read_fd], stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
        )
    finally:
        os.close(read_fd)
        if is_launcher_alive:
            os.close(write_fd)


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 11)", 128 + 11), ("", 0)],
)
def test_the_exit_status_is_that_of_the_guest(code: str, status: int) -> None:
    assert run_init(code).returncode == status


def test_the_guest_does_not_start_if_the_launcher_is_dead(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    assert run_init(code, is_launcher_alive=False).returncode == 1
    assert not (tmp_path / "ran").exists()
    run_init(code)
    assert (tmp_path / "ran").exists()


def test_a_missing_program_is_named() -> None:
    done = run_init("", program="/missing/python")
    assert (done.returncode, done.stderr) == (127, "jail: cannot start /missing/python: No such file or directory\n")


def test_the_guest_inherits_no_descriptors_and_no_inheritable_capability() -> None:
    code = """
import ctypes, os, sys
def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: for capabilities 0 to 31, then for 32 to 63
ctypes.CDLL(None).capget(header, sets)
sys.stderr.write(repr([[fd for fd in range(256) if is_open(fd)], sets[2], sets[5]]))
"""
    assert run_init(code).stderr == "[[0, 1, 2], 0, 0]"
