"""What a call needs is what it uses, and what differs is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import invariance
from bench.invariance import NEEDS, Case
from bench.probes import processes
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from sandbox.types import CallError, Result, Status
from tests.executor.calling import OWN_PYTHON

NEED_S = 0.2


@pytest.mark.parametrize("need", NEEDS)
def test_a_call_uses_what_it_needs(need: str) -> None:
    code = invariance._needing(need, NEED_S, 1.0)["code"]
    begun = time.monotonic()
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = process.stdout.read()
    process.stdout.close()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # or it would wait for it again
    assert (process.returncode, said) == (0, f"had {NEED_S}\n".encode())
    cpu_s = used.ru_utime + used.ru_stime
    assert time.monotonic() - begun >= NEED_S
    cores = {"sleep": 0.0, "both in turn": 0.5, "children side by side": 2.0}.get(need, 1.0)
    assert cpu_s >= cores * NEED_S - 0.001  # wait4 rounds down, to microseconds


def test_what_is_needed_is_judged_by_whether_it_is_more_than_the_limit() -> None:
    cases = invariance.needing(["sleep"], 2.0, repeat=2)
    assert [case.status for case in cases] == ["ok"] * 6 + ["timeout"] * 6
    assert len({case.name for case in cases}) == 12
    assert all(case.call["limits"]["timeout_s"] == 2.0 for case in cases)
    assert "NEED = 2.2" in cases[6].call["code"]


def _result(status: str = "ok", stdout: str = "1\n") -> Result:
    return Result("", Status(status), stdout, error=None if status == "ok" else CallError("Any", ""))


def test_what_ends_alike_holds() -> None:
    cases = [Case("a", {}, "ok"), Case("b", {})]
    figures = invariance.summarise(cases, [_result(), _result("error")], [_result(), _result("error")], set())
    assert figures["holds"] and figures["changed"] == []


def test_how_far_a_timeout_got_is_no_change() -> None:
    figures = invariance.summarise([Case("a", {})], [_result("timeout", "1\n")], [_result("timeout", "")], set())
    assert figures["holds"]


@pytest.mark.parametrize("other", [_result("timeout"), _result("ok", "2\n"), _result("unavailable")])
def test_another_status_or_output_is_a_change(other: Result) -> None:
    figures = invariance.summarise([Case("a", {})], [_result()], [other], set())
    assert [change["name"] for change in figures["changed"]] == ["a"]
    assert not figures["holds"]


def test_a_call_that_differs_from_itself_is_named_and_does_not_count() -> None:
    figures = invariance.summarise([Case("a", {})], [_result()], [_result("ok", "2\n")], {"a"})
    assert (figures["changed"], figures["unstable"], figures["holds"]) == ([], ["a"], True)


def test_a_call_whose_verdict_is_known_is_never_unstable() -> None:
    figures = invariance.summarise([Case("a", {}, "ok")], [_result()], [_result("timeout")], {"a"})
    assert (len(figures["changed"]), figures["unstable"], figures["holds"]) == (1, [], False)


def test_a_verdict_that_is_wrong_both_times_does_not_hold() -> None:
    late = _result("timeout")
    figures = invariance.summarise([Case("a", {}, "ok")], [late], [late], set())
    assert figures["changed"] == [] and len(figures["misjudged"]) == 1
    assert not figures["holds"]


def test_nobody_is_busy_any_more_afterwards() -> None:
    before = set(processes.tree(os.getpid()))
    with invariance.busy(2):
        added = set(processes.tree(os.getpid())) - before
    assert len(added) == 2
    assert not added & set(processes.tree(os.getpid()))


@pytest.mark.timeout(400)
def test_a_small_comparison_has_all_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        choose_level("auto")
    except IsolationError as why:
        pytest.skip(str(why))
    corpus = tmp_path / "snippets.jsonl"
    corpus.write_text('{"code": "1"}\n')
    sizes = ["--calls", str(corpus), "--needs", "CPU,sleep", "--limit-s", "0.3", "--loops", "1", "--load", "1"]
    code = invariance.main([*sizes, "--lean", "--python", OWN_PYTHON, "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    figures = json.loads(captured.out.splitlines()[-1])
    assert (figures["calls"], figures["known"]) == (13, 12)
    assert figures["corpus"] == {"from": "snippets.jsonl", "calls": 1}
    for statuses in figures["statuses"].values():
        assert sum(statuses.values()) == 13 and "error" not in statuses, captured.err
    assert code == (0 if figures["holds"] else 1)
