"""What counts as growth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import leaks
from bench.leaks import Holdings

REST = Holdings(1000, 14, 0, 160, 120, 0, 0, 500.0)


def _marks(**grown_by: float) -> list[Holdings]:
    """Ten marks, each with so much more of everything named."""
    return [
        replace(REST, calls=1000 * turn, **{name: getattr(REST, name) + by * turn for name, by in grown_by.items()})
        for turn in range(1, 11)
    ]


def test_what_stays_the_same_is_no_leak() -> None:
    assert leaks.grown(_marks(), 2000) == {}


@pytest.mark.parametrize("name", ["processes", "zombies", "descriptors", "mounts", "cgroups", "temporary_files"])
def test_whatever_grows_is_found_by_name(name: str) -> None:
    assert list(leaks.grown(_marks(**{name: 1}), 2000)) == [name]


def test_memory_may_waver_but_not_grow() -> None:
    assert leaks.grown(_marks(memory_mb=1), 2000) == {}
    assert leaks.grown(_marks(memory_mb=20), 2000) == {"memory_mb": [540.0, 660.0]}


def test_growth_before_all_is_warm_does_not_count() -> None:
    marks = _marks()
    assert leaks.grown([replace(marks[0], processes=1), *marks[1:]], 2000) == {}


def test_too_few_calls_to_tell_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert leaks.main(["--calls", "100"]) == 1
    assert "3000" in capsys.readouterr().err


@pytest.mark.runtime
@pytest.mark.slow
def test_a_small_run_holds(guest_python: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--calls", "192", "--mark", "64", "--settled", "64"]
    assert leaks.main([*sizes, "--python", str(guest_python), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(figures["marks"]) == 3
    assert figures["abandoned_batches"] == 3
