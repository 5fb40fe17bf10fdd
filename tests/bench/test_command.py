"""Tests of what all benchmarks share: the command line in a result, the printed JSON object, and requirements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import agreement, burst, peers, recipe
from bench.harness import arguments, command, requirements


def _command_line(bench: object, *argv: str) -> str:
    parser = bench._parser()  # type: ignore[attr-defined]
    return arguments.command_line(parser, parser.parse_args(argv))


def test_a_recorded_command_has_the_options_of_the_measurement_but_not_of_its_output() -> None:
    assert _command_line(burst) == "python -m bench.burst"
    left_out = ("--json", "--python", "python3", "--calls", "45000")  # the last is the default
    assert _command_line(burst, *left_out) == _command_line(burst)
    options = ("--stdlib-only", "--calls", "5", "--loops", "0.5", "--batch", "4")
    assert _command_line(burst, *options) == f"python -m bench.burst {' '.join(options)}"


def test_a_file_is_shown_without_its_directory(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").touch()
    command_line = _command_line(agreement, "--calls", str(tmp_path / "calls.jsonl"))
    assert command_line == "python -m bench.agreement --calls calls.jsonl"


def test_a_list_is_shown_as_it_was_typed() -> None:
    assert _command_line(peers, "--kinds", "print,mix") == "python -m bench.peers --kinds print,mix"
    command_line = _command_line(recipe, "--set", "seed=1", "--set", "sft.epochs=2")
    assert command_line == "python -m bench.recipe --set seed=1 sft.epochs=2"
    assert _command_line(recipe, *command_line.split()[3:]) == command_line  # parsed again


def test_a_result_has_its_command_and_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    parser = burst._parser()
    command.print_result({"bench": "burst"}, parser, parser.parse_args(["--json"]))
    printed = json.loads(capsys.readouterr().out)
    assert printed["command"] == "python -m bench.burst" and printed["machine"]["cores"] > 0
    command.print_result({"bench": "burst"}, parser, parser.parse_args([]))
    assert not capsys.readouterr().out


def test_a_requirement_says_whether_it_holds() -> None:
    rows = [requirements.at_most("seconds", 1200, 1006), requirements.at_most("share", 0.05, 0.0716)]
    table = requirements.requirement_table(rows)
    assert table.rows == [("seconds", "≤ 1200", "1,006", "yes"), ("share", "≤ 0.05", "0.0716", "**no**")]
    assert requirements.unmet({"requirements": rows}) == ["Not met: share is 0.0716, expected ≤ 0.05."]
    assert not requirements.hold(rows) and requirements.hold(rows[:1])
