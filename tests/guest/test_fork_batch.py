"""Forks in a row: each child has its own input and has taken its own steps, and what is refused is said."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jail.jails import NO_EXECUTABLE_MEMORY, without_executable_memory

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code is for x86-64")

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"
CODE = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import ctypes, errno, os, time
import wiped_memory, fork_batch
GETTIME, DUP2, CLOSE, CLONE, UMASK, SIGCHLD = 228, 33, 3, 56, 95, 17
def step(*words): return [*words, *(0,) * (fork_batch.STEP - len(words))]
def put(number, body, *steps, flags=SIGCHLD):
    first = [*step(GETTIME, 1, jobs.rooms[number]), *step(CLONE, flags)]
    jobs.put(number, inbox.order(memoryview(body)), sum((step(*one) for one in steps), first), [0, 0])
def end(text): os.write(out, text.encode() + b"\\n"); os._exit(0)
x, jobs, inbox, (got, out) = bytearray(b"x"), fork_batch.Burst(), wiped_memory.Inbox(), os.pipe()
def heard(count):
    for number in range(count):
        if jobs.result(number) > 0: os.waitpid(jobs.result(number), 0)
    os.close(out)
    return sorted(open(got).read().split("\\n"))[1:]
"""


@pytest.fixture(params=["machine code", *NO_EXECUTABLE_MEMORY])
def way(request: pytest.FixtureRequest) -> str:
    """What the process runs first; after it, but for the machine code's sake, memory cannot be made executable."""
    return "" if request.param == "machine code" else without_executable_memory(request.param)


def _run(code: str, way: str = "") -> str:
    command = [sys.executable, "-I", "-c", f"{way}{CODE}\nassert jobs.has_code is {not way}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_each_child_has_its_own_input_and_nothing_of_another(way: str) -> None:
    code = """
bodies = list(map(bytearray, [b"a secret " * 1000, b"", b"mine", b"b secret " * 500, b"x"]))
for number, body in enumerate(bodies): put(number, body)
me = jobs.run(len(bodies))
if me is not None:
    jobs.check()
    inbox.take(len(bodies[me]))
    rest = inbox._usual[len(bodies[me]):]
    end(f"{me} {bytes(inbox.body) == bodies[me]} {not any(rest)}")
print(heard(len(bodies)))
"""
    assert _run(code, way) == f"{[f'{number} True True' for number in range(5)]}\n"


def test_children_come_in_order_with_their_time(way: str) -> None:
    code = """
before = time.monotonic()
for number in range(fork_batch.MOST): put(number, x)
me = jobs.run(fork_batch.MOST)
if me is not None: end(str(os.getpid()))
times = [before, *(jobs.time(number) for number in range(fork_batch.MOST)), time.monotonic()]
pids = [jobs.result(number) for number in range(fork_batch.MOST)]
print(times == sorted(times), heard(fork_batch.MOST) == sorted(map(str, pids)), len(set(pids)))
"""
    assert _run(code, way) == "True True 32\n"


def test_a_child_whose_step_is_refused_takes_none_after_it_and_says_which(way: str) -> None:
    code = """
for number in range(2): put(number, x, (UMASK, 0o77), (CLOSE, 999 if number else 0), (UMASK, 0))
put(2, x, (UMASK, 0o11))
me = jobs.run(3)
if me is not None:
    try: jobs.check(); said = "fine"
    except OSError as why: said = f"{errno.errorcode[why.errno]} {why.strerror}"
    end(f"{me} {said} {os.umask(0):o}")
print(heard(3))
"""
    assert _run(code, way) == "['0 fine 0', '1 EBADF system call 3: Bad file descriptor 77', '2 fine 11']\n"


def test_a_fork_that_is_refused_is_told_and_the_others_go_on(way: str) -> None:
    code = """
for number in range(3): put(number, x, flags=0x800 if number == 1 else SIGCHLD)  # CLONE_SIGHAND alone
me = jobs.run(3)
if me is not None: end(str(me))
print(errno.errorcode[-jobs.result(1)], heard(3))
"""
    assert _run(code, way) == "EINVAL ['0', '2']\n"


def test_what_a_child_writes_is_its_own_affair(way: str) -> None:
    code = """
put(0, x)
before = bytes(jobs._jobs)
if jobs.run(1) is not None:
    jobs._jobs[:] = bytes(len(jobs._jobs))
    os._exit(0)
os.waitpid(jobs.result(0), 0)
print(sum(a != b for a, b in zip(before, bytes(jobs._jobs))) < 30)
"""
    assert _run(code, way) == "True\n"


def test_no_page_can_be_written_to_and_executed(way: str) -> None:
    code = """
address = lambda pages: ctypes.addressof(ctypes.c_char.from_buffer(pages))
starts = [address(jobs._code), address(jobs._jobs)]
for line in open("/proc/self/maps"):
    first, last = (int(end, 16) for end in line.split()[0].split("-"))
    for start in starts:
        if first <= start < last: print(line.split()[1])
"""
    assert sorted(_run(code, way).split()) == (["rw-p"] * 2 if way else ["r-xp", "rw-p"])


def test_large_input_has_room_of_its_own(way: str) -> None:
    code = """
inbox.put(memoryview(bytearray(b"of the call before")))
body = bytearray(b"long" * wiped_memory.ROOM)
put(0, body)
if jobs.run(1) is not None:
    inbox.take(len(body))
    end(f"{inbox.body == body} {any(inbox._usual[:])}")
inbox.shrink()
print(heard(1), len(inbox.body))
"""
    assert _run(code, way) == "['True False'] 0\n"
