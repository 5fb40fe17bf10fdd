"""Tests of each limit of a call. A use up to the limit succeeds. A use beyond the limit ends with the status or the
error of this limit.

A call returns the value of its last expression. Codes end with a line `None` where the result must have no value.
"""

from __future__ import annotations

import pytest

from sandbox.types import Result, Status
from tests.executor.calling import Caller, call

KB = 1024


def error_type(result: Result) -> str:
    """Return the error type of a call with status `error`."""
    assert result.status is Status.ERROR, result
    assert result.error is not None
    return result.error.type


# output


@pytest.mark.parametrize("write", ["print('x' * {}, end='')", "import os\nos.write(1, b'x' * {})\nNone"])
def test_output_of_exactly_the_limit_is_ok(guest: Caller, write: str) -> None:
    result = guest.run(write.format(3 * KB), output_kb=3)
    assert (result.status, result.stdout, result.truncated) == (Status.OK, "x" * 3 * KB, ())


@pytest.mark.parametrize("over", [1, 2, 4095, 4096, 4097, 100_000])
def test_output_over_the_limit_is_truncated_and_reported(guest: Caller, over: int) -> None:
    result = guest.run(f"print('x' * {3 * KB + over}, end='')", output_kb=3)
    assert (result.status, result.stdout, result.truncated) == (Status.OUTPUT_LIMIT, "x" * 3 * KB, ("stdout",))
    assert result.value is None


@pytest.mark.parametrize(
    ("code", "truncated"),
    [
        ("while True: print('flood')", ("stdout",)),
        ("while True: print('flood', end='', flush=True)", ("stdout",)),
        ("import sys\nwhile True: print('flood', file=sys.stderr)", ("stderr",)),
        ("import sys\nwhile True: sys.stdout.buffer.write(b'flood')", ("stdout",)),
        ("import sys\nwhile True: sys.stdout.write('flood')", ("stdout",)),
        ("while True:\n    try: print('flood')\n    except BaseException: pass", ("stdout",)),
        ("import warnings\nwarnings.simplefilter('always')\nwhile True: warnings.warn('flood')", ("stderr",)),
        (
            "from threading import Thread\ndef f():\n while 1: print('flood')\nfor _ in 'ab': Thread(target=f).start()",
            ("stdout",),
        ),
    ],
)
def test_endless_output_ends_the_call(guest: Caller, code: str, truncated: tuple[str, ...]) -> None:
    result = guest.run(code, timeout_s=20)
    assert (result.status, result.truncated) == (Status.OUTPUT_LIMIT, truncated)
    assert len(result.stdout + result.stderr) == 64 * KB
    assert result.usage.run_ms < 20_000


@pytest.mark.parametrize("output_kb", [1024, 3072])
@pytest.mark.parametrize("write", ["print({}, end='')", "import os\nos.write(1, {}.encode())"])
def test_output_may_exceed_the_disk_limit(guest: Caller, output_kb: int, write: str) -> None:
    limits = {"disk_mb": 1, "output_kb": output_kb}
    for over, status in ((0, Status.OK), (1, Status.OUTPUT_LIMIT), (1 << 20, Status.OUTPUT_LIMIT)):
        text = f"'x' * {output_kb * KB + over}"
        result = guest.run(write.format(f"({text})"), **limits, echo=False)  # the value of os.write is not returned
        assert (result.status, len(result.stdout)) == (status, output_kb * KB), result.error


def test_value_and_error_may_exceed_the_disk_limit(guest: Caller) -> None:
    limits = {"disk_mb": 1, "output_kb": 3072}
    assert guest.run("'x' * (2 << 20)", **limits).value == repr("x" * (2 << 20))
    assert error_type(guest.run("raise ValueError('x' * (2 << 20))", **limits)) == "ValueError"


def test_a_returned_file_may_be_as_large_as_the_disk(guest: Caller) -> None:
    result = guest.run("open('f', 'wb').write(bytes(1 << 20))", disk_mb=1, return_files=["f"])
    assert (result.value, len(result.files["f"])) == (str(1 << 20), 1 << 20)


