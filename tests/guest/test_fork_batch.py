"""Tests of a batch of forks, the calls that are forked one after another: by a template, or by the zygote in Python.

Each child has its own record and executes its own steps. A failed step is reported.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.jail.syscalls import NUMBERS
from tests.jail.jails import NO_EXECUTABLE_MEMORY, without_executable_memory

MACHINES = ("x86_64", "aarch64")
pytestmark = pytest.mark.skipif(
    platform.machine() not in MACHINES, reason=f"the machine code is for {' and '.join(MACHINES)}"
)

REPOSITORY = Path(__file__).resolve().parents[2]
GUEST = REPOSITORY / "sandbox" / "guest"
CODE = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import errno, marshal, mmap, os, signal, time
import fork_batch, system_calls, wiped_memory
from fork_batch import step
from system_calls import CLOCK_GETTIME, CLONE, CLOSE
UMASK = system_calls._number(95, 166)
CLONE_PARENT = 0x8000
batch, end = fork_batch.ForkBatch(), 0
FORK = CLONE_PARENT if batch.has_machine_code else int(signal.SIGCHLD)
read_fd, write_fd = os.pipe()
def finish(text): os.write(write_fd, text.encode() + b"\\n"); os._exit(0)
def add(number, body, *steps, flags=FORK):
    global end
    header = marshal.dumps(number)
    start, end = end, end + len(header) + len(body)
    record = batch.frame_buffer[start:end]
    record[:] = header + body
    first = [*step(CLOCK_GETTIME, 1, batch.time_addresses[number]), *step(CLONE, flags)]
    batch.add(number, record, len(header), sum((step(*words) for words in steps), tuple(first)), [0, 0])
def start():
    if batch.has_machine_code and batch.start_template(): call()
def run(count):
    if batch.run(count): call()
def texts_of_children(count):
    for number in range(count):
        if batch.child_pid(number) > 0: os.waitpid(batch.child_pid(number), 0)
    os.close(write_fd)
    return sorted(open(read_fd).read().split("\\n"))[1:]
"""


@pytest.fixture(params=["template", *NO_EXECUTABLE_MEMORY])
def prelude(request: pytest.FixtureRequest) -> str:
    """Code that runs before the code of the test. It is empty, or it forbids executable memory, so that the zygote
    executes the jobs in Python."""
    return "" if request.param == "template" else without_executable_memory(request.param)


