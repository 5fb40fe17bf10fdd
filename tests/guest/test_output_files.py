"""Memory files are no programs, on kernels too that know no flag for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GUEST = Path(__file__).parents[2] / "sandbox" / "guest"
CODE = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import output_files, errno, os
def modes():
    files = output_files.bounded_file(100), output_files.readable(memoryview(b"input"))
    return [oct(os.fstat(fd).st_mode & 0o777) for fd in files]
create = os.memfd_create
"""


def _run(code: str) -> str:
    argv = [sys.executable, "-I", "-c", CODE + code]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout


def test_before_linux_6_3_they_lose_the_right_to_be_executed() -> None:
    code = """
def older(name, flags):
    if flags & 8: raise OSError(errno.EINVAL, "Invalid argument")
    return create(name, flags)
os.memfd_create = older
print(modes())
"""
    assert _run(code) == "['0o600', '0o600']\n"


def test_a_shortage_is_no_older_kernel() -> None:
    code = """
def lacking(name, flags): raise OSError(errno.EMFILE, "Too many open files")
os.memfd_create = lacking
try: modes()
except OSError as why: print(why.errno == errno.EMFILE, bool(output_files._flags & 8))
"""
    assert _run(code) == "True True\n"