@pytest.mark.parametrize("over", [1, 4096, 8192])
def test_a_returned_file_that_is_slightly_too_large_is_reported(guest: Caller, over: int) -> None:
    # All returned files are written to one file, with at most 16 MiB of contents and 4 KiB of headers. The header of
    # this returned file has 12 bytes.
    code = f"open('f', 'wb').truncate((16 << 20) + 4096 - 12 + {over})\nNone"
    result = guest.run(code, return_files=["f"])
    assert (result.status, result.files, result.truncated) == (Status.OK, {}, ("files",))


FLOODING_PROGRAM = "import os\nwhile True: os.write(1, b'flood')"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor _ in range(100):\n    try: os.write(1, b'flood' * 1000)\n    except OSError: pass",
        "for _ in range(100):\n    try: print('flood' * 1000)\n    except OSError: pass",
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-S', '-c', {FLOODING_PROGRAM!r}], stderr=subprocess.DEVNULL)",
    ],
    ids=["direct writes", "print", "a child process"],
)
def test_output_that_ignores_errors_or_bypasses_the_python_streams_is_limited_too(guest: Caller, code: str) -> None:
    """The descriptor of an output refers to a file of bounded length. Direct writes beyond the bound get EPERM, and the
    status of the call follows from the length of the file."""
    result = guest.run(code, timeout_s=20)
    assert (result.status, result.truncated) == (Status.OUTPUT_LIMIT, ("stdout",))
    assert result.stdout.replace("\n", "") == ("flood" * 20_000)[: len(result.stdout.replace("\n", ""))]
    assert len(result.stdout) == 64 * KB


def test_each_stream_has_its_own_limit(guest: Caller) -> None:
    full = f"import sys\nprint('x' * {64 * KB}, end='')\nprint('y' * {64 * KB}, end='', file=sys.stderr)"
    assert guest.run(full).status is Status.OK
    result = guest.run(full + "\nimport os\nos.write(1, b'x')\nos.write(2, b'y')")
    assert (result.status, result.truncated) == (Status.OUTPUT_LIMIT, ("stdout", "stderr"))


LIMIT = 64 * KB
SEEKING_CODES = {
    "nothing": ("", ""),
    "a line": ("print('one')", "one\n"),
    "zero bytes in the middle": ("os.write(1, b'a' + bytes(9000) + b'b')", "a" + "\0" * 9000 + "b"),
    "a byte at the limit": (f"os.pwrite(1, b'z', {LIMIT - 1})", "\0" * (LIMIT - 1) + "z"),
    "exactly the limit": (f"os.write(1, b'x' * {LIMIT})", "x" * LIMIT),
    "a child process": ("if os.fork() == 0: os.write(1, b'child'); os._exit(0)\nos.wait()", "child"),
    "a hole": ("print('one'); sys.stdout.flush()\nctypes.CDLL(None).fallocate(1, 3, 0, 4096)", ""),
}


@pytest.mark.parametrize(("code", "stdout"), SEEKING_CODES.values(), ids=SEEKING_CODES)
def test_an_offset_beyond_the_limit_is_no_output(guest: Caller, code: str, stdout: str) -> None:
    for offset in (LIMIT + 1, 1 << 40):
        result = guest.run(f"import ctypes, os, sys\n{code}\nsys.stdout.flush()\nos.lseek(1, {offset}, 0)\nNone")
        assert (result.status, result.truncated, result.stdout) == (Status.OK, (), stdout)


@pytest.mark.parametrize("limit_kb", [1, 64])
@pytest.mark.parametrize("byte", ["x", "\0"])
def test_a_write_beyond_the_limit_is_output_whatever_the_offset_is_then(
    guest: Caller, byte: str, limit_kb: int
) -> None:
    """Zero bytes are counted in whole pages. So only more than a page of zero bytes exceeds a limit of 1 KiB."""
    code = f"import os\ntry:\n    for _ in range(20): os.write(1, {byte.encode()!r} * 8192)\nexcept OSError: pass"
    result = guest.run(f"{code}\nos.lseek(1, 1 << 40, 0)", output_kb=limit_kb)
    assert (result.status, result.truncated) == (Status.OUTPUT_LIMIT, ("stdout",))
    assert result.stdout == byte * limit_kb * KB


