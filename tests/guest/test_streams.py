"""Tests that the standard streams of a call have the same attributes and values as those of a fresh interpreter whose
output is redirected."""

from __future__ import annotations

import ast
import subprocess
import tempfile
from typing import Any

import pytest

from tests.executor.calling import OWN_PYTHON, Caller
from tests.guest.test_script import stdout_of

DESCRIBE = """
import os, sys
def describe(stream):
    values = {}
    for name in dir(stream):
        value = getattr(stream, name)
        if type(value) in (str, int, bool, type(None)) and name != "__doc__":
            values[name] = value
    for name in ("isatty", "readable", "writable", "seekable", "fileno"):
        values[name + "()"] = getattr(stream, name)()
    return sorted(dir(stream)), values, repr(stream)
described = {
    (name, level): describe(stream)
    for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
    for level, stream in enumerate((getattr(sys, name), getattr(sys, name).buffer, getattr(sys, name).buffer.raw))
}
print(described)
"""
EXTRA_NAMES = {"__module__", "__slots__", "__annotations__", "__firstlineno__", "__static_attributes__"}
"""Attributes that classes written in Python have, and classes written in C do not have."""
DIFFERENCES = {
    ("stdin", "errors"): "bytes that are not UTF-8 reach the code",
    ("stdout", "write_through"): "a killed call loses no output",
    ("stderr", "write_through"): "a killed call loses no output",
}
"""Values that differ on purpose, with the reason."""


def described_by_python(code: str, stdin: bytes) -> str:
    """Run code in a fresh interpreter whose input and output are files."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(stdin)
        given.seek(0)
        env = {"PYTHONIOENCODING": "utf-8:strict"}
        subprocess.run([OWN_PYTHON, "-c", code], stdin=given, stdout=output, stderr=errors, env=env, check=True)
        output.seek(0)
        return output.read().decode()


@pytest.mark.parametrize("stdin", ["", "x"])
def test_streams_have_the_attributes_and_values_of_a_fresh_interpreter(guest: Caller, stdin: str) -> None:
    ours = ast.literal_eval(stdout_of(guest.run(DESCRIBE, stdin=stdin)))
    theirs = ast.literal_eval(described_by_python(DESCRIBE, stdin.encode()))
    different: list[Any] = []
    for key, (names, values, shown) in theirs.items():
        our_names, our_values, our_shown = ours[key]
        different += [(key, name) for name in {*names} ^ {*our_names} if name not in EXTRA_NAMES or name in names]
        stream = key[0].strip("_")
        # An empty stdin is /dev/null in a call, and a file in the fresh interpreter. Only the file is seekable.
        is_empty = stream == "stdin" and not stdin
        different += [
            (key, name, value, our_values.get(name))
            for name, value in values.items()
            if our_values.get(name) != value and (stream, name) not in DIFFERENCES and not is_empty
        ]
        different += [(key, shown, our_shown)] if shown != our_shown else []
    assert not different, different


FAST_INPUTS = {
    "BytesIO of os.read": "from io import *\nsys.stdin = BytesIO(os.read(0, os.fstat(0).st_size))\n"
    "line = sys.stdin.readline",
    "io.open(0)": "import io\nline = io.open(0).readline",
    "open(0).read()": "data = iter(open(0).read().split('\\n'))\nline = lambda: next(data)",
    "raw.readall()": "data = iter(sys.stdin.buffer.raw.readall().split(b'\\n'))\nline = lambda: next(data)",
    "buffer.readline": "line = sys.stdin.buffer.readline",
    "mmap": "import mmap\nline = mmap.mmap(0, 0, prot=mmap.PROT_READ).readline",
    "fdopen": "line = os.fdopen(0, 'rb').readline",
    "FileIO": "import io\nline = io.BufferedReader(io.FileIO(0)).readline",
    "reconfigure": "sys.stdin.reconfigure(encoding='latin-1')\nline = sys.stdin.readline",
    "detach": "import io\nline = io.TextIOWrapper(sys.stdin.detach()).readline",
    "pyrival": """
