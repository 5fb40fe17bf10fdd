"""Immortal objects stay, mortal ones go; on Pythons that have no immortal objects nothing is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.runtime import best_python

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"


def _run(python: Path | str, code: str) -> str:
    prelude = f"import sys; sys.path.insert(0, {str(GUEST)!r}); import gc, fork_refcounts, fork_memory, weakref\n"
    done = subprocess.run([python, "-I", "-c", prelude + code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.fixture(scope="module")
def newer() -> Path:
    python, version = best_python()
    if version < (3, 12):
        pytest.skip("needs a Python 3.12 or later, as python3.12 or python3.13")
    return python


def test_using_what_was_there_counts_nothing(newer: Path) -> None:
    code = """
class Thing: pass
def used(x): return [x] * 100
here = Thing()
names = ["Thing", "used", "here"]
assert fork_refcounts.immortalize() > 1000
before = [sys.getrefcount(globals()[name]) for name in names]
more = used(here), Thing(), used
print(before == [sys.getrefcount(globals()[name]) for name in names], min(before) > 1 << 30)
"""
    assert _run(newer, code) == "True True\n"


def test_what_is_made_later_lives_and_dies_as_ever(newer: Path) -> None:
    code = """
class Thing: pass
fork_refcounts.immortalize()
gc.freeze()
thing = Thing()
thing.me = thing
gone = weakref.ref(thing)
del thing
gc.collect()
print(gone() is None)
simple = Thing()
gone = weakref.ref(simple)
del simple
print(gone() is None)
"""
    assert _run(newer, code) == "True\nTrue\n"


def test_constants_of_functions_are_immortal_too(newer: Path) -> None:
    code = """
def f(): return ("a constant", 12345678901234567890)
constant = f.__code__.co_consts[1]
fork_refcounts.immortalize()
print(all(sys.getrefcount(part) > 1 << 30 for part in (constant, *constant)))
"""
    assert _run(newer, code) == "True\n"


def test_an_older_python_is_left_alone() -> None:
    code = "print(fork_refcounts.is_supported(), fork_refcounts.immortalize() > 0)"
    possible = sys.version_info >= (3, 12)
    assert _run(sys.executable, code) == f"{possible} {possible}\n"


def test_settling_leaves_a_working_interpreter(guest_python: Path) -> None:
    code = """
import sympy
huge = fork_memory.compact_heap()
x = sympy.Symbol("x")
print(huge >= 0, gc.get_freeze_count() > 1000, sympy.solve(x**2 - 4, x))
"""
    assert _run(guest_python, code) == "True True [-2, 2]\n"