def test_one_byte_beyond_a_limit_that_ends_within_a_page_is_output(guest: Caller) -> None:
    result = guest.run(f"import os\nos.write(1, b'x' * {KB + 1})\nos.lseek(1, 1 << 40, 0)", output_kb=1)
    assert (result.status, result.stdout) == (Status.OUTPUT_LIMIT, "x" * KB)


def test_an_offset_that_is_moved_back_discards_the_output_behind_it(guest: Caller) -> None:
    assert guest.run("import os\nprint('secret')\nos.lseek(1, 0, 0)\nNone").stdout == ""
    assert error_type(guest.run("import os\nos.ftruncate(1, 1 << 30)")) in ("PermissionError", "OSError")


# time


@pytest.mark.parametrize(
    "end",
    [
        "while True: pass",
        "import time\ntime.sleep(99)",
        "input()\ninput = open(0)\nwhile True: pass",  # a builtin is replaced, and its descriptor is opened again
    ],
)
def test_a_timeout_returns_what_was_printed(guest: Caller, end: str) -> None:
    result = guest.run(f"print('one')\nprint('two', end='')\n{end}", timeout_s=0.2, stdin="x")
    assert (result.status, result.stdout) == (Status.TIMEOUT, "one\ntwo")
    assert (result.signal, result.exit_code, result.value) == (9, None, None)
    assert result.error is not None
    assert (result.error.type, result.error.message) == ("Timeout", "used up its 0.2 s")
    assert 200 <= result.usage.run_ms < 5000


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        # The C library uses signals 32 and 33; SIGKILL and SIGSTOP (9, 19) cannot be ignored.
        "import signal\nfor n in {*range(1, 65)} - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import re\nre.match('(a+)+$', 'a' * 100 + 'b')",
        "9 ** 9 ** 9",
        "import threading\nthreading.Thread(target=threading.Event().wait).start()",
        "import os\nos.fork()\nwhile True: pass",
        "import atexit, time\natexit.register(time.sleep, 1000)",
        "class A:\n    def __del__(self):\n        while True: pass\na = A()",
        "class A:\n    def __repr__(self):\n        while True: pass\nA()",
    ],
)
def test_no_code_runs_beyond_its_time_limit(guest: Caller, code: str) -> None:
    assert guest.run(code, timeout_s=0.3).status is Status.TIMEOUT


# memory


@pytest.mark.parametrize(
    "code",
    [
        "x = [0] * (1 << 28)",
        "x = bytearray(1 << 30)",
        "x = []\nwhile True: x.append(bytes(1 << 20))",
        "' ' * (1 << 32)",
        "x = {}\nn = 0\nwhile True:\n    x[n] = str(n)\n    n += 1",
        "def f():\n    x = []\n    while True: x.append([])\nf()",
    ],
)
def test_memory_over_the_limit_is_reported(guest: Caller, code: str) -> None:
    result = guest.run(f"print('before')\n{code}", memory_mb=64)
    assert (result.status, result.stdout, result.exit_code) == (Status.MEMORY_LIMIT, "before\n", 1)
    assert result.error is not None
    assert result.error.type == "MemoryError"


def test_memory_up_to_the_limit_is_available(guest: Caller) -> None:
    """The limit applies only to the memory that the call adds to the address space inherited from its zygote."""
    result = guest.run("x = bytearray(56 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nlen(x)", memory_mb=64)
    assert (result.status, result.value) == (Status.OK, str(56 << 20))
    assert result.usage.peak_memory_mb > 56


def test_a_caught_memory_error_is_not_reported(guest: Caller) -> None:
    result = guest.run("try:\n    x = bytearray(1 << 34)\nexcept MemoryError:\n    print('caught')\n1", memory_mb=64)
    assert (result.status, result.stdout, result.value) == (Status.OK, "caught\n", "1")


