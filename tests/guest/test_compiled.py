"""Tests of compiled code, the code objects of a source that an earlier call has compiled.

Compiled code only saves time: a call has the same result with right, with wrong and without compiled code.
"""

from __future__ import annotations

import marshal
from dataclasses import fields
from typing import Any

import pytest

from sandbox.judging import programs as judge
from sandbox.types import Call, EncodedCall, Result, Status
from tests.executor.calling import Caller

PROGRAMS = {
    "output": "import math\n\ndef f(n):\n    return math.gcd(n, 12)\n\nprint(f(int(input())), __name__)",
    "error": "def f():\n    return 1 / 0\n\nf()",
    "exit code": "import sys\nsys.exit(7)",
    "value": "x = 20\n\nx + 1",
    "future": "from __future__ import annotations\ndef f(x: nothing): return f.__annotations__\nf(1)",
    "syntax error": "x = (\nprint(1)",
    "surrogates": "print(ascii('\\ud800'))",
    "surrogates in the source": "print(ascii('\ud800'))",
    "warning": "x = '\\d'\nprint(x)",
    "empty": "",
}


def compile_in(guest: Caller, call: Call) -> bytes:
    result = guest.run_all([judge.compile_call(call.encode(binary=True))])[0]
    return judge.compiled_code(result.encode(binary=True))


def with_compiled(call: Call, compiled: bytes) -> EncodedCall:
    return {**call.encode(binary=True), "compiled": compiled}


def visible(result: Result) -> dict[str, Any]:
    return {item.name: getattr(result, item.name) for item in fields(result) if item.name not in ("usage", "id")}


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_has_the_same_result_with_its_compiled_code(guest: Caller, name: str, echo: bool) -> None:
    call = Call(PROGRAMS[name], stdin="18\n", echo=echo)
    compiled = compile_in(guest, call)
    assert compiled or name in (
        "syntax error",
        "warning",
        "surrogates in the source",
    )  # older interpreters print no warning
    plain, fast = guest.run_all([call, with_compiled(call, compiled)])
    assert visible(plain) == visible(fast)


def test_compiled_code_is_really_used(guest: Caller) -> None:
    other = compile_in(guest, Call("print('compiled')", echo=False))
    call = Call("print('source')", echo=False)
    assert guest.run_all([with_compiled(call, other)])[0].stdout == "compiled\n"


def test_a_call_that_only_compiles_runs_nothing(guest: Caller) -> None:
    result = guest.run_all([judge.compile_call({"code": "print(1)\nopen('x', 'w')\n1 / 0"})])[0]
    assert (result.status, result.stdout, list(result.files)) == (Status.OK, "", ["compiled"])


@pytest.mark.parametrize(
    "change",
    [
        lambda compiled: b"\0\0\0\0" + compiled[4:],  # another interpreter's magic number
        lambda compiled: compiled[:4] + b"garbage",
        lambda compiled: compiled[:20],
        lambda compiled: compiled[:4],
        lambda compiled: compiled[:4] + marshal.dumps((1, 2), 2),
        lambda compiled: compiled[:4] + marshal.dumps("text", 2),
        lambda compiled: b"x",
    ],
)
def test_unusable_compiled_code_is_ignored(guest: Caller, change: Any) -> None:
    call = Call("print('source')", echo=False)
    result = guest.run_all([with_compiled(call, change(compile_in(guest, call)))])[0]
    assert (result.status, result.stdout, result.stderr) == (Status.OK, "source\n", "")


def test_compiled_code_is_no_file_of_the_call(guest: Caller) -> None:
    call = Call("import os\nprint(os.listdir(), open('a').read())", echo=False, files={"a": b"data"})
    fast = with_compiled(call, compile_in(guest, call))
    assert guest.run_all([fast])[0].stdout == "['a'] data\n"


def test_the_interpreter_of_the_guest_runtime_compiles_too(guest_with_numpy: Caller) -> None:
    call = Call("import numpy\nprint(numpy.arange(3).sum())", echo=False)
    compiled = compile_in(guest_with_numpy, call)
    assert compiled
    assert guest_with_numpy.run_all([with_compiled(call, compiled)])[0].stdout == "3\n"


# Function tests


def call_function(guest: Caller, code: str, name: str, *args: Any) -> Result:
    test = {"call": name, "args": list(args), "expected": None}
    (call,) = judge.Program.decode({"code": code, "tests": [test]}).calls()
    return guest.run_all([call])[0]


@pytest.mark.parametrize(
    ("code", "name", "args", "value"),
    [
        ("def solve(a, b): return a + b", "solve", (1, 2), "3"),
        ("class Solution:\n    def f(self, x): return (x, [x])", "Solution.f", ("é",), r'["\u00e9", ["\u00e9"]]'),
        ("solve = lambda: None", "solve", (), "null"),
        ("def solve(x): return x", "solve", ({"a": [1.5, None, True]},), '{"a": [1.5, null, true]}'),
        ("print('noise')\ndef solve(): return 1\nif __name__ == '__main__': print('more')", "solve", (), "1"),
        ("from os import *\nstr = list = print = None\ndef solve(): return 'x'", "solve", (), '"x"'),
        ("def solve(): return 1 # no newline at the end", "solve", (), "1"),
        ("def solve():\n    return 2\nx = 1;", "solve", (), "2"),
        ("def solve(): return 10 ** 50", "solve", (), str(10**50)),
    ],
)
def test_a_function_is_called_with_json_and_returns_json(
    guest: Caller, code: str, name: str, args: tuple[Any, ...], value: str
) -> None:
    result = call_function(guest, code, name, *args)
    assert (result.status, result.value) == (Status.OK, value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1", "the test calls solve, but the code does not define solve"),
        ("def solve(a, b): pass", "missing 2 required positional arguments"),
        ("def solve(): return {1, 2}", "the function returned a set, which JSON cannot represent"),
        ("def solve(): return 10 ** 5000", "4300 digits"),
        ("def solve(): raise ValueError('own')", "own"),
        ("def solve(:", "invalid syntax"),
    ],
)
def test_a_function_that_fails_gets_a_clear_error(guest: Caller, code: str, message: str) -> None:
    result = call_function(guest, code, "solve")
    assert (result.status, result.value) == (Status.ERROR, None)
    assert result.error is not None
    assert message in result.error.message


def test_the_traceback_of_a_function_has_the_lines_of_the_code_only(guest: Caller) -> None:
    result = call_function(guest, "def solve():\n    return 1 / 0", "solve")
    assert result.error is not None
    assert result.error.line == 2
    assert 'File "main.py", line 2, in solve' in result.error.traceback
    assert "function_call.py" not in result.error.traceback


def test_numpy_arrays_and_numbers_are_json(guest_with_numpy: Caller) -> None:
    code = "import numpy as np\ndef solve(): return [np.arange(3), np.float64(0.5), np.int64(7)]"
    assert call_function(guest_with_numpy, code, "solve").value == "[[0, 1, 2], 0.5, 7]"
