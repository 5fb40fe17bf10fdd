"""Tests of a batch of forks, the calls that machine code forks one after another.

Each child has its own input and executes its own steps. A failed step is reported.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jail.jails import NO_EXECUTABLE_MEMORY, without_executable_memory

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code is for x86-64")

REPOSITORY = Path(__file__).resolve().parents[2]
GUEST = REPOSITORY / "sandbox" / "guest"
CODE = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import ctypes, errno, os, time
import fork_batch, wiped_memory
from system_calls import CLOCK_GETTIME, CLONE, CLOSE
UMASK, SIGCHLD = 95, 17  # the number of umask(2)
def step(*words): return [*words, *(0,) * (fork_batch.STEP_WORDS - len(words))]
def add(number, body, *steps, flags=SIGCHLD):
    first = [*step(CLOCK_GETTIME, 1, batch.data_addresses[number]), *step(CLONE, flags)]
    words = sum((step(*words) for words in steps), first)
    batch.add(number, call_input.prepare_copy(memoryview(body)), words, [0, 0])
def finish(text): os.write(write_fd, text.encode() + b"\\n"); os._exit(0)
x, batch, call_input = bytearray(b"x"), fork_batch.ForkBatch(), wiped_memory.CallInput()
read_fd, write_fd = os.pipe()
def texts_of_children(count):
    for number in range(count):
        if batch.child_pid(number) > 0: os.waitpid(batch.child_pid(number), 0)
    os.close(write_fd)
    return sorted(open(read_fd).read().split("\\n"))[1:]
"""


@pytest.fixture(params=["machine code", *NO_EXECUTABLE_MEMORY])
def prelude(request: pytest.FixtureRequest) -> str:
    """Code that runs before the code of the test. It is empty, or it forbids executable memory, so that Python instead
    of machine code executes the jobs."""
    return "" if request.param == "machine code" else without_executable_memory(request.param)


def _run(code: str, prelude: str = "") -> str:
    check = f"assert batch.has_machine_code is {not prelude}"
    command = [sys.executable, "-I", "-c", f"{prelude}{CODE}\n{check}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_each_child_has_its_own_input_and_no_byte_of_another(prelude: str) -> None:
    code = """
bodies = list(map(bytearray, [b"a secret " * 1000, b"", b"mine", b"b secret " * 500, b"x"]))
for number, body in enumerate(bodies): add(number, body)
own = batch.run(len(bodies))
if own is not None:
    batch.raise_if_step_failed()
    call_input.expose(len(bodies[own]))
    rest = call_input._usual[len(bodies[own]):]
    finish(f"{own} {bytes(call_input.body) == bodies[own]} {not any(rest)}")
print(texts_of_children(len(bodies)))
"""
    assert _run(code, prelude) == f"{[f'{number} True True' for number in range(5)]}\n"


def test_children_are_forked_in_order_and_have_the_time_of_their_fork(prelude: str) -> None:
    code = """
jobs = range(fork_batch.MAX_JOBS)
before = time.monotonic()
for number in jobs: add(number, x)
if batch.run(len(jobs)) is not None: finish(str(os.getpid()))
times = [before, *map(batch.forked_at, jobs), time.monotonic()]
pids = list(map(batch.child_pid, jobs))
print(times == sorted(times), texts_of_children(len(jobs)) == sorted(map(str, pids)), len(set(pids)))
"""
    assert _run(code, prelude) == "True True 32\n"


def test_a_child_stops_at_a_failed_step_and_reports_it(prelude: str) -> None:
    code = """
for number in range(2): add(number, x, (UMASK, 0o77), (CLOSE, 999 if number else 0), (UMASK, 0))
add(2, x, (UMASK, 0o11))
own = batch.run(3)
if own is not None:
    try: batch.raise_if_step_failed(); outcome = "ok"
    except OSError as error: outcome = f"{errno.errorcode[error.errno]} {error.strerror}"
    finish(f"{own} {outcome} {os.umask(0):o}")
print(texts_of_children(3))
"""
    assert _run(code, prelude) == "['0 ok 0', '1 EBADF system call 3: Bad file descriptor 77', '2 ok 11']\n"


def test_a_failed_fork_is_reported_and_the_others_continue(prelude: str) -> None:
    code = """
for number in range(3): add(number, x, flags=0x800 if number == 1 else SIGCHLD)  # CLONE_SIGHAND without CLONE_VM
own = batch.run(3)
if own is not None: finish(str(own))
print(errno.errorcode[-batch.child_pid(1)], texts_of_children(3))
"""
    assert _run(code, prelude) == "EINVAL ['0', '2']\n"


def test_a_childs_writes_to_the_jobs_stay_in_the_child(prelude: str) -> None:
    """The parent itself changes fewer than 30 bytes of the jobs: the result of the fork and the reading of the
    clock."""
    code = """
add(0, x)
before = bytes(batch._jobs)
if batch.run(1) is not None:
    batch._jobs[:] = bytes(len(batch._jobs))
    os._exit(0)
os.waitpid(batch.child_pid(0), 0)
print(sum(a != b for a, b in zip(before, bytes(batch._jobs))) < 30)
"""
    assert _run(code, prelude) == "True\n"


def test_no_page_is_both_writable_and_executable(prelude: str) -> None:
    code = """
address = lambda pages: ctypes.addressof(ctypes.c_char.from_buffer(pages))
starts = [address(batch._code), address(batch._jobs)]
for line in open("/proc/self/maps"):
    first, last = (int(end, 16) for end in line.split()[0].split("-"))
    for start in starts:
        if first <= start < last: print(line.split()[1])
"""
    assert sorted(_run(code, prelude).split()) == (["rw-p"] * 2 if prelude else ["r-xp", "rw-p"])


def test_large_input_has_a_buffer_of_its_own(prelude: str) -> None:
    code = """
add(0, bytearray(b"of the call before"))
if batch.run(1) is not None: os._exit(0)
body = bytearray(b"long" * wiped_memory.USUAL_BYTES)
add(0, body)
if batch.run(1) is not None:
    call_input.expose(len(body))
    finish(f"{call_input.body == body} {any(call_input._usual[:])}")
call_input.free_large()
print(texts_of_children(1), len(call_input.body))
"""
    assert _run(code, prelude) == "['True False'] 0\n"


def test_the_machine_code_equals_its_assembled_source() -> None:
    for program in ("make", "as", "objcopy"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    command = ["make", "--silent", "--no-print-directory", "-C", str(REPOSITORY), "machine-code"]
    assembled = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert _run("print(fork_batch._MACHINE_CODE.hex())").strip() == "".join(assembled.split())
