"""What counts as the same answer, and what is said of those that are not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import agreement
from bench.agreement import Difference, Outcome

FINE = Outcome("ok", "1\n", None, "")


def test_two_time_outs_agree_however_far_they_got() -> None:
    late = Outcome("timeout", "1\n", None, "Timeout")
    assert agreement.differing(late, replace(late, stdout="1\n2\n")) == ()
    assert agreement.differing(FINE, late) == ("status", "error")


@pytest.mark.parametrize(
    ("code", "ours", "is_unsettled", "cause"),
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
def test_differences_are_grouped_by_cause(code: str, ours: Outcome, is_unsettled: bool, cause: str) -> None:
    assert agreement.cause(code, FINE, ours, is_unsettled) == cause


def test_addresses_are_told_apart_from_answers() -> None:
    one, other = replace(FINE, value="<f at 0x7f1234567890>"), replace(FINE, value="<f at 0x7fabcdefabcd>")
    assert agreement.cause("", one, other, False) == "memory addresses"


def test_calls_without_a_right_answer_are_left_out_of_the_share() -> None:
    def difference(index: int) -> Difference:
        return Difference(index, "output", ("stdout",), FINE, FINE, "")

    figures = agreement.summarise(10, [difference(1), difference(2)], unsettled={1})
    assert figures["agreement"] == pytest.approx(8 / 9, abs=1e-5)
    assert (figures["equal"], figures["unsettled"], figures["different"]) == (8, 1, 1)


@pytest.mark.runtime
def test_scripts_agree(guest_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = ["1 + 1", "print('a')\n'b'", "1 / 0", "import sys; sys.exit(3)", "'hidden';", "def f(:", "input()"]
    calls, cache = tmp_path / "calls.jsonl", tmp_path / "cache.jsonl"
    calls.write_text("".join(json.dumps({"code": code}) + "\n" for code in codes), encoding="utf-8")
    words = ["--calls", str(calls), "--fresh-cache", str(cache), "--python", str(guest_python), "--json"]
    assert agreement.main(words) == 0
    kept = cache.read_text(encoding="utf-8")
    assert agreement.main(words) == 0
    assert cache.read_text(encoding="utf-8") == kept
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["agreement"] == 1.0
