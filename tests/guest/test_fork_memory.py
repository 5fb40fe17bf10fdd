"""Tests of the rearrangement of a zygote's memory. After it, forks copy less, and the interpreter works as before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"
PRELUDE = f"""
import sys; sys.path.insert(0, {str(GUEST)!r})
import fork_memory
"""


def _run(code: str) -> str:
    command = [sys.executable, "-I", "-c", PRELUDE + code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env={}).stdout


def test_code_in_huge_pages_still_works_and_causes_no_more_page_faults() -> None:
    code = """
import os, resource
def work():
    return sum(len(str(n ** 3)) for n in range(2000)), sorted("huge pages"), eval("[n for n in range(9)][::-1]")
def faults():
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.wait4(child, 0)[2].ru_minflt
result, faults_before = work(), min(faults() for _ in range(5))
huge_pages = fork_memory.remap_code()
print(huge_pages, work() == result, min(faults() for _ in range(5)) <= faults_before, fork_memory.remap_code())
"""
    huge_pages, same_result, no_more_faults, huge_pages_of_second_run = _run(code).split()
    assert (same_result, no_more_faults, huge_pages_of_second_run) == ("True", "True", "0")
    if huge_pages == "0":
        pytest.skip("this kernel or interpreter has no code that fills huge pages")


def test_memory_that_is_allocated_after_the_compaction_lies_behind_the_heap() -> None:
    """Objects of two sizes and blocks of malloc leave free memory. A child zygote compacts its heap a second time,
    and that leaves no free memory either."""
    code = """
fork_memory.use_one_heap()
import os
libc, kept = fork_memory._libc, []
for _ in range(2):
    scattered = [bytes(size) for size in (100, 400) for _ in range(20_000)]
    blocks = [libc.malloc(size) for size in (300, 3_000, 30_000) for _ in range(200)]
    del scattered[::7]
    kept.append(scattered)
    for block in blocks[::3]: libc.free(block)
    end = libc.sbrk(0)
    fork_memory.compact_heap()
    later = [id(each) for size in (100, 400) for each in [bytes(size) for _ in range(90)]]
    later += [libc.malloc(size) for size in (300, 3_000, 30_000)]
    print(sum(address < end for address in later), flush=True)
    fork_memory.use_one_heap()
os._exit(0)
"""
    assert _run(code) == "0\n0\n"


def test_all_objects_of_a_zygote_are_in_one_heap_of_huge_pages() -> None:
    code = """
fork_memory.use_one_heap()
import decimal, email.message, json
small, large = [[str(number)] for number in range(200_000)], bytes(1 << 20)
huge_pages = fork_memory.compact_heap()
fork_memory.remap_code()
import pathlib
mappings = [line.split() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
heap = next(range(*(int(end, 16) for end in m[0].split("-"))) for m in mappings if m[-1] == "[heap]")
libraries = [m[-1] for m in mappings if "lib-dynload" in m[-1]]
print(sum(id(subject) in heap for subject in small) > 0.9 * len(small), id(large) in heap)
print(huge_pages, len(heap) >> 21, max(map(libraries.count, libraries), default=0))
later = [[] for number in range(200_000)]
print(sum(id(subject) in heap for subject in later) < len(later) / 2)
"""
    small_in_heap, large_in_heap, huge_pages, heap_size, max_mappings, later_elsewhere = _run(code).split()
    assert (small_in_heap, large_in_heap, later_elsewhere) == ("True", "True", "True")
    assert int(max_mappings) <= 2, "code and data of a library take one mapping each"
    if huge_pages == "0":
        pytest.skip("this kernel does not collapse memory into huge pages")
    assert int(huge_pages) >= int(heap_size) - 2, "all of the heap but its two ends"
