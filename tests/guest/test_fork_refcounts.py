"""Tests of immortal objects. If Python supports them, the objects that exist in a zygote become immortal, so that their
reference counts do not change. Objects that are made later are freed as usual."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.runtime.build import best_python

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"


def _run(python: Path | str, code: str) -> str:
    prelude = f"import sys; sys.path.insert(0, {str(GUEST)!r}); import gc, fork_refcounts, fork_memory, weakref\n"
    done = subprocess.run([python, "-I", "-c", prelude + code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.fixture(scope="module")
def python_3_12() -> Path:
    python, version = best_python()
    if version < (3, 12):
        pytest.skip("needs a Python 3.12 or later, as python3.12 or python3.13")
    return python


def test_a_use_of_an_immortal_object_does_not_change_its_count(python_3_12: Path) -> None:
    code = """
class Thing: pass
def used(x): return [x] * 100
thing = Thing()
names = ["Thing", "used", "thing"]
assert fork_refcounts.immortalize() > 1000
before = [sys.getrefcount(globals()[name]) for name in names]
uses = used(thing), Thing(), used
print(before == [sys.getrefcount(globals()[name]) for name in names], min(before) > 1 << 30)
"""
    assert _run(python_3_12, code) == "True True\n"


def test_objects_that_are_made_later_are_freed(python_3_12: Path) -> None:
    code = """
class Thing: pass
fork_refcounts.immortalize()
gc.freeze()
cycle = Thing()
cycle.itself = cycle
reference = weakref.ref(cycle)
del cycle
gc.collect()
print(reference() is None)
simple = Thing()
reference = weakref.ref(simple)
del simple
print(reference() is None)
"""
    assert _run(python_3_12, code) == "True\nTrue\n"


def test_constants_of_functions_are_immortal_too(python_3_12: Path) -> None:
    code = """
def f(): return ("a constant", 12345678901234567890)
constant = f.__code__.co_consts[1]
fork_refcounts.immortalize()
print(all(sys.getrefcount(part) > 1 << 30 for part in (constant, *constant)))
"""
    assert _run(python_3_12, code) == "True\n"


def test_a_python_without_immortal_objects_is_left_unchanged() -> None:
    code = "print(fork_refcounts.is_supported(), fork_refcounts.immortalize() > 0)"
    is_supported = sys.version_info >= (3, 12)
    assert _run(sys.executable, code) == f"{is_supported} {is_supported}\n"


def test_the_interpreter_works_after_the_heap_is_compacted(guest_python: Path) -> None:
    code = """
import sympy
huge_pages = fork_memory.compact_heap()
x = sympy.Symbol("x")
print(huge_pages >= 0, gc.get_freeze_count() > 1000, sympy.solve(x**2 - 4, x))
"""
    assert _run(guest_python, code) == "True True [-2, 2]\n"
