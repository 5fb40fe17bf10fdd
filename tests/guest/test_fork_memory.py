"""The interpreter's code in huge pages: it goes on running, and what a fork would fault in is not faulted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"
CODE = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import os, resource, fork_memory
def work():
    return sum(len(str(n ** 3)) for n in range(2000)), sorted("huge pages"), eval("[n for n in range(9)][::-1]")
def faults():
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.wait4(child, 0)[2].ru_minflt
before, cost = work(), min(faults() for _ in range(5))
replaced = fork_memory.remap_code()
print(replaced, work() == before, min(faults() for _ in range(5)) <= cost, fork_memory.remap_code())
"""


def test_code_runs_on_in_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    replaced, same, cheaper, again = done.stdout.split()
    assert (same, cheaper, again) == ("True", "True", "0")
    if replaced == "0":
        pytest.skip("this kernel or interpreter has no code that fills huge pages")


def test_what_is_allocated_later_lies_together() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import fork_memory
scattered = [bytes(100) for _ in range(100_000)]
del scattered[::7]
fork_memory.compact_heap()
pools = {{id(thing) >> 14 for thing in [bytes(100) for _ in range(90)]}}
print(len(pools) <= 2)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"


LAYOUT = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import fork_memory
fork_memory.use_one_heap()
import decimal, email.message, json
kept = [[str(number)] for number in range(200_000)], bytes(1 << 20)
huge = fork_memory.compact_heap()
fork_memory.remap_code()
import pathlib
ranges = [line.split() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
heap = next(range(*(int(end, 16) for end in r[0].split("-"))) for r in ranges if r[-1] == "[heap]")
libraries = [r[-1] for r in ranges if "lib-dynload" in r[-1]]
print(sum(id(thing) in heap for thing in kept[0]) > 0.9 * len(kept[0]), id(kept[1]) in heap)
print(huge, len(heap) >> 21, max(map(libraries.count, libraries), default=0))
later = [[] for number in range(200_000)]
print(sum(id(thing) in heap for thing in later) < len(later) / 2)
"""


def test_what_a_zygote_loads_is_one_heap_of_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", LAYOUT], capture_output=True, text=True, check=True, timeout=60)
    is_small_there, is_large_there, huge, size, mappings, calls_have_their_own = done.stdout.split()
    assert (is_small_there, is_large_there, calls_have_their_own) == ("True", "True", "True")
    assert int(mappings) <= 2, "code and data of a library take one mapping each"
    if huge == "0":
        pytest.skip("this kernel does not collapse memory into huge pages")
    assert int(huge) >= int(size) - 2, "all of the heap but its ends"


STARTED = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import fork_memory
fork_memory.use_one_heap()
fork_memory.reexec_with_malloc()
import gc, os, pathlib
ranges = [line.split() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
heap = next(range(*(int(end, 16) for end in r[0].split("-"))) for r in ranges if r[-1] == "[heap]")
there = [id(thing) in heap for thing in gc.get_objects() if type(thing) is not type]
print(sum(there) > 0.99 * len(there), [name for name in os.environ if name.startswith(("PYTHON", "RSTAR"))], sys.argv)
small = fork_memory._allocator(2).malloc != fork_memory._allocator(0).malloc
print(small, sum(len(str(number)) for number in [[n] for n in range(100_000)]), flush=True)
os._exit(0)
"""


def test_what_the_interpreter_itself_takes_is_in_that_heap_too() -> None:
    done = subprocess.run(
        [sys.executable, "-s", "-c", STARTED, "one"], capture_output=True, text=True, check=True, timeout=60, env={}
    )
    assert done.stdout == "True [] ['-c', 'one']\nTrue 688890\n"


def test_fillers_stops_with_the_holes() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import fork_memory
for size in range(16, 500, 16):
    scattered = [bytes(size) for _ in range(2_000)]
    del scattered[::7]
fork_memory.compact_heap()
print(len(fork_memory._fillers) < 2_000)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"


GATHERED = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import fork_memory
fork_memory.use_one_heap()
import frames, runner
kept = [bytearray(size) for size in range(200, 4000, 8)]
del kept[::2]
def work():
    runner._last_line("a\\n  b\\nc"), runner._compile("x = 1\\n2", True)
    return frames.split_blobs(memoryview(b"abc"), [1, 2]), runner._encode_end("text", 2), runner._Report(9).encode()
before = [work() for _ in range(200)][0]
count = fork_memory.colocate_bytecode({str(GUEST)!r})
functions = frames.split_blobs, runner._encode_end, runner._last_line, runner._compile, runner._Report.encode
there = sorted(id(function.__code__) for function in functions)
print(count, all(work() == before for _ in range(200)), there[-1] - there[0] < 32768, end=" ")
print(frames.split_blobs.__name__, flush=True)
import os; os._exit(0)
"""


def test_code_that_runs_often_lies_together_and_runs_on() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", GATHERED], capture_output=True, text=True, check=True, timeout=60
    )
    count, same, together, name = done.stdout.split()
    assert (same, name) == ("True", "split_blobs")
    if count == "0":
        pytest.skip("this interpreter does not adapt its bytecode")
    assert together == "True"
