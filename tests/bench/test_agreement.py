"""Tests of bench.agreement: which outcomes count as equal, and which calls are counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import agreement
from bench.harness.call_outcomes import CallOutcome, differing_fields
from tests.bench.conftest import RunBenchmark

PRINTED_1 = CallOutcome("ok", "1\n", None, "")


def test_two_calls_that_time_out_agree_whatever_they_printed() -> None:
    timed_out = CallOutcome("timeout", "1\n", None, "Timeout")
    assert differing_fields(timed_out, replace(timed_out, stdout="1\n2\n")) == ()
    assert differing_fields(PRINTED_1, timed_out) == ("status", "error")


def test_unstable_calls_are_left_out_of_the_share() -> None:
    result = agreement.summarize(num_calls=10, num_different=1, num_unstable=1)
    assert result["agreement"] == pytest.approx(8 / 9, abs=1e-5)
    assert (result["equal"], result["unstable"], result["different"]) == (8, 1, 1)


@pytest.mark.runtime
def test_scripts_have_the_same_results_in_the_service_and_in_fresh_interpreters(
    guest_python: Path, tmp_path: Path, run_benchmark: RunBenchmark
) -> None:
    codes = ["1 + 1", "print('a')\n'b'", "1 / 0", "import sys; sys.exit(3)", "'hidden';", "def f(:", "input()"]
    calls = tmp_path / "calls.jsonl"
    calls.write_text("".join(json.dumps({"code": code}) + "\n" for code in codes), encoding="utf-8")
    exit_code, result = run_benchmark(agreement.main, "--calls", str(calls), "--python", str(guest_python))
    assert (exit_code, result["agreement"]) == (0, 1.0)
