"""Tests of the replay of a session. Each call (step) of a session first runs the earlier code again.

No step has status `ok` without having run. The replay changes neither output nor line numbers.
"""

from __future__ import annotations

import pytest

from sandbox.executor.profile_choice import imported_modules
from sandbox.integrations.connection import shared_client
from sandbox.integrations.replayed_session import ReplayedSession
from sandbox.types import CallError, Result, Status

pytestmark = pytest.mark.runtime


def run(session: ReplayedSession, *steps: str) -> Result:
    """Run the steps and return the result of the last one."""
    for code in steps:
        result = session.record(code, shared_client().submit(session.call(code)).result())
    return result


@pytest.mark.parametrize("end", ["sys.exit()", "exit()", "raise SystemExit", "sys.exit(0)"])
def test_an_exit_ends_its_own_step_only(server_url: str, end: str) -> None:
    session = ReplayedSession()
    assert run(session, f"import sys\nx = 1\n{end}\nx = 2").status is Status.OK
    failed = run(session, "assert x == 2")
    assert failed.error is not None
    assert failed.error.type == "AssertionError"
    assert run(session, "x").value == "1"


@pytest.mark.parametrize(
    "end",
    [
        "os._exit(0)",
        "import atexit; atexit.register(os._exit, 0)",
        "os.execv(sys.executable, [sys.executable, '-c', ''])",
    ],
)
def test_a_step_that_ends_the_process_is_an_error_and_not_kept(server_url: str, end: str) -> None:
    session = ReplayedSession()
    ended = run(session, "import os, sys\nx = 1", f"x = 2\n{end}")
    assert ended.error is not None
    assert (ended.status, ended.error.type, ended.exit_code) == (Status.ERROR, "ProcessExit", None)
    assert run(session, "x").value == "1"


def test_no_step_is_ok_if_earlier_code_ends_the_process(server_url: str) -> None:
    session = ReplayedSession()
    run(session, "import os\nif os.path.exists('flag'):\n    os._exit(0)")
    session._steps.insert(0, {"path": "flag", "data": ""})
    ended = run(session, "print('never')")
    assert ended.error is not None
    assert (ended.status, ended.error.type, ended.stdout) == (Status.ERROR, "ProcessExit", "")


def test_an_exit_code_other_than_0_is_an_error(server_url: str) -> None:
    result = run(ReplayedSession(), "import sys", "sys.exit(3)")
    assert (result.status, result.exit_code, result.error) == (Status.ERROR, 3, CallError("SystemExit", "3"))


@pytest.mark.parametrize(
    ("step", "stdout"),
    [
        ("sys.stdout.buffer.write(b'a\\n')", "new\n"),
        ("data = sys.stdin.buffer.read()", "new\n"),
        ("os.write(1, b'a\\n'); os.write(2, b'b\\n')", "new\n"),
        ("subprocess.run([sys.executable, '-c', 'print(1); 1/0'])", "new\n"),
        ("write = sys.stdout.write\nprint = lambda text: write(f'{text}!\\n')", "new!\n"),
        ("sys.stdout = open('log', 'w')\nprint('a')\nsys.stdout.close()\nsys.stdout = sys.__stdout__", "new\n"),
    ],
)
def test_output_of_earlier_code_is_dropped_and_output_of_new_code_is_not(
    server_url: str, step: str, stdout: str
) -> None:
    session = ReplayedSession()
    result = run(session, f"import os, subprocess, sys\n{step}", "print('new')")
    assert (result.status, result.stdout, result.stderr, result.error) == (Status.OK, stdout, "", None)


def test_a_logger_of_an_earlier_step_writes_to_stderr(server_url: str) -> None:
    setup = "import logging\nlogging.basicConfig(format='%(message)s')\nlogging.warning('first')"
    assert run(ReplayedSession(), setup, "logging.warning('second')").stderr == "second\n"


def test_future_statements_work_in_every_step(server_url: str) -> None:
    code = "from __future__ import annotations\ndef f(x: unknown): pass\nf.__annotations__"
    assert run(ReplayedSession(), code, code).value == "{'x': 'unknown'}"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("x = 1\n1/0\n", 2),
        ("x = 1\nx = = 2", 2),
        ("def f():\n    return 1/0\nf()", 2),
        ("class A:\n    def __repr__(self):\n        return 1/0\nA()", 3),
        ("eval('1 +')", 1),
        ("try:\n    {}[0]\nexcept KeyError:\n    1/0", 4),
        ("raise ExceptionGroup('two', [ValueError(1)])", 1),
        ("\ud800", None),
    ],
)
def test_an_error_in_a_session_equals_the_error_without_a_session(server_url: str, code: str, line: int | None) -> None:
    alone = shared_client().execute(code)
    result = run(ReplayedSession(), "import math", code)
    assert (result.error, result.stderr) == (alone.error, alone.stderr)
    assert result.error is not None
    assert (result.error.line, result.error.traceback) == (line, result.stderr)


@pytest.mark.parametrize("code", ["x = 1", "1;", "1; # text", "None", "type('', (), {'__repr__': lambda self: ''})()"])
def test_a_value_in_a_session_equals_the_value_without_a_session(server_url: str, code: str) -> None:
    assert run(ReplayedSession(), "import math", code).value == shared_client().execute(code).value


def test_files_are_written_where_the_session_has_started(server_url: str) -> None:
    session = ReplayedSession()
    run(session, "import os\nos.mkdir('data')\nos.chdir('data')")
    session.write_file("a.txt", b"text")
    assert run(session, "open('../a.txt').read()").value == "'text'"


def test_the_server_finds_the_imports_of_all_steps() -> None:
    session = ReplayedSession(_steps=[{"code": "import numpy as np"}])
    assert imported_modules(session.call("from sympy import x\n'''").code) == {"numpy", "sympy"}