from io import BytesIO, IOBase
BUFSIZE = 8192
class FastIO(IOBase):
    newlines = 0
    def __init__(self, file):
        self._file = file
        self._fd = file.fileno()
        self.buffer = BytesIO()
        self.writable = "x" in file.mode or "r" not in file.mode
        self.write = self.buffer.write if self.writable else None
    def read(self):
        while True:
            b = os.read(self._fd, max(os.fstat(self._fd).st_size, BUFSIZE))
            if not b:
                break
            ptr = self.buffer.tell()
            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)
        self.newlines = 0
        return self.buffer.read()
    def readline(self):
        while self.newlines == 0:
            b = os.read(self._fd, max(os.fstat(self._fd).st_size, BUFSIZE))
            self.newlines = b.count(b"\\n") + (not b)
            ptr = self.buffer.tell()
            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)
        self.newlines -= 1
        return self.buffer.readline()
    def flush(self):
        if self.writable:
            os.write(self._fd, self.buffer.getvalue())
            self.buffer.truncate(0), self.buffer.seek(0)
class IOWrapper(IOBase):
    def __init__(self, file):
        self.buffer = FastIO(file)
        self.flush = self.buffer.flush
        self.writable = self.buffer.writable
        self.write = lambda s: self.buffer.write(s.encode("ascii"))
        self.read = lambda: self.buffer.read().decode("ascii")
        self.readline = lambda: self.buffer.readline().decode("ascii")
sys.stdin, sys.stdout = IOWrapper(sys.stdin), IOWrapper(sys.stdout)
line = sys.stdin.readline
""",
}
FAST_OUTPUTS = {
    "print": "put = lambda text: print(text, end='')",
    "buffer.raw.write": "put = lambda text: sys.stdout.buffer.raw.write(text.encode())",
    "writelines": "put = lambda text: sys.stdout.buffer.writelines([text.encode()])",
    "open(1)": "out = open(1, 'w')\nput = out.write",
    "fdopen": "out = os.fdopen(sys.stdout.fileno(), 'wb', 0)\nput = lambda text: out.write(text.encode())",
    "BytesIO at exit": "import atexit, io\nout = io.BytesIO()\nput = lambda text: out.write(text.encode())\n"
    "atexit.register(lambda: os.write(1, out.getvalue()))",
    "reconfigure": "sys.stdout.reconfigure(write_through=False, line_buffering=False)\nput = sys.stdout.write",
    "detach": "import io\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), write_through=True)\n"
    "put = sys.stdout.write",
}
ADD = "\nfor _ in range(int(line())):\n    put(str(sum(map(int, line().split()))) + '\\n')\n"
STDIN, SUMS = "3\n1 2\n3 4\n5 6\n", "3\n7\n11\n"


@pytest.mark.parametrize("name", FAST_INPUTS)
def test_programs_with_their_own_input_read_all_of_it(guest: Caller, name: str) -> None:
    code = f"import os, sys\n{FAST_INPUTS[name]}\nput = sys.stdout.write{ADD}"
    assert stdout_of(guest.run(code, stdin=STDIN)) == SUMS


@pytest.mark.parametrize("name", FAST_OUTPUTS)
def test_programs_with_their_own_output_lose_none_of_it(guest: Caller, name: str) -> None:
    code = f"import os, sys\nline = sys.stdin.readline\n{FAST_OUTPUTS[name]}{ADD}"
    assert stdout_of(guest.run(code, stdin=STDIN)) == SUMS


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("close", ["close()", "buffer.close()", "buffer.raw.close()"])
def test_a_stream_that_was_closed_or_deleted_at_the_end_changes_no_exit_code(
    guest: Caller, stream: str, close: str
) -> None:
    code = f"import sys\nprint('end', flush=True)\nsys.{stream}.{close}"
    result = guest.run(code, echo=False)
    expected = subprocess.run([OWN_PYTHON, "-c", code], capture_output=True, check=False, env={})
    assert (result.stdout, result.exit_code) == (expected.stdout.decode(), expected.returncode)
    assert guest.run(f"import sys\ndel sys.{stream}", echo=False).exit_code == 0
