"""Tests of docs/machines.md and of the rows from which it is written. The machines themselves need hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.machines import report

COUNTS = {"lost": 0, "doubled": 0, "mismatched": 0, "unavailable": {}, "leftovers": []}
ROW: dict[str, Any] = {
    "version": "6.1",
    "set_up": "root",
    "kernel": "6.1.0-50-cloud-amd64",
    "date": "2026-11-29",
    "doctor": {"level": "namespaces", "call": "ok", "cgroups": "version 2, below /sys/fs/cgroup/x", "missing": []},
    "mix": {**COUNTS, "calls": 2000, "kills": 0},
    "jail": {"passed": 12, "failures": []},
    "invariance": {"calls": 42, "changed": [], "misjudged": [], "unstable": []},
    "agreement": {"calls": 200, "differences": [], "unstable": 3},
    "escape": {"passed": 9, "xfailed": 1, "failures": []},
}


def test_the_page_is_what_the_rows_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_differs_from_the_rows_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PAGE", tmp_path / "machines.md")
    report.PAGE.write_text("older")
    assert report.main(["--check"]) == 1
    assert report.main([]) == 0
    assert report.main(["--check"]) == 0


def test_a_row_in_which_all_holds_has_no_problem() -> None:
    assert not [*report.problems(ROW)]
    assert report.cells(ROW) == [
        "6.1.0-50-cloud-amd64",
        "root",
        "namespaces",
        "version 2",
        "2,000: 0 wrong or lost, 0 unavailable",
        report.NOT_RUN,
        report.NOT_RUN,
        "12 passed",
        "42 calls: 0 changed, 0 misjudged",
        "200 calls: 0 different, 3 without a single result",
        "9 passed, 1 xfailed",
        report.NOT_RUN,
        "2026-11-29",
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"problem": "the machine printed no row"}, "`the machine printed no row`"),
        ({"doctor": {"level": None, "call": "not tried"}}, "doctor: no level: not tried"),
        ({"mix": {**COUNTS, "calls": 2000, "kills": 0, "lost": 3}}, "mix: 3 calls lost"),
        (
            {"mix": {**COUNTS, "calls": 9, "kills": 0, "unavailable": {"Poison": 1}}},
            "mix: unavailable: `{'Poison': 1}`",
        ),
        ({"kills": {"problem": "no\nend"}}, "kills: `no end`"),
        ({"agreement": {"calls": 9, "differences": [4], "unstable": 0}}, "agreement: differences: `[4]`"),
        ({"escape": {"failed": 1, "failures": ["test_a"]}}, "escape: failures: `['test_a']`"),
    ],
)
def test_a_row_names_what_does_not_hold(change: dict[str, Any], problem: str) -> None:
    row = {**ROW, **change}
    assert [text.replace('"', "'") for text in report.problems(row)] == [problem]
    assert problem in report.page({"6.1-root": row})


def test_a_new_row_of_a_machine_replaces_the_parts_that_were_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "ROWS", tmp_path / "rows.json")
    newer = {"version": "6.12", "set_up": "root", "kernel": "6.12.1"}
    older = {"version": "6.1", "set_up": "root", "kernel": "6.1.0"}
    other = {"version": "6.1-arm64", "set_up": "root", "kernel": "6.1.0"}
    report.write_row("6.1-arm64-root", other)
    report.write_row("6.12-root", {**newer, "mix": {"calls": 1}, "problem": "no end"})
    report.write_row("6.1-root", {**older, "mix": {"calls": 2}})
    report.write_row("6.12-root", {**newer, "kills": {"calls": 3}})
    assert [*report.read_rows()] == ["6.1-root", "6.12-root", "6.1-arm64-root"]
    assert report.read_rows()["6.12-root"] == {**newer, "mix": {"calls": 1}, "kills": {"calls": 3}}
    report.write_row("6.1-root", {**older, "kernel": "6.1.1"})
    assert report.read_rows()["6.1-root"] == {**older, "kernel": "6.1.1"}