@pytest.mark.runtime
def test_an_array_over_the_memory_limit_is_reported(guest_with_numpy: Caller) -> None:
    result = guest_with_numpy.run("import numpy as np\nx = np.ones((1 << 14, 1 << 14))", memory_mb=256)
    assert result.status is Status.MEMORY_LIMIT
    result = guest_with_numpy.run("import numpy as np\nnp.ones(1 << 24).sum()", memory_mb=256)
    assert result.value == "np.float64(16777216.0)"


# disk, inodes, processes, descriptors


@pytest.mark.parametrize("path", ["x", "/tmp/x", "sub/x"])
def test_a_full_disk_raises_oserror_in_the_code(guest: Caller, path: str) -> None:
    code = f"import os\nos.makedirs('sub')\nwith open({path!r}, 'wb') as f:\n    while True: f.write(bytes(1 << 20))"
    result = guest.run(code, disk_mb=4)
    assert error_type(result) == "OSError"
    assert "Errno 28" in result.stderr or "Errno 27" in result.stderr  # ENOSPC, EFBIG
    assert guest.run("open('x', 'wb').write(bytes(3 << 20))\nNone", disk_mb=4).status is Status.OK


def test_the_number_of_files_is_limited(guest: Caller) -> None:
    result = guest.run("for n in range(100_000): open(f'f{n}', 'w').close()")
    assert error_type(result) == "OSError"
    assert "No space left" in result.stderr
    assert guest.run("for n in range(1000): open(f'f{n}', 'w').close()").status is Status.OK


def test_a_sparse_file_may_not_be_larger_than_the_disk_limit(guest: Caller) -> None:
    assert error_type(guest.run("open('x', 'wb').truncate(1 << 40)", disk_mb=4)) == "OSError"


def test_the_number_of_processes_is_limited(guest: Caller) -> None:
    code = """
import os, time
started = 0
try:
    while started < 500:
        if os.fork() == 0:
            time.sleep(1000)
        started += 1
except BlockingIOError:
    print("no more")
print(started)
"""
    result = guest.run(code, processes=8)
    assert result.status is Status.OK
    assert result.stdout.startswith("no more\n")
    assert int(result.stdout.split()[-1]) <= 8


def test_threads_count_as_processes(guest: Caller) -> None:
    code = """
import threading
gate = threading.Event()
threads = []
try:
    for _ in range(500):
        threads.append(threading.Thread(target=gate.wait))
        threads[-1].start()
except RuntimeError:
    print("no more")
gate.set()
"""
    assert guest.run(code, processes=8).stdout == "no more\n"


def test_a_fork_bomb_does_not_affect_other_calls(guest: Caller) -> None:
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    bomb = guest.submit(call(code, timeout_s=0.5, processes=16))
    for _ in range(5):
        assert guest.run("import os\nif os.fork() == 0: os._exit(0)\nos.wait()[1]", timeout_s=60).value == "0"
    assert guest.result_of(bomb).status is Status.TIMEOUT
    assert guest.run("1").attempts == 1


def test_the_number_of_descriptors_is_limited(guest: Caller) -> None:
    result = guest.run("import os\nfds = []\nwhile True: fds.append(os.dup(0))")
    assert error_type(result) == "OSError"
    assert "Too many open files" in result.stderr
    assert guest.run("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))").status is Status.ERROR


def test_a_call_has_only_its_own_descriptors(guest: Caller) -> None:
    code = "import os\ns = []\nfor fd in range(4096):\n  try: s += [os.fstat(fd) and fd]\n  except OSError: pass\ns"
    assert guest.run(code).value == "[0, 1, 2, 3]"
    assert guest.run(code, stdin="x").value == "[0, 1, 2, 3]"
    assert guest.run(code, return_files=("x",)).value == "[0, 1, 2, 3, 4]"


def test_the_core_dump_limit_cannot_be_changed(guest: Caller) -> None:
    for limits in ("(0, 0)", "(1, 1)"):
        result = guest.run(f"import resource\nresource.setrlimit(resource.RLIMIT_CORE, {limits})")
        assert result.error is not None
        assert result.error.type in ("ValueError", "PermissionError")  # depends on the Python version
    assert guest.run("import resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))").status == "ok"
