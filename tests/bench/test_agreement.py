"""Which results count as equal, and the causes of differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import agreement
from bench.agreement import Difference
from bench.harness.call_outcomes import CallOutcome, differing_fields

FINE = CallOutcome("ok", "1\n", None, "")


def test_two_time_outs_agree_however_far_they_got() -> None:
    timed_out = CallOutcome("timeout", "1\n", None, "Timeout")
    assert differing_fields(timed_out, replace(timed_out, stdout="1\n2\n")) == ()
    assert differing_fields(FINE, timed_out) == ("status", "error")


@pytest.mark.parametrize(
    ("code", "ours", "is_unstable", "cause"),
    [
        ("", replace(FINE, status="timeout"), False, "one of them timed out"),
        ("", replace(FINE, status="memory_limit"), False, "service: memory_limit, fresh: ok"),
        ("", replace(FINE, status="error", error="ModuleNotFoundError"), False, "missing module"),
        ("import random", replace(FINE, stdout="2\n"), True, "random numbers"),
        ("import time", replace(FINE, stdout="2\n"), True, "clock"),
        ("", replace(FINE, stdout="2\n"), False, "output"),
        ("", replace(FINE, status="error", error="ValueError"), False, "ok became ValueError"),
    ],
)
def test_differences_are_grouped_by_cause(code: str, ours: CallOutcome, is_unstable: bool, cause: str) -> None:
    assert agreement.cause(code, FINE, ours, is_unstable) == cause


def test_differences_in_memory_addresses_have_their_own_cause() -> None:
    first, second = replace(FINE, value="<f at 0x7f1234567890>"), replace(FINE, value="<f at 0x7fabcdefabcd>")
    assert agreement.cause("", first, second, False) == "memory addresses"


def test_unstable_calls_are_left_out_of_the_share() -> None:
    def difference(index: int) -> Difference:
        return Difference(index, "output", ("stdout",), FINE, FINE, "")

    result = agreement.summarize(10, [difference(1), difference(2)], unstable={1})
    assert result["agreement"] == pytest.approx(8 / 9, abs=1e-5)
    assert (result["equal"], result["unstable"], result["different"]) == (8, 1, 1)


@pytest.mark.runtime
def test_results_of_the_service_agree_with_those_of_fresh_interpreters(
    guest_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = ["1 + 1", "print('a')\n'b'", "1 / 0", "import sys; sys.exit(3)", "'hidden';", "def f(:", "input()"]
    calls = tmp_path / "calls.jsonl"
    calls.write_text("".join(json.dumps({"code": code}) + "\n" for code in codes), encoding="utf-8")
    assert agreement.main(["--calls", str(calls), "--python", str(guest_python), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["agreement"] == 1.0
