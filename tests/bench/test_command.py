"""How benchmarks speak: the command that a result keeps, and what is asked of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import burst, leaks, peers, recipe
from bench.harness import command


def _kept(bench: object, *argv: str) -> str:
    parser = bench._parser()  # type: ignore[attr-defined]
    return command.command(parser, parser.parse_args(argv))


def test_a_command_is_what_was_asked_for_and_not_how_it_is_shown() -> None:
    assert _kept(burst) == "python -m bench.burst"
    assert _kept(burst, "--json", "--plot", "a.png", "--python", "python3", "--calls", "45000") == _kept(burst)
    asked = ("--calls", "5", "--loops", "0.5", "--in-flight", "4", "--lean")
    assert _kept(burst, *asked) == f"python -m bench.burst {' '.join(asked)}"


def test_a_file_has_its_name_alone(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").touch()
    assert _kept(leaks, "--from", str(tmp_path / "calls.jsonl")) == "python -m bench.leaks --from calls.jsonl"


def test_lists_are_as_they_were_typed() -> None:
    assert _kept(peers, "--kinds", "print", "mix") == "python -m bench.peers --kinds print mix"
    sets = _kept(recipe, "--set", "seed=1", "--set", "sft.epochs=2")
    assert sets == "python -m bench.recipe --set seed=1 sft.epochs=2"
    assert _kept(recipe, *sets.split()[3:]) == sets


def test_a_result_has_its_command_and_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    parser = burst._parser()
    command.finish({"bench": "burst"}, parser, parser.parse_args(["--json"]))
    printed = json.loads(capsys.readouterr().out)
    assert printed["command"] == "python -m bench.burst" and printed["machine"]["cores"] > 0
    command.finish({"bench": "burst"}, parser, parser.parse_args([]))
    assert not capsys.readouterr().out


def test_what_is_asked_says_yes_or_no() -> None:
    rows = [
        {"what": "seconds", "needed": "≤ 1200", "got": 1006, "holds": True},
        {"what": "share", "needed": "≤ 0.05", "got": 0.0716, "holds": False},
    ]
    _, lines = command.asked(rows)
    assert lines == [("seconds", "≤ 1200", "1,006", "yes"), ("share", "≤ 0.05", "0.0716", "**no**")]
