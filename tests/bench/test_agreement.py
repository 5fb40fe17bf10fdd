"""bench.agreement: which outcomes count as equal, and the causes of differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import agreement
from bench.agreement import Difference
from bench.harness.call_outcomes import CallOutcome, differing_fields
from tests.bench.conftest import RunBenchmark

PRINTED_1 = CallOutcome("ok", "1\n", None, "")


def test_two_calls_that_time_out_agree_whatever_they_printed() -> None:
    timed_out = CallOutcome("timeout", "1\n", None, "Timeout")
    assert differing_fields(timed_out, replace(timed_out, stdout="1\n2\n")) == ()
    assert differing_fields(PRINTED_1, timed_out) == ("status", "error")


@pytest.mark.parametrize(
    ("code", "served", "is_unstable", "cause"),
    [
        ("", replace(PRINTED_1, status="timeout"), False, "one of them timed out"),
        ("", replace(PRINTED_1, status="memory_limit"), False, "service: memory_limit, fresh: ok"),
        ("", replace(PRINTED_1, status="error", error="ModuleNotFoundError"), False, "missing module"),
        ("import random", replace(PRINTED_1, stdout="2\n"), True, "random numbers"),
        ("import time", replace(PRINTED_1, stdout="2\n"), True, "clock"),
        ("", replace(PRINTED_1, stdout="2\n"), False, "output"),
        ("", replace(PRINTED_1, status="error", error="ValueError"), False, "ok became ValueError"),
    ],
)
def test_each_difference_has_a_cause(code: str, served: CallOutcome, is_unstable: bool, cause: str) -> None:
    assert agreement.cause(code, PRINTED_1, served, is_unstable) == cause


def test_differences_in_memory_addresses_have_their_own_cause() -> None:
    fresh, served = (replace(PRINTED_1, value=f"<f at {address}>") for address in ("0x7f1234567890", "0x7fabcdefabcd"))
    assert agreement.cause("", fresh, served, False) == "memory addresses"


def test_unstable_calls_are_left_out_of_the_share() -> None:
    def difference(index: int) -> Difference:
        return Difference(index, "output", ("stdout",), PRINTED_1, PRINTED_1, "")

    result = agreement.summarize(10, [difference(1), difference(2)], unstable={1})
    assert result["agreement"] == pytest.approx(8 / 9, abs=1e-5)  # call 1 of 10 is left out, call 2 differs
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
