"""Tests of the baseline of the benchmarks, a fresh interpreter per call. It runs a call as `python main.py` does, and
kills the call at its time-out."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from bench.servers.fresh_interpreter import FreshRun, interpreters


def _run(code: str, *, wrapped: bool = True, **fields: Any) -> FreshRun:
    with interpreters(sys.executable, wrapped=wrapped) as fresh:
        return fresh.run({"code": code, **fields})


def test_a_script_reads_its_input_prints_and_exits_as_with_python() -> None:
    run = _run("print(input()); raise SystemExit(3)", wrapped=False, stdin="hello\n")
    assert (run.stdout, run.exit_code, run.timed_out) == ("hello\n", 3, False)
    assert run.cpu_s > 0


@pytest.mark.parametrize(
    ("code", "value", "error", "exit_code"),
    [
        ("1 + 1", "2", None, 0),
        ("1 + 1;", None, None, 0),
        ("print(1)", None, None, 0),
        ("x = 2\nx\nx = 3", None, None, 0),
        ("1 / 0", None, "ZeroDivisionError", 1),
        ("def f(:", None, "SyntaxError", 1),
        ("import sys; sys.exit(2)", None, "SystemExit", 2),
        ("import sys; sys.exit()", None, None, 0),
    ],
)
def test_the_wrapper_reports_value_and_error(code: str, value: str | None, error: str | None, exit_code: int) -> None:
    run = _run(code)
    assert (run.report.get("value"), run.report.get("error"), run.exit_code) == (value, error, exit_code)


def test_symbols_are_bound_lazily_and_libraries_use_one_thread() -> None:
    """The service sets both variables for its calls. The baseline leaves out LD_BIND_NOW, which makes a start
    slower."""
    assert _run("import os\nos.environ.get('LD_BIND_NOW')").report["value"] is None
    assert _run("import os\nos.environ['OMP_NUM_THREADS']").report["value"] == "'1'"


def test_an_endless_call_is_killed_at_its_time_out() -> None:
    run = _run("while True: pass", limits={"timeout_s": 0.2})
    assert run.timed_out
    assert run.wall_s < 30  # it ended soon, even on a loaded machine


def test_runs_are_returned_in_order() -> None:
    with interpreters(sys.executable) as fresh:
        runs = fresh.run_all([{"code": f"print({n})"} for n in range(6)])
    assert [run.stdout for run in runs] == [f"{n}\n" for n in range(6)]
