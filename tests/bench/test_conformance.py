"""Tests of bench.conformance, which runs tests of CPython in a call and in a fresh interpreter. It finds each
difference, and each known difference has a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import conformance, report
from bench.conformance import FAILURES, MARK, Comparison, ModuleRun, Outcome
from bench.harness import command
from bench.workloads.known_differences import EXCLUDED_MODULES
from tests.bench.conftest import RefusedArguments, RunBenchmark

FAST_MODULES = (
    "test_bisect",
    "test_bufio",
    "test_csv",
    "test_errno",
    "test_eof",
    "test_fcntl",
    "test_fileinput",
    "test_fnmatch",
    "test_genericpath",
    "test_glob",
    "test_grp",
    "test_linecache",
    "test_locale",
    "test_mmap",
    "test_openpty",
    "test_posix",
    "test_pwd",
    "test_stat",
    "test_string",
    "test_struct",
    "test_textwrap",
)
PASSED = Outcome(conformance.PASSED)


@pytest.fixture(scope="module")
def python_with_tests(guest_python: Path) -> str:
    """The guest's Python. The test is skipped if this Python has no tests of CPython, as Debian's."""
    try:
        modules = conformance.test_modules(str(guest_python))
    except command.BenchFailed as error:
        pytest.skip(str(error))
    if missing := set(FAST_MODULES) - set(modules):
        pytest.skip(f"{guest_python} has only a part of CPython's tests: no {min(missing)}")
    return str(guest_python)


def test_every_difference_of_the_fast_modules_has_a_reason(run_benchmark: RunBenchmark, python_with_tests: str) -> None:
    modules = ",".join(FAST_MODULES)
    _, result = run_benchmark(conformance.main, "--python", python_with_tests, "--modules", modules)
    assert result["modules"] == len(FAST_MODULES)
    assert result["tests"] > 10 * len(FAST_MODULES), "the modules ran hardly any test"
    differences = result["differences"]
    unexplained = [f"{row['test']}: {row['detail']}" for row in differences if not conformance.reason_of(row)]
    assert not unexplained


def test_a_test_that_fails_or_is_not_reached_only_in_a_call_is_a_difference() -> None:
    failed, skipped = Outcome("failed", "why"), Outcome(conformance.SKIPPED, "no shell")
    outside = {"passes": PASSED, "fails": PASSED, "ends": PASSED, "skips": PASSED, "broken": failed}
    inside = {"passes": PASSED, "fails": failed, "skips": skipped, "broken": failed}
    comparison = Comparison()
    comparison.add("test_x", ModuleRun(inside, False, "the call ended"), ModuleRun(outside, True))
    assert comparison.tests == 5
    assert [(row["test"], row["outcome"], row["detail"]) for row in comparison.differences] == [
        ("fails", "failed", "why"),
        ("ends", conformance.NOT_REACHED, "the call ended"),
    ]
    assert [row["test"] for row in comparison.skipped_inside] == ["skips"]


def test_the_tests_of_a_class_have_the_reason_of_its_failed_setup() -> None:
    comparison = Comparison()
    setup = {"setUpClass (test.test_x.Case)": Outcome("error", "why")}
    outside = {f"test.test_x.Case.test_{name}": PASSED for name in "ab"}
    comparison.add("test_x", ModuleRun(setup, True), ModuleRun(outside, True))
    assert [row["detail"] for row in comparison.differences] == ["why", "why"]


def test_lines_among_the_output_of_tests_are_found() -> None:
    line = json.dumps({"test": "one", "outcome": "error", "detail": "x"})
    run = conformance.parse(f"noise{MARK}\n{MARK}{line}\nnoise\n{MARK}{json.dumps({'end': True})}\n", "killed")
    assert run == ModuleRun({"one": Outcome("error", "x")}, True)
    assert conformance.parse(f"{MARK}{line}\n{MARK}{line[:9]}", "killed").how == "killed"


def test_an_unknown_module_is_refused(refused_arguments: RefusedArguments, python_with_tests: str) -> None:
    error = refused_arguments(conformance.main, "--python", python_with_tests, "--modules", "test_nothing")
    assert "no module test.test_nothing" in error


def test_each_difference_of_the_committed_result_has_a_reason() -> None:
    result = report.read_results(report.RESULTS)["conformance"]
    assert not [row["test"] for row in result["differences"] if not conformance.reason_of(row)]
    assert all(row["outcome"] in FAILURES for row in result["differences"])


def test_each_excluded_module_has_exactly_one_reason() -> None:
    names = [name for names in EXCLUDED_MODULES.values() for name in names.split()]
    assert len(names) == len(set(names))
