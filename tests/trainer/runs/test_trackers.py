"""Tests of trackers, the packages to which a run logs its metrics. The metrics can be read back, a resumed run keeps
its name, and missing packages are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trainer.runs.run_folder import RunFolder
from trainer.runs.trackers import _tracker_run_name, open_trackers

ROOT = Path(__file__).parents[3]
ROWS = [{"step": step, "stage": "rl1", "reward": step / 4, "loss": None} for step in (1, 2, 3)]
EVAL_ROWS = [{"step": step, "eval/accuracy": step / 8} for step in (2, 3)]
SESSIONS = [[ROWS[0], EVAL_ROWS[0], ROWS[1]], [ROWS[1], EVAL_ROWS[0], EVAL_ROWS[1], ROWS[2]], [EVAL_ROWS[1]]]
"""A run that was killed after step 2, and continues after step 1. An evaluation is sent before the row of its step, and
the evaluation after the last step once more by another process."""
SENT_ONCE = [ROWS[0], EVAL_ROWS[0], ROWS[1], EVAL_ROWS[1], ROWS[2]]
"""What a tracker must have of `SESSIONS`."""
LOG_ROWS = """
import json, sys; from pathlib import Path; from trainer.runs.trackers import open_trackers
name, run_dir, sessions = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
for rows in sessions:
    with open_trackers([name], run_dir, {"seed": 1}, project="rstar") as log:
        for row in rows: log(row)
"""
"""Code that logs `SESSIONS`. It runs in a child process, since the packages read the environment when they are
imported."""

PRINT_TRACKIO_ROWS = """
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_logs("rstar", (run_dir / "tracker_run_name").read_text().strip())))
"""
"""Code that follows `LOG_ROWS` in the same process."""


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name} (pip install {name})")


def run_python(code: str, name: str, run_dir: Path, **environ: str) -> str:
    """Run `code` with the arguments `name`, `run_dir` and `SESSIONS` as JSON, and return what it prints to stdout."""
    command = [sys.executable, "-c", code, name, str(run_dir), json.dumps(SESSIONS)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environ, stdout=subprocess.PIPE, check=True, text=True)
    return done.stdout


def test_without_trackers_logging_writes_nothing(tmp_path: Path) -> None:
    with open_trackers([], tmp_path, {}, project="rstar") as log:
        log(ROWS[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["trackio", "wandb", "tensorboard"])
def test_a_missing_package_is_an_import_error_with_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        open_trackers([name], tmp_path, {}, project="rstar").__enter__()
    assert caught.value.name == name


@needs("tensorboard")
@needs("torch")
@pytest.mark.filterwarnings("ignore")  # warnings in modules that torch and tensorboard import
def test_tensorboard_has_the_logged_metrics(tmp_path: Path) -> None:
    with open_trackers(["tensorboard"], tmp_path, {}, project="rstar") as log:
        for row in ROWS:
            log(row)
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (events,) = (tmp_path / "tensorboard").iterdir()
    logged = [
        (event.step, value.tag, value.tensor.float_val[0])
        for event in EventFileLoader(str(events)).Load()
        for value in event.summary.value
    ]
    assert logged == [(row["step"], "reward", row["reward"]) for row in ROWS]


@needs("trackio")
def test_trackio_has_the_logged_metrics_and_continues_a_resumed_run(tmp_path: Path) -> None:
    environ = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    rows = json.loads(run_python(LOG_ROWS + PRINT_TRACKIO_ROWS, "trackio", tmp_path / "run", **environ))
    names = ("step", "reward", "eval/accuracy")
    assert [[row.get(name) for name in names] for row in rows] == [
        [row.get(name) for name in names] for row in SENT_ONCE
    ]


@needs("wandb")
def test_wandb_writes_a_run_in_offline_mode(tmp_path: Path) -> None:
    assert run_python(LOG_ROWS, "wandb", tmp_path / "run", WANDB_MODE="offline") == ""
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-run-*.wandb"))


class FakePackage:
    """wandb or trackio, with the part of their signatures that is used. It keeps the numbers of each run by name."""

    def __init__(self) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.ids: list[str | None] = []

    def init(
        self, project: str, name: str, config: dict[str, Any], resume: str, id: str | None = None, dir: str = ""
    ) -> None:
        assert resume == "allow"
        self.ids.append(id)
        self.rows = self.runs.setdefault(name, [])

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.rows.append(data if step is None else {**data, "step": step})

    def finish(self) -> None:
        del self.rows

    def all_rows(self) -> list[dict[str, Any]]:
        return [row for rows in self.runs.values() for row in rows]


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_continued_run_sends_no_step_and_no_evaluation_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = FakePackage()
    monkeypatch.setitem(sys.modules, name, package)
    for rows in SESSIONS:
        with open_trackers([name], tmp_path / "a run:1", {"seed": 1}, project="rstar") as log:
            for row in rows:
                log(row)
    ((run, logged),) = package.runs.items()
    assert run.startswith("a-run-1-"), "an id in wandb has no spaces and no colons"
    assert set(package.ids) == {run if name == "wandb" else None}
    assert logged == [{name: row[name] for name in row if name not in ("stage", "loss")} for row in SENT_ONCE]


@needs("tensorboard")
@needs("torch")
@pytest.mark.filterwarnings("ignore")  # warnings in modules that torch and tensorboard import
def test_tensorboard_has_each_step_once_also_after_a_kill(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    logs = []
    for rows in SESSIONS:
        opened = open_trackers(["tensorboard"], tmp_path, {}, project="rstar")
        logs.append(opened)  # a killed process closes nothing
        log = opened.__enter__()
        for row in rows:
            log(row)
    logged = sorted(
        (event.step, value.tag)
        for file in (tmp_path / "tensorboard").iterdir()
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    )
    assert logged == [(1, "reward"), (2, "eval/accuracy"), (2, "reward"), (3, "eval/accuracy"), (3, "reward")]
    for opened in logs:
        opened.__exit__(None, None, None)


def test_a_tracker_that_is_added_later_gets_the_steps_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {name: FakePackage() for name in ("trackio", "wandb")}
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    for names, rows in ((["trackio"], ROWS[:2]), (["trackio", "wandb"], ROWS[1:])):
        with open_trackers(names, tmp_path, {}, project="rstar") as log:
            for row in rows:
                log(row)
    steps = {name: [row["step"] for row in package.all_rows()] for name, package in packages.items()}
    assert steps == {"trackio": [1, 2, 3], "wandb": [2, 3]}


def test_a_run_keeps_its_name_and_another_run_gets_another(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "run", tmp_path / "b" / "run"
    name = _tracker_run_name(first)
    assert name.startswith("run-")
    assert _tracker_run_name(first) == name
    assert _tracker_run_name(second) != name


def test_the_run_folder_passes_each_row_of_metrics_on(tmp_path: Path) -> None:
    received: list[object] = []
    folder = RunFolder(tmp_path, on_metrics=received.append)
    folder.append_metrics({"step": 1, "stage": "rl1", "reward": float("nan"), "turns": 2})
    assert received == list(folder.read_metrics()) == [{"step": 1, "stage": "rl1", "reward": None, "turns": 2}]
