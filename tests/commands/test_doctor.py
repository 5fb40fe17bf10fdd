"""Tests of `doctor` as a whole: the verdict, the table, the JSON form, and the exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from sandbox.commands import doctor as doctor_command
from sandbox.commands import main as cli
from sandbox.commands.doctor import Report
from sandbox.commands.machine_checks import Check
from sandbox.errors import ConfigError, IsolationError, NodeError
from sandbox.jail import Level, LevelChoice, ProbedLayer
from sandbox.jail.probe import _LAYERS, NSJAIL
from sandbox.settings.server import ExecutorConfig
from sandbox.types import Call, CallError, Result, Status
from tests.jail import jails

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"
OK = Result("", Status.OK, "42\n")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine whose `level` is chosen and whose calls have `result`; either may be an exception. `levels` has the
    isolation of each call that was tried. The layers in `missing` are not granted."""
    state: dict[str, Any] = {"level": LevelChoice(Level.NAMESPACES), "result": OK, "levels": [], "missing": ()}

    def choose_level(requested: str, layers: tuple[ProbedLayer, ...]) -> LevelChoice:
        if isinstance(state["level"], Exception):
            raise state["level"]
        choice: LevelChoice = state["level"]
        return choice

    def run_once(call: Call, config: ExecutorConfig) -> Result:
        state["levels"].append(config.isolation)
        if isinstance(state["result"], Exception):
            raise state["result"]
        result: Result = state["result"]
        return result

    def probe() -> tuple[ProbedLayer, ...]:
        names = (*(layer[0] for layer in _LAYERS), NSJAIL)
        return tuple(ProbedLayer(name, name not in state["missing"], "as probed", "") for name in names)

    monkeypatch.setattr(doctor_command, "choose_level", choose_level)
    monkeypatch.setattr(doctor_command, "probe", probe)
    monkeypatch.setattr("sandbox.executor.run_once", run_once)
    monkeypatch.setenv("RSTAR_SANDBOX_PYTHON", sys.executable)
    return state


def run_doctor(capsys: pytest.CaptureFixture[str], exit_code: int) -> tuple[dict[str, Any], str]:
    """Run `doctor` in both forms. Returns the JSON and the text; assert that both have this exit code."""
    assert cli.main(["doctor", "--json"]) == exit_code
    report = json.loads(capsys.readouterr().out)
    assert cli.main(["doctor"]) == exit_code
    return report, capsys.readouterr().out


def test_the_verdict_names_a_level_at_which_a_call_has_run(
    machine: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report, text = run_doctor(capsys, 0)
    assert (report["level"], report["call"], report["python"]) == ("namespaces", "ok", sys.executable)
    assert report["verdict"].startswith("`serve` runs calls at level namespaces; a call ran at it. No level is strong")
    assert "`serve` runs calls at level namespaces" in text
    assert machine["levels"] == ["namespaces"] * 2, "the call asks for the level by name"


def test_a_weaker_level_is_named_with_the_rows_that_give_a_stronger_one(
    machine: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    machine |= {"level": LevelChoice(Level.LANDLOCK, "namespaces: refused"), "missing": ("user namespace",)}
    report, text = run_doctor(capsys, 0)
    assert report["level"] == "landlock"
    assert "A stronger level needs namespaces" in report["verdict"]
    row = next(row for row in report["checks"] if row["name"] == "namespaces")
    assert (row["ok"], row["level"]) == (False, "namespaces")
    assert re.search(r"^NO  namespaces +no user namespace: as probed$", text, re.MULTILINE)
    assert f"\n    {row['command']}\n" in text


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (Result("", Status.UNAVAILABLE, error=CallError("NodeError", "all died")), "unavailable: all died"),
        (Result("", Status.ERROR, stderr="no stdlib\n", exit_code=1), "error: no stdlib"),
        (NodeError("the zygote died"), "the zygote died"),
    ],
)
def test_no_level_is_named_if_the_call_fails(
    result: Result | Exception, message: str, machine: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    machine["result"] = result
    report, _ = run_doctor(capsys, 1)
    assert (report["level"], report["call"]) == (None, message)
    assert report["verdict"].startswith(f"`serve` does not start: a call at level namespaces failed: {message}.")


def test_no_level_is_named_if_the_machine_supports_none(
    machine: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    machine |= {"level": IsolationError("nothing isolates here"), "missing": ("seccomp",)}
    report, _ = run_doctor(capsys, 1)
    assert (report["level"], report["call"]) == (None, "not tried")
    assert report["verdict"] == (
        "`serve` does not start: isolation=auto is not possible on this machine. "
        "Missing: namespaces, seccomp_filter: see above."
    )
    assert machine["levels"] == []


def test_level_none_is_not_isolated(machine: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    machine["level"] = LevelChoice(Level.NONE)
    report, _ = run_doctor(capsys, 1)
    assert report["level"] is None
    assert "calls are not isolated" in report["verdict"]


def test_too_few_descriptors_for_serve_are_the_verdict(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(connections: int) -> int:
        raise ConfigError("the limit on open files (ulimit -Hn) is 256")

    monkeypatch.setattr(doctor_command, "raise_connection_limit", refuse)
    report, _ = run_doctor(capsys, 1)
    assert report["verdict"].startswith("`serve` does not start: the limit on open files (ulimit -Hn) is 256")


def test_without_a_runtime_the_verdict_names_the_command_that_builds_one(
    machine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RSTAR_SANDBOX_PYTHON")
    monkeypatch.setenv("RSTAR_RUNTIME", str(tmp_path / "nowhere"))
    report, _ = run_doctor(capsys, 1)
    assert "run `rstar-sandbox runtime` first" in report["verdict"]
    assert (report["python"], machine["levels"]) == (None, [])


def test_lines_fit_the_terminal_except_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = "sudo " + "x" * 100
    checks = (Check("unprivileged_userns_clone", False, "found " * 30, "missing " * 20, command),)
    report = Report("landlock", "verdict " * 40, "ok", None, "me", "6.1", checks, ())
    lines = list(doctor_command.lines(report))
    assert [line for line in lines if len(line) > 80] == [f"    {command}"]


def test_the_document_lists_the_keys_and_the_rows_of_the_json_form(
    machine: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = run_doctor(capsys, 0)
    section = OPERATIONS.read_text().split("\n## Health\n")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert documented == [*report, *(row["name"] for row in report["checks"])]
    assert list(report["checks"][0]) == [field.name for field in fields(Check)]
    assert report["layers"][0] == asdict(ProbedLayer("user namespace", True, "as probed", ""))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_an_ordinary_user_gets_a_verdict_that_a_call_has_shown() -> None:
    with jails.dir_for_all_users() as directory:
        python = jails.python_for_all_users(directory)
        repository, packages = (Path(cli.__file__).parents[2], Path(pytest.__file__).parents[1])
        for path in (repository, packages):
            if not jails.all_users_can_reach(str(path / "x")):
                pytest.skip(f"other users cannot read {path}")
        command = [python, "-c", "import sys; from sandbox.commands.main import main; sys.exit(main(sys.argv[1:]))"]
        done = subprocess.run(
            [*command, "doctor", "--json", "--python", str(Path(python).resolve())],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{repository}:{packages}"},
            cwd="/", user=jails.NOBODY, group=jails.NOBODY, extra_groups=[],
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["level"] else 1)
    assert report["user"] == "nobody"
    if report["level"]:
        assert report["call"] == "ok"
    uids = next(row for row in report["checks"] if row["name"] == "uids")
    assert not uids["ok"], "nobody has no subordinate ids"
    assert uids["command"].startswith("sudo ")
