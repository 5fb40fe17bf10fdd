"""Tests of bench.invariance. Its calls use the CPU or wall time that their parameters say, and different results of a
call are detected."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import invariance
from bench.harness import requirements
from bench.invariance import TIME_USES, Case
from bench.probes import processes
from sandbox.types import CallError, Result, Status
from tests.bench.conftest import RunBenchmark
from tests.executor.calling import OWN_PYTHON

NEED_S = 0.2


@pytest.mark.parametrize("use", TIME_USES)
def test_a_generated_call_uses_the_cpu_or_wall_time_in_its_parameters(use: str) -> None:
    code = invariance.call_using(use, NEED_S, 1.0)["code"]
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    printed = process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # so that `process` does not wait for it again
    assert (process.returncode, printed) == (0, f"used {NEED_S}\n".encode())
    cpu_s = usage.ru_utime + usage.ru_stime
    assert time.monotonic() - start >= NEED_S
    cores = {"sleep": 0.0, "both in turn": 0.5, "children side by side": 2.0}.get(use, 1.0)
    assert cpu_s >= cores * NEED_S - 0.001  # wait4 rounds down to microseconds


def test_calls_must_time_out_if_they_need_more_than_their_limit() -> None:
    cases = invariance.calls_using(["sleep"], limit_s=2.0)
    assert [case.status for case in cases] == ["ok"] * 3 + ["timeout"] * 3
    assert len({case.name for case in cases}) == 6
    assert all(case.call["limits"]["timeout_s"] == 2.0 for case in cases)
    assert "NEED = 2.2" in cases[3].call["code"]  # the fourth factor is 1.1


def _holds(result: dict[str, Any]) -> bool:
    return requirements.hold(result["requirements"])


def _result(status: str = "ok", stdout: str = "1\n") -> Result:
    return Result("", Status(status), stdout, error=None if status == "ok" else CallError("Any", ""))


def test_equal_outcomes_are_not_changed() -> None:
    cases = [Case("a", {}, "ok"), Case("b", {})]
    result = invariance.summarize(cases, [_result(), _result("error")], [_result(), _result("error")], set())
    assert _holds(result) and result["changed"] == []


def test_two_time_outs_with_different_output_are_not_changed() -> None:
    result = invariance.summarize([Case("a", {})], [_result("timeout", "1\n")], [_result("timeout", "")], set())
    assert _holds(result)


@pytest.mark.parametrize("other", [_result("timeout"), _result("ok", "2\n"), _result("unavailable")])
def test_an_outcome_with_another_status_or_output_is_changed(other: Result) -> None:
    result = invariance.summarize([Case("a", {})], [_result()], [other], set())
    assert [change["name"] for change in result["changed"]] == ["a"]
    assert not _holds(result)


def test_a_call_with_different_results_in_two_runs_is_listed_as_unstable_and_does_not_count() -> None:
    result = invariance.summarize([Case("a", {})], [_result()], [_result("ok", "2\n")], unstable={"a"})
    assert (result["changed"], result["unstable"], _holds(result)) == ([], ["a"], True)


def test_a_call_with_a_known_status_is_never_unstable() -> None:
    result = invariance.summarize([Case("a", {}, "ok")], [_result()], [_result("timeout")], unstable={"a"})
    assert (len(result["changed"]), result["unstable"], _holds(result)) == (1, [], False)


def test_a_status_that_is_wrong_in_both_runs_is_misjudged() -> None:
    timed_out = _result("timeout")
    result = invariance.summarize([Case("a", {}, "ok")], [timed_out], [timed_out], set())
    assert result["changed"] == [] and len(result["misjudged"]) == 1
    assert not _holds(result)


def test_busy_processes_end_with_their_context() -> None:
    before = set(processes.tree(os.getpid()))
    with invariance.busy_processes(2):
        added = set(processes.tree(os.getpid())) - before
    assert len(added) == 2
    assert not added & set(processes.tree(os.getpid()))


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("needs_isolation")
def test_a_small_comparison_has_a_complete_result(tmp_path: Path, run_benchmark: RunBenchmark) -> None:
    corpus = tmp_path / "snippets.jsonl"
    corpus.write_text('{"code": "1"}\n')
    sizes = ["--calls", str(corpus), "--uses", "CPU,sleep", "--loops", "1", "--load", "1"]
    exit_code, result = run_benchmark(invariance.main, *sizes, "--stdlib-only", "--python", OWN_PYTHON)
    num_known = 2 * len(invariance.FACTORS)
    assert (result["calls"], result["known"]) == (num_known + 1, num_known)
    assert result["corpus"] == {"from": "snippets.jsonl", "calls": 1}
    assert exit_code == (0 if result["holds"] else 1)
