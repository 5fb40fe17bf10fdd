"""Tests that memory files are not executable, also on kernels without a flag that forbids execution."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GUEST = Path(__file__).parents[2] / "sandbox" / "guest"
CODE = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import output_files, errno, os
def modes():
    files = output_files.bounded_file(100), output_files.input_file(memoryview(b"input"))
    return [oct(os.fstat(fd).st_mode & 0o777) for fd in files]
memfd_create = os.memfd_create
"""


def _run(code: str) -> str:
    argv = [sys.executable, "-I", "-c", CODE + code]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout


def test_before_linux_6_3_the_mode_of_memory_files_forbids_execution() -> None:
    code = """
MFD_NOEXEC_SEAL = 8
def without_the_flag(name, flags):
    if flags & MFD_NOEXEC_SEAL: raise OSError(errno.EINVAL, "Invalid argument")
    return memfd_create(name, flags)
os.memfd_create = without_the_flag
print(modes())
"""
    assert _run(code) == "['0o600', '0o600']\n"


def test_a_lack_of_descriptors_does_not_count_as_an_older_kernel() -> None:
    code = """
def fail(name, flags): raise OSError(errno.EMFILE, "Too many open files")
os.memfd_create = fail
try: modes()
except OSError as error: print(error.errno == errno.EMFILE, bool(output_files._flags & 8))  # MFD_NOEXEC_SEAL
"""
    assert _run(code) == "True True\n"