def _run(code: str, prelude: str = "") -> str:
    check = f"assert batch.has_machine_code is {not prelude}"
    command = [sys.executable, "-I", "-c", f"{prelude}{CODE}\n{check}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_each_child_has_its_own_record_and_no_byte_of_another(prelude: str) -> None:
    code = """
bodies = [b"a secret " * 1000, b"", b"mine", b"b secret " * 500, b"x"]
def call():
    batch.raise_if_step_failed()
    own, body = batch.own_call()
    rest = memoryview(batch._record._pages)[len(marshal.dumps(own)) + len(body):]
    finish(f"{own} {bytes(body) == bodies[own]} {not any(rest)}")
start()
for number, body in enumerate(bodies): add(number, body)
run(len(bodies))
print(texts_of_children(len(bodies)))
"""
    assert _run(code, prelude) == f"{[f'{number} True True' for number in range(5)]}\n"


def test_a_child_lacks_the_memory_of_the_jobs_or_finds_no_frame_in_it(prelude: str) -> None:
    """The template and the zygote share this memory, so a child that had it could read the frames of other calls."""
    code = """
address = wiped_memory.address(batch.frame_buffer)
def is_mapped(): return any(
    first <= address < last
    for first, last in ([int(end, 16) for end in line.split()[0].split("-")] for line in open("/proc/self/maps"))
)
def call(): finish(str(is_mapped() and any(batch.frame_buffer)))
start()
add(0, b"x")
add(1, b"y" * 1000)
run(2)
print(is_mapped(), texts_of_children(2), flush=True)
if os.fork() == 0: print(is_mapped() and any(batch.frame_buffer), flush=True); os._exit(0)
os.wait()
"""
    assert _run(code, prelude) == "True ['False', 'False']\nFalse\n"


def test_children_are_forked_in_order_and_have_the_time_of_their_fork(prelude: str) -> None:
    code = """
def call(): finish(f"{os.getpid()} {os.getppid()}")
start()
jobs = range(fork_batch.MAX_JOBS)
before = time.monotonic()
for number in jobs: add(number, b"x")
run(len(jobs))
times = [before, *map(batch.forked_at, jobs), time.monotonic()]
pids = list(map(batch.child_pid, jobs))
expected = sorted(f"{pid} {os.getpid()}" for pid in pids)
print(times == sorted(times), texts_of_children(len(jobs)) == expected, len(set(pids)))
"""
    assert _run(code, prelude) == "True True 32\n"


def test_a_child_stops_at_a_failed_step_and_reports_it(prelude: str) -> None:
    code = """
def call():
    try: batch.raise_if_step_failed(); outcome = "ok"
    except OSError as error: outcome = f"{errno.errorcode[error.errno]} {error.strerror}"
    finish(f"{batch.own_call()[0]} {outcome} {os.umask(0):o}")
start()
for number in range(2): add(number, b"x", (UMASK, 0o77), (CLOSE, 999 if number else 0), (UMASK, 0))
add(2, b"x", (UMASK, 0o11))
run(3)
print(texts_of_children(3))
"""
    number = NUMBERS[platform.machine()]["close"]
    assert _run(code, prelude) == f"['0 ok 0', '1 EBADF system call {number}: Bad file descriptor 77', '2 ok 11']\n"


def test_a_failed_fork_is_reported_and_the_others_continue(prelude: str) -> None:
    code = """
def call(): finish(str(batch.own_call()[0]))
start()
for number in range(3): add(number, b"x", flags=0x800 if number == 1 else FORK)  # CLONE_SIGHAND without CLONE_VM
run(3)
print(errno.errorcode[-batch.child_pid(1)], texts_of_children(3))
"""
    assert _run(code, prelude) == "EINVAL ['0', '2']\n"


def test_a_childs_writes_to_its_job_and_record_reach_no_other_call(prelude: str) -> None:
    code = """
def call():
    own, body = batch.own_call()
    is_clean = bytes(body) == b"x" and not batch.copy[fork_batch.DATA_OFFSET + 1]
    batch.copy[:] = memoryview(b"forged!!" * len(batch.copy)).cast("q")
    memoryview(batch._record._pages)[:] = b"forged!!" * (wiped_memory.USUAL_BYTES // 8)
    finish(f"{own} {is_clean}")
start()
for _ in range(2):
    add(0, b"x")
    run(1)
    os.waitpid(batch.child_pid(0), 0)
print(os.read(read_fd, 100))
"""
    assert _run(code, prelude) == "b'0 True\\n0 True\\n'\n"


def test_no_page_is_both_writable_and_executable(prelude: str) -> None:
    code = """
starts = [batch._code_address, batch._copy_address, batch._address]
for line in open("/proc/self/maps"):
    first, last = (int(end, 16) for end in line.split()[0].split("-"))
    for start in starts:
        if first <= start < last: print(line.split()[1])
"""
    assert sorted(_run(code, prelude).split()) == (["rw-p"] * 3 if prelude else ["r-xp", "rw-p", "rw-s"])


def test_a_large_record_comes_from_a_descriptor(prelude: str) -> None:
    code = """
import output_files
from system_calls import DUP3
header, body = marshal.dumps("large"), b"long" * wiped_memory.USUAL_BYTES
def call():
    own, found = batch.own_call()
    finish(f"{own} {found == body} {len(found)}")
start()
fd = output_files.input_file(memoryview(header + body))
steps = step(CLOCK_GETTIME, 1, batch.time_addresses[0]) + step(CLONE, FORK) + step(DUP3, fd, fork_batch.RECORD_FD)
batch.add(0, memoryview(b""), len(header), steps, [0, 0])
run(1)
print(texts_of_children(1))
"""
    assert _run(code, prelude) == f"['large True {4 << 18}']\n"


def test_the_end_of_the_template_is_an_error_of_the_next_run_and_the_template_ends_with_its_zygote() -> None:
    code = """
def call(): os._exit(0)
if os.fork() == 0:
    start()
    os.write(write_fd, open("/proc/self/task/%d/children" % os.getpid(), "rb").read())
    add(0, b"x")
    run(1)
    os._exit(0)
os.wait()
template = int(os.read(read_fd, 100))
while os.path.exists(f"/proc/{template}") and open(f"/proc/{template}/stat").read().split()[2] != "Z": time.sleep(0.01)
start()
os.kill(int(open("/proc/self/task/%d/children" % os.getpid()).read().split()[-1]), signal.SIGKILL)
add(0, b"x")
try: run(1)
except ChildProcessError as error: print(error)
"""
    assert _run(code) == "the template has ended\n"


@pytest.mark.parametrize("machine", MACHINES)
def test_the_machine_code_equals_its_assembled_source(machine: str) -> None:
    for program in ("make", f"{machine}-linux-gnu-as", f"{machine}-linux-gnu-objcopy"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    command = ["make", "--silent", "--no-print-directory", "-C", str(REPOSITORY), "machine-code", f"MACHINE={machine}"]
    assembled = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert _run(f"print(fork_batch._MACHINE_CODE[{machine!r}])").strip() == "".join(assembled.split())
